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

#include "Patterns.h"
#include "SoftmaxMixTiles.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/Support/MathExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

/// Queries that share one packing of a key block, a multiple of kGroupRows.
static constexpr int64_t kQueryBlock = 192;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

namespace {
class MixKernel {
public:
  MixKernel(Emitter &e, SoftmaxMixOp op)
      : e(e), op(op), rule(op, /*rowsAreKeys=*/false),
        blockKeys(getColumnVectors(e) * e.width) {}

  void emit();

private:
  void allocate();
  void takeViews(Value batch, Value head);
  void emitQueryBlock(Value firstQuery);

  // Packing a block of keys.
  void packKeys(Value firstKey);
  void packKeyVector(Value firstKey, int64_t vector);

  // One group of queries and one block of keys.
  void emitGroup(Value firstQuery, Value group, Value firstKey);
  Value getVisible(Value row, Value firstKey, int64_t vector);
  Values finishLogits(Value row, Value firstKey, ArrayRef<Value> products);
  Value updateState(Value slot, int64_t row, ArrayRef<Value> logits);

  void writeRow(Value firstQuery, Value slot);
  Value positionOf(Value row) { return e.add(origin, row); }

  Emitter &e;
  SoftmaxMixOp op;
  PositionRule rule;
  const int64_t blockKeys;

  Value numQueries, numKeys, numValues, origin;
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
  PackedShape keys =
      getPackedShape(e, op.getQ(), op.getK(), getSize(e, op.getQ(), 3));
  packedKeys = e.scratch(keys.sizes, keys.element);
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
  OpFoldResult padded = padToVectors(e, getSize(e, op.getV(), 2));
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
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
    packKeyVector(e.add(firstKey, e.index(vector * e.width)), vector);
  if (v)
    packRows(e, v, firstKey, blockKeys, packedBias, packedValues);
}

/// Packs one vector of keys. A key that nobody sees, and one behind the last,
/// has bias -inf; where it is masked its features are 0.
void MixKernel::packKeyVector(Value firstKey, int64_t vector) {
  Value slot = e.index(vector * e.width);
  Values rows = clampRows(e, firstKey, e.width, numKeys);
  Value exists = e.firstLanes(e.sub(numKeys, firstKey));
  Value isReal = keyMask ? loadLanes(e, keyMask, rows) : Value();
  Value value = e.f32(0.0);
  if (keyBias)
    value = e.loadFloats(keyBias, {firstKey}, exists);
  value = e.select(e.both(exists, isReal), value, e.f32(-kInfinity));
  e.storeVector(value, packedBias, {slot});
  if (keyLevel)
    e.storeVector(e.loadFloats(keyLevel, {firstKey}, exists), packedLevel,
                  {slot});

  packTransposed(e, k, rows, isReal, packedKeys, slot);
}

//===----------------------------------------------------------------------===//
// Logits of a register tile
//===----------------------------------------------------------------------===//

/// Which keys of a vector query `row` sees by position and level; null for all.
Value MixKernel::getVisible(Value row, Value firstKey, int64_t vector) {
  Value visible = rule.getVisible(e, positionOf(row),
                                  e.add(firstKey, e.index(vector * e.width)));
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

/// `group` is the first of six slots of the query block's state.
void MixKernel::emitGroup(Value firstQuery, Value group, Value firstKey) {
  auto body = [&] {
    // Slots behind the last query repeat it; nobody reads their state.
    Values rows =
        clampRows(e, e.add(firstQuery, group), kGroupRows, numQueries);
    Values decays;
    Tile products = multiplyTile(e, q, rows, packedKeys);
    for (int64_t row = 0; row < kGroupRows; ++row) {
      Values logits = finishLogits(rows[row], firstKey, products[row]);
      decays.push_back(updateState(e.add(group, e.index(row)), row, logits));
    }
    if (v) // o' = a o + p v
      accumulateTile(e, weights, packedValues, accumulators, group, decays,
                     getSize(e, v, 1));
  };
  Value position = positionOf(e.add(firstQuery, group));
  if (Value visible = rule.isGroupVisible(e, position, firstKey, blockKeys))
    e.ifThen(visible, body);
  else
    body();
}

//===----------------------------------------------------------------------===//
// Blocks of queries
//===----------------------------------------------------------------------===//

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
  auto [begin, end] =
      rule.getRange(e, positionOf(firstQuery), numRows, numKeys, blockKeys);
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
    if (failed(matchContiguousBuffers(op, rewriter)))
      return failure();
    Emitter emitter(op.getLoc(), rewriter, options);
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
