//===- DecodeMemory.cpp - Loads, stores, atomics, fences, addresses -------===//

#include "Decoder.h"

#include <algorithm>

namespace moe::sim {

Space decodeSpace(const Instruction &instruction) {
  static constexpr std::pair<std::string_view, Space> spaces[] = {
      {"global", Space::Global},      {"shared::cluster", Space::SharedCluster},
      {"shared::cta", Space::Shared}, {"shared", Space::Shared},
      {"local", Space::Local},        {"param", Space::Param},
      {"param::entry", Space::Param}, {"param::func", Space::Param},
      {"const", Space::Const}};
  for (auto [word, space] : spaces)
    if (instruction.has(word))
      return space;
  return Space::Generic;
}

void decodeOrder(Inst &inst, const Instruction &instruction) {
  static constexpr std::pair<std::string_view, Order> orders[] = {
      {"volatile", Order::Volatile}, {"mmio", Order::Volatile},
      {"relaxed", Order::Relaxed},   {"acquire", Order::Acquire},
      {"release", Order::Release},   {"acq_rel", Order::AcqRel}};
  static constexpr std::pair<std::string_view, Scope> scopes[] = {
      {"cta", Scope::Cta},
      {"cluster", Scope::Cluster},
      {"gpu", Scope::Gpu},
      {"sys", Scope::System}};
  for (auto [word, order] : orders)
    if (instruction.has(word))
      inst.order = order;
  for (auto [word, scope] : scopes)
    if (instruction.has(word))
      inst.scope = scope;
  if (inst.order == Order::Volatile)
    inst.scope = Scope::System;
}

namespace {

bool isDataType(const std::string &word) { return typeBytes(word) != 0; }

/// The table's name of a type in memory: only size and sign matter.
std::string storageType(const std::string &type) {
  return (type[0] == 's' ? "s" : "u") + std::to_string(typeBytes(type) * 8);
}

u8 vectorLength(const Instruction &instruction) {
  if (instruction.has("v2"))
    return 2;
  if (instruction.has("v4"))
    return 4;
  return instruction.has("v8") ? 8 : 1;
}

/// Strong accesses outside shared memory let blocks talk to each other.
void noteCommunication(Decoder &decoder, const Inst &inst) {
  if (inst.order == Order::Weak || inst.space == Space::Local ||
      inst.space == Space::Param)
    return;
  decoder.kernel.spins = true;
  if (inst.space != Space::Shared)
    decoder.kernel.blocksCommunicate = true;
}

u32 elementWidth(Decoder &decoder, const Operand &operand, u32 bytes) {
  const Operand *first = &operand;
  if (operand.is(Operand::Kind::Vector))
    for (const Operand &part : operand.parts) {
      first = &part;
      if (decoder.registerWidth(part))
        break;
    }
  u32 width = decoder.registerWidth(*first);
  return width ? width : bytes;
}

bool decodeLoad(Decoder &decoder, const Instruction &instruction) {
  const std::string &type = instruction.words.back();
  if (!isDataType(type))
    return false;
  Draft draft;
  draft.inst.space = decodeSpace(instruction);
  draft.inst.vec = vectorLength(instruction);
  draft.inst.bytes = static_cast<u8>(typeBytes(type));
  decodeOrder(draft.inst, instruction);
  const Operand &to = instruction.operands.at(0);
  u32 width = elementWidth(decoder, to, draft.inst.bytes);
  draft.inst.run = decoder.handler("ld." + storageType(type) + "." +
                                   std::to_string(width * 8));
  decoder.destinations(draft, to, width);
  decoder.address(draft, instruction.operands.at(1));
  noteCommunication(decoder, draft.inst);
  decoder.emit(std::move(draft));
  return true;
}

bool decodeStore(Decoder &decoder, const Instruction &instruction) {
  const std::string &type = instruction.words.back();
  if (!isDataType(type))
    return false;
  Draft draft;
  draft.inst.space = decodeSpace(instruction);
  draft.inst.vec = vectorLength(instruction);
  draft.inst.bytes = static_cast<u8>(typeBytes(type));
  draft.inst.effect = true;
  decodeOrder(draft.inst, instruction);
  const Operand &from = instruction.operands.at(1);
  u32 width = elementWidth(decoder, from, draft.inst.bytes);
  draft.inst.run = decoder.handler("st." + storageType(type) + "." +
                                   std::to_string(width * 8));
  decoder.sources(draft, from, width, isFloatType(type));
  decoder.address(draft, instruction.operands.at(0));
  noteCommunication(decoder, draft.inst);
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Atomics
//===----------------------------------------------------------------------===//

std::string atomicOperation(const Instruction &instruction) {
  for (const char *op :
       {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"})
    if (instruction.has(op))
      return op;
  return {};
}

bool decodeAtomic(Decoder &decoder, const Instruction &instruction) {
  // The type is the last word, or comes before the operation of a vector.
  auto last = std::find_if(instruction.words.rbegin(), instruction.words.rend(),
                           isDataType);
  std::string op = atomicOperation(instruction);
  if (op.empty() || last == instruction.words.rend())
    return false;
  const std::string &type = *last;
  Draft draft;
  draft.inst.space = decodeSpace(instruction);
  draft.inst.vec = vectorLength(instruction);
  u32 bytes = typeBytes(type);
  draft.inst.bytes = static_cast<u8>(bytes);
  draft.inst.effect = true;
  draft.inst.order = Order::Relaxed;
  draft.inst.scope = Scope::Gpu;
  decodeOrder(draft.inst, instruction);
  bool isFloat = isFloatType(type);
  draft.inst.run = decoder.handler("atom." + op + "." +
                                   (isFloat ? type : storageType(type)));
  size_t next = 0;
  const auto &operands = instruction.operands;
  if (instruction.words[0] == "atom")
    decoder.destinations(draft, operands.at(next++), bytes);
  const Operand &address = operands.at(next++);
  decoder.sources(draft, operands.at(next++), bytes, isFloat);
  if (op == "cas")
    decoder.sources(draft, operands.at(next++), bytes, isFloat);
  decoder.address(draft, address);
  noteCommunication(decoder, draft.inst);
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Fences
//===----------------------------------------------------------------------===//

bool decodeFence(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  Inst &inst = draft.inst;
  inst.effect = true;
  if (instruction.has("proxy") || instruction.has("mbarrier_init")) {
    // mbarrier_init orders the initialisation for the asynchronous proxy too.
    bool async = instruction.has("async") ||
                 instruction.has("async::generic") ||
                 instruction.has("async.shared::cta") ||
                 instruction.has("mbarrier_init");
    bool tensorMap = instruction.has("tensormap") ||
                     instruction.has("tensormap::generic") ||
                     instruction.has("alias");
    if (!async && !tensorMap)
      return false;
    bool acquires = instruction.has("acquire");
    if (async || instruction.has("alias")) {
      inst.run = decoder.handler(async ? "fence.proxy.async" : "nop");
    } else if (acquires || instruction.has("release")) {
      inst.run = decoder.handler("fence.proxy.tensormap");
      inst.aux = acquires;
      // The map's generic address, and its size.
      if (acquires)
        decoder.address(draft, instruction.operands.at(0));
    } else {
      return false;
    }
    decoder.emit(std::move(draft));
    return true;
  }
  inst.run = decoder.handler("fence");
  inst.order = Order::AcqRel;
  inst.scope = Scope::Gpu;
  if (instruction.words[0] == "membar") {
    inst.scope = instruction.has("cta")   ? Scope::Cta
                 : instruction.has("sys") ? Scope::System
                                          : Scope::Gpu;
  } else {
    decodeOrder(inst, instruction);
    inst.order = instruction.has("acquire")   ? Order::Acquire
                 : instruction.has("release") ? Order::Release
                                              : Order::AcqRel;
  }
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Addresses
//===----------------------------------------------------------------------===//

bool decodeCvta(Decoder &decoder, const Instruction &instruction) {
  bool to = instruction.has("to");
  Space space = decodeSpace(instruction);
  u32 bytes = typeBytes(instruction.words.back());
  Draft draft;
  draft.inst.bytes = static_cast<u8>(bytes);
  const char *key = "cvta.global";
  switch (space) {
  case Space::Shared:
  case Space::SharedCluster:
    key = to ? "cvta.to.shared" : "cvta.shared";
    break;
  case Space::Local:
    key = to ? "cvta.to.local" : "cvta.local";
    break;
  case Space::Param:
    if (to)
      return false;
    key = "cvta.param";
    break;
  default:
    break;
  }
  draft.inst.run = decoder.handler(key);
  draft.d = {decoder.destination(instruction.operands.at(0), bytes)};
  i64 offset;
  const Operand &from = instruction.operands.at(1);
  draft.s = {
      decoder.memorySymbol(from)
          ? decoder.source(from, 8)
          : decoder.addressOperand(from, draft.inst.wideAddress, offset)};
  decoder.emit(std::move(draft));
  return true;
}

bool decodeClusterAddress(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  Draft draft;
  draft.inst.run = decoder.handler(op);
  // Without a space the address is generic.
  draft.inst.aux = decodeSpace(instruction) == Space::Generic;
  u32 bytes = op == "mapa" ? typeBytes(instruction.words.back()) : 4;
  draft.inst.bytes = static_cast<u8>(bytes);
  draft.d = {decoder.destination(instruction.operands.at(0), bytes)};
  i64 offset;
  draft.s = {decoder.addressOperand(instruction.operands.at(1),
                                    draft.inst.wideAddress, offset)};
  if (op == "mapa")
    draft.s.push_back(decoder.source(instruction.operands.at(2), 4));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeIsspacep(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  draft.inst.run = decoder.handler("isspacep");
  draft.inst.space = decodeSpace(instruction);
  draft.d = {decoder.predicateDestination(instruction.operands.at(0))};
  draft.s = {decoder.source(instruction.operands.at(1), 8)};
  decoder.emit(std::move(draft));
  return true;
}

} // namespace

bool decodeMemory(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (instruction.has("bulk") || instruction.has("async"))
    if (op != "fence")
      return false;
  if (op == "ld" || op == "ldu")
    return decodeLoad(decoder, instruction);
  if (op == "st")
    return decodeStore(decoder, instruction);
  if (op == "atom" || op == "red")
    return decodeAtomic(decoder, instruction);
  if (op == "membar" || op == "fence")
    return decodeFence(decoder, instruction);
  if (op == "cvta")
    return decodeCvta(decoder, instruction);
  if (op == "mapa" || op == "getctarank")
    return decodeClusterAddress(decoder, instruction);
  if (op == "isspacep")
    return decodeIsspacep(decoder, instruction);
  return false;
}

} // namespace moe::sim
