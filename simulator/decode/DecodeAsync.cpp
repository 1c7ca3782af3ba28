//===- DecodeAsync.cpp - cp.async, bulk copies and mbarriers --------------===//

#include "BulkCopy.h"
#include "Decoder.h"
#include "TensorMapField.h"

#include <algorithm>
#include <cstdlib>

namespace moe::sim {
namespace {

/// An address as one register, its offset added.
u32 foldedAddress(Decoder &decoder, const Operand &operand, bool &wide) {
  i64 offset;
  u32 place = decoder.addressOperand(operand, wide, offset);
  if (offset == 0)
    return place;
  u32 bytes = wide ? 8 : 4;
  Draft add;
  add.inst.run = decoder.handler(wide ? "add.u64" : "add.u32");
  u32 sum = decoder.scratch(bytes);
  add.d = {sum};
  add.s = {place, decoder.constant(static_cast<u64>(offset), bytes)};
  decoder.emitHidden(std::move(add));
  return sum;
}

i64 immediate(const Instruction &instruction, size_t index) {
  return index < instruction.operands.size()
             ? static_cast<i64>(instruction.operands[index].bits)
             : 0;
}

Draft withHandler(Decoder &decoder, const std::string &key) {
  Draft draft;
  draft.inst.run = decoder.handler(key);
  draft.inst.effect = true;
  return draft;
}

//===----------------------------------------------------------------------===//
// cp.async
//===----------------------------------------------------------------------===//

bool decodeCopy(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  if (!instruction.has("ca") && !instruction.has("cg"))
    return false;
  Draft draft = withHandler(decoder, "cp.async");
  bool wide;
  draft.s = {decoder.addressOperand(operands.at(1), wide, draft.inst.imm2)};
  if (!wide)
    return false;
  draft.inst.bytes = static_cast<u8>(operands.at(2).bits);
  // A cache policy is a 64-bit register and comes last.
  if (operands.size() > 3 &&
      !(instruction.has("L2::cache_hint") && operands.size() == 4)) {
    const Operand &rest = operands[3];
    bool ignores = rest.is(Operand::Kind::Name) &&
                   decoder.registerWidth(rest) == 0 &&
                   !decoder.memorySymbol(rest);
    draft.inst.aux = ignores;
    draft.s.push_back(ignores ? decoder.predicate(rest)
                              : decoder.source(rest, 4));
  }
  decoder.address(draft, operands.at(0));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeCopyGroups(Decoder &decoder, const Instruction &instruction) {
  bool commits = instruction.has("commit_group");
  Draft draft = withHandler(decoder, commits ? "cp.async.commit_group"
                                             : "cp.async.wait_group");
  draft.inst.imm = instruction.has("wait_all") ? -1 : immediate(instruction, 0);
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// mbarrier
//===----------------------------------------------------------------------===//

bool isGeneric(const Instruction &instruction) {
  return decodeSpace(instruction) == Space::Generic;
}

void noteWaiting(Decoder &decoder) {
  decoder.kernel.spins = true;
  decoder.kernel.usesAsyncProxy = true;
}

bool decodeMbarrierArrive(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  bool drops = instruction.words[1] == "arrive_drop";
  Draft draft = withHandler(decoder, "mbarrier.arrive");
  draft.inst.aux = (instruction.has("expect_tx") ? 1 : 0) | (drops ? 2 : 0) |
                   (instruction.has("relaxed") ? 4 : 0);
  draft.inst.aux2 = isGeneric(instruction);
  // Remote arrivals may have no state operand.
  size_t next = operands.at(0).is(Operand::Kind::Address) ? 0 : 1;
  if (next)
    decoder.destinations(draft, operands[0], 8);
  size_t address = next++;
  if (next < operands.size())
    draft.s.push_back(decoder.source(operands[next], 4));
  decoder.address(draft, operands.at(address));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeMbarrierTest(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  Draft draft = withHandler(decoder, "mbarrier.test_wait");
  bool parity = instruction.has("parity");
  draft.inst.aux = (parity ? 1 : 0) | (instruction.has("relaxed") ? 4 : 0);
  draft.inst.aux2 = isGeneric(instruction);
  draft.d = {decoder.predicateDestination(operands.at(0))};
  draft.s = {decoder.source(operands.at(2), parity ? 4 : 8)};
  decoder.address(draft, operands.at(1));
  noteWaiting(decoder);
  decoder.emit(std::move(draft));
  return true;
}

bool decodeMbarrier(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  const std::string &what = instruction.words.at(1);
  if (what == "arrive" || what == "arrive_drop")
    return decodeMbarrierArrive(decoder, instruction);
  if (what == "test_wait" || what == "try_wait")
    return decodeMbarrierTest(decoder, instruction);
  if (what == "pending_count") {
    Draft draft = withHandler(decoder, "mbarrier.pending_count");
    draft.d = {decoder.destination(operands.at(0), 4)};
    draft.s = {decoder.source(operands.at(1), 8)};
    decoder.emit(std::move(draft));
    return true;
  }
  bool isTx = what == "expect_tx" || what == "complete_tx";
  if (what != "init" && what != "inval" && !isTx)
    return false;
  Draft draft =
      withHandler(decoder, isTx ? "mbarrier.expect_tx" : "mbarrier." + what);
  draft.inst.aux = what == "complete_tx";
  draft.inst.aux2 = isGeneric(instruction);
  if (operands.size() > 1)
    draft.s = {decoder.source(operands[1], 4)};
  decoder.address(draft, operands.at(0));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeCopyArrive(Decoder &decoder, const Instruction &instruction) {
  Draft draft = withHandler(decoder, "cp.async.mbarrier.arrive");
  draft.inst.aux = instruction.has("noinc");
  draft.inst.aux2 = isGeneric(instruction);
  decoder.address(draft, instruction.operands.at(0));
  noteWaiting(decoder);
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Bulk copies
//===----------------------------------------------------------------------===//

bool readOperation(const Instruction &instruction, BulkShape &shape) {
  static constexpr std::pair<std::string_view, BulkReduction> names[] = {
      {"add", BulkReduction::Add}, {"min", BulkReduction::Min},
      {"max", BulkReduction::Max}, {"and", BulkReduction::And},
      {"or", BulkReduction::Or},   {"xor", BulkReduction::Xor},
      {"inc", BulkReduction::Inc}, {"dec", BulkReduction::Dec}};
  shape.reduces = true;
  for (auto [name, reduction] : names)
    if (instruction.has(name)) {
      shape.reduction = reduction;
      return true;
    }
  return false;
}

bool readReduction(const Instruction &instruction, BulkShape &shape) {
  static constexpr std::pair<std::string_view, NumberType> types[] = {
      {"f16", NumberType::F16}, {"bf16", NumberType::BF16},
      {"f32", NumberType::F32}, {"f64", NumberType::F64},
      {"s32", NumberType::S32}, {"u32", NumberType::U32},
      {"s64", NumberType::S64}, {"u64", NumberType::U64},
      {"b32", NumberType::U32}, {"b64", NumberType::U64}};
  const std::string &type = instruction.words.back();
  for (auto [name, number] : types)
    if (type == name) {
      shape.type = number;
      shape.elementBytes = static_cast<u8>(typeBytes(type));
      return readOperation(instruction, shape);
    }
  return false;
}

u8 tensorRank(const Instruction &instruction) {
  for (const std::string &word : instruction.words)
    if (word.size() == 2 && word[1] == 'd' && word[0] >= '1' && word[0] <= '5')
      return static_cast<u8>(word[0] - '0');
  return 0;
}

/// Fills the places of BulkCopy.h.
void emitBulk(Decoder &decoder, const char *key, BulkShape shape,
              const Operand &global, const Operand &shared,
              const Operand *mbarrier, const Operand *mask,
              const Operand *size) {
  Draft draft = withHandler(decoder, key);
  bool wide;
  draft.s.push_back(foldedAddress(decoder, shared, wide));
  shape.wideShared = wide;
  if (mbarrier) {
    draft.s.push_back(foldedAddress(decoder, *mbarrier, wide));
    shape.wideMbarrier = wide;
  } else {
    draft.s.push_back(decoder.constant(0, 4));
  }
  shape.multicast = mask != nullptr;
  draft.s.push_back(mask ? decoder.widened(decoder.source(*mask, 2))
                         : decoder.constant(0, 4));
  if (shape.rank) {
    const Operand &coordinates = global.parts.at(1);
    if (coordinates.parts.size() != shape.rank)
      decoder.fail("expected " + std::to_string(shape.rank) +
                   " coordinates, found " +
                   std::to_string(coordinates.parts.size()));
    for (const Operand &part : coordinates.parts)
      draft.s.push_back(decoder.source(part, 4));
  } else {
    draft.s.push_back(decoder.source(*size, 4));
  }
  decoder.address(draft, global);
  draft.inst.imm2 = shape.pack();
  noteWaiting(decoder);
  decoder.emit(std::move(draft));
}

bool decodeBulkTensor(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  BulkShape shape;
  shape.rank = tensorRank(instruction);
  if (!shape.rank || instruction.has("im2col"))
    return false;
  bool stores = instruction.has("bulk_group");
  // The element type is in the map.
  if (instruction.words[1] == "reduce" &&
      (!stores || !readOperation(instruction, shape)))
    return false;
  if (stores) {
    emitBulk(decoder, "bulk.store", shape, operands.at(0), operands.at(1),
             nullptr, nullptr, nullptr);
    return true;
  }
  const Operand *mask =
      instruction.has("multicast::cluster") ? &operands.at(3) : nullptr;
  emitBulk(decoder, "bulk.load", shape, operands.at(1), operands.at(0),
           &operands.at(2), mask, nullptr);
  return true;
}

bool decodeBulkPlain(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  BulkShape shape;
  bool stores = instruction.has("bulk_group");
  bool reduces = instruction.words[1] == "reduce";
  if (reduces && !readReduction(instruction, shape))
    return false;
  if (instruction.has("cp_mask"))
    return false;
  if (stores) {
    emitBulk(decoder, "bulk.store", shape, operands.at(0), operands.at(1),
             nullptr, nullptr, &operands.at(2));
    return true;
  }
  // The destination's space comes first, the source's second.
  bool fromGlobal = instruction.has("global");
  const Operand *mask =
      instruction.has("multicast::cluster") ? &operands.at(4) : nullptr;
  emitBulk(decoder, fromGlobal ? "bulk.load" : "bulk.cluster", shape,
           operands.at(1), operands.at(0), &operands.at(3), mask,
           &operands.at(2));
  return true;
}

/// st.async, red.async: an address in the cluster, values, an mbarrier.
bool decodeStoreAsync(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  const std::string &type = instruction.words.back();
  Draft draft = withHandler(decoder, "store.async");
  BulkShape shape;
  shape.elementBytes = static_cast<u8>(typeBytes(type));
  if (instruction.words[0] == "red" && !readReduction(instruction, shape))
    return false;
  draft.inst.vec = instruction.has("v4") ? 4 : instruction.has("v2") ? 2 : 1;
  u32 bytes = shape.elementBytes * draft.inst.vec;
  if (!instruction.has("mbarrier::complete_tx::bytes") || bytes < 4 ||
      bytes > 16)
    return false;
  bool wide;
  draft.s = {foldedAddress(decoder, operands.at(2), wide)};
  shape.wideMbarrier = wide;
  decoder.sources(draft, operands.at(1), shape.elementBytes, isFloatType(type));
  decoder.address(draft, operands.at(0));
  draft.inst.imm2 = shape.pack();
  noteWaiting(decoder);
  decoder.emit(std::move(draft));
  return true;
}

bool decodeBulk(Decoder &decoder, const Instruction &instruction) {
  if (instruction.has("prefetch")) {
    decoder.emit(withHandler(decoder, "nop"));
    return true;
  }
  if (instruction.has("commit_group") || instruction.has("wait_group")) {
    bool waits = instruction.has("wait_group");
    Draft draft =
        withHandler(decoder, waits ? "bulk.wait_group" : "bulk.commit_group");
    draft.inst.imm = immediate(instruction, 0);
    draft.inst.aux = instruction.has("read");
    decoder.emit(std::move(draft));
    return true;
  }
  return instruction.has("tensor") ? decodeBulkTensor(decoder, instruction)
                                   : decodeBulkPlain(decoder, instruction);
}

//===----------------------------------------------------------------------===//
// Registers
//===----------------------------------------------------------------------===//

bool decodeRegisterBudget(Decoder &decoder, const Instruction &instruction) {
  constexpr u64 least = 24, most = 256, step = 8;
  const Operand &count = instruction.operands.at(0);
  bool increases = instruction.has("inc");
  if (increases == instruction.has("dec"))
    return false;
  if (!count.is(Operand::Kind::Integer) || count.bits < least ||
      count.bits > most || count.bits % step)
    decoder.fail("expected setmaxnreg to ask for a multiple of 8 from 24 to "
                 "256, found " +
                 (count.is(Operand::Kind::Integer) ? std::to_string(count.bits)
                                                   : count.name));
  Draft draft;
  draft.inst.flow = Flow::Registers;
  draft.inst.effect = draft.inst.aligned = true;
  draft.inst.imm = static_cast<i64>(count.bits);
  draft.inst.aux = increases;
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Tensor maps
//===----------------------------------------------------------------------===//

/// Fields that an instruction sets once for each dimension.
bool hasOrdinal(TensorMapField field) {
  return field >= TensorMapField::BoxDim &&
         field <= TensorMapField::ElementStride;
}

bool decodeTensorMapReplace(Decoder &decoder, const Instruction &instruction) {
  static constexpr std::pair<std::string_view, TensorMapField> fields[] = {
      {"global_address", TensorMapField::GlobalAddress},
      {"rank", TensorMapField::Rank},
      {"box_dim", TensorMapField::BoxDim},
      {"global_dim", TensorMapField::GlobalDim},
      {"global_stride", TensorMapField::GlobalStride},
      {"element_stride", TensorMapField::ElementStride},
      {"elemtype", TensorMapField::ElementType},
      {"interleave_layout", TensorMapField::Interleave},
      {"swizzle_mode", TensorMapField::Swizzle},
      {"swizzle_atomicity", TensorMapField::SwizzleAtomicity},
      {"fill_mode", TensorMapField::Fill}};
  const auto &operands = instruction.operands;
  auto field =
      std::find_if(std::begin(fields), std::end(fields),
                   [&](const auto &f) { return instruction.has(f.first); });
  if (field == std::end(fields) || !instruction.has("tile"))
    return false;
  Draft draft = withHandler(decoder, "tensormap.replace");
  draft.inst.space = decodeSpace(instruction);
  draft.inst.aux = static_cast<u8>(field->second);
  bool ordinal = hasOrdinal(field->second);
  if (ordinal)
    draft.inst.aux2 = static_cast<u8>(immediate(instruction, 1));
  // Of the innermost dimension there is no stride.
  u64 last = field->second == TensorMapField::GlobalStride ? 3 : 4;
  if (ordinal && operands.at(1).bits > last)
    decoder.fail("expected a dimension from 0 to " + std::to_string(last) +
                 ", found " + std::to_string(operands.at(1).bits));
  // Strides were given in units of 16 bytes up to PTX 8.4.
  bool inUnits =
      field->second == TensorMapField::GlobalStride &&
      std::strtod(decoder.module.program.tree.version.c_str(), nullptr) < 8.45;
  draft.inst.imm2 = inUnits ? 16 : 1;
  draft.inst.bytes = static_cast<u8>(typeBytes(instruction.words.back()));
  if (draft.inst.bytes != 4 && draft.inst.bytes != 8)
    return false;
  draft.s = {decoder.source(operands.at(ordinal ? 2 : 1), draft.inst.bytes)};
  decoder.address(draft, operands.at(0));
  decoder.kernel.usesAsyncProxy = true;
  decoder.emit(std::move(draft));
  return true;
}

/// tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release...
/// [to], [from], 128: s[0] is the target, s[1] the source.
bool decodeTensorMapCopy(Decoder &decoder, const Instruction &instruction) {
  if (!instruction.has("release") || immediate(instruction, 2) != 128)
    return false;
  Draft draft = withHandler(decoder, "tensormap.cp_fenceproxy");
  draft.inst.flow = Flow::WarpSync;
  draft.inst.aligned = true;
  bool wide;
  draft.s = {foldedAddress(decoder, instruction.operands.at(1), wide)};
  draft.inst.aux = wide;
  decoder.address(draft, instruction.operands.at(0));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeTensorMap(Decoder &decoder, const Instruction &instruction) {
  return instruction.has("replace")
             ? decodeTensorMapReplace(decoder, instruction)
             : instruction.has("cp_fenceproxy") &&
                   decodeTensorMapCopy(decoder, instruction);
}

} // namespace

bool decodeAsync(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (op == "mbarrier")
    return decodeMbarrier(decoder, instruction);
  if (op == "setmaxnreg")
    return decodeRegisterBudget(decoder, instruction);
  if (op == "tensormap")
    return decodeTensorMap(decoder, instruction);
  if (!instruction.has("async"))
    return false;
  if (op == "st" || op == "red")
    return decodeStoreAsync(decoder, instruction);
  if (op != "cp")
    return false;
  if (instruction.has("bulk"))
    return decodeBulk(decoder, instruction);
  if (instruction.has("mbarrier"))
    return decodeCopyArrive(decoder, instruction);
  if (instruction.has("commit_group") || instruction.has("wait_group") ||
      instruction.has("wait_all"))
    return decodeCopyGroups(decoder, instruction);
  return decodeCopy(decoder, instruction);
}

} // namespace moe::sim
