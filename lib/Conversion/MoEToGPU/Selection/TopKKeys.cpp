//===- TopKKeys.cpp - Sortable keys and their networks --------------------===//

#include "TopKKeys.h"

#include "MoE/Dialect/MoE/Utils/SortableKeys.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Wide keys
//===----------------------------------------------------------------------===//

Value WideKeys::ordered(ThreadBuilder &b, Value x) {
  return toSortableKey(b, x, KeyOrder::Unsigned);
}

static Value i64(ThreadBuilder &b, int64_t value) {
  return arith::ConstantOp::create(b, b.getI64IntegerAttr(value));
}

/// The upper 32 bits of a wide key.
static Value upperHalf(ThreadBuilder &b, Value key) {
  return arith::TruncIOp::create(b, b.getI32Type(),
                                 b.op<arith::ShRUIOp>(key, i64(b, 32)));
}

Value WideKeys::make(ThreadBuilder &b, Value score, Value expert) {
  Type wide = b.getI64Type();
  Value value = arith::ExtUIOp::create(b, wide, ordered(b, score));
  value = b.op<arith::ShLIOp>(value, i64(b, 32));
  Value inverted = b.op<arith::XOrIOp>(expert, b.i32(-1));
  return b.either(value, arith::ExtUIOp::create(b, wide, inverted));
}

Value WideKeys::expertOf(ThreadBuilder &b, Value key) {
  Value index = arith::TruncIOp::create(b, b.getI32Type(), key);
  return b.op<arith::XOrIOp>(index, b.i32(-1));
}

Value WideKeys::scoreOf(ThreadBuilder &b, Value key) {
  Value x = fromSortableKey(b, upperHalf(b, key), KeyOrder::Unsigned);
  return b.select(b.isNaN(x), b.f32(0.0), x);
}

Value WideKeys::isExcluded(ThreadBuilder &b, Value key) {
  // The upper half of -inf.
  return b.compare(CmpIPredicate::eq, upperHalf(b, key), b.i32(0x007fffff));
}

//===----------------------------------------------------------------------===//
// Packed keys
//===----------------------------------------------------------------------===//
//
// Two scores at a time, in four instructions. Why the scores are negated: the
// product with -1 makes every NaN the canonical positive one, which is the
// largest bit pattern of a positive number. Inverting the magnitude of the
// positive ones sends it to 0, below -inf, and nothing has to look for it.
//
//   score   negated   ordered
//   +inf    ff80      ff80
//    0      0000      7fff
//   -inf    7f80      007f
//   NaN     7fff      0000       (of bf16)

Value PackedKeys::assembly(StringRef text, ValueRange operands) {
  std::string constraints = "=r";
  for (size_t i = 0; i < operands.size(); ++i)
    constraints += ",r";
  return LLVM::InlineAsmOp::create(
             b, TypeRange{b.getI32Type()}, operands, text, constraints,
             /*has_side_effects=*/false, /*is_align_stack=*/false,
             LLVM::tailcallkind::TailCallKind::None,
             /*asm_dialect=*/LLVM::AsmDialectAttr(),
             /*operand_attrs=*/ArrayAttr())
      .getResult(0);
}

Value PackedKeys::negate(Value word) {
  // Plus 0: 0 * -1 is -0, and -0 + 0 is 0.
  if (type.isBF16())
    return assembly("fma.rn.bf16x2 $0, $1, $2, $3;",
                    {word, b.i32(0xbf80bf80), b.i32(0)});
  return assembly("fma.rn.f16x2 $0, $1, $2, $3;",
                  {word, b.i32(0xbc00bc00), b.i32(0)});
}

Value PackedKeys::order(Value negated) {
  // ffff in each half with a sign.
  Value signs = assembly("prmt.b32 $0, $1, $1, 0xbb99;", {negated});
  Value flip = b.both(b.op<arith::XOrIOp>(signs, b.i32(-1)), b.i32(0x7fff7fff));
  return b.op<arith::XOrIOp>(negated, flip);
}

Value PackedKeys::make(Value orderedWord, bool upper, int64_t expert) {
  Value value = upper ? b.both(orderedWord, b.i32(0xffff0000))
                      : b.op<arith::ShLIOp>(orderedWord, b.i32(16));
  return b.either(value, b.i32(0xffff - expert));
}

Value PackedKeys::expertOf(Value key) {
  return b.both(b.op<arith::XOrIOp>(key, b.i32(0xffff)), b.i32(0xffff));
}

Value PackedKeys::scoreOf(Value key) {
  Value isNegative = b.op<arith::ShRSIOp>(key, b.i32(31));
  Value flip =
      b.both(b.op<arith::XOrIOp>(isNegative, b.i32(-1)), b.i32(0x7fff0000));
  Value bits = b.both(b.op<arith::XOrIOp>(key, flip), b.i32(0xffff0000));
  Value negated;
  if (type.isBF16()) {
    negated = arith::BitcastOp::create(b, b.getF32Type(), bits);
  } else {
    Value half = arith::TruncIOp::create(b, b.getI16Type(),
                                         b.op<arith::ShRUIOp>(bits, b.i32(16)));
    half = arith::BitcastOp::create(b, b.getF16Type(), half);
    negated = arith::ExtFOp::create(b, b.getF32Type(), half);
  }
  return arith::NegFOp::create(b, negated);
}

Value PackedKeys::mergeNaN(Value seen, Value negated) {
  return assembly(type.isBF16() ? "max.NaN.bf16x2 $0, $1, $2;"
                                : "max.NaN.f16x2 $0, $1, $2;",
                  {seen, negated});
}

Value PackedKeys::hasNaN(Value word) {
  Value lower = b.both(word, b.i32(0xffff));
  Value upper = b.op<arith::ShRUIOp>(word, b.i32(16));
  return b.either(b.compare(CmpIPredicate::eq, lower, b.i32(0x7fff)),
                  b.compare(CmpIPredicate::eq, upper, b.i32(0x7fff)));
}

//===----------------------------------------------------------------------===//
// Networks
//===----------------------------------------------------------------------===//

/// (high, low) = (max, min)
static void compareExchange(ThreadBuilder &b, Value &high, Value &low) {
  Value max = b.op<arith::MaxUIOp>(high, low);
  low = b.op<arith::MinUIOp>(high, low);
  high = max;
}

/// Batcher's odd-even merge sort.
void mlir::moe::sortKeys(ThreadBuilder &b, MutableArrayRef<Value> keys) {
  size_t n = keys.size();
  for (size_t p = 1; p < n; p *= 2)
    for (size_t k = p; k >= 1; k /= 2)
      for (size_t j = k % p; j + k < n; j += 2 * k)
        for (size_t i = 0; i < k && i + j + k < n; ++i)
          if ((i + j) / (2 * p) == (i + j + k) / (2 * p))
            compareExchange(b, keys[i + j], keys[i + j + k]);
}

void mlir::moe::keepHighest(ThreadBuilder &b, MutableArrayRef<Value> kept,
                            ArrayRef<Value> others) {
  size_t n = kept.size();
  for (size_t i = 0; i < n; ++i)
    kept[i] = b.op<arith::MaxUIOp>(kept[i], others[n - 1 - i]);
  for (size_t distance = n / 2; distance > 0; distance /= 2)
    for (size_t i = 0; i < n; ++i)
      if (!(i & distance))
        compareExchange(b, kept[i], kept[i + distance]);
}
