//===- MixEmitter.cpp - What the kernels of softmax_mix share -------------===//

#include "MixEmitter.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Logits
//===----------------------------------------------------------------------===//

SmallVector<Value> MixEmitter::getLogits(unsigned row, ArrayRef<Value> products,
                                         Value firstKey, ArrayRef<Value> biases,
                                         ArrayRef<Value> levels) {
  Value place = clampRow(b.add(firstRow, b.toIndex(layout.rows[row])));
  PairTerms pair;
  pair.row = positionOf(layout.rows[row]);
  if (op.getQueryLevel())
    pair.rowLevel = b.loadF32(op.getQueryLevel(), {batch, place});
  SmallVector<Value> logits;
  for (auto [column, product] : llvm::enumerate(products)) {
    Value key = layout.keys[column];
    pair.product = product;
    pair.biases = {biases[column]};
    pair.column = b.add(b.toI32(firstKey), key);
    if (pair.rowLevel)
      pair.columnLevel = levels[column];
    if (Value bias = op.getBias()) {
      pair.biases.push_back(
          loadPairBias(b, bias, batch, head, place,
                       clampKey(b.add(firstKey, b.toIndex(key)))));
      // A bias at a hidden key may be anything.
      pair.isReal =
          b.compare(CmpFPredicate::UNE, biases[column], b.negInfinity());
    }
    logits.push_back(pairLogits.getVisibleLogit(b, pair));
  }
  return logits;
}

//===----------------------------------------------------------------------===//
// The online softmax
//===----------------------------------------------------------------------===//

Value MixEmitter::reduceRow(Value value,
                            function_ref<Value(Value, Value)> combine) {
  for (int64_t bit : layout.laneBits)
    value = combine(value, b.shuffleXor(value, bit));
  return value;
}

SmallVector<Value> MixEmitter::getInitialState() {
  SmallVector<Value> state;
  for (size_t row = 0; row < layout.rows.size(); ++row) {
    state.push_back(b.negInfinity());
    state.append(getRowStateSize() - 1, b.f32(0.0));
  }
  return state;
}

SmallVector<Value> MixEmitter::update(SmallVectorImpl<Value> &state,
                                      Fragment &products, Value firstKey,
                                      Value biasPlace) {
  auto loadColumn = [&](Value key, int64_t array) {
    Value offset = b.mul(key, b.i32(sizeof(float)));
    offset = b.add(offset, b.i32(array * layout.numKeys * sizeof(float)));
    return b.load(b.getF32Type(), b.at(biasPlace, offset), sizeof(float));
  };
  SmallVector<Value> biases, levels, decays;
  OnlineSoftmax softmax(b);
  for (Value key : layout.keys) {
    biases.push_back(loadColumn(key, 0));
    if (op.getKeyLevel())
      levels.push_back(loadColumn(key, 1));
  }
  for (unsigned row = 0; row < layout.rows.size(); ++row) {
    MutableArrayRef<Value> own(state.begin() + row * getRowStateSize(),
                               getRowStateSize());
    SmallVector<Value> logits =
        getLogits(row, products[row], firstKey, biases, levels);
    Value blockMax = logits.front();
    for (Value x : ArrayRef(logits).drop_front())
      blockMax = softmax.updateMax(x, blockMax);
    blockMax = reduceRow(
        blockMax, [&](Value x, Value y) { return softmax.updateMax(x, y); });
    Value newMax = softmax.updateMax(blockMax, own[0]);
    SoftmaxStep step = softmax.start(own[0], newMax);
    SoftmaxSums sums = getSums(own);
    softmax.add(sums, step, logits);
    products[row] = logits;
    own[0] = newMax;
    own[1] = sums.sum;
    if (sums.moment)
      own[2] = sums.moment;
    decays.push_back(step.decay);
  }
  return decays;
}

SmallVector<Value> MixEmitter::finish(ValueRange state) {
  auto sum = [&](Value x, Value y) { return b.add(x, y); };
  SmallVector<Value> factors;
  for (unsigned row = 0; row < layout.rows.size(); ++row) {
    SmallVector<Value> own(
        state.slice(row * getRowStateSize(), getRowStateSize()));
    SoftmaxSums total = getSums(own);
    total.sum = reduceRow(total.sum, sum);
    if (total.moment)
      total.moment = reduceRow(total.moment, sum);
    Value place = b.add(firstRow, b.toIndex(layout.rows[row])), isReal;
    if (Value mask = op.getQueryMask())
      isReal =
          memref::LoadOp::create(b, mask, ValueRange{batch, clampRow(place)});
    OnlineSoftmax::Result result =
        OnlineSoftmax(b).finish(own[0], total, isReal);
    b.ifThen(b.both(layout.isFirstLane, b.less(place, numQueries)), [&] {
      SmallVector<Value> indices{batch, head, place};
      memref::StoreOp::create(b, result.lse, op.getLseInit(), indices);
      if (result.entropy)
        memref::StoreOp::create(b, result.entropy, op.getEntropyInit(),
                                indices);
    });
    factors.push_back(
        b.select(result.isEmpty, b.f32(0.0), b.div(b.f32(1.0), total.sum)));
  }
  return factors;
}

void MixEmitter::storeMixed(Value value, Value factor, Value row,
                            Value column) {
  Value mixed = op.getMixedInit();
  Value isEmpty = b.compare(CmpFPredicate::OEQ, factor, b.f32(0.0));
  value = b.select(isEmpty, b.f32(0.0), b.mul(value, factor));
  Value place = b.add(firstRow, b.toIndex(row));
  Value inside = b.less(place, numQueries);
  Value position = b.toIndex(column);
  inside =
      b.both(inside, b.less(position, b.createOrFold<memref::DimOp>(mixed, 3)));
  b.ifThen(inside, [&] {
    memref::StoreOp::create(b, value, mixed,
                            ValueRange{batch, head, place, position});
  });
}

//===----------------------------------------------------------------------===//
// Fragments
//===----------------------------------------------------------------------===//

MixLayout mlir::moe::getFragmentLayout(WarpBuilder &b, Value warp,
                                       int64_t rowFragments, int64_t numRows,
                                       int64_t numKeys) {
  MixLayout layout;
  layout.numRows = numRows;
  layout.numKeys = numKeys;
  Value row = b.add(b.mul(warp, b.i32(16 * rowFragments)), b.div(b.lane(), 4));
  for (int64_t i = 0; i < 2 * rowFragments; ++i)
    layout.rows.push_back(b.add(row, b.i32(8 * i)));
  Value key = b.mul(b.rem(b.lane(), 4), b.i32(2));
  for (int64_t i = 0; i < numKeys / 8; ++i)
    for (int64_t j = 0; j < 2; ++j)
      layout.keys.push_back(b.add(key, b.i32(8 * i + j)));
  layout.laneBits = {1, 2};
  layout.isFirstLane =
      b.compare(CmpIPredicate::eq, b.rem(b.lane(), 4), b.i32(0));
  return layout;
}

Fragment mlir::moe::splitWeights(WarpBuilder &b,
                                 ArrayRef<SmallVector<Value>> rows,
                                 int64_t step, int64_t numTerms) {
  Fragment terms(numTerms);
  for (int64_t j = 0; j < 4; ++j) {
    ArrayRef<Value> row = rows[j % 2];
    int64_t key = 4 * step + 2 * (j / 2);
    for (auto [term, packed] :
         llvm::zip_equal(terms, b.splitBF16(row[key], row[key + 1], numTerms)))
      term.push_back(packed);
  }
  return terms;
}

void mlir::moe::finishFragments(MixEmitter &mix, ValueRange state,
                                ValueRange sums) {
  WarpBuilder &b = mix.b;
  SmallVector<Value> factors = mix.finish(state);
  Value firstColumn = b.mul(b.rem(b.lane(), 4), b.i32(2));
  int64_t sumsOfRows = 2 * sums.size() / mix.layout.rows.size();
  for (auto [number, sum] : llvm::enumerate(sums)) {
    int64_t row = 2 * (number / sumsOfRows) + number % 4 / 2;
    int64_t column = 8 * (number % sumsOfRows / 4) + number % 2;
    mix.storeMixed(sum, factors[row], mix.layout.rows[row],
                   b.add(firstColumn, b.i32(column)));
  }
}
