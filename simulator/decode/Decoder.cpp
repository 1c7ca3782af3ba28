//===- Decoder.cpp - Scopes, symbols and operands -------------------------===//

#include "Decoder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace moe::sim {
namespace {

/// Addresses in the parameters of device functions, which live in the local
/// frame, carry this bit so that ld.param can tell them from the kernel's.
constexpr u64 kFunctionParamBit = 1ull << 32;

u64 alignTo(u64 value, u64 alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

u64 lowBytes(u64 value, u32 bytes) {
  return bytes >= 8 ? value : value & ((1ull << (8 * bytes)) - 1);
}

/// The bits of an immediate as an operand of `bytes` bytes.
u64 immediateBits(const Operand &operand, u32 bytes, bool isFloat) {
  if (operand.is(Operand::Kind::Integer))
    return lowBytes(operand.bits, bytes);
  double value = operand.is(Operand::Kind::Float32)
                     ? std::bit_cast<float>(static_cast<u32>(operand.bits))
                     : std::bit_cast<double>(operand.bits);
  if (bytes == 8 && (isFloat || !operand.is(Operand::Kind::Float32)))
    return operand.is(Operand::Kind::Float64) ? operand.bits
                                              : std::bit_cast<u64>(value);
  if (operand.is(Operand::Kind::Float32))
    return lowBytes(operand.bits, bytes);
  return std::bit_cast<u32>(static_cast<float>(value));
}

} // namespace

void Decoder::fail(const std::string &what) const {
  u32 line = current ? current->line : function.line;
  throw std::invalid_argument("line " + std::to_string(line) + ": " + what);
}

void Decoder::unknown(const std::string &why) {
  std::string text = "line " + std::to_string(current->line) +
                     ": unknown instruction " + current->opcode();
  if (!why.empty())
    text += ": " + why;
  if (module.seenProblems.insert(text).second)
    module.problems.push_back(std::move(text));
}

Handler Decoder::handler(const std::string &key) {
  const HandlerTable &table = handlers();
  auto it = table.find(key);
  if (it != table.end())
    return it->second;
  unknown();
  return nullptr;
}

//===----------------------------------------------------------------------===//
// Registers, presets and symbols
//===----------------------------------------------------------------------===//

u32 Decoder::allocateRegister(u32 bytes) {
  // Predicates are one mask; all others start on a cache line.
  u32 size = bytes == 0 ? 4 : bytes * kWarpSize;
  u32 alignment = bytes == 0 ? 4 : 64;
  u32 offset = static_cast<u32>(alignTo(kernel.registerBytes, alignment));
  kernel.registerBytes = offset + size;
  return offset;
}

u32 Decoder::temporary(u32 bytes) {
  // Consumed by the next instruction of the same lanes, so one will do.
  std::string key = "temporary" + std::to_string(bytes);
  auto it = presets.find(key);
  if (it != presets.end())
    return it->second;
  return presets[key] = scratch(bytes);
}

u32 Decoder::scratch(u32 bytes) {
  u32 place = allocateRegister(bytes);
  registerBytes[place] = bytes;
  return place;
}

u32 Decoder::widened(u32 place) {
  Draft draft;
  draft.inst.run = handler("resize.u32.u16");
  u32 wide = scratch(4);
  draft.d = {wide};
  draft.s = {place};
  emitHidden(std::move(draft));
  return wide;
}

u32 Decoder::presetArray(Preset preset, const std::string &key) {
  auto it = presets.find(key);
  if (it != presets.end())
    return it->second;
  preset.offset = allocateRegister(
      preset.kind == Preset::Kind::Predicate ? 0 : preset.bytes);
  kernel.presets.push_back(preset);
  return presets[key] = preset.offset;
}

u32 Decoder::constant(u64 value, u32 bytes) {
  value = lowBytes(value, bytes);
  return presetArray({Preset::Kind::Constant, 0, bytes, value},
                     "constant" + std::to_string(bytes) + ":" +
                         std::to_string(value));
}

u32 Decoder::carryFlag() {
  auto it = presets.find("carry");
  return it != presets.end() ? it->second : presets["carry"] = scratch(0);
}

u32 Decoder::constantPredicate(bool value) {
  return presetArray({Preset::Kind::Predicate, 0, 4, value ? ~0u : 0u},
                     value ? "true" : "false");
}

std::optional<SpecialRegister>
Decoder::specialRegister(const std::string &name) {
  using S = SpecialRegister;
  static const std::unordered_map<std::string, S> names = {
      {"%tid.x", S::TidX},
      {"%tid.y", S::TidY},
      {"%tid.z", S::TidZ},
      {"%ntid.x", S::NtidX},
      {"%ntid.y", S::NtidY},
      {"%ntid.z", S::NtidZ},
      {"%ctaid.x", S::CtaidX},
      {"%ctaid.y", S::CtaidY},
      {"%ctaid.z", S::CtaidZ},
      {"%nctaid.x", S::NctaidX},
      {"%nctaid.y", S::NctaidY},
      {"%nctaid.z", S::NctaidZ},
      {"%laneid", S::LaneId},
      {"%warpid", S::WarpId},
      {"%nwarpid", S::NWarpId},
      {"%lanemask_eq", S::LaneMaskEq},
      {"%lanemask_le", S::LaneMaskLe},
      {"%lanemask_lt", S::LaneMaskLt},
      {"%lanemask_ge", S::LaneMaskGe},
      {"%lanemask_gt", S::LaneMaskGt},
      {"%dynamic_smem_size", S::DynamicSmemSize},
      {"%total_smem_size", S::TotalSmemSize},
      {"%clock", S::Clock},
      {"%clock64", S::Clock64},
      {"%globaltimer", S::GlobalTimer},
      {"%globaltimer_lo", S::GlobalTimerLo},
      {"%smid", S::SmId},
      {"%nsmid", S::NSmId},
      {"%gridid", S::GridId},
      {"%clusterid.x", S::ClusterIdX},
      {"%clusterid.y", S::ClusterIdY},
      {"%clusterid.z", S::ClusterIdZ},
      {"%nclusterid.x", S::NClusterIdX},
      {"%nclusterid.y", S::NClusterIdY},
      {"%nclusterid.z", S::NClusterIdZ},
      {"%cluster_ctaid.x", S::ClusterCtaidX},
      {"%cluster_ctaid.y", S::ClusterCtaidY},
      {"%cluster_ctaid.z", S::ClusterCtaidZ},
      {"%cluster_nctaid.x", S::ClusterNctaidX},
      {"%cluster_nctaid.y", S::ClusterNctaidY},
      {"%cluster_nctaid.z", S::ClusterNctaidZ},
      {"%cluster_ctarank", S::ClusterCtarank},
      {"%cluster_nctarank", S::ClusterNctarank},
      {"%is_explicit_cluster", S::IsExplicitCluster}};
  auto it = names.find(name);
  if (it == names.end())
    return std::nullopt;
  return it->second;
}

u32 Decoder::special(SpecialRegister which, u32 bytes) {
  Preset preset{Preset::Kind::Special, 0, bytes, 0, which};
  return presetArray(preset, "special" + std::to_string(bytes) + ":" +
                                 std::to_string(static_cast<int>(which)));
}

Decoder::Symbol *Decoder::lookupRegister(const std::string &name) {
  size_t digits = name.size();
  while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9')
    --digits;
  for (size_t i = scopes.size(); i-- > 0;) {
    auto symbol = scopes[i].symbols.find(name);
    if (symbol != scopes[i].symbols.end())
      return &symbol->second;
    auto range = digits < name.size()
                     ? scopes[i].ranges.find(name.substr(0, digits))
                     : scopes[i].ranges.end();
    if (range != scopes[i].ranges.end() &&
        std::stoll(name.substr(digits)) < range->second.count) {
      Symbol fresh{Symbol::Kind::Register};
      fresh.bytes = range->second.bytes;
      fresh.offset = allocateRegister(fresh.bytes);
      registerBytes[fresh.offset] = fresh.bytes;
      return &(scopes[i].symbols[name] = fresh);
    }
    if (scopes[i].isFunction)
      break;
  }
  return nullptr;
}

Decoder::Symbol *Decoder::lookup(const std::string &name) {
  if (Symbol *symbol = lookupRegister(name))
    return symbol;
  auto global = scopes[0].symbols.find(name);
  if (global != scopes[0].symbols.end())
    return &global->second;
  for (const Variable &variable : module.program.tree.variables)
    if (variable.name == name)
      return &(scopes[0].symbols[name] = moduleSymbol(variable));
  return nullptr;
}

u64 Decoder::allocateShared(const Variable &variable) {
  u64 offset = alignTo(kernel.sharedBytes, variable.alignment);
  kernel.sharedBytes = offset + variable.bytes();
  kernel.sharedAlignment = std::max(kernel.sharedAlignment, variable.alignment);
  kernel.sharedVariables.push_back({variable.name, offset, variable.bytes()});
  return offset;
}

/// Shared variables get their place when a kernel first uses them, as ptxas
/// allocates only what is used.
Decoder::Symbol Decoder::moduleSymbol(const Variable &variable) {
  Symbol symbol{Symbol::Kind::Memory};
  symbol.space = variable.space;
  if (variable.space == Space::Shared) {
    if (variable.isUnsized || (variable.isExternal && variable.count == 0)) {
      symbol.dynamicShared = true;
      kernel.usesDynamicShared = true;
      kernel.dynamicAlignment =
          std::max(kernel.dynamicAlignment, variable.alignment);
    } else {
      symbol.address = allocateShared(variable);
    }
    return symbol;
  }
  for (const GlobalVariable &global : module.program.globals)
    if (global.name == variable.name)
      symbol.address = reinterpret_cast<u64>(global.data);
  return symbol;
}

void Decoder::declareRegisters(const RegisterDeclaration &declaration) {
  u32 bytes = typeBytes(declaration.type);
  for (const auto &[name, count] : declaration.names) {
    if (count >= 0) {
      scopes.back().ranges[name] = {bytes, count};
      continue;
    }
    Symbol symbol{Symbol::Kind::Register};
    symbol.bytes = bytes;
    symbol.offset = allocateRegister(bytes);
    registerBytes[symbol.offset] = bytes;
    scopes.back().symbols[name] = symbol;
  }
}

void Decoder::declareVariable(const Variable &variable) {
  Symbol symbol{Symbol::Kind::Memory};
  symbol.space = variable.space;
  if (variable.space == Space::Shared) {
    if (variable.isUnsized) {
      symbol = moduleSymbol(variable);
    } else {
      // A device function's shared variable is one, however often it is called.
      std::string key = (callStack.empty() ? function.name : callStack.back()) +
                        ":" + variable.name;
      auto it = sharedVariables.find(key);
      if (it == sharedVariables.end())
        it = sharedVariables.emplace(key, allocateShared(variable)).first;
      symbol.address = it->second;
    }
  } else if (variable.space == Space::Local || variable.space == Space::Param) {
    symbol.functionParam = variable.space == Space::Param;
    symbol.space = Space::Local;
    symbol.address = alignTo(kernel.localBytes, variable.alignment);
    kernel.localBytes = symbol.address + variable.bytes();
  } else {
    fail("expected ." + variable.name +
         " to be declared outside the function body: only registers, .local, "
         ".param and .shared variables belong inside");
  }
  scopes.back().symbols[variable.name] = symbol;
}

void Decoder::declareParams() {
  for (const Variable &variable : function.params) {
    Symbol symbol{Symbol::Kind::Memory};
    symbol.space = Space::Param;
    symbol.address = alignTo(kernel.paramBytes, variable.alignment);
    kernel.paramBytes = symbol.address + variable.bytes();
    kernel.params.push_back({variable.name, variable.type, symbol.address,
                             variable.bytes(), variable.count});
    scopes.back().symbols[variable.name] = symbol;
  }
}

//===----------------------------------------------------------------------===//
// Operands
//===----------------------------------------------------------------------===//

u32 Decoder::registerWidth(const Operand &operand) {
  if (!operand.is(Operand::Kind::Name))
    return 0;
  Symbol *symbol = lookupRegister(operand.name);
  return symbol && symbol->kind == Symbol::Kind::Register ? symbol->bytes : 0;
}

u32 Decoder::destination(const Operand &operand, u32 bytes) {
  if (operand.is(Operand::Kind::Sink))
    return kNone;
  Symbol *symbol =
      operand.is(Operand::Kind::Name) ? lookupRegister(operand.name) : nullptr;
  if (!symbol || symbol->kind != Symbol::Kind::Register)
    fail("expected a destination register in " + current->opcode() +
         ", found '" + operand.name + "'");
  if (bytes && symbol->bytes != bytes)
    fail("expected a register of " + std::to_string(bytes * 8) +
         " bits as destination of " + current->opcode() + ", found " +
         operand.name + " with " + std::to_string(symbol->bytes * 8));
  return symbol->offset;
}

void Decoder::destinations(Draft &draft, const Operand &operand, u32 bytes) {
  if (operand.is(Operand::Kind::Vector)) {
    for (const Operand &part : operand.parts)
      draft.d.push_back(destination(part, bytes));
    return;
  }
  if (operand.is(Operand::Kind::Pair)) {
    draft.d.push_back(destination(operand.parts[0], bytes));
    draft.d.push_back(predicateDestination(operand.parts[1]));
    return;
  }
  draft.d.push_back(destination(operand, bytes));
}

u32 Decoder::predicateDestination(const Operand &operand) {
  u32 offset = destination(operand, 0);
  if (offset != kNone && registerWidth(operand) != 0)
    fail("expected a predicate as destination of " + current->opcode() +
         ", found " + operand.name);
  return offset;
}

u32 Decoder::variableAddress(const Symbol &symbol, i64 offset, u32 bytes) {
  u64 address = symbol.address + offset;
  if (symbol.functionParam)
    address += kFunctionParamBit;
  if (symbol.space != Space::Shared)
    return constant(address, bytes);
  if (!symbol.dynamicShared)
    return presetArray({Preset::Kind::SharedAddress, 0, bytes, address},
                       "shared" + std::to_string(bytes) + ":" +
                           std::to_string(address));
  std::string key =
      "dynamic" + std::to_string(bytes) + ":" + std::to_string(address);
  bool fresh = !presets.count(key);
  u32 place =
      presetArray({Preset::Kind::SharedAddress, 0, bytes, address}, key);
  if (fresh)
    dynamicPresets.push_back(kernel.presets.size() - 1);
  return place;
}

u32 Decoder::source(const Operand &operand, u32 bytes, bool isFloat) {
  switch (operand.kind) {
  case Operand::Kind::Integer:
  case Operand::Kind::Float32:
  case Operand::Kind::Float64:
  case Operand::Kind::Decimal:
    return constant(immediateBits(operand, bytes, isFloat), bytes);
  case Operand::Kind::Name:
    break;
  default:
    fail("expected a register or an immediate in " + current->opcode());
  }
  if (auto which = specialRegister(operand.name))
    return special(*which, bytes);
  if (operand.name == "WARP_SZ")
    return constant(kWarpSize, bytes);
  Symbol *symbol = lookup(operand.name);
  if (!symbol)
    fail("unknown name '" + operand.name + "' in " + current->opcode());
  if (symbol->kind == Symbol::Kind::Memory)
    return variableAddress(*symbol, operand.offset, bytes);
  if (symbol->bytes < bytes)
    fail("expected an operand of " + std::to_string(bytes * 8) + " bits in " +
         current->opcode() + ", found " + operand.name + " with " +
         std::to_string(symbol->bytes * 8));
  if (symbol->bytes == bytes)
    return symbol->offset;
  // Instructions on narrow types read the low part of a wider register.
  Draft narrow;
  narrow.inst.run = handler("resize.u" + std::to_string(bytes * 8) + ".u" +
                            std::to_string(symbol->bytes * 8));
  u32 place = scratch(bytes);
  narrow.d = {place};
  narrow.s = {symbol->offset};
  emitHidden(std::move(narrow));
  return place;
}

void Decoder::sources(Draft &draft, const Operand &operand, u32 bytes,
                      bool isFloat) {
  if (operand.is(Operand::Kind::Vector)) {
    for (const Operand &part : operand.parts)
      draft.s.push_back(part.is(Operand::Kind::Sink)
                            ? constant(0, bytes)
                            : source(part, bytes, isFloat));
    return;
  }
  draft.s.push_back(source(operand, bytes, isFloat));
}

u32 Decoder::predicate(const Operand &operand) {
  if (operand.is(Operand::Kind::Integer))
    return constantPredicate((operand.bits != 0) != operand.negated);
  Symbol *symbol =
      operand.is(Operand::Kind::Name) ? lookupRegister(operand.name) : nullptr;
  if (!symbol || symbol->bytes != 0)
    fail("expected a predicate in " + current->opcode() + ", found '" +
         operand.name + "'");
  if (!operand.negated)
    return symbol->offset;
  Draft invert;
  invert.inst.run = handler("not.pred");
  u32 place = temporary(0);
  invert.d = {place};
  invert.s = {symbol->offset};
  emitHidden(std::move(invert));
  return place;
}

u32 Decoder::addressOperand(const Operand &operand, bool &wide, i64 &offset) {
  const Operand &base =
      operand.is(Operand::Kind::Address) ? operand.parts.at(0) : operand;
  offset = base.offset;
  wide = true;
  if (base.is(Operand::Kind::Integer))
    return constant(base.bits, 8);
  Symbol *symbol = base.is(Operand::Kind::Name) ? lookup(base.name) : nullptr;
  if (!symbol)
    fail("unknown address '" + base.name + "' in " + current->opcode());
  if (symbol->kind == Symbol::Kind::Memory)
    return variableAddress(*symbol, 0, 8);
  if (symbol->bytes != 4 && symbol->bytes != 8)
    fail("expected an address of 32 or 64 bits in " + current->opcode() +
         ", found " + base.name);
  wide = symbol->bytes == 8;
  return symbol->offset;
}

void Decoder::address(Draft &draft, const Operand &operand) {
  bool wide;
  u32 place = addressOperand(operand, wide, draft.inst.imm);
  draft.inst.wideAddress = wide;
  draft.inst.addressed = true;
  draft.s.insert(draft.s.begin(), place);
}

const Decoder::Symbol *Decoder::memorySymbol(const Operand &operand) {
  const Operand &base =
      operand.is(Operand::Kind::Address) ? operand.parts.at(0) : operand;
  if (!base.is(Operand::Kind::Name))
    return nullptr;
  Symbol *symbol = lookup(base.name);
  return symbol && symbol->kind == Symbol::Kind::Memory ? symbol : nullptr;
}

} // namespace moe::sim
