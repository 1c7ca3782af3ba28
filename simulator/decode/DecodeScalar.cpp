//===- DecodeScalar.cpp - Arithmetic, logic, moves and comparisons --------===//

#include "Decoder.h"

#include <algorithm>
#include <unordered_map>

namespace moe::sim {

bool isFloatType(std::string_view type) {
  return type.find('f') != std::string_view::npos;
}

namespace {

bool isHalfType(const std::string &type) {
  return type == "f16" || type == "bf16" || type == "f16x2" || type == "bf16x2";
}

/// "b32" for "u32": for operations that do not care.
std::string bitType(const std::string &type) {
  return "b" + std::to_string(typeBytes(type) * 8);
}

/// Signed and unsigned names as the tables have them.
std::string integerType(const std::string &type) {
  return type[0] == 'b' ? "u" + type.substr(1) : type;
}

u8 directedRounding(const Instruction &instruction) {
  if (instruction.has("rz"))
    return 1;
  if (instruction.has("rm"))
    return 2;
  return instruction.has("rp") ? 3 : 0;
}

/// Every word but the operation, rounding to nearest and the type, in the
/// order in which the tables spell them.
std::string modifiers(const Instruction &instruction) {
  std::string text;
  for (const char *word :
       {"lo", "hi", "wide", "approx", "shiftamt", "ftz", "NaN", "sat", "relu",
        "finite", "infinite", "number", "notanumber", "normal", "subnormal"})
    if (instruction.has(word))
      text += std::string(".") + word;
  return text;
}

bool hasUnknownModifier(const Instruction &instruction) {
  static constexpr std::string_view known[] = {
      "lo",  "hi",   "wide",       "approx",   "shiftamt", "ftz",      "NaN",
      "sat", "relu", "finite",     "infinite", "number",   "rn",       "normal",
      "rz",  "rm",   "notanumber", "rp",       "full",     "subnormal"};
  for (size_t i = 1; i < instruction.words.size(); ++i) {
    const std::string &word = instruction.words[i];
    if (typeBytes(word) == 0 && word != "pred" &&
        std::find(std::begin(known), std::end(known), word) == std::end(known))
      return true;
  }
  return false;
}

void emitElementwise(Decoder &decoder, const Instruction &instruction,
                     const std::string &key, u32 destinationBytes,
                     const std::vector<u32> &sourceBytes, bool isFloat) {
  if (instruction.operands.size() != sourceBytes.size() + 1)
    decoder.fail("expected " + std::to_string(sourceBytes.size() + 1) +
                 " operands for " + instruction.opcode() + ", found " +
                 std::to_string(instruction.operands.size()));
  Draft draft;
  draft.inst.run = decoder.handler(key);
  decoder.destinations(draft, instruction.operands[0], destinationBytes);
  for (size_t i = 0; i < sourceBytes.size(); ++i)
    decoder.sources(draft, instruction.operands[i + 1], sourceBytes[i],
                    isFloat);
  decoder.emit(std::move(draft));
}

//===----------------------------------------------------------------------===//
// Arithmetic: op.modifiers.type d, a, b, c
//===----------------------------------------------------------------------===//

bool emitDirected(Decoder &decoder, const Instruction &instruction,
                  const std::string &type) {
  static const std::unordered_map<std::string, u8> operations = {
      {"add", 0}, {"sub", 1}, {"mul", 2}, {"fma", 3},
      {"mad", 3}, {"div", 4}, {"rcp", 5}, {"sqrt", 6}};
  u8 rounding = directedRounding(instruction);
  auto it = operations.find(instruction.words[0]);
  if (!rounding || it == operations.end() || isHalfType(type) ||
      !isFloatType(type))
    return false;
  Draft draft;
  draft.inst.run = decoder.handler("directed." + type);
  draft.inst.aux = it->second;
  draft.inst.aux2 = rounding | (instruction.has("ftz") ? 4 : 0) |
                    (instruction.has("sat") ? 8 : 0);
  u32 bytes = typeBytes(type);
  decoder.destinations(draft, instruction.operands.at(0), bytes);
  for (size_t i = 1; i < instruction.operands.size(); ++i)
    decoder.sources(draft, instruction.operands[i], bytes, true);
  decoder.emit(std::move(draft));
  return true;
}

/// min and max of three numbers, which is what min of min is.
bool emitThreeWay(Decoder &decoder, const Instruction &instruction,
                  const std::string &type) {
  if (type != "f32")
    return false;
  Handler run = decoder.handler(instruction.words[0] + modifiers(instruction) +
                                "." + type);
  Draft first, second;
  first.inst.run = second.inst.run = run;
  u32 partial = decoder.scratch(4);
  first.d = {partial};
  decoder.sources(first, instruction.operands[1], 4, true);
  decoder.sources(first, instruction.operands[2], 4, true);
  decoder.emitHidden(std::move(first));
  decoder.destinations(second, instruction.operands[0], 4);
  second.s = {partial};
  decoder.sources(second, instruction.operands[3], 4, true);
  decoder.emit(std::move(second));
  return true;
}

bool decodeArithmetic(Decoder &decoder, const Instruction &instruction) {
  static const std::unordered_map<std::string, u32> arity = {
      {"add", 2},     {"sub", 2},   {"mul", 2}, {"mad", 3}, {"fma", 3},
      {"sad", 3},     {"div", 2},   {"rem", 2}, {"min", 2}, {"max", 2},
      {"neg", 1},     {"abs", 1},   {"ex2", 1}, {"lg2", 1}, {"rcp", 1},
      {"sqrt", 1},    {"rsqrt", 1}, {"sin", 1}, {"cos", 1}, {"tanh", 1},
      {"copysign", 2}};
  auto it = arity.find(instruction.words[0]);
  if (it == arity.end() || hasUnknownModifier(instruction))
    return false;
  const std::string &type = instruction.words.back();
  u32 bytes = typeBytes(type);
  if (bytes == 0)
    return false;
  if (emitDirected(decoder, instruction, type))
    return true;
  if (instruction.operands.size() == 4 && it->second == 2 &&
      (it->first == "min" || it->first == "max"))
    return emitThreeWay(decoder, instruction, type);
  std::string op = instruction.words[0];
  bool isFloat = isFloatType(type);
  std::string mods = modifiers(instruction);
  if (op == "mad" && isFloat)
    op = "fma";
  if (op == "mul" && !isFloat && mods.empty())
    mods = ".lo";
  bool wide = instruction.has("wide");
  std::vector<u32> sources(it->second, bytes);
  if (wide && it->second == 3)
    sources[2] = 2 * bytes;
  emitElementwise(decoder, instruction,
                  op + mods + "." + (isFloat ? type : integerType(type)),
                  wide ? 2 * bytes : bytes, sources, isFloat);
  return true;
}

/// add.cc, addc, sub.cc, subc, mad.lo.cc, madc.hi ...: the carry flag is a
/// predicate of the kernel's.
bool decodeCarry(Decoder &decoder, const Instruction &instruction) {
  static const std::unordered_map<std::string, u8> operations = {
      {"add", 0},  {"addc", 0}, {"sub", 1},
      {"subc", 1}, {"mad", 2},  {"madc", 2}};
  const std::string &op = instruction.words[0];
  auto it = operations.find(op);
  bool reads = op.back() == 'c', writes = instruction.has("cc");
  if (it == operations.end() || (!reads && !writes))
    return false;
  const std::string &type = instruction.words.back();
  u32 bytes = typeBytes(type);
  if (bytes != 4 && bytes != 8)
    return false;
  bool high = instruction.has("hi");
  Draft draft;
  draft.inst.run =
      decoder.handler(high ? "carry." + integerType(type)
                           : "carry.u" + std::to_string(bytes * 8));
  draft.inst.aux = static_cast<u8>(it->second + (high ? 1 : 0));
  draft.inst.aux2 = reads;
  draft.d = {decoder.destination(instruction.operands.at(0), bytes)};
  u32 flag = decoder.carryFlag();
  if (writes)
    draft.d.push_back(flag);
  draft.s = {reads ? flag : decoder.constantPredicate(false)};
  for (size_t i = 1; i < instruction.operands.size(); ++i)
    draft.s.push_back(decoder.source(instruction.operands[i], bytes));
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Bits
//===----------------------------------------------------------------------===//

bool decodePredicateLogic(Decoder &decoder, const Instruction &instruction) {
  Draft draft;
  draft.inst.run = decoder.handler(instruction.words[0] + ".pred");
  draft.d = {decoder.predicateDestination(instruction.operands.at(0))};
  for (size_t i = 1; i < instruction.operands.size(); ++i)
    draft.s.push_back(decoder.predicate(instruction.operands[i]));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeLop3(Decoder &decoder, const Instruction &instruction) {
  const auto &operands = instruction.operands;
  if (instruction.words.size() != 2 || operands.size() != 5)
    return false;
  Draft draft;
  draft.inst.run = decoder.handler("lop3.b32");
  draft.inst.imm = static_cast<i64>(operands[4].bits);
  draft.d = {decoder.destination(operands[0], 4)};
  for (size_t i = 1; i < 4; ++i)
    draft.s.push_back(decoder.source(operands[i], 4));
  decoder.emit(std::move(draft));
  return true;
}

bool decodePermute(Decoder &decoder, const Instruction &instruction) {
  static constexpr std::string_view modes[] = {"",    "f4e", "b4e", "rc8",
                                               "ecl", "ecr", "rc16"};
  Draft draft;
  draft.inst.run = decoder.handler("prmt.b32");
  for (u8 mode = 1; mode < 7; ++mode)
    if (instruction.has(modes[mode]))
      draft.inst.aux = mode;
  draft.d = {decoder.destination(instruction.operands.at(0), 4)};
  for (size_t i = 1; i < 4; ++i)
    draft.s.push_back(decoder.source(instruction.operands.at(i), 4));
  decoder.emit(std::move(draft));
  return true;
}

bool decodeBits(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  const std::string &type = instruction.words.back();
  u32 bytes = typeBytes(type);
  if ((op == "and" || op == "or" || op == "xor" || op == "not") &&
      type == "pred")
    return decodePredicateLogic(decoder, instruction);
  if (op == "lop3")
    return decodeLop3(decoder, instruction);
  if (op == "prmt")
    return decodePermute(decoder, instruction);
  auto emit = [&](const std::string &key, u32 destination,
                  std::vector<u32> sources) {
    emitElementwise(decoder, instruction, key, destination, sources, false);
    return true;
  };
  if (op == "and" || op == "or" || op == "xor")
    return emit(op + "." + bitType(type), bytes, {bytes, bytes});
  if (op == "not" || op == "cnot")
    return emit(op + "." + bitType(type), bytes, {bytes});
  if (op == "shl")
    return emit("shl." + bitType(type), bytes, {bytes, 4});
  if (op == "shr")
    return emit("shr." + integerType(type), bytes, {bytes, 4});
  if (op == "shf")
    return emit("shf." + instruction.words.at(1) + "." +
                    instruction.words.at(2) + ".b32",
                4, {4, 4, 4});
  if (op == "bfe")
    return emit("bfe." + type, bytes, {bytes, 4, 4});
  if (op == "bfi")
    return emit("bfi." + type, bytes, {bytes, bytes, 4, 4});
  if (op == "bfind")
    return emit("bfind" + modifiers(instruction) + "." + type, 4, {bytes});
  if (op == "popc" || op == "clz")
    return emit(op + "." + bitType(type), 4, {bytes});
  if (op == "brev")
    return emit("brev." + bitType(type), bytes, {bytes});
  if (op == "bmsk" || op == "szext")
    return emit(op + (instruction.has("wrap") ? ".wrap." : ".clamp.") + type, 4,
                {4, 4});
  if (op == "dp4a")
    return emit("dp4a." + instruction.words.at(1) + "." +
                    instruction.words.at(2),
                4, {4, 4, 4});
  return false;
}

//===----------------------------------------------------------------------===//
// Comparisons and selections
//===----------------------------------------------------------------------===//

u8 combination(const Instruction &instruction) {
  if (instruction.has("and"))
    return 1;
  if (instruction.has("or"))
    return 2;
  return instruction.has("xor") ? 3 : 0;
}

/// lo, ls, hi, hs compare without sign; the type says so already.
std::string comparisonName(const std::string &word) {
  if (word == "lo")
    return "lt";
  if (word == "ls")
    return "le";
  if (word == "hi")
    return "gt";
  return word == "hs" ? "ge" : word;
}

void comparisonSources(Decoder &decoder, const Instruction &instruction,
                       Draft &draft, const std::string &type) {
  u32 bytes = typeBytes(type);
  bool isFloat = isFloatType(type);
  for (size_t i = 1; i <= 2; ++i)
    draft.s.push_back(
        decoder.source(instruction.operands.at(i), bytes, isFloat));
  draft.inst.aux = combination(instruction);
  if (draft.inst.aux)
    draft.s.push_back(decoder.predicate(instruction.operands.at(3)));
}

bool decodeSetp(Decoder &decoder, const Instruction &instruction) {
  const std::string &type = instruction.words.back();
  Draft draft;
  draft.inst.run = decoder.handler(
      "setp." + comparisonName(instruction.words.at(1)) +
      (instruction.has("ftz") && type == "f32" ? ".ftz." : ".") +
      (isFloatType(type) ? type : integerType(type)));
  const Operand &result = instruction.operands.at(0);
  bool pair = result.is(Operand::Kind::Pair);
  draft.d = {decoder.predicateDestination(pair ? result.parts[0] : result)};
  if (pair)
    draft.d.push_back(decoder.predicateDestination(result.parts[1]));
  comparisonSources(decoder, instruction, draft, type);
  decoder.emit(std::move(draft));
  return true;
}

bool decodeSet(Decoder &decoder, const Instruction &instruction) {
  const std::string &from = instruction.words.back();
  std::string to = instruction.words.at(instruction.words.size() - 2);
  u32 bytes = typeBytes(to);
  if (to == "s32")
    to = "u32";
  Draft draft;
  draft.inst.run = decoder.handler(
      "set." + comparisonName(instruction.words.at(1)) +
      (instruction.has("ftz") && from == "f32" ? ".ftz." : ".") + to + "." +
      (isFloatType(from) ? from : integerType(from)));
  draft.d = {decoder.destination(instruction.operands.at(0), bytes)};
  comparisonSources(decoder, instruction, draft, from);
  decoder.emit(std::move(draft));
  return true;
}

bool decodeSelection(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  const auto &operands = instruction.operands;
  Draft draft;
  if (op == "selp") {
    const std::string &type = instruction.words.back();
    if (type == "pred") {
      draft.inst.run = decoder.handler("selp.pred");
      draft.d = {decoder.predicateDestination(operands.at(0))};
      draft.s = {decoder.predicate(operands.at(1)),
                 decoder.predicate(operands.at(2))};
    } else {
      u32 bytes = typeBytes(type);
      bool isFloat = isFloatType(type);
      draft.inst.run = decoder.handler("selp." + bitType(type));
      draft.d = {decoder.destination(operands.at(0), bytes)};
      draft.s = {decoder.source(operands.at(1), bytes, isFloat),
                 decoder.source(operands.at(2), bytes, isFloat)};
    }
    draft.s.push_back(decoder.predicate(operands.at(3)));
  } else {
    const std::string &type =
        instruction.words.at(instruction.words.size() - 2);
    const std::string &test = instruction.words.back();
    u32 bytes = typeBytes(type);
    bool isFloat = isFloatType(type);
    draft.inst.run = decoder.handler("slct." + bitType(type) + "." + test);
    draft.d = {decoder.destination(operands.at(0), bytes)};
    draft.s = {decoder.source(operands.at(1), bytes, isFloat),
               decoder.source(operands.at(2), bytes, isFloat),
               decoder.source(operands.at(3), 4, test == "f32")};
  }
  decoder.emit(std::move(draft));
  return true;
}

bool decodeTestp(Decoder &decoder, const Instruction &instruction) {
  const std::string &type = instruction.words.back();
  Draft draft;
  draft.inst.run =
      decoder.handler("testp." + instruction.words.at(1) + "." + type);
  draft.d = {decoder.predicateDestination(instruction.operands.at(0))};
  draft.s = {decoder.source(instruction.operands.at(1), typeBytes(type), true)};
  decoder.emit(std::move(draft));
  return true;
}

//===----------------------------------------------------------------------===//
// Moves
//===----------------------------------------------------------------------===//

bool decodeMov(Decoder &decoder, const Instruction &instruction) {
  const std::string &type = instruction.words.back();
  const Operand &to = instruction.operands.at(0);
  const Operand &from = instruction.operands.at(1);
  if (type == "pred")
    return decodePredicateLogic(decoder, instruction);
  u32 bytes = typeBytes(type);
  if (bytes == 0)
    return false;
  Draft draft;
  if (from.is(Operand::Kind::Vector)) {
    draft.inst.bytes = static_cast<u8>(bytes / from.parts.size());
    draft.inst.run = decoder.handler("pack");
    decoder.destinations(draft, to, bytes);
    decoder.sources(draft, from, draft.inst.bytes);
  } else if (to.is(Operand::Kind::Vector)) {
    draft.inst.bytes = static_cast<u8>(bytes / to.parts.size());
    draft.inst.run = decoder.handler("unpack");
    decoder.destinations(draft, to, draft.inst.bytes);
    decoder.sources(draft, from, bytes);
  } else {
    draft.inst.run = decoder.handler("mov." + bitType(type));
    decoder.destinations(draft, to, bytes);
    decoder.sources(draft, from, bytes, isFloatType(type));
  }
  decoder.emit(std::move(draft));
  return true;
}

/// Hints and annotations without effect on what a kernel computes.
bool decodeHint(Decoder &decoder, const Instruction &instruction) {
  static constexpr std::string_view hints[] = {"prefetch", "prefetchu",
                                               "discard",  "applypriority",
                                               "pmevent",  "griddepcontrol"};
  const std::string &op = instruction.words[0];
  Draft draft;
  if (std::find(std::begin(hints), std::end(hints), op) != std::end(hints)) {
    draft.inst.run = decoder.handler("nop");
  } else if (op == "createpolicy") {
    draft.inst.run = decoder.handler("mov.b64");
    draft.d = {decoder.destination(instruction.operands.at(0), 8)};
    draft.s = {decoder.constant(0, 8)};
  } else if (op == "nanosleep") {
    draft.inst.run = decoder.handler("yield");
  } else if (op == "trap" || op == "brkpt") {
    draft.inst.run = decoder.handler("trap");
    draft.inst.effect = true;
  } else {
    return false;
  }
  decoder.emit(std::move(draft));
  return true;
}

} // namespace

bool decodeScalar(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (op == "mov")
    return decodeMov(decoder, instruction);
  if (op == "setp")
    return decodeSetp(decoder, instruction);
  if (op == "set")
    return decodeSet(decoder, instruction);
  if (op == "selp" || op == "slct")
    return decodeSelection(decoder, instruction);
  if (op == "testp")
    return decodeTestp(decoder, instruction);
  return decodeCarry(decoder, instruction) ||
         decodeBits(decoder, instruction) ||
         decodeArithmetic(decoder, instruction) ||
         decodeHint(decoder, instruction);
}

} // namespace moe::sim
