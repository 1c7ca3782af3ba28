//===- SortableKeys.cpp - Integers with the order of floats ---------------===//

#include "MoE/Dialect/MoE/Utils/SortableKeys.h"

using namespace mlir;
using namespace mlir::moe;

/// What is flipped in the bits of a float to make its key, and back: of a
/// negative one, whose `sign` is -1, the magnitude, of others nothing. For
/// unsigned keys the sign bit of both.
static Value getFlip(ArithmeticBuilder &b, Value sign, KeyOrder order) {
  Type type = sign.getType();
  return order == KeyOrder::Signed
             ? b.both(sign, b.constantInt(type, 0x7fffffff))
             : b.either(sign, b.constantInt(type, kEmptyKey));
}

Value mlir::moe::toSortableKey(ArithmeticBuilder &b, Value score,
                               KeyOrder order) {
  // -0 + 0 is +0, so both zeros get one key.
  Value zero = b.constant(score.getType(), 0.0);
  Value bits = b.bitcast(b.add(score, zero), b.getI32Type());
  Type type = bits.getType();
  Value sign = arith::ShRSIOp::create(b, bits, b.constantInt(type, 31));
  Value key = arith::XOrIOp::create(b, bits, getFlip(b, sign, order));
  int64_t nan = order == KeyOrder::Signed ? kNaNKey : kNaNKey - kEmptyKey;
  return b.select(b.isNaN(score), b.constantInt(type, nan), key);
}

Value mlir::moe::fromSortableKey(ArithmeticBuilder &b, Value key,
                                 KeyOrder order) {
  Type type = key.getType();
  Value sign = arith::ShRSIOp::create(b, key, b.constantInt(type, 31));
  if (order == KeyOrder::Unsigned)
    sign = arith::XOrIOp::create(b, sign, b.constantInt(type, -1));
  Value bits = arith::XOrIOp::create(b, key, getFlip(b, sign, order));
  return b.bitcast(bits, b.getF32Type());
}
