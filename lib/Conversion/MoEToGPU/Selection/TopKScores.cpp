//===- TopKScores.cpp - The scores of a row -------------------------------===//

#include "TopKScores.h"
#include "ThreadLowerings.h"
#include "TopKKeys.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

/// The widest access of a thread.
static constexpr int64_t kAccessBytes = 16;

//===----------------------------------------------------------------------===//
// Loads
//===----------------------------------------------------------------------===//

Value RowScores::loadScore(Value expert) const {
  return b.loadF32(row.op.getScores(), row.at(row.op.getScores(), 1, expert));
}

/// Whether the lane's j-th expert exists; null if it always does. The experts
/// of one access exist together.
Value RowScores::exists(int64_t j) const {
  int64_t first = row.shape.getFirstExpert(j);
  if (first + (row.shape.lanes - 1) * row.shape.width < row.numExperts)
    return {};
  return b.compare(CmpIPredicate::slt, experts[j], b.i32(row.numExperts));
}

/// Loads the scores as vectors of `width`; an access past the end reads the
/// last ones, which are ignored.
void RowScores::loadScores() {
  Value scoresIn = row.op.getScores();
  Type element = getElementTypeOrSelf(scoresIn.getType());
  int64_t width = row.shape.width;
  for (int64_t j = 0; j < row.shape.keysPerLane; ++j)
    experts.push_back(b.add(b.mul(row.lane, b.i32(width)),
                            b.i32(row.shape.getFirstExpert(j))));
  for (int64_t j = 0; j < row.shape.keysPerLane; j += width) {
    Value first = experts[j];
    if (exists(j))
      first = b.minSigned(first, b.i32(row.numExperts - width));
    SmallVector<Value> place = row.at(scoresIn, 1, first);
    if (width == 1 && !row.form.hasPackedKeys) {
      scores.push_back(b.loadF32(scoresIn, place));
    } else if (width == 1) {
      Value bits = memref::LoadOp::create(b, scoresIn, place);
      bits = arith::BitcastOp::create(b, b.getI16Type(), bits);
      words.push_back(arith::ExtUIOp::create(b, b.getI32Type(), bits));
    } else {
      Value loaded = vector::LoadOp::create(
          b, VectorType::get({width}, element), scoresIn, place,
          /*nontemporal=*/false, llvm::MaybeAlign(kAccessBytes));
      Type word = element.isF32() ? element : Type(b.getI32Type());
      constexpr int64_t wordsPerAccess = kAccessBytes / 4;
      loaded = element.isF32()
                   ? loaded
                   : vector::BitCastOp::create(
                         b, VectorType::get({wordsPerAccess}, word), loaded);
      for (int64_t i = 0; i < wordsPerAccess; ++i)
        (element.isF32() ? scores : words)
            .push_back(vector::ExtractOp::create(b, loaded, i));
    }
  }
  if (!words.empty() && (!row.form.hasPackedKeys || row.form.needsRowSoftmax))
    widenWords();
}

/// The scores in the words as f32.
void RowScores::widenWords() {
  Type element = getElementTypeOrSelf(row.op.getScores().getType());
  auto widen = [&](Value upperBits) -> Value {
    if (element.isBF16())
      return arith::BitcastOp::create(b, b.getF32Type(), upperBits);
    Value half = arith::TruncIOp::create(
        b, b.getI16Type(), b.op<arith::ShRUIOp>(upperBits, b.i32(16)));
    half = arith::BitcastOp::create(b, b.getF16Type(), half);
    return arith::ExtFOp::create(b, b.getF32Type(), half);
  };
  for (Value word : words) {
    scores.push_back(widen(b.op<arith::ShLIOp>(word, b.i32(16))));
    if (row.shape.width > 1)
      scores.push_back(widen(b.both(word, b.i32(0xffff0000))));
  }
}

//===----------------------------------------------------------------------===//
// The row
//===----------------------------------------------------------------------===//

/// Scores past the end repeat others of the row.
void RowScores::findNaN() {
  if (!row.form.hasPackedKeys) {
    Value any = b.boolean(false);
    for (Value x : scores)
      any = b.either(any, b.isNaN(x));
    hasNaN = row.anyLane(any);
    return;
  }
  PackedKeys keys(b, getElementTypeOrSelf(row.op.getScores().getType()));
  for (Value word : words)
    negated.push_back(keys.negate(word));
  Value seen = negated.front();
  for (Value word : ArrayRef(negated).drop_front())
    seen = keys.mergeNaN(seen, word);
  hasNaN = row.anyLane(keys.hasNaN(seen));
}

void RowScores::computeRowSoftmax() {
  if (!row.form.needsRowSoftmax)
    return;
  Value highest = scores.front();
  for (Value x : ArrayRef(scores).drop_front())
    highest = row.maximum(highest, x);
  rowMax = finiteOrZero(b, row.reduceMax(highest));
  rowSum = b.f32(0.0);
  for (auto [j, x] : llvm::enumerate(scores)) {
    Value weight = b.exp(b.sub(x, rowMax));
    if (Value isExpert = exists(j))
      weight = b.select(isExpert, weight, b.f32(0.0));
    rowSum = b.add(rowSum, weight);
  }
  rowSum = row.reduceSum(rowSum);
}

void RowScores::load() {
  loadScores();
  computeRowSoftmax();
}

//===----------------------------------------------------------------------===//
// Scores by which experts are chosen
//===----------------------------------------------------------------------===//

/// lhs / rhs for 0 <= lhs <= 1 <= rhs <= 2: what the division of IEEE takes
/// where no exponent is extreme, without its branches, which would keep the
/// scores of a lane from being computed together. Quotients below 2^-100 may
/// differ in their last bit.
static Value divideScores(ThreadBuilder &b, Value lhs, Value rhs) {
  Value minus = b.neg(rhs), inverse = b.reciprocal(rhs);
  inverse = b.fma(b.fma(minus, inverse, b.f32(1.0)), inverse, inverse);
  Value quotient = b.mul(lhs, inverse);
  for (int step = 0; step < 2; ++step)
    quotient = b.fma(b.fma(minus, quotient, lhs), inverse, quotient);
  return quotient;
}

/// As in ScoreFunctions.cpp, but for the division.
static Value sigmoid(ThreadBuilder &b, Value x) {
  Value one = b.f32(1.0), t = b.exp(b.neg(b.abs(x)));
  Value isNegative = b.less(x, b.f32(0.0));
  return divideScores(b, b.select(isNegative, t, one), b.add(one, t));
}

Value RowScores::score(Value x) const {
  if (row.form.function == ScoreFunction::Sigmoid)
    return sigmoid(b, x);
  if (isElementwise(row.form.function))
    return buildScore(b, row.form.function, x);
  Value weight = b.exp(b.sub(x, rowMax));
  Value isEmpty = b.compare(CmpFPredicate::OEQ, rowSum, b.f32(0.0));
  return b.div(weight, b.select(isEmpty, b.f32(1.0), rowSum));
}

SmallVector<Value> RowScores::getChoiceScores() const {
  if (row.form.choosesByScores && row.op.getNGroup() == 1)
    return scores;
  SmallVector<Value> choice;
  for (auto [j, x] : llvm::enumerate(scores)) {
    Value c = row.form.choosesByScores ? x : score(x);
    if (Value bias = row.op.getSelectBias()) {
      Value expert = experts[j];
      if (exists(j))
        expert = b.minSigned(expert, b.i32(row.numExperts - 1));
      c = b.add(c, b.loadF32(bias, b.toIndex(expert)));
    }
    choice.push_back(c);
  }
  return choice;
}
