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
#include "SoftmaxMixQueries.h"
#include "SoftmaxMixSplits.h"

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
        splits(e, op.getQ(), kBlockRows, kSplitRows, kMaxSplits) {
    assert(kBlockRows % splits.blockColumns == 0 &&
           "expected a block of rows to hold its columns' tokens");
  }

  void emit();

private:
  void allocateSums();
  void takeViews(const PairSplits::Task &task);
  Value holdsSums(Value gradient, Type sums);
  Value getSums(const PairSplits::Task &task, Value split, Value all,
                Value gradient);

  // One split.
  void emitSplit(Value split);
  void allocateBuffers(KernelBuffers &buffers);
  void clearSums(Value firstColumn);
  void packColumns(Value firstColumn);
  void packColumnVector(Value firstColumn, Value slot);
  struct Group {
    Value first, firstColumn;
    Values tokens;
    Value gradients;
  };
  void emitGroup(Value firstRow, Value slot, Value firstColumn);
  Values findAlive(GradientRole &role, const Group &group);
  void addRole(GradientRole &role, const Group &group, const Tile &products,
               Value weights, bool adds);
  void addBothRoles(const Group &group, const Tile &products, Value weights);
  void clearGroup(Value tile);
  void forEachVector(
      function_ref<void(int64_t slot, int64_t vector, Values place)> body);
  void buildWeights(GradientRole &role, const Group &group,
                    const Tile &products, Value weights, ArrayRef<Value> alive);
  void multiplyBlocks(Value firstRow, Value firstColumn);
  Value getKeyWeights();
  void mirror(Value firstSlot);
  void transposeTile(Value from, Value to, Value firstSlot, Value row,
                     Value column);
  void addToRows(Value firstRow, Value firstColumn);
  void packRowFeatures(Value firstRow);
  void addToColumns(Value firstRow, Value firstColumn, Value numRows);

  void writeRow(Value row, Value numSplits, Value firstSums, Value sums,
                Value out, double scale);
  void writeBlock(const PairSplits::Task &task);

  bool readsInPlace();

  Emitter &e;
  SoftmaxMixBackwardSelfOp op;
  GradientRole asQuery, asKey;
  PairSplits splits;

  /// The sums of all splits, and those of one at one batch and head.
  Value allFeatureSums, allValueSums, featureSums, valueSums;
  /// The first row of a split.
  Value splitFirst;
  Value featureGradient, valueGradient;
  /// What a split reads in place of lse, delta and g.
  std::optional<ScaledQueries> queries;
  // The packed block of columns: features transposed and row by row, levels.
  std::optional<BlockProducts> blockProducts;
  Value packedFeatures, columnFeatures, packedLevels;
  // Of a block of rows: a, b and t, and what t multiplies.
  Value keptWeights, keptKeyWeights, keptGradients;
  Value rowTerms, rowFeatures;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

void SelfGradientKernel::allocateSums() {
  auto allocate = [&](Value out) {
    return splits.allocate({padToVectors(e, getSize(e, out, 3))},
                           /*perSplit=*/true);
  };
  allFeatureSums = allocate(op.getOuts()[0]);
  allValueSums = allocate(op.getOuts()[1]);
}

void SelfGradientKernel::takeViews(const PairSplits::Task &task) {
  asQuery.takeViews(task.batch, task.head);
  asKey.takeViews(task.batch, task.head);
  featureGradient = viewTokens(e, op.getOuts()[0], task.batch, task.head);
  valueGradient = viewTokens(e, op.getOuts()[1], task.batch, task.head);
}

/// Whether the first split takes its sums where their total belongs: that needs
/// whole blocks of columns and whole vectors. Null: it does not.
Value SelfGradientKernel::holdsSums(Value gradient, Type sums) {
  int64_t size = cast<MemRefType>(gradient.getType()).getDimSize(1);
  if (gradient.getType() != sums || ShapedType::isDynamic(size) ||
      size % e.width != 0)
    return {};
  Value rest = e.rest(splits.numTokens, splits.blockColumns);
  return e.compare(arith::CmpIPredicate::eq, rest, e.index(0));
}

/// The sums of a split.
Value SelfGradientKernel::getSums(const PairSplits::Task &task, Value split,
                                  Value all, Value gradient) {
  Value sums = splits.slice(all, task.slot, /*perSplit=*/true, split);
  Value holds = holdsSums(gradient, sums.getType());
  if (!holds)
    return sums;
  Value isFirst = e.compare(arith::CmpIPredicate::eq, split, e.index(0));
  return e.select(e.both(holds, isFirst), gradient, sums);
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
  keptWeights = buffers.allocate({blockRows, columns});
  keptKeyWeights = buffers.allocate({blockRows, columns});
  keptGradients = buffers.allocate({blockRows, columns});
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
// A group of rows and a block of columns
//===----------------------------------------------------------------------===//

/// Which rows of a group a role has gradients of: of masked ones, whose
/// features may be NaN, it has none; null where there are no such rows.
Values SelfGradientKernel::findAlive(GradientRole &role, const Group &group) {
  Values alive(kGroupRows);
  if (op.getMask())
    for (auto [isReal, token] : llvm::zip_equal(alive, group.tokens))
      isReal = role.isRowReal(token);
  return alive;
}

void SelfGradientKernel::forEachVector(
    function_ref<void(int64_t slot, int64_t vector, Values place)> body) {
  for (int64_t slot = 0; slot < kGroupRows; ++slot)
    for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
      body(slot, vector, {e.index(slot), e.index(vector * e.width)});
}

void SelfGradientKernel::buildWeights(GradientRole &role, const Group &group,
                                      const Tile &products, Value weights,
                                      ArrayRef<Value> alive) {
  for (auto [slot, token] : llvm::enumerate(group.tokens))
    role.buildWeights(slot, token, token, group.firstColumn, products[slot],
                      packedLevels, weights, alive[slot]);
}

/// Writes p of one role to `weights` and its part of t to the gradients, or
/// adds it there.
void SelfGradientKernel::addRole(GradientRole &role, const Group &group,
                                 const Tile &products, Value weights,
                                 bool adds) {
  Values alive = findAlive(role, group);
  buildWeights(role, group, products, weights, alive);
  Tile values =
      multiplyTile(e, role.rows.values, group.tokens, role.packedValues);
  forEachVector([&](int64_t slot, int64_t vector, Values place) {
    Value dx = role.center(group.tokens[slot], vector, values[slot][vector]);
    dx = e.mul(e.loadVector(weights, place), dx);
    if (alive[slot])
      dx = e.select(alive[slot], dx, e.f32(0.0));
    if (adds)
      dx = e.add(e.loadVector(group.gradients, place), dx);
    e.storeVector(dx, group.gradients, place);
  });
}

/// The same for both roles at once, which share their weights.
void SelfGradientKernel::addBothRoles(const Group &group, const Tile &products,
                                      Value weights) {
  Values alive = findAlive(asQuery, group);
  buildWeights(asQuery, group, products, weights, alive);
  auto multiply = [&](GradientRole &role) {
    return multiplyTile(e, role.rows.values, group.tokens, role.packedValues);
  };
  Tile values = multiply(asQuery);
  forEachVector([&](int64_t slot, int64_t vector, Values place) {
    e.storeVector(
        asQuery.center(group.tokens[slot], vector, values[slot][vector]),
        group.gradients, place);
  });
  values = multiply(asKey);
  forEachVector([&](int64_t slot, int64_t vector, Values place) {
    Value dx = asKey.center(group.tokens[slot], vector, values[slot][vector]);
    dx = e.add(e.loadVector(group.gradients, place), dx);
    dx = e.mul(e.loadVector(weights, place), dx);
    if (alive[slot])
      dx = e.select(alive[slot], dx, e.f32(0.0));
    e.storeVector(dx, group.gradients, place);
  });
}

void SelfGradientKernel::clearGroup(Value tile) {
  forEachVector([&](int64_t, int64_t, Values place) {
    e.storeVector(e.f32(0.0), tile, place);
  });
}

/// Writes a, b and t of the rows in slots `slot..` of the block.
void SelfGradientKernel::emitGroup(Value firstRow, Value slot,
                                   Value firstColumn) {
  Group group;
  group.first = e.add(firstRow, slot);
  group.firstColumn = firstColumn;
  // Slots behind the last row repeat it; nobody reads their sums.
  group.tokens = clampRows(e, group.first, kGroupRows, splits.numTokens);
  group.gradients = sliceFrom(e, keptGradients, slot);
  Tile products = blockProducts->get(e, asQuery.rows.features, group.tokens,
                                     packedFeatures, slot);
  auto write = [&](GradientRole &role, Value kept, bool adds) {
    Value weights = sliceFrom(e, kept, slot);
    Value visible =
        isTileVisible(e, role.logits.rule, group.first, firstColumn);
    if (!visible)
      return addRole(role, group, products, weights, adds);
    e.ifElse(
        visible, TypeRange(),
        [&]() -> Values {
          return addRole(role, group, products, weights, adds), Values();
        },
        [&]() -> Values {
          clearGroup(weights);
          if (!adds)
            clearGroup(group.gradients);
          return {};
        });
  };
  auto writeBoth = [&] {
    write(asQuery, keptWeights, /*adds=*/false);
    write(asKey, keptKeyWeights, /*adds=*/true);
    return Values();
  };
  if (!queries->isShared)
    return void(writeBoth());
  auto writeShared = [&] {
    addBothRoles(group, products, sliceFrom(e, keptWeights, slot));
    return Values();
  };
  e.ifElse(queries->isShared, TypeRange(), writeShared, writeBoth);
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
  accumulateColumns(e, keptGradients, features, featureSums, firstColumn,
                    numRows, getSize(e, featureGradient, 1), isFirst);
  accumulateColumns(e, keptWeights, sliceFrom(e, queries->cotangents, firstRow),
                    valueSums, firstColumn, numRows,
                    getSize(e, valueGradient, 1), isFirst);
}

/// What a block of rows has of b.
Value SelfGradientKernel::getKeyWeights() {
  return queries->isShared
             ? e.select(queries->isShared, keptWeights, keptKeyWeights)
             : keptKeyWeights;
}

/// Gives rows their sums over a block of columns.
void SelfGradientKernel::addToRows(Value firstRow, Value firstColumn) {
  Value numRows = splits.getNumRows(firstRow, firstColumn);
  // Slots behind the last row.
  Value last = e.sub(numRows, e.index(1));
  Value end = e.sub(e.add(last, e.index(kGroupRows)), e.rest(last, kGroupRows));
  e.loop(numRows, end, 1, [&](Value slot) {
    for (Value tile : {getKeyWeights(), keptGradients})
      for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
        e.storeVector(e.f32(0.0), tile, {slot, e.index(vector * e.width)});
  });
  Value all = e.index(splits.blockColumns), existing = all;
  Value features = columnFeatures;
  if (!features) {
    features = sliceFrom(e, asQuery.columns.features, firstColumn);
    existing = e.minSigned(all, e.sub(splits.numTokens, firstColumn));
  }
  accumulateRows(e, keptGradients, features, featureSums, firstRow, numRows,
                 existing, getSize(e, featureGradient, 1));
  accumulateRows(e, getKeyWeights(),
                 sliceFrom(e, queries->cotangents, firstColumn), valueSums,
                 firstRow, numRows, all, getSize(e, valueGradient, 1));
}

/// to[column, row] = from[row, column] for a vector of rows of a block's own
/// columns and a vector of columns.
void SelfGradientKernel::transposeTile(Value from, Value to, Value firstSlot,
                                       Value row, Value column) {
  Values lines;
  for (int64_t lane = 0; lane < e.width; ++lane)
    lines.push_back(e.loadVector(
        from, {e.add(e.add(firstSlot, row), e.index(lane)), column}));
  for (auto [lane, line] : llvm::enumerate(transposeLanes(e, lines)))
    e.storeVector(line, to,
                  {e.add(e.add(firstSlot, column), e.index(lane)), row});
}

/// Where tokens are their own columns, from slot `firstSlot` of the rows on,
/// products behind the diagonal are not taken: t is symmetric, and how the row
/// sees the column is how the column, as a row, is seen by it.
void SelfGradientKernel::mirror(Value firstSlot) {
  Value zero = e.index(0), keyWeights = getKeyWeights();
  e.loop(zero, e.index(splits.blockColumns), e.width, [&](Value column) {
    e.loop(zero, column, e.width, [&](Value row) {
      transposeTile(keptGradients, keptGradients, firstSlot, row, column);
      transposeTile(keptWeights, keyWeights, firstSlot, row, column);
    });
  });
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
    emitGroup(firstRow, slot, firstColumn);
  });
  Value firstSlot = e.sub(firstColumn, firstRow);
  e.ifThen(e.compare(arith::CmpIPredicate::slt, firstSlot, e.index(kBlockRows)),
           [&] { mirror(firstSlot); });
  splits.ifBefore(firstRow, firstColumn, [&](Value numRows) {
    addToColumns(firstRow, firstColumn, numRows);
  });
  addToRows(firstRow, firstColumn);
}

void SelfGradientKernel::emitSplit(Value split) {
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

/// Writes a gradient of one token: the sums of the first `numSplits` splits, in
/// order. A masked one has none.
void SelfGradientKernel::writeRow(Value row, Value numSplits, Value firstSums,
                                  Value sums, Value out, double scale) {
  Value isReal = asKey.isRowReal(row);
  Value size = e.dim(out, 1);
  e.loop(e.index(0), size, e.width, [&](Value element) {
    Values first{e.loadVector(firstSums, {row, element})};
    Values total =
        e.loop(e.index(1), numSplits, 1, first,
               [&](Value split, ValueRange old) -> Values {
                 Value place = e.add(e.mul(split, splits.paddedTokens), row);
                 return {e.add(old[0], e.loadVector(sums, {place, element}))};
               });
    Value value = e.mul(total.front(), e.f32(scale));
    e.storeVector(e.select(isReal, value, e.f32(0.0)), out, {row, element},
                  e.firstLanes(e.sub(size, element)));
  });
}

/// Writes the gradients of a block of rows.
void SelfGradientKernel::writeBlock(const PairSplits::Task &task) {
  Value first = e.mul(task.number, e.index(kBlockRows));
  Value end = e.minSigned(e.add(first, e.index(kBlockRows)), splits.numTokens);
  // Splits that begin behind these rows have not taken them.
  Value numSplits =
      e.minSigned(splits.numSplits, e.add(task.number, e.index(1)));
  auto write = [&](Value all, Value out, double scale) {
    Value firstSums = getSums(task, e.index(0), all, out);
    Value sums = splits.slice(all, task.slot, /*perSplit=*/true);
    auto writeRows = [&] {
      e.loop(first, end, 1, [&](Value row) {
        writeRow(row, numSplits, firstSums, sums, out, scale);
      });
      return Values();
    };
    Value holds = holdsSums(out, sums.getType());
    if (!holds || scale != 1.0 || op.getMask())
      return void(writeRows());
    Value isAlone = e.compare(arith::CmpIPredicate::eq, numSplits, e.index(1));
    // The sums of one split are the gradient.
    e.ifElse(
        e.both(holds, isAlone), TypeRange(), [] { return Values(); },
        writeRows);
  };
  write(allFeatureSums, featureGradient, op.getScale().convertToDouble());
  write(allValueSums, valueGradient, 1.0);
}

void SelfGradientKernel::emit() {
  allocateSums();
  splits.run(
      [&](const PairSplits::Task &task) {
        takeViews(task);
        featureSums =
            getSums(task, task.number, allFeatureSums, featureGradient);
        valueSums = getSums(task, task.number, allValueSums, valueGradient);
        emitSplit(task.number);
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
