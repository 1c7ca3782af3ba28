//===- SoftmaxMixBackward.cpp - The sweeps of softmax_mix's gradient ------===//
//
// Matches moe.softmax_mix_backward_{dq,dkv,self} on buffers with contiguous
// rows. One kernel serves all: its rows are queries and its columns keys, the
// other way round, or both at once where queries and keys are the same tokens.
// A block of columns is packed once for a block of rows, then groups of six
// rows meet it (r a row, c a column, a term of -inf hides its token):
//
//   p_rc  = exp(scale f_r.f_c + term_r + term_c + bias)     24 accumulators
//   dx_rc = p_rc (g_r.g_c - delta)                          24 accumulators
//   df_r += scale sum_c dx_rc f_c
//   dg_r += sum_c p_rc g_c              where rows are keys
//
// with features f (q or k), values g (dmixed or v), and terms -lse of a query
// and key_bias of a key: p is the softmax itself. In both roles at once the
// product f_r.f_c serves both, and their dx are added before the sum over
// features. Each sweep computes p again, so that no sum is shared between rows:
// the order of every sum is fixed, and memory is linear in the number of rows
// of a block.
//
// Blocks of columns start at multiples of their size, whatever the row, and a
// block without a visible column adds zeros: a row's gradient does not depend
// on its position in a tile, and skipping blocks is free.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixSweep.h"

#include <vector>

using namespace mlir;
using namespace mlir::moe;

/// Rows that share one packing of a block of columns, a multiple of kGroupRows:
/// those of a tile.
static constexpr int64_t kRowBlock = 96;
/// Larger buffers do not go on the stack, whose size is the caller's.
static constexpr int64_t kMaxStackBytes = 256 * 1024;

namespace {
/// The destinations of a sweep, null where absent: the gradients of the rows'
/// features and values, the sums of dx over the columns, and the gradient of
/// the bias.
struct Destinations {
  Value features, values, sums, bias;
};

class SweepKernel {
public:
  /// `origin` is the column position of row 0; null for the default.
  SweepKernel(Emitter &e, MixLogitsOpInterface op, std::vector<SweepRole> roles,
              Value rowFeatures, Value columnFeatures, Destinations all,
              Value origin)
      : e(e), op(op), roles(std::move(roles)), rowFeatures(rowFeatures),
        columnFeatures(columnFeatures), all(all), origin(origin),
        blockColumns(getColumnVectors(e) * e.width) {}

  void emit();

private:
  Value allocateBuffer(ArrayRef<OpFoldResult> shape, Type element = {});
  void allocate();
  void clearBiasGradient();
  void takeViews(Value batch, Value head);
  void emitRowBlock(Value firstRow);
  std::pair<Value, Value> getRange(Value firstRow, Value count);

  void packColumns(Value firstColumn);
  void packColumnVector(Value firstColumn, int64_t vector);

  Value isGroupVisible(SweepRole &role, Value first, Value firstColumn);
  void emitGroup(Value firstRow, Value group, Value firstColumn);
  void emitTile(Value first, Value group, Value firstColumn);
  void addRole(SweepRole &role, Value group, Value firstColumn,
               ArrayRef<Value> tokens, const Tile &products);
  void buildGradients(SweepRole &role, int64_t slot, Value row, Value group,
                      ArrayRef<Value> products);
  void addBiasGradient(int64_t slot, Value row, Value firstColumn);

  void writeRow(Value firstRow, Value slot);

  /// The role whose columns are queries, if there is one: it has the gradient
  /// of values.
  SweepRole *getKeyRole() {
    return roles.back().rowsAreKeys ? &roles.back() : nullptr;
  }
  bool hasSeveralRoles() const { return roles.size() > 1; }

  Emitter &e;
  MixLogitsOpInterface op;
  std::vector<SweepRole> roles;
  Value rowFeatures, columnFeatures;
  Destinations all, views;
  Value origin;
  const int64_t blockColumns;

  Value numRows, numColumns;
  // The packed block of columns that all roles read: features transposed and
  // row by row, values row by row, and levels.
  Value packedFeatures, featureRows, valueRows, packedLevels;
  // p and dx of a group.
  Value weights, gradients;
  // The sums of each row of a block.
  Value featureSums, valueSums, logitSums;
  Values heapBuffers;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

/// A buffer, by default of f32, that lives as long as the kernel runs.
Value SweepKernel::allocateBuffer(ArrayRef<OpFoldResult> shape, Type element) {
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
  heapBuffers.push_back(
      memref::AllocOp::create(e, MemRefType::get(sizes, element), dynamicSizes,
                              e.getI64IntegerAttr(64)));
  return heapBuffers.back();
}

void SweepKernel::allocate() {
  OpFoldResult width = getSize(e, rowFeatures, 3),
               block = e.getIndexAttr(blockColumns);
  OpFoldResult rowBlock = e.getIndexAttr(kRowBlock);
  OpFoldResult group = e.getIndexAttr(kGroupRows);
  OpFoldResult padded = padToVectors(e, width);
  PackedShape features = getPackedShape(e, rowFeatures, columnFeatures, width);
  packedFeatures = allocateBuffer(features.sizes, features.element);
  featureRows = allocateBuffer({block, padded});
  featureSums = allocateBuffer({rowBlock, padded});
  for (SweepRole &role : roles)
    role.allocate([&](ArrayRef<OpFoldResult> shape, Type element) {
      return allocateBuffer(shape, element);
    });
  if (op.getKeyLevel())
    packedLevels = allocateBuffer({block});
  weights = allocateBuffer({group, block});
  gradients = allocateBuffer({group, block});
  if (all.sums)
    logitSums = allocateBuffer({rowBlock, e.getIndexAttr(e.width)});
  if (all.values) {
    OpFoldResult numValues = padToVectors(e, getSize(e, all.values, 3));
    valueRows = allocateBuffer({block, numValues});
    valueSums = allocateBuffer({rowBlock, numValues});
  }
}

void SweepKernel::takeViews(Value batch, Value head) {
  for (SweepRole &role : roles)
    role.takeViews(batch, head);
  views.features = viewTokens(e, all.features, batch, head);
  views.values = viewTokens(e, all.values, batch, head);
  views.sums = viewTokens(e, all.sums, batch, head);
  views.bias = viewBias(e, all.bias, batch, head);
}

/// Several heads and batches may add to one bias, and hidden pairs to none.
void SweepKernel::clearBiasGradient() {
  Value zero = e.index(0);
  e.loop(zero, e.dim(all.bias, 0), 1, [&](Value batch) {
    e.loop(zero, e.dim(all.bias, 1), 1, [&](Value head) {
      e.loop(zero, numRows, 1, [&](Value row) {
        e.loop(zero, numColumns, e.width, [&](Value column) {
          e.storeVector(e.f32(0.0), all.bias, {batch, head, row, column},
                        e.firstLanes(e.sub(numColumns, column)));
        });
      });
    });
  });
}

//===----------------------------------------------------------------------===//
// Packing
//===----------------------------------------------------------------------===//

void SweepKernel::packColumns(Value firstColumn) {
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
    packColumnVector(e.add(firstColumn, e.index(vector * e.width)), vector);
  packRows(e, roles.front().columns.features, firstColumn, blockColumns,
           roles.front().packedTerms, featureRows);
  if (valueRows)
    packRows(e, getKeyRole()->columns.values, firstColumn, blockColumns,
             getKeyRole()->packedTerms, valueRows);
}

/// Packs one vector of columns, zeros for those that are masked or behind the
/// last.
void SweepKernel::packColumnVector(Value firstColumn, int64_t vector) {
  Value slot = e.index(vector * e.width);
  Values tokens = clampRows(e, firstColumn, e.width, numColumns);
  Value exists = e.firstLanes(e.sub(numColumns, firstColumn));
  Value isReal = exists;
  const MixSide &columns = roles.front().columns;
  if (columns.mask)
    isReal = e.both(isReal, loadLanes(e, columns.mask, tokens));
  Value inFirstRole;
  for (SweepRole &role : roles) {
    Value inRole = role.packColumns(firstColumn, slot, tokens, exists, isReal);
    inFirstRole = inFirstRole ? inFirstRole : inRole;
  }
  if (columns.level)
    e.storeVector(e.loadFloats(columns.level, {firstColumn}, exists),
                  packedLevels, {slot});
  packTransposed(e, columns.features, tokens, inFirstRole, packedFeatures,
                 slot);
}

//===----------------------------------------------------------------------===//
// A group of rows and a block of columns
//===----------------------------------------------------------------------===//

/// dx of one row, from p and the products of values, and their sum. With
/// several roles it is added to that of the one before.
void SweepKernel::buildGradients(SweepRole &role, int64_t slot, Value row,
                                 Value group, ArrayRef<Value> products) {
  Values sums;
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector) {
    Values place{e.index(slot), e.index(vector * e.width)};
    Value product = products.empty() ? e.f32(0.0) : products[vector];
    Value dx =
        role.buildGradient(row, vector, e.loadVector(weights, place), product);
    if (hasSeveralRoles())
      dx = e.add(e.loadVector(gradients, place), dx);
    e.storeVector(dx, gradients, place);
    sums.push_back(dx);
  }
  if (!logitSums)
    return;
  Values position{e.add(group, e.index(slot)), e.index(0)};
  Value total = e.add(e.loadVector(logitSums, position), sumVectors(e, sums));
  e.storeVector(total, logitSums, position);
}

void SweepKernel::addBiasGradient(int64_t slot, Value row, Value firstColumn) {
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector) {
    Value offset = e.index(vector * e.width);
    Value column = e.add(firstColumn, offset);
    Value exists = e.firstLanes(e.sub(numColumns, column));
    Value old = e.loadFloats(views.bias, {row, column}, exists);
    Value dx = e.loadVector(gradients, {e.index(slot), offset});
    e.storeVector(e.add(old, dx), views.bias, {row, column}, exists);
  }
}

/// Adds dx of one role to the gradients, and p times values to their sums.
void SweepKernel::addRole(SweepRole &role, Value group, Value firstColumn,
                          ArrayRef<Value> tokens, const Tile &products) {
  for (int64_t slot = 0; slot < kGroupRows; ++slot)
    role.buildWeights(slot, tokens[slot], e.add(origin, tokens[slot]),
                      firstColumn, products[slot], packedLevels, weights);
  Tile valueProducts(kGroupRows);
  if (role.rows.values)
    valueProducts =
        multiplyTile(e, role.rows.values, tokens, role.packedValues);
  for (int64_t slot = 0; slot < kGroupRows; ++slot)
    buildGradients(role, slot, tokens[slot], group, valueProducts[slot]);
  if (valueSums && role.rowsAreKeys)
    accumulateTile(e, weights, valueRows, valueSums, group, {},
                   getSize(e, role.rows.values, 1));
}

/// Six rows from `first`, the slots `group..` of the row block's sums.
void SweepKernel::emitTile(Value first, Value group, Value firstColumn) {
  // Slots behind the last row repeat it; nobody reads their sums.
  Values tokens = clampRows(e, first, kGroupRows, numRows);
  Tile products =
      multiplyTile(e, roles.front().rows.features, tokens, packedFeatures);
  if (hasSeveralRoles())
    for (int64_t slot = 0; slot < kGroupRows; ++slot)
      for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
        e.storeVector(e.f32(0.0), gradients,
                      {e.index(slot), e.index(vector * e.width)});
  for (SweepRole &role : roles) {
    auto add = [&] { addRole(role, group, firstColumn, tokens, products); };
    // One role alone is visible, or the tile would not be computed.
    Value visible =
        hasSeveralRoles() ? isGroupVisible(role, first, firstColumn) : Value();
    visible ? e.ifThen(visible, add) : add();
  }
  if (views.bias)
    for (int64_t slot = 0; slot < kGroupRows; ++slot) {
      Value row = e.add(first, e.index(slot));
      // A row behind the last must not be added twice.
      Value exists = e.compare(arith::CmpIPredicate::slt, row, numRows);
      e.ifThen(e.both(exists, roles.front().isRowReal(tokens[slot])),
               [&] { addBiasGradient(slot, row, firstColumn); });
    }
  accumulateTile(e, gradients, featureRows, featureSums, group, {},
                 getSize(e, roles.front().rows.features, 1));
}

/// Whether a group of rows sees a block of columns in `role`; null for always.
Value SweepKernel::isGroupVisible(SweepRole &role, Value first,
                                  Value firstColumn) {
  return role.rule.isGroupVisible(e, e.add(origin, first), firstColumn,
                                  blockColumns);
}

void SweepKernel::emitGroup(Value firstRow, Value group, Value firstColumn) {
  Value first = e.add(firstRow, group), visible;
  for (SweepRole &role : roles) {
    Value inRole = isGroupVisible(role, first, firstColumn);
    if (!inRole)
      return emitTile(first, group, firstColumn);
    visible = visible ? arith::OrIOp::create(e, visible, inRole) : inRole;
  }
  e.ifThen(visible, [&] { emitTile(first, group, firstColumn); });
}

//===----------------------------------------------------------------------===//
// Blocks of rows
//===----------------------------------------------------------------------===//

/// The gradients of one row from its sums. A row that is masked has none.
void SweepKernel::writeRow(Value firstRow, Value slot) {
  Value row = e.add(firstRow, slot);
  // The last role asks least of a row: as a key it need not see any.
  Value isReal = roles.back().isRowReal(row);
  auto write = [&](Value sums, Value out, double scale) {
    Value size = e.dim(out, 1);
    e.loop(e.index(0), size, e.width, [&](Value element) {
      Value total = e.loadVector(sums, {slot, element});
      if (scale != 1.0)
        total = e.mul(total, e.f32(scale));
      e.storeVector(e.select(isReal, total, e.f32(0.0)), out, {row, element},
                    e.firstLanes(e.sub(size, element)));
    });
  };
  write(featureSums, views.features, op.getScale().convertToDouble());
  if (valueSums)
    write(valueSums, views.values, 1.0);
  if (logitSums) {
    Value sum = e.reduceAdd(e.loadVector(logitSums, {slot, e.index(0)}));
    e.store(e.select(isReal, sum, e.constant(e.getF32Type(), 0.0)), views.sums,
            {row});
  }
}

/// The columns that `count` rows from `firstRow` on may see in any role.
std::pair<Value, Value> SweepKernel::getRange(Value firstRow, Value count) {
  std::pair<Value, Value> range;
  for (SweepRole &role : roles) {
    auto [begin, end] = role.rule.getRange(e, e.add(origin, firstRow), count,
                                           numColumns, blockColumns);
    bool isFirst = !range.first;
    range = {isFirst ? begin : e.minIndex(range.first, begin),
             isFirst ? end : e.maxIndex(range.second, end)};
  }
  return range;
}

void SweepKernel::emitRowBlock(Value firstRow) {
  Value zero = e.index(0);
  Value count = e.minIndex(e.sub(numRows, firstRow), e.index(kRowBlock));
  auto clear = [&](Value sums) {
    if (!sums)
      return;
    e.loop(zero, e.index(kRowBlock), 1, [&](Value slot) {
      e.loop(zero, e.dim(sums, 1), e.width, [&](Value element) {
        e.storeVector(e.f32(0.0), sums, {slot, element});
      });
    });
  };
  clear(featureSums);
  clear(valueSums);
  clear(logitSums);
  auto [begin, end] = getRange(firstRow, count);
  e.loop(begin, end, blockColumns, [&](Value firstColumn) {
    packColumns(firstColumn);
    e.loop(zero, count, kGroupRows,
           [&](Value group) { emitGroup(firstRow, group, firstColumn); });
  });
  e.loop(zero, count, 1, [&](Value slot) { writeRow(firstRow, slot); });
}

void SweepKernel::emit() {
  numRows = e.dim(rowFeatures, 2);
  numColumns = e.dim(columnFeatures, 2);
  if (!origin)
    origin = e.sub(numColumns, numRows);
  allocate();
  if (all.bias)
    clearBiasGradient();
  Value zero = e.index(0);
  e.loop(zero, e.dim(rowFeatures, 0), 1, [&](Value batch) {
    e.loop(zero, e.dim(rowFeatures, 1), 1, [&](Value head) {
      takeViews(batch, head);
      e.loop(zero, numRows, kRowBlock,
             [&](Value firstRow) { emitRowBlock(firstRow); });
    });
  });
  for (Value buffer : heapBuffers)
    memref::DeallocOp::create(e, buffer);
}

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

/// The operands that the sweeps of one role have.
template <typename OpTy>
static MixOperands getOperands(OpTy op) {
  return {op.getQ(),       op.getK(),          op.getLse(),
          op.getDelta(),   op.getV(),          op.getDmixed(),
          op.getKeyBias(), op.getBias(),       op.getQueryMask(),
          op.getKeyMask(), op.getQueryLevel(), op.getKeyLevel()};
}

namespace {
/// moe.softmax_mix_backward_dq on buffers -> register tiles, rows are queries.
struct DqToVector : OpRewritePattern<SoftmaxMixBackwardDqOp> {
  DqToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(SoftmaxMixBackwardDqOp op,
                                PatternRewriter &rewriter) const override {
    if (failed(matchContiguousBuffers(op, rewriter)))
      return failure();
    Emitter e(op.getLoc(), rewriter, options);
    Destinations all{op.getOut("dq"), Value(), op.getOut("sums"),
                     op.getOut("dbias")};
    SweepKernel(e, op, {SweepRole(e, op, getOperands(op), false)}, op.getQ(),
                op.getK(), all, op.getOrigin())
        .emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};

/// moe.softmax_mix_backward_dkv on buffers -> register tiles, rows are keys.
struct DkvToVector : OpRewritePattern<SoftmaxMixBackwardDkvOp> {
  DkvToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(SoftmaxMixBackwardDkvOp op,
                                PatternRewriter &rewriter) const override {
    if (failed(matchContiguousBuffers(op, rewriter)))
      return failure();
    Emitter e(op.getLoc(), rewriter, options);
    Destinations all{op.getOut("dk"), op.getOut("dv"), op.getOut("sums"),
                     Value()};
    SweepKernel(e, op, {SweepRole(e, op, getOperands(op), true)}, op.getK(),
                op.getQ(), all, op.getOrigin())
        .emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};

/// moe.softmax_mix_backward_self on buffers -> register tiles in both roles.
struct SelfToVector : OpRewritePattern<SoftmaxMixBackwardSelfOp> {
  SelfToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(SoftmaxMixBackwardSelfOp op,
                                PatternRewriter &rewriter) const override {
    if (failed(matchContiguousBuffers(op, rewriter)))
      return failure();
    Emitter e(op.getLoc(), rewriter, options);
    MixOperands asQueries = getOperands(op);
    // The rows as keys of the columns.
    MixOperands asKeys = asQueries;
    std::swap(asKeys.q, asKeys.k);
    std::swap(asKeys.queryMask, asKeys.keyMask);
    std::swap(asKeys.queryLevel, asKeys.keyLevel);
    asKeys.lse = op.getKeyLse();
    asKeys.delta = op.getKeyDelta();
    asKeys.v = op.getQueryV();
    asKeys.dmixed = op.getKeyDmixed();
    Destinations all{op.getOuts()[0], op.getOuts()[1], Value(), Value()};
    SweepKernel(
        e, op,
        {SweepRole(e, op, asQueries, false), SweepRole(e, op, asKeys, true)},
        op.getQ(), op.getK(), all, op.getOrigin())
        .emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateSoftmaxMixBackwardToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<DqToVector, DkvToVector, SelfToVector>(patterns.getContext(),
                                                      options);
}
