//===- WeightCodes.cpp - Codes of a packed weight, in registers -----------===//

#include "WeightCodes.h"

#include <cmath>

using namespace mlir;
using namespace mlir::moe;

/// With it in the upper bits a code is a bf16, as 128 is 0x4300 and its
/// mantissa has 7 bits.
static constexpr uint32_t kPairOf128 = 0x43004300;

WeightFormat WeightCodes::getFormat() { return *op.getFormat(); }

Value WeightCodes::shift(Value vector, int64_t bits) {
  return bits == 0 ? vector
                   : Value(arith::ShRUIOp::create(e, vector, e.i32(bits)));
}

Value WeightCodes::mask(Value vector, uint32_t bits) {
  return arith::AndIOp::create(e, vector, e.i32(bits));
}

/// 12 plus twice the values of codes of a sign, 2 of exponent, 1 of mantissa.
static constexpr int8_t kFloat4Codes[] = {12, 13, 14, 15, 16, 18, 20, 24,
                                          12, 11, 10, 9,  8,  6,  4,  0};
static constexpr int8_t kSignedFloat4Codes[] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                0, -1, -2, -3, -4, -6, -8, -12};

Value WeightCodes::loadLine(ValueRange at) {
  auto type = VectorType::get({4 * e.width}, e.getI8Type());
  return vector::BitCastOp::create(
      e, e.ints(), vector::LoadOp::create(e, type, op.getW(), at));
}

/// The two quads of 4 bits that lie in the halves of bytes.
Values WeightCodes::splitHalves(Value line) {
  return {mask(line, 0x0f0f0f0f), mask(shift(line, 4), 0x0f0f0f0f)};
}

/// Two lines have the lower 4 bits of two quads each, the third the upper 2 of
/// all four.
Values WeightCodes::loadSixBits(ValueRange at) {
  Values place = at, lines;
  for (int64_t line = 0; line < 3; ++line) {
    place[2] = e.add(at[2], e.index(line));
    lines.push_back(loadLine(place));
  }
  Values quads = splitHalves(lines[0]);
  quads.append(splitHalves(lines[1]));
  for (auto [number, quad] : llvm::enumerate(quads)) {
    int64_t up = 4 - 2 * static_cast<int64_t>(number);
    Value high = up > 0 ? Value(arith::ShLIOp::create(e, lines[2], e.i32(up)))
                        : shift(lines[2], -up);
    quad = arith::OrIOp::create(e, quad, mask(high, 0x30303030));
  }
  return quads;
}

Values WeightCodes::load(ValueRange at) {
  if (getBits() == 6)
    return loadSixBits(at);
  Value line = loadLine(at);
  if (getBits() == 8)
    return {line};
  Values quads = splitHalves(line);
  if (getFormat() == WeightFormat::Fp4E2M1)
    for (Value &quad : quads)
      quad =
          e.lookUpBytes(quad, areSigned() ? kSignedFloat4Codes : kFloat4Codes);
  return quads;
}

/// The bytes of even number, floats of 8 bits, as f32 that are 2^-8 of them: an
/// f16 has the same bits of mantissa at other places, and 8 more of exponent.
Value WeightCodes::widenFloat8(Value bytes) {
  auto shiftUp = [&](Value vector, int64_t bits) -> Value {
    return arith::ShLIOp::create(e, vector, e.i32(bits));
  };
  Value halves = arith::OrIOp::create(e, shiftUp(mask(bytes, 0x00800080), 8),
                                      shiftUp(mask(bytes, 0x007f007f), 7));
  halves = vector::BitCastOp::create(
      e, VectorType::get({2 * e.width}, e.getF16Type()), halves);
  return arith::ExtFOp::create(
      e, VectorType::get({2 * e.width}, e.getF32Type()), halves);
}

/// Pairs of bf16 whose magnitude the lower 7 bits of a byte stand for, and
/// their sign the upper one, byte by byte by a table.
Values WeightCodes::lookUpPairs(Value bytes, Value signs,
                                function_ref<float(int)> getMagnitude) {
  SmallVector<int8_t> lowBytes, highBytes;
  for (int code = 0; code < 128; ++code) {
    uint32_t bits = llvm::bit_cast<uint32_t>(getMagnitude(code)) >> 16;
    lowBytes.push_back(static_cast<int8_t>(bits));
    highBytes.push_back(static_cast<int8_t>(bits >> 8));
  }
  auto either = [&](Value a, Value b) -> Value {
    return arith::OrIOp::create(e, a, b);
  };
  Value low = e.lookUpBytes(bytes, lowBytes);
  Value high = either(e.lookUpBytes(bytes, highBytes), mask(signs, 0x80808080));
  Value evenHigh = arith::ShLIOp::create(e, mask(high, 0x00ff00ff), e.i32(8));
  return {either(mask(low, 0x00ff00ff), evenHigh),
          either(mask(shift(low, 8), 0x00ff00ff), mask(high, 0xff00ff00))};
}

/// 2^-8 of floats of 8 bits.
Values WeightCodes::lookUpFloat8(Value quad) {
  return lookUpPairs(quad, quad, [](int code) {
    int exponent = code >> 3, mantissa = code & 7;
    return std::ldexp(float(exponent == 0 ? mantissa : mantissa + 8),
                      std::max(exponent, 1) - 18);
  });
}

/// A code less 127.5, which has as many bits as a bf16: the codes from 128 on
/// mirror those below.
Values WeightCodes::lookUpInt8(Value quad) {
  auto bytes = VectorType::get({4 * e.width}, e.getI8Type());
  Value others = arith::XOrIOp::create(e, quad, e.i32(0xffffffff));
  Value least =
      arith::MinUIOp::create(e, vector::BitCastOp::create(e, bytes, quad),
                             vector::BitCastOp::create(e, bytes, others));
  return lookUpPairs(vector::BitCastOp::create(e, e.ints(), least), others,
                     [](int code) { return 127.5f - code; });
}

/// Of each column two numbers lie side by side, as pairs do.
Values WeightCodes::expandFloat8(Value quad) {
  if (areLookedUp())
    return lookUpFloat8(quad);
  Values sides{widenFloat8(quad), widenFloat8(shift(quad, 8))};
  if (product == CodeProduct::Pairs) {
    auto pairs = VectorType::get({2 * e.width}, e.getBF16Type());
    return llvm::map_to_vector(sides, [&](Value side) -> Value {
      return vector::BitCastOp::create(e, e.ints(),
                                       arith::TruncFOp::create(e, pairs, side));
    });
  }
  Values numbers;
  for (int64_t feature = 0; feature < 4; ++feature) {
    auto order = llvm::map_to_vector(llvm::seq(e.width), [&](int64_t lane) {
      return 2 * lane + feature / 2;
    });
    Value side = sides[feature % 2];
    numbers.push_back(vector::ShuffleOp::create(e, side, side, order));
  }
  return numbers;
}

Values WeightCodes::expand(Value quad) {
  if (getFormat() == WeightFormat::Fp8E4M3)
    return expandFloat8(quad);
  switch (product) {
  case CodeProduct::Bytes:
    return {quad};
  case CodeProduct::Words:
    return {mask(quad, 0x00ff00ff), mask(shift(quad, 8), 0x00ff00ff)};
  case CodeProduct::Pairs: {
    if (getBits() == 8)
      return areLookedUp() ? lookUpInt8(quad) : expandBytePairs(quad);
    Values pairs;
    for (int64_t bits : {0, 8})
      pairs.push_back(arith::OrIOp::create(
          e, mask(shift(quad, bits), 0x00ff00ff), e.i32(kPairOf128)));
    return pairs;
  }
  case CodeProduct::Floats:
    break;
  }
  return areSigned() ? expandSigned(quad) : expandUnsigned(quad);
}

/// The f32 of an integer of 8 bits is a bf16 with 16 zeros behind it.
Values WeightCodes::expandBytePairs(Value quad) {
  Values numbers = expandUnsigned(quad), pairs;
  for (int64_t first : {0, 1}) {
    Value low = e.bitcast(numbers[first], e.getI32Type());
    Value high = e.bitcast(numbers[first + 2], e.getI32Type());
    pairs.push_back(arith::OrIOp::create(e, shift(low, 16), high));
  }
  return pairs;
}

Values WeightCodes::expandUnsigned(Value quad) {
  Values numbers;
  for (int64_t byte = 0; byte < 4; ++byte) {
    Value code = shift(quad, 8 * byte);
    if (byte < 3)
      code = mask(code, 0xff);
    numbers.push_back(arith::SIToFPOp::create(e, e.floats(), code));
  }
  return numbers;
}

/// Bytes with the code that stands for 0 taken off.
Values WeightCodes::expandSigned(Value quad) {
  if (getFormat() == WeightFormat::Int8)
    quad = arith::XOrIOp::create(e, quad, e.i32(0x80808080));
  if (getFormat() == WeightFormat::Int4 || getFormat() == WeightFormat::Int6) {
    auto bytes = VectorType::get({4 * e.width}, e.getI8Type());
    int8_t middle = 1 << (getBits() - 1);
    Value middles =
        arith::ConstantOp::create(e, DenseElementsAttr::get(bytes, middle));
    quad = vector::BitCastOp::create(
        e, e.ints(),
        arith::SubIOp::create(e, vector::BitCastOp::create(e, bytes, quad),
                              middles));
  }
  Values numbers;
  for (int64_t byte = 0; byte < 4; ++byte) {
    Value code = quad;
    if (byte < 3)
      code = arith::ShLIOp::create(e, code, e.i32(24 - 8 * byte));
    code = arith::ShRSIOp::create(e, code, e.i32(24));
    numbers.push_back(arith::SIToFPOp::create(e, e.floats(), code));
  }
  return numbers;
}

int64_t WeightCodes::getNumExpanded() {
  switch (product) {
  case CodeProduct::Bytes:
    return 1;
  case CodeProduct::Words:
  case CodeProduct::Pairs:
    return 2;
  case CodeProduct::Floats:
    return 4;
  }
  llvm_unreachable("unknown product");
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// A pair of products is at most 2 127 15, of floats of 4 bits 2 127 24, and of
/// 6 bits 2 127 63.
int64_t WeightCodes::getQuadsOfSum() {
  if (!sumsWords())
    return 1;
  if (getBits() == 6)
    return 2;
  return getFormat() == WeightFormat::Fp4E2M1 ? 4 : 8;
}

Value WeightCodes::multiplyAdd(Value codes, Value features, Value sum) {
  switch (product) {
  case CodeProduct::Bytes:
    if (!sumsWords())
      return e.dotBytes(codes, features, sum);
    codes = e.multiplyBytePairs(codes, features);
    return sum ? Value(arith::AddIOp::create(e, sum, codes)) : codes;
  case CodeProduct::Words:
    return e.dotWords(codes, features, sum);
  case CodeProduct::Pairs:
    return e.dotPairs(features, codes, sum);
  case CodeProduct::Floats:
    return e.fma(features, codes, sum);
  }
  llvm_unreachable("unknown product");
}

//===----------------------------------------------------------------------===//
// What codes stand for
//===----------------------------------------------------------------------===//

double WeightCodes::getZero() {
  if (areSigned())
    return 0.0;
  bool arePairs = product == CodeProduct::Pairs;
  double behind = 0.0;
  if (arePairs && getBits() < 8)
    behind = 128.0;
  if (getFormat() == WeightFormat::Int8 && areLookedUp())
    behind = -127.5;
  if (op.getZeros())
    return behind;
  switch (getFormat()) {
  case WeightFormat::Fp8E4M3:
    return 0.0;
  case WeightFormat::Int4:
    return behind + 8.0;
  case WeightFormat::Int6:
    return behind + 32.0;
  case WeightFormat::Int8:
    return behind + 128.0;
  case WeightFormat::Fp4E2M1:
    return behind + 12.0;
  }
  llvm_unreachable("unknown format");
}

double WeightCodes::getUnit() {
  switch (getFormat()) {
  case WeightFormat::Int4:
  case WeightFormat::Int6:
  case WeightFormat::Int8:
    return 1.0;
  case WeightFormat::Fp4E2M1:
    return 0.5;
  case WeightFormat::Fp8E4M3:
    return 256.0;
  }
  llvm_unreachable("unknown format");
}
