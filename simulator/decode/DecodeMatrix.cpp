//===- DecodeMatrix.cpp - mma, wgmma, ldmatrix and friends ----------------===//

#include "Decoder.h"
#include "Wgmma.h"
#include "execute/Mma.h"

#include <charconv>
#include <unordered_map>

namespace moe::sim {
namespace {

struct MatrixType {
  NumberType number;
  u8 bits;
  bool integer;
  bool isSigned;
};

const MatrixType *matrixType(const std::string &name) {
  using N = NumberType;
  static const std::unordered_map<std::string, MatrixType> types = {
      {"f16", {N::F16, 16, false, false}},
      {"bf16", {N::BF16, 16, false, false}},
      {"tf32", {N::TF32, 32, false, false}},
      {"e4m3", {N::E4M3, 8, false, false}},
      {"e5m2", {N::E5M2, 8, false, false}},
      {"s8", {N::S8, 8, true, true}},
      {"u8", {N::U8, 8, true, false}},
      {"s4", {N::S8, 4, true, true}},
      {"u4", {N::U8, 4, true, false}}};
  auto it = types.find(name);
  return it == types.end() ? nullptr : &it->second;
}

/// m, n and k of "m16n8k16".
bool parseShape(const std::string &word, u32 &m, u32 &n, u32 &k) {
  const char *at = word.data(), *end = at + word.size();
  for (auto [letter, value] : {std::pair{'m', &m}, {'n', &n}, {'k', &k}}) {
    if (at == end || *at++ != letter)
      return false;
    auto [next, error] = std::from_chars(at, end, *value);
    if (error != std::errc())
      return false;
    at = next;
  }
  return at == end;
}

const std::string *shapeWord(const Instruction &instruction) {
  u32 m, n, k;
  for (const std::string &word : instruction.words)
    if (parseShape(word, m, n, k))
      return &word;
  return nullptr;
}

size_t partsOf(const Operand &operand) {
  return operand.is(Operand::Kind::Vector) ? operand.parts.size() : 1;
}

void expectParts(Decoder &decoder, const Operand &operand, size_t parts,
                 const char *what) {
  if (partsOf(operand) != parts)
    decoder.fail("expected " + std::to_string(parts) + " registers for " +
                 what + " of " + decoder.current->opcode() + ", found " +
                 std::to_string(partsOf(operand)));
}

//===----------------------------------------------------------------------===//
// mma.sync
//===----------------------------------------------------------------------===//

bool decodeMma(Decoder &decoder, const Instruction &instruction) {
  const auto &words = instruction.words;
  const std::string *shape = shapeWord(instruction);
  u32 m, n, k;
  if (!shape || words.size() < 8 || instruction.operands.size() < 4)
    return false;
  parseShape(*shape, m, n, k);
  const MatrixType *a = matrixType(words[words.size() - 3]);
  const MatrixType *b = matrixType(words[words.size() - 2]);
  const std::string &typeD = words[words.size() - 4];
  const std::string &typeC = words.back();
  if (!a || !b || a->bits != b->bits || m != 16 || n != 8 ||
      !instruction.has("row") || !instruction.has("col") ||
      instruction.has("sp") || instruction.has("block_scale"))
    return false;
  u32 width = 4 * (32 / a->bits);
  if (k < width || k % width || k > 256)
    return false;
  MmaShape packed;
  packed.typeA = a->number;
  packed.typeB = b->number;
  packed.k = static_cast<u16>(k);
  packed.elementBits = a->bits;
  packed.elementBytes = static_cast<u8>(a->bits / 8);
  packed.signedA = a->isSigned;
  packed.signedB = b->isSigned;
  packed.saturates = instruction.has("satfinite");
  packed.halfC = typeC == "f16";
  packed.halfD = typeD == "f16";
  Draft draft;
  draft.inst.flow = Flow::WarpSync;
  draft.inst.aligned = true;
  draft.inst.run = decoder.handler(a->integer ? "mma.integer" : "mma.float");
  draft.inst.imm = packed.pack();
  const auto &operands = instruction.operands;
  expectParts(decoder, operands[0], packed.halfD ? 2 : 4, "D");
  expectParts(decoder, operands[1], 2 * k / width, "A");
  expectParts(decoder, operands[2], k / width, "B");
  expectParts(decoder, operands[3], packed.halfC ? 2 : 4, "C");
  decoder.destinations(draft, operands[0], 4);
  for (size_t i = 1; i < 4; ++i)
    decoder.sources(draft, operands[i], 4, i == 3);
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Loads and stores of 8 x 8 matrices
//===----------------------------------------------------------------------===//

bool decodeMatrixMemory(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (!instruction.has("m8n8") || instruction.words.back() != "b16")
    return false;
  Draft draft;
  draft.inst.flow = Flow::WarpSync;
  draft.inst.aligned = true;
  draft.inst.run = decoder.handler(op);
  draft.inst.aux = instruction.has("trans");
  const auto &operands = instruction.operands;
  if (op == "movmatrix") {
    draft.d = {decoder.destination(operands.at(0), 4)};
    draft.s = {decoder.source(operands.at(1), 4)};
    decoder.emit(std::move(draft));
    return true;
  }
  draft.inst.space = decodeSpace(instruction);
  draft.inst.vec = instruction.has("x4") ? 4 : instruction.has("x2") ? 2 : 1;
  bool stores = op == "stmatrix";
  const Operand &registers = operands.at(stores ? 1 : 0);
  expectParts(decoder, registers, draft.inst.vec, "the matrices");
  if (stores) {
    draft.inst.effect = true;
    decoder.sources(draft, registers, 4);
  } else {
    decoder.destinations(draft, registers, 4);
  }
  decoder.address(draft, operands.at(stores ? 0 : 1));
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// wgmma
//===----------------------------------------------------------------------===//

i64 immediateOr(const Instruction &instruction, size_t index, i64 otherwise) {
  if (index >= instruction.operands.size())
    return otherwise;
  return static_cast<i64>(instruction.operands[index].bits);
}

/// Operands: D, A (registers or a descriptor), B's descriptor, scale-d, and
/// then the signs and, for 16-bit types, the transpositions.
bool decodeWgmmaMma(Decoder &decoder, const Instruction &instruction) {
  const auto &words = instruction.words;
  const auto &operands = instruction.operands;
  const std::string *shape = shapeWord(instruction);
  u32 m, n, k;
  if (!shape || operands.size() < 3 || instruction.has("sp"))
    return false;
  parseShape(*shape, m, n, k);
  const MatrixType *a = matrixType(words[words.size() - 2]);
  const MatrixType *b = matrixType(words.back());
  const std::string &typeD = words[words.size() - 3];
  if (!a || !b || m != 64 || n % 8 || n > 256 || a->bits < 8 ||
      k * a->bits != 256)
    return false;
  WgmmaShape packed;
  packed.typeA = a->number;
  packed.typeB = b->number;
  packed.n = static_cast<u16>(n);
  packed.elementBytes = static_cast<u8>(a->bits / 8);
  packed.registersA = operands[1].is(Operand::Kind::Vector);
  packed.halfD = typeD == "f16";
  packed.integer = a->integer;
  packed.saturates = instruction.has("satfinite");
  packed.negateA = immediateOr(instruction, 4, 1) == -1;
  packed.negateB = immediateOr(instruction, 5, 1) == -1;
  // With A in registers only B can be transposed.
  packed.transposeA = !packed.registersA && immediateOr(instruction, 6, 0);
  packed.transposeB =
      immediateOr(instruction, packed.registersA ? 6 : 7, 0) != 0;
  Draft draft;
  draft.inst.flow = Flow::WarpSync;
  draft.inst.aligned = true;
  draft.inst.effect = true;
  draft.inst.run = decoder.handler("wgmma.mma_async");
  draft.inst.imm = packed.pack();
  expectParts(decoder, operands[0], packed.halfD ? n / 4 : n / 2, "D");
  decoder.destinations(draft, operands[0], 4);
  // Sources: scale-d, B's descriptor, A.
  draft.s = {operands.size() > 3 ? decoder.predicate(operands[3])
                                 : decoder.constantPredicate(true)};
  draft.s.push_back(decoder.source(operands[2], 8));
  if (packed.registersA) {
    expectParts(decoder, operands[1], 4, "A");
    decoder.sources(draft, operands[1], 4);
  } else {
    draft.s.push_back(decoder.source(operands[1], 8));
  }
  decoder.kernel.usesAsyncProxy = true;
  decoder.emit(std::move(draft));
  return true;
}

bool decodeWgmma(Decoder &decoder, const Instruction &instruction) {
  if (instruction.has("mma_async"))
    return decodeWgmmaMma(decoder, instruction);
  Draft draft;
  draft.inst.flow = Flow::WarpSync;
  draft.inst.aligned = true;
  draft.inst.effect = true;
  for (const char *name : {"fence", "commit_group", "wait_group"})
    if (instruction.has(name)) {
      draft.inst.run = decoder.handler(std::string("wgmma.") + name);
      draft.inst.imm = immediateOr(instruction, 0, 0);
      decoder.emit(std::move(draft));
      return true;
    }
  return false;
}

} // namespace

bool decodeMatrix(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (op == "mma")
    return decodeMma(decoder, instruction);
  if (op == "wgmma")
    return decodeWgmma(decoder, instruction);
  if (op == "ldmatrix" || op == "stmatrix" || op == "movmatrix")
    return decodeMatrixMemory(decoder, instruction);
  return false;
}

} // namespace moe::sim
