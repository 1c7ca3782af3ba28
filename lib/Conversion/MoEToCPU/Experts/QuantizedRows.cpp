//===- QuantizedRows.cpp - Rows as products with codes read them ----------===//

#include "QuantizedRows.h"

#include "Product/MatrixUnit.h"

#include "mlir/Dialect/Math/IR/Math.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

/// Codes of floats of 8 bits are no integers. Two products of a code of 4 or 6
/// bits, at most 63, fit into 16 bits, those of a code of 8 bits do not. Pairs
/// of bf16 hold numbers below 128 exactly, which are those of 4 and 6 bits.
CodeProduct mlir::moe::getCodeProduct(const CPUTarget &target,
                                      GroupedLinearOp op) {
  bool areFloat8 = op.getFormat() == WeightFormat::Fp8E4M3;
  if (op.getActivations() == ActivationFormat::Int8) {
    if (areFloat8 || !(target.int8Dot || target.bytePairs))
      return CodeProduct::Floats;
    return target.int8Dot || op.getCodeBits() < 8 ? CodeProduct::Bytes
                                                  : CodeProduct::Words;
  }
  // To make pairs of codes of 8 bits without a table costs more than vdpbf16ps
  // saves.
  bool arePairs = target.bf16Dot && getElementType(op.getX()).isBF16() &&
                  (areFloat8 || op.getCodeBits() < 8 || target.bf16Tiles ||
                   target.byteTable);
  return arePairs ? CodeProduct::Pairs : CodeProduct::Floats;
}

static int64_t getNumK(GroupedLinearOp op) {
  return cast<MemRefType>(op.getX().getType()).getDimSize(1);
}

static Type getFeatureType(Emitter &e, CodeProduct product) {
  switch (product) {
  case CodeProduct::Bytes:
    return e.getI8Type();
  case CodeProduct::Words:
    return e.getI16Type();
  case CodeProduct::Pairs:
    return e.getBF16Type();
  case CodeProduct::Floats:
    return e.getF32Type();
  }
  llvm_unreachable("unknown product");
}

QuantizedRows::QuantizedRows(Emitter &e, GroupedLinearOp op)
    : product(getCodeProduct(e.target, op)), numK(getNumK(op)),
      blockSize(op.getProductBlock()),
      numBlocks(llvm::divideCeil(numK, blockSize)), e(e), x(op.getX()),
      areRounded(op.getActivations() == ActivationFormat::Int8) {
  Type type = getFeatureType(e, product);
  int64_t width = std::max<int64_t>(numBlocks * blockSize, 1);
  int64_t bytes = width * type.getIntOrFloatBitWidth() / 8;
  mostRows = std::clamp<int64_t>(e.target.l2Bytes / 4 / bytes, 1,
                                 e.target.getExpertRows());
}

void QuantizedRows::allocate() {
  Type type = getFeatureType(e, product);
  int64_t bytes = type.getIntOrFloatBitWidth() / 8;
  // An odd number of lines: the same features of rows that are multiplied at
  // once are at different places of a cache.
  int64_t lines =
      llvm::divideCeil(numBlocks * blockSize * bytes, CPUTarget::kLineBytes) |
      1;
  int64_t width = lines * CPUTarget::kLineBytes / bytes;
  auto make = [&](int64_t size, Type element) {
    return e.scratch({e.getIndexAttr(mostRows), e.getIndexAttr(size)}, element);
  };
  // A tile of a matrix unit reads behind the last row, and nobody takes what it
  // makes of that.
  bool haveTiles = product == CodeProduct::Pairs && e.target.bf16Tiles;
  int64_t behind = haveTiles ? kUnitTileSize : 0;
  features = e.scratch(
      {e.getIndexAttr(mostRows + behind), e.getIndexAttr(width)}, type);
  sums = make(std::max<int64_t>(numBlocks, 1), e.getF32Type());
  if (areRounded)
    scales = make(std::max<int64_t>(numBlocks, 1), e.getF32Type());
}

//===----------------------------------------------------------------------===//
// Copying
//===----------------------------------------------------------------------===//

/// The integers nearest to floats * inverse, as floats. A number that is none,
/// whose block has a scale that is none, becomes one.
Value QuantizedRows::round(Value floats, Value inverse) const {
  Value q = math::RoundEvenOp::create(e, e.mul(floats, inverse));
  return e.maxOrRhs(e.minOrRhs(q, e.f32(127.0)), e.f32(-127.0));
}

void QuantizedRows::storeFeatures(Value floats, Value number, Value k) const {
  if (product == CodeProduct::Words || product == CodeProduct::Pairs) {
    SmallVector<int64_t> order;
    for (int64_t lane = 0; lane < e.width; lane += 4)
      order.append({lane, lane + 2, lane + 1, lane + 3});
    floats = vector::ShuffleOp::create(e, floats, floats, order);
  }
  Type type = e.vectorOf(getFeatureType(e, product));
  if (areIntegers(product)) {
    Value integers = arith::FPToSIOp::create(e, e.ints(), floats);
    floats = arith::TruncIOp::create(e, type, integers);
  }
  if (product == CodeProduct::Pairs)
    floats = arith::TruncFOp::create(e, type, floats);
  e.storeVector(floats, features, {number, k});
}

void QuantizedRows::packBlock(Value source, Value number, Value block) const {
  Value first = e.mul(block, e.index(blockSize));
  bool hasTail = numK % blockSize != 0;
  Values vectors;
  for (int64_t offset = 0; offset < blockSize; offset += e.width) {
    Value k = e.add(first, e.index(offset));
    Value mask = hasTail ? e.firstLanes(e.sub(e.index(numK), k)) : Value();
    vectors.push_back(e.loadFloats(x, {source, k}, mask));
  }
  auto fold = [](ArrayRef<Value> values, auto combine) {
    Value all = values.front();
    for (Value value : values.drop_front())
      all = combine(all, value);
    return all;
  };
  if (areRounded) {
    auto magnitudes =
        llvm::map_to_vector(vectors, [&](Value v) { return e.abs(v); });
    Value largest = vector::ReductionOp::create(
        e, vector::CombiningKind::MAXIMUMF,
        fold(magnitudes, [&](Value a, Value b) { return e.maximum(a, b); }));
    // Finite where the block is zeros, or so small that its inverse is not.
    Value inverse = e.minOrRhs(e.div(e.f32(127.0), e.splat(largest)),
                               e.f32(std::numeric_limits<float>::max()));
    for (Value &vector : vectors)
      vector = round(vector, inverse);
    Value most = arith::ConstantOp::create(e, e.getF32FloatAttr(127.0f));
    e.store(arith::DivFOp::create(e, largest, most), scales, {number, block});
  }
  Value sum = fold(vectors, [&](Value a, Value b) { return e.add(a, b); });
  e.store(e.reduceAdd(sum), sums, {number, block});
  for (auto [i, vector] : llvm::enumerate(vectors))
    storeFeatures(vector, number, e.add(first, e.index(i * e.width)));
}

void QuantizedRows::pack(Value source, Value number) const {
  e.loop(e.index(0), e.index(numBlocks), 1,
         [&](Value block) { packBlock(source, number, block); });
}

//===----------------------------------------------------------------------===//
// Reading
//===----------------------------------------------------------------------===//

Value QuantizedRows::splat(Value row, Value quad, int64_t i) const {
  auto splatWord = [&](int64_t count) -> Value {
    Value first = e.add(e.mul(quad, e.index(4)), e.index(count * i));
    auto type = VectorType::get({count}, getFeatureType(e, product));
    Value loaded =
        vector::LoadOp::create(e, type, features, ValueRange{row, first});
    Value word = vector::BitCastOp::create(
        e, VectorType::get({1}, e.getI32Type()), loaded);
    return e.splat(vector::ExtractOp::create(e, word, ArrayRef<int64_t>{0}));
  };
  Value k = e.mul(quad, e.index(4));
  switch (product) {
  case CodeProduct::Bytes:
    return splatWord(4);
  case CodeProduct::Words:
    return splatWord(2);
  case CodeProduct::Pairs:
    return e.splatPair(features, {row, e.add(k, e.index(2 * i))});
  case CodeProduct::Floats:
    return e.splat(e.load(features, {row, e.add(k, e.index(i))}));
  }
  llvm_unreachable("unknown product");
}

Value QuantizedRows::splatSum(Value row, Value block) const {
  return e.splat(e.load(sums, {row, block}));
}

Value QuantizedRows::splatScale(Value row, Value block) const {
  return areRounded ? e.splat(e.load(scales, {row, block})) : Value();
}
