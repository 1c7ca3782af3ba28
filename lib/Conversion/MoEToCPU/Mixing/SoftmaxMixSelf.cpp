//===- SoftmaxMixSelf.cpp - moe.softmax_mix_self on vectors ---------------===//
//
// Matches moe.softmax_mix_self on buffers with contiguous rows. Each pair of
// tokens is multiplied once (SoftmaxMixSplits.h), and x_ij is taken by
//
//   rows     (m, l, o)_i as in moe.softmax_mix, for each group of six rows
//            (SoftmaxMixState.h);
//   columns  (m, l, o)_j of all rows before the block of columns at once
//            (SoftmaxMixColumnState.h).
//
// At the end the states of a token, as a row and as a column of each split, are
// merged (SoftmaxMixMerge.h). Nothing is assumed about the tokens' norms, and
// memory is linear in the tokens.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixMerge.h"
#include "SoftmaxMixPairs.h"

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
        splits(e, op.getQ(), kBlockRows, kSplitRows, kMaxSplits),
        columns(e, splits, softmax) {}

  void emit();

private:
  void allocateStates();
  void takeViews(const PairSplits::Task &task);

  // One split.
  void emitSplit(Value split);
  void clearStates(Value split);
  void allocateBuffers();
  void emitGroup(Value firstRow, Value group, Value firstColumn);
  void keepForColumns(Value slot, Value row, int64_t vector,
                      const PairTerms &pair, Value x);

  void packRowValues(Value firstRow);

  Value at(Value first, int64_t vector) {
    return e.add(first, e.index(vector * e.width));
  }

  Emitter &e;
  SoftmaxMixSelfOp op;
  OnlineSoftmax softmax;
  /// The rows as queries and as keys.
  const PairLogits asQuery, asKey;
  PairSplits splits;

  /// The states of rows, of all batches and heads and views at one.
  RowState allRows, rows;
  ColumnState columns;
  /// Views at one batch and head.
  MixKeys tokens;
  Value mixed, lse;
  // Of one split.
  std::optional<KeyBlock> block;
  std::optional<BlockProducts> blockProducts;
  Value weights, logits, rowTerms, rowValues;
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
  columns.allocate(values);
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
  columns.takeViews(slot, Value());
}

//===----------------------------------------------------------------------===//
// Splits
//===----------------------------------------------------------------------===//

/// Forgets what was seen by the split's rows and, in this split, by columns.
void SelfMixKernel::clearStates(Value split) {
  columns.clear();
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
            columns.update(firstColumn, {logits, rowValues, numRows,
                                         getSize(e, tokens.values, 1)});
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

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

void SelfMixKernel::emit() {
  allocateStates();
  splits.run(
      [&](const PairSplits::Task &task) {
        takeViews(task);
        columns.takeViews(task.slot, task.number);
        emitSplit(task.number);
      },
      [&](const PairSplits::Task &task) {
        takeViews(task);
        // Not in the loop, which would grow the stack.
        Value factors =
            e.scratch({e.getIndexAttr(kMaxSplits), e.getIndexAttr(e.width)},
                      e.getF32Type());
        StateMerge merge(e, splits, softmax, rows, columns, tokens);
        Value first = e.mul(task.number, e.index(kBlockRows));
        Value end =
            e.minSigned(e.add(first, e.index(kBlockRows)), splits.numTokens);
        e.loop(first, end, e.width, [&](Value token) {
          merge.writeResults(token, factors, mixed, lse);
        });
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
