//===- SoftmaxMixSelf.cpp - moe.softmax_mix_self on vectors ---------------===//
//
// Matches moe.softmax_mix_self on buffers with contiguous rows. Each pair of
// tokens is multiplied once (SoftmaxMixSplits.h), and x_ij is taken by
//
//   rows     (m, l, o)_i as in moe.softmax_mix, for each group of six rows
//            (SoftmaxMixState.h);
//   columns  (m, l, o)_j of all rows before the block of columns at once.
//            Tokens are lanes here, so nothing is reduced over lanes:
//            m_j' = max(m_j, max_i x_ij), p_ij = exp(x_ij - m_j'),
//            l_j' = a_j l_j + sum_i p_ij, o_j' = a_j o_j + sum_i p_ij v_i.
//
// At the end the states of a token, as a row and as a column of each split, are
// merged. Nothing is assumed about the tokens' norms, and memory is linear in
// the tokens.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "RegisterTile.h"
#include "SoftmaxMixPairs.h"
#include "SoftmaxMixSplits.h"
#include "SoftmaxMixState.h"

using namespace mlir;
using namespace mlir::moe;

/// Columns are multiplied with as many rows at once.
static constexpr int64_t kBlockRows = 96;

/// Each split packs all columns and has a state of them.
static constexpr int64_t kMaxSplits = 8;
/// Rows of a split where there are enough: it packs all columns, which costs as
/// much as 48 rows.
static constexpr int64_t kSplitRows = 384;

namespace {
class SelfMixKernel {
public:
  SelfMixKernel(Emitter &e, SoftmaxMixSelfOp op)
      : e(e), op(op), softmax(e), asQuery(op), asKey(op, /*isTransposed=*/true),
        splits(e, op.getQ(), kBlockRows, kSplitRows, kMaxSplits) {}

  void emit();

private:
  void allocateStates();
  void takeViews(const PairSplits::Task &task);
  void takeColumns(Value slot, Value split);

  // One split.
  void emitSplit(Value split);
  void clearStates(Value split);
  void allocateBuffers();
  void emitGroup(Value firstRow, Value group, Value firstColumn);
  void keepForColumns(Value slot, Value row, int64_t vector,
                      const PairTerms &pair, Value x);

  // The online softmax of columns.
  void packRowValues(Value firstRow);
  void updateColumns(Value firstColumn, Value numRows);
  Values sumWeights(ArrayRef<Value> shifts, Value numRows);
  void mixColumns(Value firstColumn, ArrayRef<Value> decays, Value numRows,
                  Value firstValue, int64_t numValues);

  // The results of one vector of tokens.
  void mergeTokens(Value first);
  Value findMax(Value first);
  Value sumSplits(Value own, Value first);
  void writeValues(Value first, ArrayRef<Value> factors, ArrayRef<Value> sums,
                   ArrayRef<Value> empty);

  Value at(Value first, int64_t vector) {
    return e.add(first, e.index(vector * e.width));
  }
  /// The number of the block of columns that a token is in.
  Value getBlock(Value token) {
    return arith::DivSIOp::create(e, token, e.index(splits.blockColumns));
  }
  /// Where a token is among those of all splits.
  Value inSplit(Value split, Value token) {
    return e.add(e.mul(split, splits.paddedTokens), token);
  }

  Emitter &e;
  SoftmaxMixSelfOp op;
  OnlineSoftmax softmax;
  /// The rows as queries and as keys.
  const PairLogits asQuery, asKey;
  PairSplits splits;

  /// The states of rows, and those of columns for each split, whose o is
  /// `[block, value, column]`.
  RowState allRows;
  Value allMax, allSums, allMixed;
  /// Views at one batch and head: of one split, and of all when they merge.
  RowState rows;
  Value columnMax, columnSum, columnMixed;
  /// Views at one batch and head.
  MixKeys tokens;
  Value mixed, lse;
  // Of one split.
  std::optional<KeyBlock> block;
  std::optional<BlockProducts> blockProducts;
  Value weights, logits, rowTerms, rowValues;
  /// Of one vector of tokens: what each split's state is multiplied by.
  Value factors;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

void SelfMixKernel::allocateStates() {
  OpFoldResult lanes = e.getIndexAttr(e.width);
  OpFoldResult values = padToVectors(e, getSize(e, op.getV(), 2));
  allRows.max = splits.allocate({}, /*perSplit=*/false);
  allRows.sum = splits.allocate({lanes}, /*perSplit=*/false);
  allRows.mixed = splits.allocate({values}, /*perSplit=*/false);
  allMax = splits.allocate({}, /*perSplit=*/true);
  allSums = splits.allocate({}, /*perSplit=*/true);
  allMixed = splits.allocate({values}, /*perSplit=*/true, /*inBlocks=*/true);
}

void SelfMixKernel::takeViews(const PairSplits::Task &task) {
  auto [batch, head, slot, number] = task;
  tokens = {viewTokens(e, op.getQ(), batch, head),
            viewTokens(e, op.getV(), batch), Value(),
            viewTokens(e, op.getMask(), batch),
            viewTokens(e, op.getLevel(), batch)};
  mixed = viewTokens(e, op.getOuts()[0], batch, head);
  lse = viewTokens(e, op.getOuts()[1], batch, head);
  rows = {splits.slice(allRows.max, slot, false),
          splits.slice(allRows.sum, slot, false), Value(),
          splits.slice(allRows.mixed, slot, false)};
  takeColumns(slot, Value());
}

void SelfMixKernel::takeColumns(Value slot, Value split) {
  columnMax = splits.slice(allMax, slot, true, split);
  columnSum = splits.slice(allSums, slot, true, split);
  columnMixed = splits.slice(allMixed, slot, true, split, /*inBlocks=*/true);
}

//===----------------------------------------------------------------------===//
// Splits
//===----------------------------------------------------------------------===//

/// Forgets what was seen by the split's rows and, in this split, by columns.
void SelfMixKernel::clearStates(Value split) {
  Value zero = e.index(0);
  e.loop(zero, splits.paddedTokens, e.width, [&](Value column) {
    e.storeVector(e.negInfinity(), columnMax, {column});
    e.storeVector(e.f32(0.0), columnSum, {column});
  });
  e.loop(zero, e.dim(columnMixed, 0), 1, [&](Value place) {
    e.loop(zero, e.dim(columnMixed, 1), 1, [&](Value value) {
      for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
        e.storeVector(e.f32(0.0), columnMixed,
                      {place, value, e.index(vector * e.width)});
    });
  });
  splits.forEachBlock(split, [&](Value first) {
    rows.clear(e, first, e.add(first, e.index(kBlockRows)));
  });
}

void SelfMixKernel::allocateBuffers() {
  Type f32 = e.getF32Type();
  OpFoldResult columns = e.getIndexAttr(splits.blockColumns),
               blockRows = e.getIndexAttr(kBlockRows);
  block.emplace(
      e, op.getQ(),
      MixKeys{op.getQ(), op.getV(), Value(), op.getMask(), op.getLevel()});
  blockProducts.emplace(e, getSize(e, op.getQ(), 3), kBlockRows);
  weights = e.scratch({e.getIndexAttr(kGroupRows), columns}, f32);
  logits = e.scratch({blockRows, columns}, f32);
  rowTerms = e.scratch({blockRows}, f32);
  rowValues =
      e.scratch({blockRows, padToVectors(e, getSize(e, op.getV(), 2))}, f32);
}

void SelfMixKernel::emitSplit(Value split) {
  auto isDynamic = [](Value memref, int64_t position) {
    return cast<MemRefType>(memref.getType()).isDynamicDim(position);
  };
  e.withScratch(isDynamic(op.getQ(), 3) || isDynamic(op.getV(), 2), [&] {
    allocateBuffers();
    clearStates(split);
    splits.forEachBlockPair(
        split, [&](Value firstColumn) { block->pack(e, tokens, firstColumn); },
        [&](Value firstRow, Value firstColumn) {
          blockProducts->multiply(
              e, tokens.features, block->features, firstRow,
              splits.getNumRows(firstRow, firstColumn), tokens.features,
              e.add(firstColumn, e.index(splits.blockColumns)));
          splits.forEachGroup(firstRow, firstColumn, [&](Value group) {
            emitGroup(firstRow, group, firstColumn);
          });
          splits.ifBefore(firstRow, firstColumn, [&](Value numRows) {
            packRowValues(firstRow);
            updateColumns(firstColumn, numRows);
          });
        });
  });
}

//===----------------------------------------------------------------------===//
// A group of rows
//===----------------------------------------------------------------------===//

/// x of row `slot` of the block, -inf where the columns do not see it.
void SelfMixKernel::keepForColumns(Value slot, Value row, int64_t vector,
                                   const PairTerms &pair, Value x) {
  Value hidden = e.negInfinity();
  if (Value visible = asKey.isVisible(e, pair))
    x = e.select(visible, x, hidden);
  // What a masked token holds may be NaN.
  if (tokens.mask)
    x = e.select(e.load(tokens.mask, {row}), x, hidden);
  e.storeVector(x, logits, {slot, e.index(vector * e.width)});
}

void SelfMixKernel::emitGroup(Value firstRow, Value group, Value firstColumn) {
  Value first = e.add(firstRow, group);
  // Slots behind the last token repeat it; nobody reads their state.
  Values places = clampRows(e, first, kGroupRows, splits.numTokens);
  // Products become the logits of queries.
  Tile products =
      blockProducts->get(e, tokens.features, places, block->features, group);
  for (int64_t row = 0; row < kGroupRows; ++row) {
    Value slot = e.add(first, e.index(row));
    Value isNotBehind = splits.isNotBehind(slot, firstColumn);
    Value level = tokens.level ? e.load(tokens.level, {places[row]}) : Value();
    for (auto [vector, product] : llvm::enumerate(products[row])) {
      Value offset = e.index(vector * e.width);
      Value levels = level ? e.loadVector(block->level, {offset}) : Value();
      PairTerms pair = makePairs(e, asQuery.rule, places[row],
                                 at(firstColumn, vector), level, levels);
      pair.product = product;
      pair.biases = {e.loadVector(block->bias, {offset})};
      Value x = asQuery.getLogit(e, pair);
      keepForColumns(e.add(group, e.index(row)), places[row], vector, pair, x);
      Value hidden = e.negInfinity();
      if (Value seen = asQuery.isVisible(e, pair))
        x = e.select(seen, x, hidden);
      product = e.select(isNotBehind, x, hidden);
    }
  }
  Values decays = rows.update(e, first, products, weights);
  accumulateTile(e, weights, block->values, rows.mixed, first, decays,
                 getSize(e, tokens.values, 1),
                 {e.index(0), e.index(splits.blockColumns)});
}

//===----------------------------------------------------------------------===//
// The online softmax of columns
//===----------------------------------------------------------------------===//

/// The values of a block of rows in f32, 0 for masked ones.
void SelfMixKernel::packRowValues(Value firstRow) {
  Type f32 = e.getF32Type();
  Value last = e.sub(splits.numTokens, e.index(1));
  e.loop(e.index(0), e.index(kBlockRows), 1, [&](Value slot) {
    Value term = e.constant(f32, 0.0);
    if (tokens.mask) {
      Value row = e.minSigned(e.add(firstRow, slot), last);
      term = e.select(e.load(tokens.mask, {row}), term,
                      e.constant(f32, -kInfinity));
    }
    e.store(term, rowTerms, {slot});
  });
  packRows(e, tokens.values, firstRow, kBlockRows, rowTerms, rowValues);
}

/// Turns the kept logits into p = exp(x - shift) and returns its sums over the
/// rows.
Values SelfMixKernel::sumWeights(ArrayRef<Value> shifts, Value numRows) {
  Values zeros(shifts.size(), e.f32(0.0));
  return e.loop(
      e.index(0), numRows, 1, zeros, [&](Value row, ValueRange sums) -> Values {
        Values next;
        for (auto [vector, shift] : llvm::enumerate(shifts)) {
          Values place{row, e.index(vector * e.width)};
          Value weight = softmax.weigh(e.loadVector(logits, place), shift);
          e.storeVector(weight, logits, place);
          next.push_back(e.add(sums[vector], weight));
        }
        return next;
      });
}

/// o' = a o + sum_i p_i v_i for `numValues` values from `firstValue` on.
void SelfMixKernel::mixColumns(Value firstColumn, ArrayRef<Value> decays,
                               Value numRows, Value firstValue,
                               int64_t numValues) {
  RegisterTile tile(e, numValues, decays.size());
  Values sums = loopOverK(
      e, e.index(0), numRows, tile.getZeros(), [&](Value row, ValueRange old) {
        Values columns;
        for (int64_t vector = 0; vector < tile.numVectors; ++vector)
          columns.push_back(
              e.loadVector(logits, {row, e.index(vector * e.width)}));
        auto splatValue = [&](int64_t i) {
          return e.splat(
              e.load(rowValues, {row, e.add(firstValue, e.index(i))}));
        };
        return tile.multiplyAdd(splatValue, columns, old);
      });
  tile.forEachSum(sums, [&](int64_t i, int64_t vector, Value sum) {
    Values place{getBlock(firstColumn), e.add(firstValue, e.index(i)),
                 e.index(vector * e.width)};
    Value old = e.loadVector(columnMixed, place);
    e.storeVector(e.fma(old, decays[vector], sum), columnMixed, place);
  });
}

/// Takes `numRows` kept logits of each column of a block into its state.
void SelfMixKernel::updateColumns(Value firstColumn, Value numRows) {
  int64_t numVectors = getColumnVectors(e);
  Values none(numVectors, e.negInfinity());
  Values blockMax = e.loop(
      e.index(0), numRows, 1, none, [&](Value row, ValueRange old) -> Values {
        Values next;
        for (int64_t vector = 0; vector < numVectors; ++vector)
          next.push_back(softmax.updateMax(
              e.loadVector(logits, {row, e.index(vector * e.width)}),
              old[vector]));
        return next;
      });
  Values shifts, decays;
  for (int64_t vector = 0; vector < numVectors; ++vector) {
    Value place = at(firstColumn, vector);
    Value oldMax = e.loadVector(columnMax, {place});
    Value newMax = softmax.updateMax(blockMax[vector], oldMax);
    e.storeVector(newMax, columnMax, {place});
    SoftmaxStep step = softmax.start(oldMax, newMax);
    shifts.push_back(step.shift);
    decays.push_back(step.decay);
  }
  for (auto [vector, sum] : llvm::enumerate(sumWeights(shifts, numRows))) {
    Value place = at(firstColumn, vector);
    Value old = e.loadVector(columnSum, {place});
    e.storeVector(e.fma(old, decays[vector], sum), columnSum, {place});
  }
  std::optional<int64_t> numValues =
      getConstantIntValue(getSize(e, tokens.values, 1));
  if (!numValues) {
    e.loop(e.index(0), e.dim(tokens.values, 1), 1, [&](Value value) {
      mixColumns(firstColumn, decays, numRows, value, 1);
    });
    return;
  }
  int64_t rest = *numValues % kGroupRows, whole = *numValues - rest;
  if (whole)
    e.loop(e.index(0), e.index(whole), kGroupRows, [&](Value value) {
      mixColumns(firstColumn, decays, numRows, value, kGroupRows);
    });
  if (rest)
    mixColumns(firstColumn, decays, numRows, e.index(whole), rest);
}

//===----------------------------------------------------------------------===//
// Merging
//===----------------------------------------------------------------------===//

/// The maxima of a vector of tokens over their own state and all splits'.
Value SelfMixKernel::findMax(Value first) {
  Values own{e.loadVector(rows.max, {first})};
  return e
      .loop(e.index(0), splits.numSplits, 1, own,
            [&](Value split, ValueRange old) -> Values {
              return {softmax.updateMax(
                  e.loadVector(columnMax, {inSplit(split, first)}), old[0])};
            })
      .front();
}

/// The sums of a vector of tokens over their own, which has a factor `own`, and
/// all splits'.
Value SelfMixKernel::sumSplits(Value own, Value first) {
  Values lanes;
  for (int64_t lane = 0; lane < e.width; ++lane)
    lanes.push_back(
        e.loadVector(rows.sum, {e.add(first, e.index(lane)), e.index(0)}));
  Values start{e.mul(sumTree(e, transposeLanes(e, lanes)), own)};
  return e
      .loop(e.index(0), splits.numSplits, 1, start,
            [&](Value split, ValueRange old) -> Values {
              Value factor = e.loadVector(factors, {split, e.index(0)});
              return {e.fma(e.loadVector(columnSum, {inSplit(split, first)}),
                            factor, old[0])};
            })
      .front();
}

/// mixed of a vector of tokens: a factor of their own state, a sum, and whether
/// there is nothing to mix, each a number a token.
void SelfMixKernel::writeValues(Value first, ArrayRef<Value> own,
                                ArrayRef<Value> sums, ArrayRef<Value> empty) {
  Value numValues = e.dim(tokens.values, 1);
  Value offset = e.rest(first, splits.blockColumns);
  e.loop(e.index(0), numValues, e.width, [&](Value column) {
    Values zeros(e.width, e.f32(0.0));
    Values totals =
        e.loop(e.index(0), splits.numSplits, 1, zeros,
               [&](Value split, ValueRange old) -> Values {
                 Value factor = e.loadVector(factors, {split, e.index(0)});
                 Value tokens = getBlock(inSplit(split, first));
                 Values next;
                 for (int64_t lane = 0; lane < e.width; ++lane) {
                   Value value = e.add(column, e.index(lane));
                   Value part =
                       e.loadVector(columnMixed, {tokens, value, offset});
                   next.push_back(e.fma(part, factor, old[lane]));
                 }
                 return next;
               });
    Value exists = e.firstLanes(e.sub(numValues, column));
    for (auto [lane, others] : llvm::enumerate(transposeLanes(e, totals))) {
      Value token = e.add(first, e.index(lane));
      Value total = e.fma(e.loadVector(rows.mixed, {token, column}),
                          e.splat(own[lane]), others);
      Value value =
          e.select(empty[lane], e.f32(0.0), e.div(total, e.splat(sums[lane])));
      e.ifThen(e.compare(arith::CmpIPredicate::slt, token, splits.numTokens),
               [&, column = column] {
                 e.storeVector(value, mixed, {token, column}, exists);
               });
    }
  });
}

/// The results of a vector of tokens from the states of all splits, in order.
void SelfMixKernel::mergeTokens(Value first) {
  Value max = findMax(first);
  SoftmaxStep step = softmax.start(e.loadVector(rows.max, {first}), max);
  e.loop(e.index(0), splits.numSplits, 1, [&](Value split) {
    Value old = e.loadVector(columnMax, {inSplit(split, first)});
    e.storeVector(softmax.weigh(old, step.shift), factors, {split, e.index(0)});
  });
  SoftmaxSums sums{sumSplits(step.decay, first), Value()};
  Value isReal;
  if (tokens.mask)
    isReal = loadLanes(e, tokens.mask,
                       clampRows(e, first, e.width, splits.numTokens));
  OnlineSoftmax::Result result = softmax.finish(max, sums, isReal);
  e.storeVector(result.lse, lse, {first},
                e.firstLanes(e.sub(splits.numTokens, first)));
  auto split = [&](Value vector) {
    Values lanes;
    for (int64_t lane = 0; lane < e.width; ++lane)
      lanes.push_back(
          vector::ExtractOp::create(e, vector, ArrayRef<int64_t>{lane}));
    return lanes;
  };
  writeValues(first, split(step.decay), split(sums.sum), split(result.isEmpty));
}

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

void SelfMixKernel::emit() {
  allocateStates();
  splits.run(
      [&](const PairSplits::Task &task) {
        takeViews(task);
        takeColumns(task.slot, task.number);
        emitSplit(task.number);
      },
      [&](const PairSplits::Task &task) {
        takeViews(task);
        // Not in the loop, which would grow the stack.
        factors =
            e.scratch({e.getIndexAttr(kMaxSplits), e.getIndexAttr(e.width)},
                      e.getF32Type());
        Value first = e.mul(task.number, e.index(kBlockRows));
        Value end =
            e.minSigned(e.add(first, e.index(kBlockRows)), splits.numTokens);
        e.loop(first, end, e.width, [&](Value token) { mergeTokens(token); });
      });
}

void mlir::moe::addSoftmaxMixSelfFacts(KernelFacts &facts) {
  auto getConfigs = [](auto op) -> SmallVector<KernelConfigAttr> {
    if (!canTakePairsOnce(op))
      return {};
    auto get = [&](KernelSchedule schedule) {
      return KernelConfigAttr::get(op->getContext(), /*rows=*/0, /*threads=*/0,
                                   schedule, KernelLoop::Shared,
                                   /*shared_bytes=*/0);
    };
    return {get(KernelSchedule::PairsOnce), get(KernelSchedule::Queries)};
  };
  facts.addConfigs<SimilarityInformOp>(getConfigs);
  facts.addConfigs<SimilarityInformBackwardOp>(getConfigs);
}

void mlir::moe::populateSoftmaxMixSelfToCPUPatterns(RewritePatternSet &patterns,
                                                    const CPUTarget &options) {
  patterns.add<KernelPattern<SoftmaxMixSelfOp, SelfMixKernel>>(
      patterns.getContext(), options);
}
