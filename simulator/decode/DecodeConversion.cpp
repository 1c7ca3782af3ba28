//===- DecodeConversion.cpp - cvt -----------------------------------------===//

#include "Conversion.h"
#include "Decoder.h"

#include <optional>
#include <unordered_map>

namespace moe::sim {
namespace {

struct TypeInfo {
  NumberType number;
  u32 bytes; // of one element
  bool packed;
};

std::optional<TypeInfo> typeInfo(const std::string &name) {
  using N = NumberType;
  static const std::unordered_map<std::string, TypeInfo> types = {
      {"u8", {N::U8, 1, false}},      {"s8", {N::S8, 1, false}},
      {"u16", {N::U16, 2, false}},    {"s16", {N::S16, 2, false}},
      {"u32", {N::U32, 4, false}},    {"s32", {N::S32, 4, false}},
      {"u64", {N::U64, 8, false}},    {"s64", {N::S64, 8, false}},
      {"f16", {N::F16, 2, false}},    {"bf16", {N::BF16, 2, false}},
      {"tf32", {N::TF32, 4, false}},  {"f32", {N::F32, 4, false}},
      {"f64", {N::F64, 8, false}},    {"f16x2", {N::F16, 2, true}},
      {"bf16x2", {N::BF16, 2, true}}, {"e4m3x2", {N::E4M3, 1, true}},
      {"e5m2x2", {N::E5M2, 1, true}}};
  auto it = types.find(name);
  if (it == types.end())
    return std::nullopt;
  return it->second;
}

bool isInteger(NumberType type) { return type <= NumberType::S64; }
bool isSigned(NumberType type) {
  return type == NumberType::S8 || type == NumberType::S16 ||
         type == NumberType::S32 || type == NumberType::S64;
}

bool readModifiers(const Instruction &instruction, Conversion &c) {
  static const std::unordered_map<std::string, Rounding> roundings = {
      {"rn", Rounding::Nearest},
      {"rz", Rounding::Zero},
      {"rm", Rounding::Down},
      {"rp", Rounding::Up},
      {"rna", Rounding::NearestAway}};
  for (size_t i = 1; i + 2 < instruction.words.size(); ++i) {
    const std::string &word = instruction.words[i];
    auto rounding = roundings.find(word);
    auto integral = word.size() == 3 && word.back() == 'i'
                        ? roundings.find(word.substr(0, 2))
                        : roundings.end();
    if (rounding != roundings.end()) {
      c.rounding = rounding->second;
    } else if (integral != roundings.end()) {
      c.rounding = integral->second;
      c.toIntegral = true;
    } else if (word == "ftz") {
      c.ftz = true;
    } else if (word == "sat") {
      c.saturate = true;
    } else if (word == "satfinite") {
      c.saturateFinite = true;
    } else if (word == "relu") {
      c.relu = true;
    } else {
      return false;
    }
  }
  return true;
}

/// The table's own handler for a common conversion, else the generic one.
Handler conversionHandler(Decoder &decoder, const Instruction &instruction,
                          const Conversion &c) {
  std::string key = "cvt";
  if (!isInteger(c.from) || !isInteger(c.to)) {
    if (c.toIntegral && c.rounding == Rounding::Zero)
      key += ".rzi";
    else if (instruction.has("rn"))
      key += ".rn";
    if (c.relu)
      key += ".relu";
  }
  for (size_t i = instruction.words.size() - 2; i < instruction.words.size();
       ++i)
    key += "." + instruction.words[i];
  bool special = c.ftz || c.saturate || c.saturateFinite ||
                 (c.rounding != Rounding::Nearest &&
                  !(c.toIntegral && c.rounding == Rounding::Zero)) ||
                 (c.toIntegral && c.rounding == Rounding::Nearest);
  auto it = special ? handlers().end() : handlers().find(key);
  return it != handlers().end() ? it->second : decoder.handler("cvt");
}

std::string resizeKey(u32 toBytes, bool toSigned, u32 fromBytes,
                      bool fromSigned) {
  return std::string("resize.") + (toSigned ? "s" : "u") +
         std::to_string(toBytes * 8) + "." + (fromSigned ? "s" : "u") +
         std::to_string(fromBytes * 8);
}

/// Integer to integer: low bytes, or an extension by the source's sign; .sat
/// clamps to the destination's range.
void emitIntegerConversion(Decoder &decoder, const TypeInfo &to,
                           const TypeInfo &from, u32 place, u32 source,
                           bool saturate) {
  Draft draft;
  draft.d = {place};
  draft.s = {source};
  if (saturate) {
    Conversion c{to.number, from.number};
    c.saturate = true;
    draft.inst.imm = c.pack();
    draft.inst.run = decoder.handler("cvt");
  } else {
    draft.inst.run = decoder.handler(resizeKey(
        to.bytes, isSigned(to.number), from.bytes, isSigned(from.number)));
  }
  decoder.emit(std::move(draft));
}

} // namespace

bool decodeConversion(Decoder &decoder, const Instruction &instruction) {
  const std::string &op = instruction.words[0];
  if (op != "cvt" || instruction.words.size() < 3)
    return false;
  auto to = typeInfo(instruction.words[instruction.words.size() - 2]);
  auto from = typeInfo(instruction.words.back());
  Conversion c;
  if (!to || !from || !readModifiers(instruction, c))
    return false;
  c.to = to->number;
  c.from = from->number;
  c.packed = to->packed;
  const Operand &result = instruction.operands.at(0);
  u32 resultBytes = to->bytes * (to->packed ? 2 : 1);
  u32 sourceBytes = from->bytes * (from->packed ? 2 : 1);
  bool isFloat = !isInteger(from->number);
  std::vector<u32> sources = {
      decoder.source(instruction.operands[1], sourceBytes, isFloat)};
  for (size_t i = 2; i < instruction.operands.size(); ++i)
    sources.push_back(
        decoder.source(instruction.operands[i], sourceBytes, isFloat));
  // Integer results may go to a wider register, extended by their own sign.
  u32 width = decoder.registerWidth(result);
  bool widened = isInteger(to->number) && width > resultBytes;
  u32 place = widened ? decoder.temporary(resultBytes)
                      : decoder.destination(result, resultBytes);
  if (isInteger(to->number) && isInteger(from->number)) {
    emitIntegerConversion(decoder, *to, *from, place, sources[0], c.saturate);
  } else {
    Draft draft;
    draft.inst.run = conversionHandler(decoder, instruction, c);
    draft.inst.imm = c.pack();
    draft.d = {place};
    draft.s = sources;
    decoder.emit(std::move(draft));
  }
  if (widened) {
    Draft extend;
    bool sign = isSigned(to->number);
    extend.inst.run =
        decoder.handler(resizeKey(width, sign, resultBytes, sign));
    extend.d = {decoder.destination(result, width)};
    extend.s = {place};
    decoder.emit(std::move(extend));
  }
  return true;
}

} // namespace moe::sim
