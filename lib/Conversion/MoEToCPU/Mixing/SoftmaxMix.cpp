//===- SoftmaxMix.cpp - moe.softmax_mix on vectors ------------------------===//
//
// Matches moe.softmax_mix on buffers with contiguous rows. Queries are taken in
// blocks, keys in blocks of four vectors. A block of keys is packed once for a
// block of queries, then multiplied with groups of six:
//
//   x_ij = scale q_i.k_j + key_bias_j + bias_ij     24 accumulators
//
// and take it into their online softmax (SoftmaxMixState.h). Memory is linear
// in the number of queries of a block.
//
// Key blocks start at multiples of their size, whatever the query, and a block
// without a visible key changes no bit of the state: a query's result does not
// depend on its position in a tile, and skipping blocks is free. A block is
// skipped where positions hide it, and where the bias does: a mask of a cache
// of fixed size hides all that is not filled yet.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixPairs.h"
#include "SoftmaxMixState.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
class MixKernel {
public:
  MixKernel(Emitter &e, SoftmaxMixOp op)
      : e(e), op(op), pairLogits(op), blockKeys(getColumnVectors(e) * e.width),
        blockQueries(e.target.getMixQueries()) {}

  void emit();

private:
  void allocate();
  void takeViews(Value batch, Value head);
  void emitQueryBlock(Value firstQuery);
  void takeKeyBlock(Value firstQuery, Value numRows, Value firstKey);

  // One group of queries and one block of keys.
  void emitGroup(Value firstQuery, Value group, Value firstKey);
  Value isGroupVisible(Value firstQuery, Value group, Value firstKey);
  Value isVisibleByPosition(Value firstQuery, Value group, Value firstKey);
  Value isVisibleByBias(Value firstQuery, Value group, Value firstKey);
  Value findVisibleGroups(Value firstQuery, Value numRows, Value firstKey);
  std::pair<Value, Value> getGroupKeys(Value firstQuery, Value group,
                                       Value firstKey);
  Values finishLogits(Value row, Value firstKey, ArrayRef<Value> products);

  void writeRow(Value firstQuery, Value slot);
  Value positionOf(Value row) { return e.add(origin, row); }

  Emitter &e;
  SoftmaxMixOp op;
  const PairLogits pairLogits;
  const int64_t blockKeys;
  /// Queries that share one packing of a key block, a multiple of kGroupRows.
  const int64_t blockQueries;

  Value numQueries, numKeys, origin;
  // Views at one batch and head.
  MixKeys keys;
  Value q, bias, queryMask, queryLevel;
  Value mixed, lse, entropy;
  std::optional<KeyBlock> block;
  std::optional<BlockProducts> products;
  Value weights;
  /// Whether the group from a slot on sees the block of keys; null: positions
  /// alone say so.
  Value visibleGroups;
  /// Of each query of a block.
  RowState state;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

void MixKernel::allocate() {
  Type f32 = e.getF32Type();
  OpFoldResult rows = e.getIndexAttr(blockQueries);
  OpFoldResult lanes = e.getIndexAttr(e.width);
  // Values of each head are those of attention, whose result is rounded to
  // their type; what all heads share are scores, which stay f32.
  bool pairValues = op.getV() && areValuesPerHead(op.getV());
  block.emplace(e, op.getQ(),
                MixKeys{op.getK(), op.getV(), op.getKeyBias(), op.getKeyMask(),
                        op.getKeyLevel()},
                pairValues);
  products.emplace(e, getSize(e, op.getQ(), 3), blockQueries);
  state.max = e.scratch({rows}, f32);
  state.sum = e.scratch({rows, lanes}, f32);
  if (op.getWithEntropy())
    state.moment = e.scratch({rows, lanes}, f32);
  if (op.getBias())
    visibleGroups = e.scratch({rows}, e.getI1Type());
  if (!op.getV())
    return;
  // Beside pairs of values, weights are pairs, too.
  bool arePairs = !getElementType(block->values).isF32();
  weights = e.scratch({e.getIndexAttr(kGroupRows), e.getIndexAttr(blockKeys)},
                      arePairs ? cast<Type>(e.getBF16Type()) : cast<Type>(f32));
  state.mixed =
      e.scratch({rows, padToVectors(e, getLastSize(e, op.getV()))}, f32);
}

void MixKernel::takeViews(Value batch, Value head) {
  auto view = [&](Value memref) { return viewTokens(e, memref, batch, head); };
  auto viewShared = [&](Value memref) { return viewTokens(e, memref, batch); };
  Value v = op.getV();
  keys = {view(op.getK()), areValuesPerHead(v) ? view(v) : viewShared(v),
          view(op.getKeyBias()), viewShared(op.getKeyMask()),
          viewShared(op.getKeyLevel())};
  q = view(op.getQ());
  bias = viewBias(e, op.getBias(), batch, head);
  queryMask = viewShared(op.getQueryMask());
  queryLevel = viewShared(op.getQueryLevel());
  mixed = view(op.getMixedInit());
  lse = view(op.getLseInit());
  entropy = view(op.getEntropyInit());
}

//===----------------------------------------------------------------------===//
// Logits of a register tile
//===----------------------------------------------------------------------===//

/// x = scale q.k + key_bias + bias, -inf where the key is not visible.
Values MixKernel::finishLogits(Value row, Value firstKey,
                               ArrayRef<Value> products) {
  Values logits;
  Value level = queryLevel ? e.load(queryLevel, {row}) : Value();
  for (auto [vector, product] : llvm::enumerate(products)) {
    Value offset = e.index(vector * e.width), key = e.add(firstKey, offset);
    Value levels = level ? e.loadVector(block->level, {offset}) : Value();
    PairTerms pair =
        makePairs(e, pairLogits.rule, positionOf(row), key, level, levels);
    pair.product = product;
    Value keyBias = e.loadVector(block->bias, {offset});
    pair.biases = {keyBias};
    if (bias) {
      Value exists = e.firstLanes(e.sub(numKeys, key));
      pair.biases.push_back(e.loadFloats(bias, {row, key}, exists));
      // A bias at a hidden key may be anything.
      pair.isReal =
          e.compare(arith::CmpFPredicate::UNE, keyBias, e.negInfinity());
    }
    logits.push_back(pairLogits.getVisibleLogit(e, pair));
  }
  return logits;
}

/// `group` is the first of six slots of the query block's state.
void MixKernel::emitGroup(Value firstQuery, Value group, Value firstKey) {
  auto body = [&] {
    // Slots behind the last query repeat it; nobody reads their state.
    Values rows =
        clampRows(e, e.add(firstQuery, group), kGroupRows, numQueries);
    Tile logits = products->get(e, q, rows, block->features, group);
    for (auto [row, x] : llvm::zip_equal(rows, logits))
      x = finishLogits(row, firstKey, x);
    Values decays = state.update(e, group, logits, weights);
    if (keys.values) // o' = a o + p v
      accumulateTile(e, weights, block->values, state.mixed, group, decays,
                     getSize(e, keys.values, 1),
                     getGroupKeys(firstQuery, group, firstKey));
  };
  Value visible = isGroupVisible(firstQuery, group, firstKey);
  visible ? e.ifThen(visible, body) : body();
}

/// The keys of a block whose values a group sums up: those that it sees, where
/// values are wide enough for a loop of unknown length to pay for its code.
std::pair<Value, Value> MixKernel::getGroupKeys(Value firstQuery, Value group,
                                                Value firstKey) {
  int64_t width = cast<MemRefType>(keys.values.getType()).getDimSize(1);
  if (!ShapedType::isDynamic(width) && width <= e.width)
    return {e.index(0), e.index(blockKeys)};
  Value position = positionOf(e.add(firstQuery, group));
  return pairLogits.rule.getBlockColumns(e, position, kGroupRows, firstKey,
                                         blockKeys);
}

/// Whether a group sees a block of keys; null for always.
Value MixKernel::isGroupVisible(Value firstQuery, Value group, Value firstKey) {
  return visibleGroups ? e.load(visibleGroups, {group})
                       : isVisibleByPosition(firstQuery, group, firstKey);
}

Value MixKernel::isVisibleByPosition(Value firstQuery, Value group,
                                     Value firstKey) {
  Value position = positionOf(e.add(firstQuery, group));
  return isTileVisible(e, pairLogits.rule, position, firstKey);
}

/// Whether the bias of any pair of a group and a block of keys is not -inf.
Value MixKernel::isVisibleByBias(Value firstQuery, Value group,
                                 Value firstKey) {
  Value lanes;
  for (Value row :
       clampRows(e, e.add(firstQuery, group), kGroupRows, numQueries))
    for (int64_t first = 0; first < blockKeys; first += e.width) {
      Value key = e.add(firstKey, e.index(first));
      Value exists = e.firstLanes(e.sub(numKeys, key));
      Value biases = e.loadFloats(bias, {row, key}, exists, -kInfinity);
      Value isReal =
          e.compare(arith::CmpFPredicate::UNE, biases, e.negInfinity());
      lanes = e.either(lanes, isReal);
    }
  return e.anyLane(lanes);
}

/// Notes which groups of a query block see a block of keys; returns whether one
/// does.
Value MixKernel::findVisibleGroups(Value firstQuery, Value numRows,
                                   Value firstKey) {
  Value none = arith::ConstantIntOp::create(e, 0, 1);
  return e
      .loop(e.index(0), numRows, kGroupRows, none,
            [&](Value group, ValueRange any) -> Values {
              Value visible =
                  e.both(isVisibleByBias(firstQuery, group, firstKey),
                         isVisibleByPosition(firstQuery, group, firstKey));
              e.store(visible, visibleGroups, {group});
              return {e.either(any.front(), visible)};
            })
      .front();
}

//===----------------------------------------------------------------------===//
// Blocks of queries
//===----------------------------------------------------------------------===//

/// mixed, lse and entropy of one query from its state.
void MixKernel::writeRow(Value firstQuery, Value slot) {
  Value row = e.add(firstQuery, slot);
  auto reduce = [&](Value lanes) {
    return lanes ? e.reduceAdd(e.loadVector(lanes, {slot, e.index(0)})) : lanes;
  };
  SoftmaxSums sums{reduce(state.sum), reduce(state.moment)};
  OnlineSoftmax::Result result =
      OnlineSoftmax(e).finish(e.load(state.max, {slot}), sums,
                              queryMask ? e.load(queryMask, {row}) : Value());
  e.store(result.lse, lse, {row});
  if (entropy)
    e.store(result.entropy, entropy, {row});
  if (!mixed)
    return;
  Value divisors = e.splat(sums.sum), numValues = e.dim(mixed, 1);
  e.loop(e.index(0), numValues, e.width, [&](Value column) {
    Value total = e.loadVector(state.mixed, {slot, column});
    Value value = e.select(result.isEmpty, e.f32(0.0), e.div(total, divisors));
    e.storeVector(value, mixed, {row, column},
                  e.firstLanes(e.sub(numValues, column)));
  });
}

/// Takes a block of keys into the softmax of a block of queries.
void MixKernel::takeKeyBlock(Value firstQuery, Value numRows, Value firstKey) {
  block->pack(e, keys, firstKey);
  products->multiply(e, q, block->features, firstQuery, numRows, keys.features,
                     e.add(firstKey, e.index(blockKeys)), [&](Value group) {
                       return isGroupVisible(firstQuery, group, firstKey);
                     });
  e.loop(e.index(0), numRows, kGroupRows,
         [&](Value group) { emitGroup(firstQuery, group, firstKey); });
}

void MixKernel::emitQueryBlock(Value firstQuery) {
  Value zero = e.index(0);
  Value numRows =
      e.minSigned(e.sub(numQueries, firstQuery), e.index(blockQueries));
  state.clear(e, zero, e.index(blockQueries));
  auto [begin, end] = pairLogits.rule.getColumns(e, positionOf(firstQuery),
                                                 numRows, numKeys, blockKeys);
  e.loop(begin, end, blockKeys, [&](Value firstKey) {
    auto take = [&] { takeKeyBlock(firstQuery, numRows, firstKey); };
    visibleGroups
        ? e.ifThen(findVisibleGroups(firstQuery, numRows, firstKey), take)
        : take();
  });
  e.loop(zero, numRows, 1, [&](Value slot) { writeRow(firstQuery, slot); });
}

void MixKernel::emit() {
  auto isDynamic = [](Value memref) {
    return memref && ShapedType::isDynamic(
                         cast<MemRefType>(memref.getType()).getShape().back());
  };
  e.withScratch(isDynamic(op.getQ()) || isDynamic(op.getV()), [&] {
    numQueries = e.dim(op.getQ(), 2);
    numKeys = e.dim(op.getK(), 2);
    origin = op.getOrigin() ? op.getOrigin() : e.sub(numKeys, numQueries);
    allocate();
    Value zero = e.index(0);
    e.loop(zero, e.dim(op.getQ(), 0), 1, [&](Value batch) {
      e.loop(zero, e.dim(op.getQ(), 1), 1, [&](Value head) {
        takeViews(batch, head);
        e.loop(zero, numQueries, blockQueries,
               [&](Value firstQuery) { emitQueryBlock(firstQuery); });
      });
    });
  });
}

void mlir::moe::addSoftmaxMixFacts(KernelFacts &facts, int64_t tileRows) {
  // What a tile makes of the keys is shared by its queries.
  auto getConfigs = [=](Operation *op) -> SmallVector<KernelConfigAttr> {
    return {KernelConfigAttr::get(op->getContext(), 2 * tileRows,
                                  /*threads=*/0, KernelSchedule::Queries,
                                  KernelLoop::Shared, /*shared_bytes=*/0)};
  };
  facts.addConfigs<SoftmaxMixOp>(getConfigs);
  facts.addConfigs<SoftmaxMixBackwardDqOp>(getConfigs);
  facts.addConfigs<SoftmaxMixBackwardDkvOp>(getConfigs);
}

void mlir::moe::populateSoftmaxMixToCPUPatterns(RewritePatternSet &patterns,
                                                const CPUTarget &options) {
  patterns.add<KernelPattern<SoftmaxMixOp, MixKernel>>(patterns.getContext(),
                                                       options);
}
