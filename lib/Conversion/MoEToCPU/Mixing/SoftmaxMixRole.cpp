//===- SoftmaxMixRole.cpp - The roles of rows in a gradient ---------------===//

#include "SoftmaxMixRole.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

/// Larger buffers do not go on the stack.
static constexpr int64_t kMaxStackBytes = 256 * 1024;

Value KernelBuffers::allocate(ArrayRef<OpFoldResult> shape, Type element) {
  if (!element)
    element = e.getF32Type();
  int64_t bytes = sizeof(float);
  bool isStatic = true;
  for (OpFoldResult size : shape) {
    std::optional<int64_t> constant = getConstantIntValue(size);
    isStatic &= constant.has_value();
    bytes *= constant.value_or(1);
  }
  if (isStatic && bytes <= kMaxStackBytes)
    return e.scratch(shape, element);
  SmallVector<int64_t> sizes;
  Values dynamicSizes;
  dispatchIndexOpFoldResults(shape, dynamicSizes, sizes);
  onHeap.push_back(memref::AllocOp::create(e, MemRefType::get(sizes, element),
                                           dynamicSizes,
                                           e.getI64IntegerAttr(64)));
  return onHeap.back();
}

void KernelBuffers::free() {
  for (Value buffer : onHeap)
    memref::DeallocOp::create(e, buffer);
}

void GradientRole::allocate(KernelBuffers &buffers) {
  OpFoldResult block = e.getIndexAttr(getColumnVectors(e) * e.width);
  packedTerms = buffers.allocate({block});
  if (rowsAreKeys)
    packedDeltas = buffers.allocate({block});
  if (all.v)
    packedValues = buffers.allocate({getLastSize(e, all.v), block});
}

void GradientRole::takeViews(Value batch, Value head) {
  views = all;
  for (Value *perHead : {&views.q, &views.k, &views.lse, &views.delta,
                         &views.dmixed, &views.keyBias})
    *perHead = viewTokens(e, *perHead, batch, head);
  views.v =
      viewTokens(e, all.v, batch, areValuesPerHead(all.v) ? head : Value());
  for (Value *shared :
       {&views.queryMask, &views.keyMask, &views.queryLevel, &views.keyLevel})
    *shared = viewTokens(e, *shared, batch);
  views.bias = viewBias(e, all.bias, batch, head);
  takeSides();
}

void GradientRole::replaceQueries(Value lse, Value delta, Value dmixed) {
  views.lse = lse;
  views.delta = delta;
  views.dmixed = dmixed;
  takeSides();
}

void GradientRole::takeSides() {
  rows = {views.q, views.dmixed, views.queryMask, views.queryLevel};
  columns = {views.k, views.v, views.keyMask, views.keyLevel};
  if (rowsAreKeys)
    std::swap(rows, columns);
}

//===----------------------------------------------------------------------===//
// Columns
//===----------------------------------------------------------------------===//

Value GradientRole::packColumns(Value firstColumn, Value slot,
                                ArrayRef<Value> tokens, Value exists,
                                Value isReal) {
  Value zero = e.f32(0.0), hidden = e.negInfinity();
  Value term = zero;
  if (rowsAreKeys) {
    // A query that sees no key has lse = -inf.
    Value lse = e.loadFloats(views.lse, {firstColumn}, exists);
    isReal = e.both(isReal, e.compare(arith::CmpFPredicate::UNE, lse, hidden));
    term = e.sub(zero, lse);
    Value delta = e.loadFloats(views.delta, {firstColumn}, exists);
    e.storeVector(e.select(isReal, delta, zero), packedDeltas, {slot});
  } else if (views.keyBias) {
    term = e.loadFloats(views.keyBias, {firstColumn}, exists);
  }
  e.storeVector(e.select(isReal, term, hidden), packedTerms, {slot});
  if (packedValues)
    packTransposed(e, columns.values, tokens, isReal, packedValues, slot);
  return isReal;
}

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

Value GradientRole::isEmptyQuery(Value row) const {
  return e.compare(arith::CmpFPredicate::OEQ, e.load(views.lse, {row}),
                   e.constant(e.getF32Type(), -kInfinity));
}

Value GradientRole::isRowReal(Value row) const {
  Value yes = e.constantInt(e.getI1Type(), 1);
  Value isReal = rows.mask ? e.load(rows.mask, {row}) : yes;
  if (rowsAreKeys)
    return isReal;
  return e.both(isReal, arith::XOrIOp::create(e, isEmptyQuery(row), yes));
}

/// The part of the exponent that a row has; null for 0.
Value GradientRole::getRowTerm(Value row) {
  if (rowsAreKeys)
    return views.keyBias ? e.load(views.keyBias, {row}) : Value();
  Type f32 = e.getF32Type();
  Value negated = e.sub(e.constant(f32, 0.0), e.load(views.lse, {row}));
  return e.select(isEmptyQuery(row), e.constant(f32, -kInfinity), negated);
}

/// The bias between a row and a vector of columns.
Value GradientRole::getBias(Value row, Value firstColumn) {
  Value numColumns = e.dim(columns.features, 0);
  if (!rowsAreKeys)
    return e.loadFloats(views.bias, {row, firstColumn},
                        e.firstLanes(e.sub(numColumns, firstColumn)));
  Values lanes;
  for (Value column : clampRows(e, firstColumn, e.width, numColumns))
    lanes.push_back(e.toF32(e.load(views.bias, {column, row})));
  return vector::FromElementsOp::create(e, e.floats(), lanes);
}

void GradientRole::buildWeights(int64_t slot, Value row, Value position,
                                Value firstColumn, ArrayRef<Value> products,
                                Value packedLevels, Value weights,
                                Value alive) {
  Value hidden = e.negInfinity();
  Value rowTerm = getRowTerm(row);
  Value level = rows.level ? e.load(rows.level, {row}) : Value();
  for (auto [vector, product] : llvm::enumerate(products)) {
    Value offset = e.index(vector * e.width);
    Value column = e.add(firstColumn, offset);
    Value levels = level ? e.loadVector(packedLevels, {offset}) : Value();
    PairTerms pair = makePairs(e, logits.rule, position, column, level, levels);
    pair.product = product;
    Value term = e.loadVector(packedTerms, {offset});
    pair.biases = {term, rowTerm ? e.splat(rowTerm) : Value()};
    if (views.bias) {
      pair.biases.push_back(getBias(row, column));
      // A bias at a hidden pair may be anything.
      pair.isReal = e.compare(arith::CmpFPredicate::UNE, term, hidden);
    }
    Value x = logits.getVisibleLogit(e, pair);
    if (alive)
      x = e.select(alive, x, hidden);
    e.storeVector(e.exp(x), weights, {e.index(slot), offset});
  }
}

Value GradientRole::center(Value row, int64_t vector, Value product) {
  Value delta;
  if (rowsAreKeys) {
    delta = e.loadVector(packedDeltas, {e.index(vector * e.width)});
  } else {
    // That of a query without a key may be anything.
    Value none = e.constant(e.getF32Type(), 0.0);
    delta =
        e.splat(e.select(isEmptyQuery(row), none, e.load(views.delta, {row})));
  }
  return e.sub(product, delta);
}
