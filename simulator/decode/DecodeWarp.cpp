//===- DecodeWarp.cpp - Barriers and warp collectives ---------------------===//

#include "Decoder.h"
#include "execute/Barriers.h"

namespace moe::sim {
namespace {

void setMemberMask(Decoder &decoder, Draft &draft, const Operand &operand) {
  draft.inst.flow = Flow::WarpSync;
  if (operand.is(Operand::Kind::Integer))
    draft.inst.memberMask = static_cast<u32>(operand.bits);
  else
    draft.inst.memberRegister = decoder.source(operand, 4);
}

//===----------------------------------------------------------------------===//
// Barriers of the block and of the cluster
//===----------------------------------------------------------------------===//

BarrierKind barrierKind(const Instruction &instruction) {
  if (instruction.has("arrive"))
    return BarrierKind::Arrive;
  if (instruction.has("popc"))
    return BarrierKind::Popc;
  if (instruction.has("and"))
    return BarrierKind::And;
  return instruction.has("or") ? BarrierKind::Or : BarrierKind::Sync;
}

bool decodeBarrier(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  Draft draft;
  Inst &inst = draft.inst;
  inst.flow = Flow::Barrier;
  inst.effect = true;
  // bar is barrier.aligned by another name.
  inst.aligned = instruction.words[0] == "bar" || instruction.has("aligned");
  BarrierKind kind = barrierKind(instruction);
  inst.aux = static_cast<u8>(kind);
  size_t next = 0;
  bool reduces = instruction.has("red");
  if (reduces)
    draft.d = {kind == BarrierKind::Popc
                   ? decoder.destination(operands.at(next), 4)
                   : decoder.predicateDestination(operands.at(next))};
  next += reduces;
  draft.s = {decoder.source(operands.at(next++), 4)};
  size_t rest = operands.size() - next;
  bool hasCount = rest > (reduces ? 1u : 0u);
  draft.s.push_back(hasCount ? decoder.source(operands[next++], 4)
                             : decoder.constant(0, 4));
  if (reduces)
    draft.s.push_back(decoder.predicate(operands.at(next)));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeClusterBarrier(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  Inst &inst = draft.inst;
  inst.effect = true;
  inst.aligned = instruction.has("aligned");
  if (instruction.has("arrive")) {
    inst.run = decoder.handler("barrier.cluster.arrive");
    inst.aux = instruction.has("relaxed");
  } else if (instruction.has("wait")) {
    inst.flow = Flow::ClusterWait;
  } else {
    return false;
  }
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Collectives of the warp
//===----------------------------------------------------------------------===//

bool decodeShuffle(Decoder &decoder, const Instruction &instruction) {
  static constexpr std::string_view modes[] = {"up", "down", "bfly", "idx"};
  const auto &operands = instruction.operands;
  if (!instruction.has("sync") || operands.size() != 5)
    return false;
  Draft draft;
  draft.inst.run = decoder.handler("shfl");
  for (u8 mode = 0; mode < 4; ++mode)
    if (instruction.has(modes[mode]))
      draft.inst.aux = mode;
  decoder.destinations(draft, operands[0], 4);
  for (size_t i = 1; i < 4; ++i)
    draft.s.push_back(decoder.source(operands[i], 4));
  setMemberMask(decoder, draft, operands[4]);
  decoder.emit(std::move(draft));
  return true;
}

bool decodeVote(Decoder &decoder, const Instruction &instruction) {
  static constexpr std::string_view modes[] = {"all", "any", "uni", "ballot"};
  const auto &operands = instruction.operands;
  if (!instruction.has("sync"))
    return false;
  Draft draft;
  draft.inst.run = decoder.handler("vote");
  for (u8 mode = 0; mode < 4; ++mode)
    if (instruction.has(modes[mode]))
      draft.inst.aux = mode;
  draft.d = {instruction.has("ballot")
                 ? decoder.destination(operands.at(0), 4)
                 : decoder.predicateDestination(operands.at(0))};
  draft.s = {decoder.predicate(operands.at(1))};
  setMemberMask(decoder, draft, operands.at(2));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeMatch(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  const std::string &type = instruction.words.back();
  Draft draft;
  draft.inst.run =
      decoder.handler(std::string("match.") +
                      (instruction.has("any") ? "any." : "all.") + type);
  decoder.destinations(draft, operands.at(0), 4);
  draft.s = {decoder.source(operands.at(1), typeBytes(type))};
  setMemberMask(decoder, draft, operands.at(2));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeRedux(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  std::string key = "redux";
  for (size_t i = 1; i < instruction.words.size(); ++i)
    if (instruction.words[i] != "sync")
      key += "." + instruction.words[i];
  Draft draft;
  draft.inst.run = decoder.handler(key);
  draft.d = {decoder.destination(operands.at(0), 4)};
  draft.s = {decoder.source(operands.at(1), 4)};
  setMemberMask(decoder, draft, operands.at(2));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeElect(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  draft.inst.run = decoder.handler("elect");
  decoder.destinations(draft, instruction.operands.at(0), 4);
  setMemberMask(decoder, draft, instruction.operands.at(1));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeWarpBarrier(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  draft.inst.run = decoder.handler("bar.warp.sync");
  draft.inst.effect = true;
  // Lanes may meet at different bar.warp.sync instructions.
  draft.inst.aux2 = 1;
  setMemberMask(decoder, draft, instruction.operands.at(0));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeActiveMask(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  draft.inst.run = decoder.handler("activemask");
  draft.d = {decoder.destination(instruction.operands.at(0), 4)};
  decoder.emit(std::move(draft));
  return true;
}

} // namespace

bool decodeWarp(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (op == "bar" || op == "barrier") {
    if (instruction.has("warp"))
      return decodeWarpBarrier(decoder, instruction);
    if (instruction.has("cluster"))
      return decodeClusterBarrier(decoder, instruction);
    return decodeBarrier(decoder, instruction);
  }
  if (op == "shfl")
    return decodeShuffle(decoder, instruction);
  if (op == "vote")
    return decodeVote(decoder, instruction);
  if (op == "match")
    return decodeMatch(decoder, instruction);
  if (op == "redux")
    return decodeRedux(decoder, instruction);
  if (op == "elect")
    return decodeElect(decoder, instruction);
  if (op == "activemask")
    return decodeActiveMask(decoder, instruction);
  return false;
}

} // namespace moe::sim
