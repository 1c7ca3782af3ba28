//===- MixEmitter.cpp - What the kernels of softmax_mix share -------------===//

#include "MixEmitter.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Tiles
//===----------------------------------------------------------------------===//

static Value getDim(ThreadBuilder &b, Value memref, int64_t dim) {
  return b.createOrFold<memref::DimOp>(memref, dim);
}

MixEmitter::MixEmitter(WarpBuilder &b, SoftmaxMixOp op, MixLayout layout)
    : b(b), op(op), layout(std::move(layout)), pairLogits(op) {
  numQueries = getDim(b, op.getQ(), 2);
  numKeys = getDim(b, op.getK(), 2);
  origin = op.getOrigin() ? op.getOrigin() : b.sub(numKeys, numQueries);
}

SmallVector<Value>
MixEmitter::forEachTile(ValueRange initial,
                        function_ref<SmallVector<Value>(ValueRange)> emitTile) {
  Value zero = b.index(0);
  auto emitRows = [&](Value row, ValueRange carried) {
    firstRow = row;
    return emitTile(carried);
  };
  auto emitHead = [&](Value index, ValueRange carried) {
    head = index;
    return b.loop(zero, numQueries, layout.numRows, carried, emitRows);
  };
  auto emitBatch = [&](Value index, ValueRange carried) {
    batch = index;
    return b.loop(zero, getDim(b, op.getQ(), 1), 1, carried, emitHead);
  };
  return b.loop(zero, getDim(b, op.getQ(), 0), 1, initial, emitBatch);
}

void MixEmitter::forEachTile(function_ref<void()> emitTile) {
  forEachTile(ValueRange(), [&](ValueRange) -> SmallVector<Value> {
    emitTile();
    return {};
  });
}

std::pair<Value, Value> MixEmitter::getKeyRange() {
  Value rows =
      b.minSigned(b.sub(numQueries, firstRow), b.index(layout.numRows));
  return pairLogits.rule.getColumns(b, b.add(origin, firstRow), rows, numKeys,
                                    layout.numKeys);
}

Value MixEmitter::clampKey(Value key) {
  return b.minSigned(key, b.sub(numKeys, b.index(1)));
}

Value MixEmitter::clampRow(Value row) {
  return b.minSigned(row, b.sub(numQueries, b.index(1)));
}

SmallVector<Value> MixEmitter::getValuePlace(Value key, Value column) {
  if (areValuesPerHead(op.getV()))
    return {batch, head, key, column};
  return {batch, key, column};
}

/// The key position of a row of the tile, as i32.
Value MixEmitter::positionOf(Value row) {
  return b.add(b.toI32(b.add(origin, firstRow)), row);
}

//===----------------------------------------------------------------------===//
// Key biases
//===----------------------------------------------------------------------===//

int64_t MixEmitter::getBiasBytes(SoftmaxMixOp op, int64_t numKeys) {
  return numKeys * sizeof(float) * (op.getKeyLevel() ? 2 : 1);
}

Value MixEmitter::isUnmasked(Value key) {
  if (!op.getKeyMask())
    return {};
  return memref::LoadOp::create(b, op.getKeyMask(), ValueRange{batch, key});
}

Value MixEmitter::isReal(Value key) {
  Value exists = b.less(key, numKeys);
  Value unmasked = isUnmasked(clampKey(key));
  return unmasked ? b.both(exists, unmasked) : exists;
}

void MixEmitter::writeBiases(Value thread, Value firstKey, Value shared) {
  b.ifThen(b.less(thread, b.i32(layout.numKeys)), [&] {
    Value key = b.add(firstKey, b.toIndex(thread));
    Value bias = op.getKeyBias()
                     ? b.loadF32(op.getKeyBias(), {batch, head, clampKey(key)})
                     : b.f32(0.0);
    bias = b.select(isReal(key), bias, b.negInfinity());
    Value place = b.at(shared, b.mul(thread, b.i32(sizeof(float))));
    b.store(bias, place, sizeof(float));
    if (op.getKeyLevel())
      b.store(b.loadF32(op.getKeyLevel(), {batch, clampKey(key)}),
              b.at(place, layout.numKeys * sizeof(float)), sizeof(float));
  });
}

//===----------------------------------------------------------------------===//
// Logits
//===----------------------------------------------------------------------===//

bool mlir::moe::isBiasShared(Value bias, int64_t dim) {
  return cast<MemRefType>(bias.getType()).getDimSize(dim) == 1;
}

Value mlir::moe::loadPairBias(ThreadBuilder &b, Value bias, Value batch,
                              Value head, Value query, Value key) {
  Value zero = b.index(0);
  return b.loadF32(bias, {isBiasShared(bias, 0) ? zero : batch,
                          isBiasShared(bias, 1) ? zero : head, query, key});
}

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
  inside = b.both(inside, b.less(position, getDim(b, mixed, 3)));
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
