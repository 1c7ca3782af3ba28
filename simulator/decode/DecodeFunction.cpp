//===- DecodeFunction.cpp - Statements, control flow and calls ------------===//

#include "ControlFlow.h"
#include "Decoder.h"
#include "Wgmma.h"

#include <algorithm>
#include <stdexcept>

namespace moe::sim {
namespace {

/// What hardware gives a kernel without static shared memory, whose swizzles
/// may rely on it.
constexpr u32 kDynamicSharedAlignment = 1024;
/// Of a thread; that of all chips.
constexpr u64 kMaxLocalBytes = 512 * 1024;

u64 alignTo(u64 value, u64 alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

/// With which ptxas lets a kernel with setmaxnreg start: as .maxnreg says, or
/// what an SM can give each thread of .minnctapersm blocks. With neither (the
/// block's size alone is not enough) ptxas says that it ignores setmaxnreg.
u32 launchRegisters(const Function &function) {
  constexpr u32 perSm = 65536, most = 255, granularity = 8;
  if (function.maxRegisters)
    return function.maxRegisters;
  const u32 *block = function.requiredBlock;
  u64 threads =
      block[0] ? u64(block[0]) * block[1] * block[2] : u64(function.maxThreads);
  if (!function.minBlocks || !threads)
    return 0;
  u64 share = perSm / (threads * function.minBlocks);
  return static_cast<u32>(
      std::min<u64>(share / granularity * granularity, most));
}

} // namespace

//===----------------------------------------------------------------------===//
// Statements
//===----------------------------------------------------------------------===//

void Decoder::emit(Draft draft) {
  Inst &inst = draft.inst;
  if (inst.guard == kNone) {
    inst.guard = guard;
    inst.guardNegated = current && current->guardNegated;
  }
  inst.line = current ? current->line : 0;
  std::string opcode = hidden || !current ? "" : current->opcode();
  auto [it, fresh] = module.opcodeIndex.try_emplace(
      opcode, static_cast<u16>(module.program.opcodes.size()));
  if (fresh)
    module.program.opcodes.push_back(opcode);
  inst.opcode = it->second;
  inst.nd = static_cast<u16>(draft.d.size());
  inst.ns = static_cast<u16>(draft.s.size());
  u32 start = static_cast<u32>(kernel.operands.size());
  operandStarts.emplace_back(start, start + inst.nd);
  kernel.operands.insert(kernel.operands.end(), draft.d.begin(), draft.d.end());
  kernel.operands.insert(kernel.operands.end(), draft.s.begin(), draft.s.end());
  kernel.sources.push_back(current ? current->source : SourceLine());
  kernel.code.push_back(inst);
}

void Decoder::emitHidden(Draft draft) {
  hidden = true;
  emit(std::move(draft));
  hidden = false;
}

/// Labels of a scope are known from its start: branches go forward too.
void Decoder::openScope(const std::vector<Statement> &statements,
                        size_t begin) {
  Scope &scope = scopes.emplace_back();
  int depth = 0;
  for (size_t i = begin; i < statements.size() && depth >= 0; ++i) {
    const Statement &statement = statements[i];
    if (statement.kind == Statement::Kind::OpenScope)
      ++depth;
    else if (statement.kind == Statement::Kind::CloseScope)
      --depth;
    else if (depth == 0 && statement.kind == Statement::Kind::Label) {
      Symbol label{Symbol::Kind::Label};
      label.offset = static_cast<u32>(labelPcs.size());
      labelPcs.push_back(kNone);
      scope.symbols[statement.label] = label;
    } else if (depth == 0 && statement.kind == Statement::Kind::BranchTargets) {
      scope.branchTargets[statement.label] = statement.targets;
    }
  }
}

void Decoder::body(const std::vector<Statement> &statements, size_t begin,
                   size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const Statement &statement = statements[i];
    switch (statement.kind) {
    case Statement::Kind::OpenScope:
      openScope(statements, i + 1);
      break;
    case Statement::Kind::CloseScope:
      scopes.pop_back();
      break;
    case Statement::Kind::Registers:
      declareRegisters(statement.registers);
      break;
    case Statement::Kind::Variable:
      declareVariable(statement.variable);
      break;
    case Statement::Kind::Label:
      labelPcs[scopes.back().symbols.at(statement.label).offset] = nextPc();
      break;
    case Statement::Kind::BranchTargets:
      break;
    case Statement::Kind::Instruction:
      instruction(statement.instruction);
      break;
    }
  }
}

void Decoder::instruction(const Instruction &instruction) {
  current = &instruction;
  guard = kNone;
  if (!instruction.guard.empty()) {
    Symbol *symbol = lookupRegister(instruction.guard);
    if (!symbol || symbol->bytes != 0)
      fail("unknown predicate '" + instruction.guard + "'");
    guard = symbol->offset;
  }
  const std::string &word = instruction.words[0];
  if (word == "bra") {
    branch(instruction);
  } else if (word == "brx") {
    branchIndexed(instruction);
  } else if (word == "call") {
    call(instruction);
  } else if (word == "ret" && !returnLabels.empty()) {
    Draft jump;
    jump.inst.flow = Flow::Branch;
    fixups.push_back({nextPc(), returnLabels.back()});
    emit(std::move(jump));
  } else if (word == "ret" || word == "exit") {
    Draft exit;
    exit.inst.flow = Flow::Exit;
    emit(std::move(exit));
  } else {
    static constexpr Family families[] = {decodeScalar, decodeConversion,
                                          decodeMemory, decodeWarp,
                                          decodeMatrix, decodeAsync};
    bool decoded = false;
    for (Family family : families)
      if ((decoded = family(*this, instruction)))
        break;
    if (!decoded)
      unknown();
  }
  current = nullptr;
}

u32 Decoder::labelOf(const std::string &name) {
  for (size_t i = scopes.size(); i-- > 0;) {
    auto it = scopes[i].symbols.find(name);
    if (it != scopes[i].symbols.end() && it->second.kind == Symbol::Kind::Label)
      return it->second.offset;
    if (scopes[i].isFunction)
      break;
  }
  fail("unknown label '" + name + "'");
}

void Decoder::branch(const Instruction &instruction) {
  Draft draft;
  draft.inst.flow = Flow::Branch;
  fixups.push_back({nextPc(), labelOf(instruction.operands.at(0).name)});
  emit(std::move(draft));
}

void Decoder::branchIndexed(const Instruction &instruction) {
  const std::string &name = instruction.operands.at(1).name;
  const std::vector<std::string> *targets = nullptr;
  for (size_t i = scopes.size(); i-- > 0 && !targets;) {
    auto it = scopes[i].branchTargets.find(name);
    if (it != scopes[i].branchTargets.end())
      targets = &it->second;
  }
  if (!targets)
    fail("unknown .branchtargets '" + name + "'");
  Draft draft;
  draft.inst.flow = Flow::BranchIndex;
  draft.inst.target = static_cast<u32>(kernel.branchTables.size());
  draft.s = {source(instruction.operands[0], 4)};
  std::vector<u32> &table = kernel.branchTables.emplace_back();
  for (const std::string &target : *targets)
    table.push_back(labelOf(target)); // a label until finish()
  emit(std::move(draft));
}

//===----------------------------------------------------------------------===//
// Calls
//===----------------------------------------------------------------------===//

void Decoder::bindParams(const Function &callee, Scope &scope,
                         const std::vector<Operand> &arguments,
                         const std::vector<Variable> &params) {
  if (arguments.size() != params.size())
    fail("expected " + std::to_string(params.size()) + " operands for " +
         callee.name + ", found " + std::to_string(arguments.size()));
  for (size_t i = 0; i < params.size(); ++i) {
    Symbol *symbol = arguments[i].is(Operand::Kind::Name)
                         ? lookup(arguments[i].name)
                         : nullptr;
    if (symbol) {
      scope.symbols[params[i].name] = *symbol;
      continue;
    }
    Symbol value{Symbol::Kind::Register};
    value.bytes = params[i].elementBytes;
    value.offset = source(arguments[i], value.bytes);
    scope.symbols[params[i].name] = value;
  }
}

void Decoder::call(const Instruction &instruction) {
  std::vector<Operand> results, arguments;
  std::string name;
  for (const Operand &operand : instruction.operands) {
    if (operand.is(Operand::Kind::List))
      (name.empty() ? results : arguments) = operand.parts;
    else if (name.empty())
      name = operand.name;
  }
  auto it = module.program.tree.functions.find(name);
  if (it == module.program.tree.functions.end() || !it->second.hasBody) {
    externalCall(name);
    return;
  }
  const Function &callee = it->second;
  if (std::find(callStack.begin(), callStack.end(), name) != callStack.end())
    fail("recursive call of " + name + ": the simulator needs calls that end");
  // @p call: jump over the inlined body where the guard is false.
  std::optional<u32> skip;
  if (guard != kNone) {
    Draft jump;
    jump.inst.flow = Flow::Branch;
    jump.inst.guard = guard;
    jump.inst.guardNegated = !instruction.guardNegated;
    skip = nextPc();
    emit(std::move(jump));
  }
  Scope frame;
  frame.isFunction = true;
  bindParams(callee, frame, results, callee.results);
  bindParams(callee, frame, arguments, callee.params);
  u32 end = static_cast<u32>(labelPcs.size());
  labelPcs.push_back(kNone);
  returnLabels.push_back(end);
  callStack.push_back(name);
  scopes.push_back(std::move(frame));
  openScope(callee.body, 0);
  body(callee.body, 0, callee.body.size());
  scopes.pop_back();
  scopes.pop_back();
  callStack.pop_back();
  returnLabels.pop_back();
  labelPcs[end] = nextPc();
  if (skip)
    kernel.code[*skip].target = nextPc();
}

void Decoder::externalCall(const std::string &callee) {
  Draft draft;
  if (callee == "__assertfail") {
    draft.inst.run = handler("trap");
    draft.inst.effect = true;
    draft.inst.aux = 1;
    emit(std::move(draft));
  } else if (callee == "vprintf") {
    // Prints nothing; its result says that nothing was printed.
    draft.inst.run = handler("nop");
    emit(std::move(draft));
  } else {
    unknown("call of the external function " + callee +
            ", which has no body here");
  }
}

//===----------------------------------------------------------------------===//
// The whole kernel
//===----------------------------------------------------------------------===//

void Decoder::run() {
  kernel.name = function.name;
  kernel.maxThreads = function.maxThreads;
  std::copy_n(function.requiredBlock, 3, kernel.requiredBlock);
  std::copy_n(function.requiredCluster, 3, kernel.requiredCluster);
  kernel.maxClusterRank = function.maxClusterRank;
  kernel.launchRegisters = launchRegisters(function);
  scopes.emplace_back(); // module
  scopes.emplace_back().isFunction = true;
  declareParams();
  openScope(function.body, 0);
  body(function.body, 0, function.body.size());
  guard = kNone;
  Draft end;
  end.inst.flow = Flow::Exit;
  emit(std::move(end));
  finish();
}

void Decoder::finish() {
  if (kernel.code.size() > kPcLimit)
    throw std::invalid_argument(
        "kernel " + kernel.name + ": expected at most " +
        std::to_string(kPcLimit) + " instructions, found " +
        std::to_string(kernel.code.size()));
  if (kernel.localBytes > kMaxLocalBytes)
    throw std::invalid_argument(
        "kernel " + kernel.name + ": expected at most " +
        std::to_string(kMaxLocalBytes) + " bytes of local memory, found " +
        std::to_string(kernel.localBytes));
  for (size_t pc = 0; pc < kernel.code.size(); ++pc) {
    kernel.code[pc].d = kernel.operands.data() + operandStarts[pc].first;
    kernel.code[pc].s = kernel.operands.data() + operandStarts[pc].second;
  }
  for (const Fixup &fixup : fixups)
    kernel.code[fixup.pc].target = labelPcs[fixup.label];
  for (std::vector<u32> &table : kernel.branchTables)
    for (u32 &entry : table)
      entry = labelPcs[entry];
  kernel.dynamicStart = kernel.sharedBytes;
  if (kernel.usesDynamicShared) {
    kernel.sharedAlignment =
        std::max(kernel.sharedAlignment, kernel.dynamicAlignment);
    kernel.dynamicStart =
        alignTo(kernel.sharedBytes,
                std::max(kernel.dynamicAlignment, kDynamicSharedAlignment));
  }
  for (size_t index : dynamicPresets)
    kernel.presets[index].value += kernel.dynamicStart;
  markWgmmaOperands();
  // The files of a block's warps follow each other, and vectors of registers
  // are read and written by aligned accesses.
  kernel.registerBytes = static_cast<u32>(alignTo(kernel.registerBytes, 64));
  analyzeDefinedness(kernel, registerBytes);
  kernel.order = reconvergenceOrder(kernel);
}

/// Writes to registers that wgmma takes need a wgmma.fence before the next
/// wgmma.
void Decoder::markWgmmaOperands() {
  const HandlerTable &table = handlers();
  Handler mma = table.at("wgmma.mma_async");
  std::set<u32> operands;
  for (const Inst &inst : kernel.code)
    if (inst.run == mma) {
      operands.insert(inst.d, inst.d + inst.nd);
      // A descriptor is read when the instruction issues; registers are not.
      if (WgmmaShape::unpack(inst.imm).registersA)
        operands.insert(inst.s + 2, inst.s + inst.ns);
    }
  for (Inst &inst : kernel.code)
    if (inst.run != mma)
      inst.feedsWgmma = std::any_of(inst.d, inst.d + inst.nd, [&](u32 place) {
        return operands.count(place) != 0;
      });
}

} // namespace moe::sim
