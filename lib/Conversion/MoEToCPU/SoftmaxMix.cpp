//===- SoftmaxMix.cpp - moe.softmax_mix on vectors ------------------------===//
//
// Matches moe.softmax_mix on buffers with contiguous rows. Queries are taken in
// blocks, keys in blocks of four vectors. A block of keys is packed once for a
// block of queries: transposed, so that a vector holds one feature of
// neighbouring keys, in f32, with zeros for masked keys (E11). Then groups of
// six queries meet it:
//
//   x_ij = scale q_i.k_j + key_bias_j + bias_ij     24 accumulators
//   m_i' = max(m_i, max_j x_ij)                     the running maximum
//   a_i  = exp(m_i - m_i'),  p_ij = exp(x_ij - m_i')
//   l_i' = a_i l_i + sum_j p_ij                     one sum a lane
//   t_i' = a_i (t_i + (m_i - m_i') l_i) + sum_j p_ij (x_ij - m_i')
//   o_i' = a_i o_i + sum_j p_ij v_j
//
// so that at the end mixed = o / l, lse = m + ln l, entropy = ln l - t / l.
// Keeping t relative to the maximum keeps the entropy exact where the logits
// are large. Memory is linear in the number of queries of a block.
//
// Key blocks start at multiples of their size, whatever the query, and a block
// without a visible key changes no bit of (m, l, t, o): a query's result does
// not depend on its position in a tile, and skipping blocks is free.
//
//===----------------------------------------------------------------------===//

#include "Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/Support/MathExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

/// Queries of a register tile: 6 rows of 4 vectors leave 8 of 32 registers.
static constexpr int64_t kGroupRows = 6;
/// Vectors of a key block.
static constexpr int64_t kKeyVectors = 4;
/// Queries that share one packing of a key block, a multiple of kGroupRows.
static constexpr int64_t kQueryBlock = 192;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

namespace {
/// The vectors of a register tile, a row a query of the group.
using Tile = SmallVector<Values>;

class MixKernel {
public:
  MixKernel(Emitter &e, SoftmaxMixOp op)
      : e(e), op(op), blockKeys(kKeyVectors * e.width) {}

  void emit();

private:
  void allocate();
  void takeViews(Value batch, Value head);
  void emitQueryBlock(Value firstQuery);
  std::pair<Value, Value> getKeyRange(Value firstQuery, Value numRows);

  // Packing a block of keys.
  void packKeys(Value firstKey);
  void packKeyVector(Value firstKey, int64_t vector);
  void packValues(Value firstKey);

  // One group of queries and one block of keys.
  void emitGroup(Value firstQuery, Value group, Value firstKey);
  Value isGroupVisible(Value position, Value firstKey);
  Tile multiply(ArrayRef<Value> rows);
  Value getVisible(Value row, Value firstKey, int64_t vector);
  Values finishLogits(Value row, Value firstKey, ArrayRef<Value> products);
  Value updateState(Value slot, int64_t row, ArrayRef<Value> logits);
  void mixValues(Value group, ArrayRef<Value> decays);

  void writeRow(Value firstQuery, Value slot);
  Value positionOf(Value row) { return e.add(origin, row); }

  Emitter &e;
  SoftmaxMixOp op;
  const int64_t blockKeys;

  Value numQueries, numKeys, numFeatures, numValues, origin;
  // Views at one batch and head.
  Value q, k, v, keyBias, bias, queryMask, keyMask, queryLevel, keyLevel;
  Value mixed, lse, entropy;
  // The packed block of keys.
  Value packedKeys, packedBias, packedLevel, packedValues;
  Value weights;
  // The state of each query of a block.
  Value runningMax, runningSum, runningMoment, accumulators;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

void MixKernel::allocate() {
  Type f32 = e.getF32Type();
  auto fixed = [&](int64_t size) -> OpFoldResult {
    return e.getIndexAttr(size);
  };
  packedKeys = e.scratch({getSize(e, op.getQ(), 3), fixed(blockKeys)}, f32);
  packedBias = e.scratch({fixed(blockKeys)}, f32);
  if (op.getKeyLevel())
    packedLevel = e.scratch({fixed(blockKeys)}, f32);
  runningMax = e.scratch({fixed(kQueryBlock)}, f32);
  runningSum = e.scratch({fixed(kQueryBlock), fixed(e.width)}, f32);
  if (op.getWithEntropy())
    runningMoment = e.scratch({fixed(kQueryBlock), fixed(e.width)}, f32);
  if (!op.getV())
    return;
  weights = e.scratch({fixed(kGroupRows), fixed(blockKeys)}, f32);
  // Rows of whole vectors.
  OpFoldResult padded;
  int64_t size = cast<MemRefType>(op.getV().getType()).getDimSize(2);
  if (ShapedType::isDynamic(size)) {
    Value vectors =
        arith::CeilDivSIOp::create(e, e.dim(op.getV(), 2), e.index(e.width));
    padded = e.mul(vectors, e.index(e.width));
  } else {
    padded = fixed(llvm::alignTo(size, e.width));
  }
  packedValues = e.scratch({fixed(blockKeys), padded}, f32);
  accumulators = e.scratch({fixed(kQueryBlock), padded}, f32);
}

void MixKernel::takeViews(Value batch, Value head) {
  auto view = [&](Value memref, ValueRange indices) {
    return memref ? sliceLeading(e, memref, indices) : Value();
  };
  q = view(op.getQ(), {batch, head});
  k = view(op.getK(), {batch, head});
  v = view(op.getV(), {batch});
  keyBias = view(op.getKeyBias(), {batch, head});
  if (Value memref = op.getBias()) {
    // A dim of 1 is broadcast.
    auto type = cast<MemRefType>(memref.getType());
    Value zero = e.index(0);
    bias = view(memref, {type.getDimSize(0) == 1 ? zero : batch,
                         type.getDimSize(1) == 1 ? zero : head});
  }
  queryMask = view(op.getQueryMask(), {batch});
  keyMask = view(op.getKeyMask(), {batch});
  queryLevel = view(op.getQueryLevel(), {batch});
  keyLevel = view(op.getKeyLevel(), {batch});
  mixed = view(op.getMixedInit(), {batch, head});
  lse = view(op.getLseInit(), {batch, head});
  entropy = view(op.getEntropyInit(), {batch, head});
}

//===----------------------------------------------------------------------===//
// Packing
//===----------------------------------------------------------------------===//

/// Packs keys [firstKey, firstKey + blockKeys): features, biases, values.
void MixKernel::packKeys(Value firstKey) {
  for (int64_t vector = 0; vector < kKeyVectors; ++vector)
    packKeyVector(e.add(firstKey, e.index(vector * e.width)), vector);
  if (v)
    packValues(firstKey);
}

/// Packs one vector of keys. A key that nobody sees, and one behind the last,
/// has bias -inf; where it is masked its features are 0.
void MixKernel::packKeyVector(Value firstKey, int64_t vector) {
  Value slot = e.index(vector * e.width);
  Value last = e.sub(numKeys, e.index(1));
  Values rows;
  for (int64_t lane = 0; lane < e.width; ++lane)
    rows.push_back(e.minIndex(e.add(firstKey, e.index(lane)), last));

  Value exists = e.firstLanes(e.sub(numKeys, firstKey));
  Value isReal;
  if (keyMask) {
    Values lanes;
    for (Value row : rows)
      lanes.push_back(
          arith::ExtUIOp::create(e, e.getI32Type(), e.load(keyMask, {row})));
    isReal =
        e.compare(arith::CmpIPredicate::ne,
                  vector::FromElementsOp::create(e, e.ints(), lanes), e.i32(0));
  }
  Value value = e.f32(0.0);
  if (keyBias)
    value = e.loadFloats(keyBias, {firstKey}, exists);
  value = e.select(e.both(exists, isReal), value, e.f32(-kInfinity));
  e.storeVector(value, packedBias, {slot});
  if (keyLevel)
    e.storeVector(e.loadFloats(keyLevel, {firstKey}, exists), packedLevel,
                  {slot});

  auto packFeatures = [&](Value feature, Value mask, Value count) {
    Values vectors;
    for (Value row : rows)
      vectors.push_back(e.loadFloats(k, {row, feature}, mask));
    for (auto [lane, column] : llvm::enumerate(transposeLanes(e, vectors))) {
      Value keys = isReal ? e.select(isReal, column, e.f32(0.0)) : column;
      Value position = e.add(feature, e.index(lane));
      auto storeKeys = [&] {
        e.storeVector(keys, packedKeys, {position, slot});
      };
      if (count)
        e.ifThen(e.compare(arith::CmpIPredicate::slt, e.index(lane), count),
                 storeKeys);
      else
        storeKeys();
    }
  };
  int64_t size = cast<MemRefType>(k.getType()).getDimSize(1);
  Value rest =
      ShapedType::isDynamic(size)
          ? arith::RemSIOp::create(e, numFeatures, e.index(e.width)).getResult()
          : e.index(size % e.width);
  Value wholeEnd = e.sub(numFeatures, rest);
  e.loop(e.index(0), wholeEnd, e.width,
         [&](Value feature) { packFeatures(feature, Value(), Value()); });
  if (ShapedType::isDynamic(size) || size % e.width != 0)
    packFeatures(wholeEnd, e.firstLanes(rest), rest);
}

/// Copies the values in rows of whole vectors, 0 for keys that nobody sees.
void MixKernel::packValues(Value firstKey) {
  Value last = e.sub(numKeys, e.index(1));
  e.loop(e.index(0), e.index(blockKeys), 1, [&](Value key) {
    Value row = e.minIndex(e.add(firstKey, key), last);
    Value isHidden =
        e.compare(arith::CmpFPredicate::OEQ, e.load(packedBias, {key}),
                  e.constant(e.getF32Type(), -kInfinity));
    e.loop(e.index(0), numValues, e.width, [&](Value column) {
      Value mask = e.firstLanes(e.sub(numValues, column));
      Value values = e.loadFloats(v, {row, column}, mask);
      e.storeVector(e.select(isHidden, e.f32(0.0), values), packedValues,
                    {key, column});
    });
  });
}

//===----------------------------------------------------------------------===//
// Logits of a register tile
//===----------------------------------------------------------------------===//

/// Products that one accumulator takes before it is added to the total: one
/// long chain would round the sum of d products d times, and log-sum-exps would
/// leave their tolerance from d = 352 on.
static constexpr int64_t kChainLength = 64;

/// q.k of the group's rows with the packed keys.
Tile MixKernel::multiply(ArrayRef<Value> rows) {
  Values zeros(kGroupRows * kKeyVectors, e.f32(0.0));
  auto accumulate = [&](Value feature, ValueRange carried) -> Values {
    Values keys, next;
    for (int64_t vector = 0; vector < kKeyVectors; ++vector)
      keys.push_back(
          e.loadVector(packedKeys, {feature, e.index(vector * e.width)}));
    for (auto [i, row] : llvm::enumerate(rows)) {
      Value query = e.splat(e.toF32(e.load(q, {row, feature})));
      for (auto [j, key] : llvm::enumerate(keys))
        next.push_back(e.fma(query, key, carried[i * kKeyVectors + j]));
    }
    return next;
  };
  Values sums =
      e.loop(e.index(0), numFeatures, kChainLength, zeros,
             [&](Value first, ValueRange totals) -> Values {
               Value end =
                   e.minIndex(e.add(first, e.index(kChainLength)), numFeatures);
               Values chain = e.loop(first, end, 1, zeros, accumulate);
               Values next;
               for (auto [total, part] : llvm::zip_equal(totals, chain))
                 next.push_back(e.add(total, part));
               return next;
             });
  Tile tile;
  for (int64_t row = 0; row < kGroupRows; ++row)
    tile.push_back(
        Values(ArrayRef(sums).slice(row * kKeyVectors, kKeyVectors)));
  return tile;
}

/// Which keys of a vector query `row` sees by position and level; null for all.
Value MixKernel::getVisible(Value row, Value firstKey, int64_t vector) {
  Value visible;
  if (op.getCausal() || op.getWindow() || op.getExcludeSelf()) {
    Type i32 = e.getI32Type();
    Value begin = e.add(firstKey, e.index(vector * e.width));
    Value keys = e.add(e.splat(e.fromIndex(begin, i32)), e.iota());
    Value position = positionOf(row);
    Value own = e.splat(e.fromIndex(position, i32));
    if (op.getCausal())
      visible = e.compare(arith::CmpIPredicate::sle, keys, own);
    if (op.getExcludeSelf())
      visible = e.both(visible, e.compare(arith::CmpIPredicate::ne, keys, own));
    if (std::optional<uint64_t> window = op.getWindow()) {
      // Without itself a query still sees `window` keys.
      int64_t reach = *window + (op.getExcludeSelf() ? 1 : 0);
      Value end = e.splat(e.fromIndex(e.sub(position, e.index(reach)), i32));
      visible =
          e.both(visible, e.compare(arith::CmpIPredicate::sgt, keys, end));
    }
  }
  if (queryLevel) {
    Value own = e.splat(e.load(queryLevel, {row}));
    Value levels = e.loadVector(packedLevel, {e.index(vector * e.width)});
    visible =
        e.both(visible, e.compare(arith::CmpFPredicate::OLE, levels, own));
  }
  return visible;
}

/// x = scale q.k + key_bias + bias, -inf where the key is not visible.
Values MixKernel::finishLogits(Value row, Value firstKey,
                               ArrayRef<Value> products) {
  Values logits;
  Value hidden = e.f32(-kInfinity);
  for (auto [vector, product] : llvm::enumerate(products)) {
    Value offset = e.index(vector * e.width);
    Value base = e.loadVector(packedBias, {offset});
    Value x = e.fma(product, e.f32(op.getScale().convertToDouble()), base);
    Value visible = getVisible(row, firstKey, vector);
    if (bias) {
      Value key = e.add(firstKey, offset);
      Value exists = e.firstLanes(e.sub(numKeys, key));
      x = e.add(x, e.loadFloats(bias, {row, key}, exists));
      // A bias at a hidden key may be anything.
      visible =
          e.both(visible, e.compare(arith::CmpFPredicate::UNE, base, hidden));
    }
    logits.push_back(visible ? e.select(visible, x, hidden) : x);
  }
  return logits;
}

//===----------------------------------------------------------------------===//
// The online softmax
//===----------------------------------------------------------------------===//

/// Sums four vectors in a fixed order.
static Value sumVectors(Emitter &e, ArrayRef<Value> vectors) {
  if (vectors.size() == 1)
    return vectors.front();
  size_t half = vectors.size() / 2;
  return e.add(sumVectors(e, vectors.take_front(half)),
               sumVectors(e, vectors.drop_front(half)));
}

/// Takes the logits of one query into its state and writes its weights p;
/// returns the factor a of what was accumulated before.
Value MixKernel::updateState(Value slot, int64_t row, ArrayRef<Value> logits) {
  Type f32 = e.getF32Type();
  Value hidden = e.constant(f32, -kInfinity);
  Value oldMax = e.load(runningMax, {slot});
  Value blockMax = logits.front();
  for (Value x : logits.drop_front())
    blockMax = e.max(x, blockMax);
  Value newMax = e.max(e.reduceMax(blockMax), oldMax);
  e.store(newMax, runningMax, {slot});
  // Before the first visible key there is nothing to be relative to.
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, newMax, hidden);
  Value shift = e.select(isEmpty, e.constant(f32, 0.0), newMax);
  Value decay = e.exp(e.splat(e.sub(oldMax, shift)));

  Values weightVectors, moments;
  for (auto [vector, x] : llvm::enumerate(logits)) {
    Value relative = e.sub(x, e.splat(shift));
    Value weight = e.exp(relative);
    weightVectors.push_back(weight);
    if (weights)
      e.storeVector(weight, weights, {e.index(row), e.index(vector * e.width)});
    if (runningMoment) {
      // 0 ln 0 = 0: a hidden key's relative logit is kept finite.
      double lowest = std::numeric_limits<float>::lowest();
      moments.push_back(e.mul(weight, e.max(relative, e.f32(lowest))));
    }
  }
  Value zero = e.index(0);
  Value oldSum = e.loadVector(runningSum, {slot, zero});
  e.storeVector(e.fma(oldSum, decay, sumVectors(e, weightVectors)), runningSum,
                {slot, zero});
  if (runningMoment) {
    Value wasEmpty = e.compare(arith::CmpFPredicate::OEQ, oldMax, hidden);
    Value drop = e.select(wasEmpty, e.constant(f32, 0.0), e.sub(oldMax, shift));
    Value old = e.loadVector(runningMoment, {slot, zero});
    Value moved = e.mul(e.fma(oldSum, e.splat(drop), old), decay);
    e.storeVector(e.add(moved, sumVectors(e, moments)), runningMoment,
                  {slot, zero});
  }
  return decay;
}

/// o' = a o + p v for the group, up to four vectors of columns at a time.
void MixKernel::mixValues(Value group, ArrayRef<Value> decays) {
  auto mixColumns = [&](Value column, int64_t numVectors) {
    auto at = [&](int64_t vector) {
      return e.add(column, e.index(vector * e.width));
    };
    Values carried;
    for (auto [row, decay] : llvm::enumerate(decays))
      for (int64_t vector = 0; vector < numVectors; ++vector)
        carried.push_back(
            e.mul(e.loadVector(accumulators,
                               {e.add(group, e.index(row)), at(vector)}),
                  decay));
    Values sums = e.loop(
        e.index(0), e.index(blockKeys), 1, carried,
        [&](Value key, ValueRange old) -> Values {
          Values values, next;
          for (int64_t vector = 0; vector < numVectors; ++vector)
            values.push_back(e.loadVector(packedValues, {key, at(vector)}));
          for (int64_t row = 0; row < kGroupRows; ++row) {
            Value weight = e.splat(e.load(weights, {e.index(row), key}));
            for (auto [vector, value] : llvm::enumerate(values))
              next.push_back(
                  e.fma(weight, value, old[row * numVectors + vector]));
          }
          return next;
        });
    for (int64_t row = 0; row < kGroupRows; ++row)
      for (int64_t vector = 0; vector < numVectors; ++vector)
        e.storeVector(sums[row * numVectors + vector], accumulators,
                      {e.add(group, e.index(row)), at(vector)});
  };
  int64_t size = cast<MemRefType>(v.getType()).getDimSize(1);
  if (ShapedType::isDynamic(size)) {
    e.loop(e.index(0), numValues, e.width,
           [&](Value column) { mixColumns(column, 1); });
    return;
  }
  int64_t numVectors = llvm::divideCeil(size, e.width);
  for (int64_t vector = 0; vector < numVectors; vector += 4)
    mixColumns(e.index(vector * e.width),
               std::min<int64_t>(4, numVectors - vector));
}

/// Whether any query of the group at key position `position` can see a key of
/// the block; null if that is not decided by position.
Value MixKernel::isGroupVisible(Value position, Value firstKey) {
  Value visible;
  if (op.getCausal())
    visible = e.compare(arith::CmpIPredicate::sle, firstKey,
                        e.add(position, e.index(kGroupRows - 1)));
  if (std::optional<uint64_t> window = op.getWindow()) {
    int64_t reach = *window + (op.getExcludeSelf() ? 1 : 0);
    visible = e.both(visible, e.compare(arith::CmpIPredicate::sgt,
                                        e.add(firstKey, e.index(blockKeys - 1)),
                                        e.sub(position, e.index(reach))));
  }
  return visible;
}

/// `group` is the first of six slots of the query block's state.
void MixKernel::emitGroup(Value firstQuery, Value group, Value firstKey) {
  auto body = [&] {
    // Slots behind the last query repeat it; nobody reads their state.
    Value last = e.sub(numQueries, e.index(1));
    Values rows, slots, decays;
    for (int64_t row = 0; row < kGroupRows; ++row) {
      slots.push_back(e.add(group, e.index(row)));
      rows.push_back(e.minIndex(e.add(firstQuery, slots.back()), last));
    }
    Tile products = multiply(rows);
    for (int64_t row = 0; row < kGroupRows; ++row) {
      Values logits = finishLogits(rows[row], firstKey, products[row]);
      decays.push_back(updateState(slots[row], row, logits));
    }
    if (v)
      mixValues(group, decays);
  };
  Value position = positionOf(e.add(firstQuery, group));
  if (Value visible = isGroupVisible(position, firstKey))
    e.ifThen(visible, body);
  else
    body();
}

//===----------------------------------------------------------------------===//
// Blocks of queries
//===----------------------------------------------------------------------===//

/// The key blocks that some query of a block may see.
std::pair<Value, Value> MixKernel::getKeyRange(Value firstQuery,
                                               Value numRows) {
  Value begin = e.index(0), end = numKeys;
  Value position = positionOf(firstQuery);
  if (op.getCausal())
    end = e.minIndex(end, e.add(position, numRows));
  if (std::optional<uint64_t> window = op.getWindow()) {
    int64_t reach = *window + (op.getExcludeSelf() ? 1 : 0);
    Value first = e.maxIndex(e.sub(position, e.index(reach - 1)), begin);
    begin = e.sub(first, arith::RemSIOp::create(e, first, e.index(blockKeys)));
  }
  return {begin, end};
}

/// mixed, lse and entropy of one query from its state.
void MixKernel::writeRow(Value firstQuery, Value slot) {
  Type f32 = e.getF32Type();
  Value zero = e.constant(f32, 0.0), hidden = e.constant(f32, -kInfinity);
  Value row = e.add(firstQuery, slot);
  Value max = e.load(runningMax, {slot});
  Value sum = e.reduceAdd(e.loadVector(runningSum, {slot, e.index(0)}));
  // A visible key weighs 1 at the maximum, so only a query without one sums to
  // 0. The maximum does not tell: it stays -inf when every logit is NaN (E3).
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, sum, zero);
  // E10: a masked query has the results of one that sees no key.
  if (queryMask) {
    Value isReal = e.load(queryMask, {row});
    isEmpty = e.select(isReal, isEmpty, e.constantInt(e.getI1Type(), 1));
  }
  Value logSum = math::LogOp::create(e, sum);
  e.store(e.select(isEmpty, hidden, e.add(max, logSum)), lse, {row});
  if (entropy) {
    Value moment = e.reduceAdd(e.loadVector(runningMoment, {slot, e.index(0)}));
    Value value = e.sub(logSum, e.div(moment, sum));
    e.store(e.select(isEmpty, zero, value), entropy, {row});
  }
  if (!v)
    return;
  Value sums = e.splat(sum);
  e.loop(e.index(0), numValues, e.width, [&](Value column) {
    Value total = e.loadVector(accumulators, {slot, column});
    Value value = e.select(isEmpty, e.f32(0.0), e.div(total, sums));
    e.storeVector(value, mixed, {row, column},
                  e.firstLanes(e.sub(numValues, column)));
  });
}

void MixKernel::emitQueryBlock(Value firstQuery) {
  Value zero = e.index(0);
  Value numRows =
      e.minIndex(e.sub(numQueries, firstQuery), e.index(kQueryBlock));
  Value hidden = e.constant(e.getF32Type(), -kInfinity);
  e.loop(zero, e.index(kQueryBlock), 1, [&](Value slot) {
    e.store(hidden, runningMax, {slot});
    e.storeVector(e.f32(0.0), runningSum, {slot, zero});
    if (runningMoment)
      e.storeVector(e.f32(0.0), runningMoment, {slot, zero});
    if (v)
      e.loop(zero, numValues, e.width, [&](Value column) {
        e.storeVector(e.f32(0.0), accumulators, {slot, column});
      });
  });
  auto [begin, end] = getKeyRange(firstQuery, numRows);
  e.loop(begin, end, blockKeys, [&](Value firstKey) {
    packKeys(firstKey);
    e.loop(zero, numRows, kGroupRows,
           [&](Value group) { emitGroup(firstQuery, group, firstKey); });
  });
  e.loop(zero, numRows, 1, [&](Value slot) { writeRow(firstQuery, slot); });
}

void MixKernel::emit() {
  auto isDynamic = [](Value memref, int64_t position) {
    return memref && cast<MemRefType>(memref.getType()).isDynamicDim(position);
  };
  e.withScratch(isDynamic(op.getQ(), 3) || isDynamic(op.getV(), 2), [&] {
    numQueries = e.dim(op.getQ(), 2);
    numKeys = e.dim(op.getK(), 2);
    numFeatures = e.dim(op.getQ(), 3);
    if (op.getV())
      numValues = e.dim(op.getV(), 2);
    origin = op.getOrigin() ? op.getOrigin() : e.sub(numKeys, numQueries);
    allocate();
    Value zero = e.index(0);
    e.loop(zero, e.dim(op.getQ(), 0), 1, [&](Value batch) {
      e.loop(zero, e.dim(op.getQ(), 1), 1, [&](Value head) {
        takeViews(batch, head);
        e.loop(zero, numQueries, kQueryBlock,
               [&](Value firstQuery) { emitQueryBlock(firstQuery); });
      });
    });
  });
}

namespace {
/// moe.softmax_mix on buffers -> register tiles with an online softmax.
struct SoftmaxMixToVector : OpRewritePattern<SoftmaxMixOp> {
  SoftmaxMixToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(SoftmaxMixOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    for (Value operand : op->getOperands())
      if (isa<MemRefType>(operand.getType()) &&
          !isInnermostContiguous(operand.getType()))
        return rewriter.notifyMatchFailure(
            op, "expected operands with contiguous rows");
    Emitter emitter(op.getLoc(), rewriter, options.vectorWidth);
    MixKernel(emitter, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateSoftmaxMixToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<SoftmaxMixToVector>(patterns.getContext(), options);
}
