//===- SoftmaxMixBackwardSelf.cpp - The gradient of a self-mix ------------===//
//
// Matches moe.softmax_mix_backward_self on buffers with contiguous rows. Each
// pair of tokens is multiplied once (SoftmaxMixSplits.h), in both of its roles
// (r a row, c a column, u features, g the gradient of mixed, v values):
//
//   a_rc = exp(scale u_r.u_c - lse_r)     r a query that sees c
//   b_rc = exp(scale u_r.u_c - lse_c)     c a query that sees r
//   t_rc = a_rc (g_r.v_c - delta_r) + b_rc (g_c.v_r - delta_c)
//   du_r += scale sum_c t_rc u_c          dv_r += sum_c b_rc g_c
//   du_c += scale sum_r t_rc u_r          dv_c += sum_r a_rc g_r
//
// t is symmetric: it is the gradient of x_rc and of x_cr at once. The last line
// is for rows before the block of columns alone; within it each token is a row
// too, and one side of the diagonal mirrors the other. So a pair costs three
// products of features; where lse are near, it costs one exponential
// (SoftmaxMixQueries.h). Each split has sums of its own, the first one in the
// results where it can, which are added in order: memory is linear in the
// tokens.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixPairGradients.h"
#include "SoftmaxMixSplitSums.h"

using namespace mlir;
using namespace mlir::moe;

/// Columns get the sums of as many rows at once, three blocks of them.
static constexpr int64_t kBlockRows = 192;

/// Each has gradients of all tokens, as wide as their features.
static constexpr int64_t kMaxSplits = 4;
/// Rows of a split where there are enough: adding the gradients of two splits
/// costs as much as their products with 17 rows.
static constexpr int64_t kSplitRows = 768;

/// Both roles read the same tokens.
static MixOperands getOperands(SoftmaxMixBackwardSelfOp op) {
  return {op.getQ(),    op.getQ(),      op.getLse(),   op.getDelta(),
          op.getV(),    op.getDmixed(), Value(),       Value(),
          op.getMask(), op.getMask(),   op.getLevel(), op.getLevel()};
}

namespace {
class SelfGradientKernel {
public:
  SelfGradientKernel(Emitter &e, SoftmaxMixBackwardSelfOp op)
      : e(e), op(op), asQuery(e, op, getOperands(op), /*rowsAreKeys=*/false),
        asKey(e, op, getOperands(op), /*rowsAreKeys=*/true),
        splits(e, op.getQ(), kBlockRows, kSplitRows, kMaxSplits),
        allFeatureSums(e, splits, op.getOuts()[0]),
        allValueSums(e, splits, op.getOuts()[1]) {
    assert(kBlockRows % splits.blockColumns == 0 &&
           "expected a block of rows to hold its columns' tokens");
  }

  void emit();

private:
  void takeViews(const PairSplits::Task &task);

  // One split.
  void emitSplit(const PairSplits::Task &task);
  void allocateBuffers(KernelBuffers &buffers);
  bool readsInPlace();

  // A block of columns.
  void packColumns(Value firstColumn);
  void clearSums(Value firstColumn);
  void packColumnVector(Value firstColumn, Value slot);

  // A block of rows and a block of columns.
  void multiplyBlocks(Value firstRow, Value firstColumn);
  void packRowFeatures(Value firstRow);
  void addToColumns(Value firstRow, Value firstColumn, Value numRows);
  void addToRows(Value firstRow, Value firstColumn);

  void writeBlock(const PairSplits::Task &task);

  Emitter &e;
  SoftmaxMixBackwardSelfOp op;
  GradientRole asQuery, asKey;
  PairSplits splits;

  /// The sums of all splits, and those of one at one batch and head.
  SplitSums allFeatureSums, allValueSums;
  Value featureSums, valueSums;
  /// The first row of a split.
  Value splitFirst;
  /// What a split reads in place of lse, delta and g.
  std::optional<ScaledQueries> queries;
  // The packed block of columns: features transposed and row by row, levels.
  std::optional<BlockProducts> blockProducts;
  Value packedFeatures, columnFeatures, packedLevels;
  // Of a block of rows: a, b and t, and what t multiplies.
  std::optional<PairGradients> pairs;
  Value rowTerms, rowFeatures;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

void SelfGradientKernel::takeViews(const PairSplits::Task &task) {
  asQuery.takeViews(task.batch, task.head);
  asKey.takeViews(task.batch, task.head);
  allFeatureSums.takeView(task);
  allValueSums.takeView(task);
}

/// Whether features are summed where they lie: whole vectors of f32, none of
/// them of a masked token.
bool SelfGradientKernel::readsInPlace() {
  auto type = cast<MemRefType>(op.getQ().getType());
  int64_t size = type.getDimSize(3);
  return type.getElementType().isF32() && !op.getMask() &&
         !ShapedType::isDynamic(size) && size % e.width == 0;
}

void SelfGradientKernel::allocateBuffers(KernelBuffers &buffers) {
  OpFoldResult columns = e.getIndexAttr(splits.blockColumns),
               blockRows = e.getIndexAttr(kBlockRows);
  OpFoldResult width = getSize(e, op.getQ(), 3),
               padded = padToVectors(e, width);
  PackedShape features = getPackedShape(e, op.getQ(), op.getQ(), width);
  packedFeatures = buffers.allocate(features.sizes, features.element);
  blockProducts.emplace(e, width, kBlockRows);
  if (!readsInPlace()) {
    columnFeatures = buffers.allocate({columns, padded});
    rowFeatures = buffers.allocate({blockRows, padded});
    rowTerms = buffers.allocate({blockRows});
  }
  queries.emplace(e, buffers, splits.paddedTokens,
                  getSize(e, op.getDmixed(), 3));
  if (op.getLevel())
    packedLevels = buffers.allocate({columns});
  asQuery.allocate(buffers);
  asKey.allocate(buffers);
  pairs.emplace(e, buffers, kBlockRows, asQuery, asKey, splits, *queries,
                /*hasMask=*/bool(op.getMask()));
}

//===----------------------------------------------------------------------===//
// Columns
//===----------------------------------------------------------------------===//

/// Starts the sums of the split's first block of columns. Those of others start
/// with what the first block of rows gives them.
void SelfGradientKernel::clearSums(Value firstColumn) {
  for (Value sums : {featureSums, valueSums})
    e.loop(e.index(0), e.index(splits.blockColumns), 1, [&](Value slot) {
      e.loop(e.index(0), e.dim(sums, 1), e.width, [&](Value element) {
        e.storeVector(e.f32(0.0), sums, {e.add(firstColumn, slot), element});
      });
    });
}

void SelfGradientKernel::packColumns(Value firstColumn) {
  e.ifThen(e.compare(arith::CmpIPredicate::eq, firstColumn, splitFirst),
           [&] { clearSums(firstColumn); });
  e.loop(e.index(0), e.index(splits.blockColumns), e.width,
         [&](Value slot) { packColumnVector(e.add(firstColumn, slot), slot); });
  if (columnFeatures)
    packRows(e, asQuery.columns.features, firstColumn, splits.blockColumns,
             asQuery.packedTerms, columnFeatures);
}

/// Packs one vector of columns, zeros for those that are masked or behind the
/// last.
void SelfGradientKernel::packColumnVector(Value firstColumn, Value slot) {
  Values tokens = clampRows(e, firstColumn, e.width, splits.numTokens);
  Value exists = e.firstLanes(e.sub(splits.numTokens, firstColumn));
  const MixSide &columns = asQuery.columns;
  Value isReal = exists;
  if (columns.mask)
    isReal = e.both(isReal, loadLanes(e, columns.mask, tokens));
  asQuery.packColumns(firstColumn, slot, tokens, exists, isReal);
  asKey.packColumns(firstColumn, slot, tokens, exists, isReal);
  if (columns.level)
    e.storeVector(e.loadFloats(columns.level, {firstColumn}, exists),
                  packedLevels, {slot});
  packTransposed(e, columns.features, tokens, isReal, packedFeatures, slot);
}

//===----------------------------------------------------------------------===//
// A block of rows and a block of columns
//===----------------------------------------------------------------------===//

/// The features of a block of rows in f32, 0 for masked ones.
void SelfGradientKernel::packRowFeatures(Value firstRow) {
  Type f32 = e.getF32Type();
  Value last = e.sub(splits.numTokens, e.index(1));
  e.loop(e.index(0), e.index(kBlockRows), 1, [&](Value slot) {
    Value row = e.minSigned(e.add(firstRow, slot), last);
    e.store(e.select(asKey.isRowReal(row), e.constant(f32, 0.0),
                     e.constant(f32, -kInfinity)),
            rowTerms, {slot});
  });
  packRows(e, asQuery.rows.features, firstRow, kBlockRows, rowTerms,
           rowFeatures);
}

/// Gives `numRows` kept rows of a and t to their columns.
void SelfGradientKernel::addToColumns(Value firstRow, Value firstColumn,
                                      Value numRows) {
  if (rowFeatures)
    packRowFeatures(firstRow);
  Value features =
      rowFeatures ? rowFeatures : sliceFrom(e, asQuery.rows.features, firstRow);
  Value isFirst = e.compare(arith::CmpIPredicate::eq, firstRow, splitFirst);
  accumulateColumns(e, pairs->gradients, features, featureSums, firstColumn,
                    numRows, getSize(e, allFeatureSums.gradient, 1), isFirst);
  accumulateColumns(
      e, pairs->weights, sliceFrom(e, queries->cotangents, firstRow), valueSums,
      firstColumn, numRows, getSize(e, allValueSums.gradient, 1), isFirst);
}

/// Gives rows their sums over a block of columns.
void SelfGradientKernel::addToRows(Value firstRow, Value firstColumn) {
  Value numRows = splits.getNumRows(firstRow, firstColumn);
  pairs->clearBehind(numRows);
  Value all = e.index(splits.blockColumns), existing = all;
  Value features = columnFeatures;
  if (!features) {
    features = sliceFrom(e, asQuery.columns.features, firstColumn);
    existing = e.minSigned(all, e.sub(splits.numTokens, firstColumn));
  }
  accumulateRows(e, pairs->gradients, features, featureSums, firstRow, numRows,
                 existing, getSize(e, allFeatureSums.gradient, 1));
  accumulateRows(e, pairs->getKeyWeights(),
                 sliceFrom(e, queries->cotangents, firstColumn), valueSums,
                 firstRow, numRows, all, getSize(e, allValueSums.gradient, 1));
}

void SelfGradientKernel::multiplyBlocks(Value firstRow, Value firstColumn) {
  // Of a tile behind the diagonal; the first one that is not.
  auto getFirstVector = [&](Value group) -> Value {
    Value behind = e.sub(e.add(firstRow, group), firstColumn);
    return arith::DivSIOp::create(e, e.maxSigned(behind, e.index(0)),
                                  e.index(e.width));
  };
  blockProducts->multiply(e, asQuery.rows.features, packedFeatures, firstRow,
                          splits.getNumRows(firstRow, firstColumn),
                          asQuery.columns.features,
                          e.add(firstColumn, e.index(splits.blockColumns)),
                          /*isVisible=*/{}, getFirstVector);
  splits.forEachGroup(firstRow, firstColumn, [&](Value slot) {
    pairs->emitGroup(firstRow, slot, firstColumn, packedLevels,
                     [&](ArrayRef<Value> tokens) {
                       return blockProducts->get(e, asQuery.rows.features,
                                                 tokens, packedFeatures, slot);
                     });
  });
  Value firstSlot = e.sub(firstColumn, firstRow);
  e.ifThen(e.compare(arith::CmpIPredicate::slt, firstSlot, e.index(kBlockRows)),
           [&] { pairs->mirror(firstSlot); });
  splits.ifBefore(firstRow, firstColumn, [&](Value numRows) {
    addToColumns(firstRow, firstColumn, numRows);
  });
  addToRows(firstRow, firstColumn);
}

void SelfGradientKernel::emitSplit(const PairSplits::Task &task) {
  featureSums = allFeatureSums.get(task, task.number);
  valueSums = allValueSums.get(task, task.number);
  Value split = task.number;
  KernelBuffers buffers(e);
  allocateBuffers(buffers);
  splitFirst = splits.getFirstRow(split, e.index(0));
  // Levels and positions may admit a pair in one role only.
  queries->fill(e, asQuery, asQuery.logits.rule.admitsAll() && !op.getLevel());
  for (GradientRole *role : {&asQuery, &asKey})
    role->replaceQueries(queries->lse, queries->delta,
                         queries->getCotangents(e));
  splits.forEachBlockPair(
      split, [&](Value firstColumn) { packColumns(firstColumn); },
      [&](Value firstRow, Value firstColumn) {
        multiplyBlocks(firstRow, firstColumn);
      });
  buffers.free();
}

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

/// Writes the gradients of a block of rows.
void SelfGradientKernel::writeBlock(const PairSplits::Task &task) {
  Value first = e.mul(task.number, e.index(kBlockRows));
  Value end = e.minSigned(e.add(first, e.index(kBlockRows)), splits.numTokens);
  // Splits that begin behind these rows have not taken them.
  Value numSplits =
      e.minSigned(splits.numSplits, e.add(task.number, e.index(1)));
  // A masked token has no gradient.
  SplitSums::TokenMask mask{bool(op.getMask()),
                            [&](Value row) { return asKey.isRowReal(row); }};
  allFeatureSums.write(task, {first, end, numSplits}, mask,
                       op.getScale().convertToDouble());
  allValueSums.write(task, {first, end, numSplits}, mask, /*scale=*/1.0);
}

void SelfGradientKernel::emit() {
  allFeatureSums.allocate();
  allValueSums.allocate();
  splits.run(
      [&](const PairSplits::Task &task) {
        takeViews(task);
        emitSplit(task);
      },
      [&](const PairSplits::Task &task) {
        takeViews(task);
        writeBlock(task);
      });
}

void mlir::moe::populateSoftmaxMixBackwardSelfToCPUPatterns(
    RewritePatternSet &patterns, const CPUTarget &options) {
  patterns.add<KernelPattern<SoftmaxMixBackwardSelfOp, SelfGradientKernel>>(
      patterns.getContext(), options);
}
