//===- SoftmaxMixBackward.cpp - The gradient of softmax_mix on vectors ----===//
//
// Matches moe.softmax_mix_backward_{dq,dkv} on buffers with contiguous rows.
// One kernel serves both: its rows are queries and its columns keys, or the
// other way round. A block of columns is packed once for a block of rows, then
// multiplied with groups of six (r a row, c a column, a term of -inf hides its
// token):
//
//   p_rc  = exp(scale f_r.f_c + term_r + term_c + bias)     24 accumulators
//   dx_rc = p_rc (g_r.g_c - delta)                          24 accumulators
//   df_r += scale sum_c dx_rc f_c
//   dg_r += sum_c p_rc g_c              where rows are keys
//
// with features f (q or k), values g (dmixed or v), and terms -lse of a query
// and key_bias of a key: p is the softmax itself. Each gradient computes p
// again, so that no sum is shared between rows: the order of every sum is
// fixed, and memory is linear in the number of rows of a block.
//
// Blocks of columns start at multiples of their size, whatever the row, and a
// block without a visible column adds zeros: a row's gradient does not depend
// on its position in a tile, and skipping blocks is free.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixRole.h"

#include "MoE/Dialect/MoE/Utils/OnlineSoftmax.h"

using namespace mlir;
using namespace mlir::moe;

/// Rows that share one packing of a block of columns, a multiple of kGroupRows:
/// those of a tile.
static constexpr int64_t kRowBlock = 96;

namespace {
/// The destinations of a gradient, null where absent: the gradients of the
/// rows' features and values, the sums of dx over the columns, and the gradient
/// of the bias.
struct Destinations {
  Value features, values, sums, bias;
};

/// The sums of each row of a block, null where absent.
struct RowSums {
  Value features, values, logits;

  void clear(Emitter &e) const;
  /// Writes the gradients of `row`, whose sums are in `slot`; 0 where it is not
  /// `isReal`.
  void write(Emitter &e, Value row, Value slot, Value isReal,
             const Destinations &all, double scale) const;
};

class GradientKernel {
public:
  GradientKernel(Emitter &e, SoftmaxMixBackwardDqOp op);
  GradientKernel(Emitter &e, SoftmaxMixBackwardDkvOp op);

  void emit();

private:
  /// `origin` is the column position of row 0; null for the default.
  GradientKernel(Emitter &e, MixLogitsOpInterface op, const GradientRole &role,
                 Value rowFeatures, Value columnFeatures, Destinations all,
                 Value origin)
      : e(e), op(op), role(role), rowFeatures(rowFeatures),
        columnFeatures(columnFeatures), all(all), origin(origin),
        blockColumns(getColumnVectors(e) * e.width), buffers(e) {}

  void allocate();
  void takeViews(Value batch, Value head);
  void emitRowBlock(Value firstRow);

  void packColumns(Value firstColumn);
  void packColumnVector(Value firstColumn, Value slot);

  std::pair<Value, Value> getColumns(Value first, Value firstColumn);
  Value isGroupVisible(Value first, Value firstColumn);
  void emitGroup(Value firstRow, Value group, Value firstColumn);
  void emitTile(Value first, Value group, Value firstColumn);
  void buildGradients(int64_t slot, Value row, Value group,
                      ArrayRef<Value> products);
  void addBiasGradient(int64_t slot, Value row, Value firstColumn);

  Emitter &e;
  MixLogitsOpInterface op;
  GradientRole role;
  Value rowFeatures, columnFeatures;
  Destinations all, views;
  Value origin;
  const int64_t blockColumns;

  Value numRows, numColumns;
  // The packed block of columns: features transposed and row by row, values row
  // by row, and levels.
  std::optional<BlockProducts> blockProducts;
  Value packedFeatures, featureRows, valueRows, packedLevels;
  // p and dx of a group.
  Value weights, gradients;
  RowSums sums;
  KernelBuffers buffers;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

void GradientKernel::allocate() {
  OpFoldResult width = getSize(e, rowFeatures, 3),
               block = e.getIndexAttr(blockColumns);
  OpFoldResult rowBlock = e.getIndexAttr(kRowBlock);
  OpFoldResult group = e.getIndexAttr(kGroupRows);
  OpFoldResult padded = padToVectors(e, width);
  PackedShape features = getPackedShape(e, rowFeatures, columnFeatures, width);
  packedFeatures = buffers.allocate(features.sizes, features.element);
  blockProducts.emplace(e, width, kRowBlock);
  featureRows = buffers.allocate({block, padded});
  sums.features = buffers.allocate({rowBlock, padded});
  role.allocate(buffers);
  if (op.getKeyLevel())
    packedLevels = buffers.allocate({block});
  weights = buffers.allocate({group, block});
  gradients = buffers.allocate({group, block});
  if (all.sums)
    sums.logits = buffers.allocate({rowBlock, e.getIndexAttr(e.width)});
  if (all.values) {
    OpFoldResult numValues = padToVectors(e, getSize(e, all.values, 3));
    valueRows = buffers.allocate({block, numValues});
    sums.values = buffers.allocate({rowBlock, numValues});
  }
}

void GradientKernel::takeViews(Value batch, Value head) {
  role.takeViews(batch, head);
  views.features = viewTokens(e, all.features, batch, head);
  views.values = viewTokens(e, all.values, batch, head);
  views.sums = viewTokens(e, all.sums, batch, head);
  views.bias = viewBias(e, all.bias, batch, head);
}

//===----------------------------------------------------------------------===//
// Packing
//===----------------------------------------------------------------------===//

void GradientKernel::packColumns(Value firstColumn) {
  e.loop(e.index(0), e.index(blockColumns), e.width,
         [&](Value slot) { packColumnVector(e.add(firstColumn, slot), slot); });
  packRows(e, role.columns.features, firstColumn, blockColumns,
           role.packedTerms, featureRows);
  if (valueRows)
    packRows(e, role.columns.values, firstColumn, blockColumns,
             role.packedTerms, valueRows);
}

/// Packs one vector of columns, zeros for those that are masked or behind the
/// last.
void GradientKernel::packColumnVector(Value firstColumn, Value slot) {
  Values tokens = clampRows(e, firstColumn, e.width, numColumns);
  Value exists = e.firstLanes(e.sub(numColumns, firstColumn));
  Value isReal = exists;
  const MixSide &columns = role.columns;
  if (columns.mask)
    isReal = e.both(isReal, loadLanes(e, columns.mask, tokens));
  isReal = role.packColumns(firstColumn, slot, tokens, exists, isReal);
  if (columns.level)
    e.storeVector(e.loadFloats(columns.level, {firstColumn}, exists),
                  packedLevels, {slot});
  packTransposed(e, columns.features, tokens, isReal, packedFeatures, slot);
}

//===----------------------------------------------------------------------===//
// A group of rows and a block of columns
//===----------------------------------------------------------------------===//

/// dx of one row, from p and the products of values, and their sum.
void GradientKernel::buildGradients(int64_t slot, Value row, Value group,
                                    ArrayRef<Value> products) {
  Values terms;
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector) {
    Values place{e.index(slot), e.index(vector * e.width)};
    Value product = products.empty() ? e.f32(0.0) : products[vector];
    Value dx =
        e.mul(e.loadVector(weights, place), role.center(row, vector, product));
    e.storeVector(dx, gradients, place);
    terms.push_back(dx);
  }
  if (!sums.logits)
    return;
  Values position{e.add(group, e.index(slot)), e.index(0)};
  Value total = e.add(e.loadVector(sums.logits, position), sumTree(e, terms));
  e.storeVector(total, sums.logits, position);
}

void GradientKernel::addBiasGradient(int64_t slot, Value row,
                                     Value firstColumn) {
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector) {
    Value offset = e.index(vector * e.width);
    Value column = e.add(firstColumn, offset);
    Value exists = e.firstLanes(e.sub(numColumns, column));
    Value old = e.loadFloats(views.bias, {row, column}, exists);
    Value dx = e.loadVector(gradients, {e.index(slot), offset});
    e.storeVector(e.add(old, dx), views.bias, {row, column}, exists);
  }
}

/// Six rows from `first`, the slots `group..` of the row block's sums.
void GradientKernel::emitTile(Value first, Value group, Value firstColumn) {
  // Slots behind the last row repeat it; nobody reads their sums.
  Values tokens = clampRows(e, first, kGroupRows, numRows);
  Tile products =
      blockProducts->get(e, role.rows.features, tokens, packedFeatures, group);
  for (int64_t slot = 0; slot < kGroupRows; ++slot)
    role.buildWeights(slot, tokens[slot], e.add(origin, tokens[slot]),
                      firstColumn, products[slot], packedLevels, weights);
  Tile valueProducts(kGroupRows);
  if (role.rows.values)
    valueProducts =
        multiplyTile(e, role.rows.values, tokens, role.packedValues);
  for (int64_t slot = 0; slot < kGroupRows; ++slot)
    buildGradients(slot, tokens[slot], group, valueProducts[slot]);
  std::pair<Value, Value> columns = getColumns(first, firstColumn);
  if (sums.values)
    accumulateTile(e, weights, valueRows, sums.values, group, {},
                   getSize(e, role.rows.values, 1), columns);
  if (views.bias)
    for (int64_t slot = 0; slot < kGroupRows; ++slot) {
      Value row = e.add(first, e.index(slot));
      // A row behind the last must not be added twice.
      Value exists = e.compare(arith::CmpIPredicate::slt, row, numRows);
      e.ifThen(e.both(exists, role.isRowReal(tokens[slot])),
               [&] { addBiasGradient(slot, row, firstColumn); });
    }
  accumulateTile(e, gradients, featureRows, sums.features, group, {},
                 getSize(e, role.rows.features, 1), columns);
}

/// The columns of a block that a group of rows sees.
std::pair<Value, Value> GradientKernel::getColumns(Value first,
                                                   Value firstColumn) {
  return role.logits.rule.getBlockColumns(e, e.add(origin, first), kGroupRows,
                                          firstColumn, blockColumns);
}

/// Whether a group of rows sees a block of columns; null for always.
Value GradientKernel::isGroupVisible(Value first, Value firstColumn) {
  return isTileVisible(e, role.logits.rule, e.add(origin, first), firstColumn);
}

void GradientKernel::emitGroup(Value firstRow, Value group, Value firstColumn) {
  Value first = e.add(firstRow, group);
  auto tile = [&] { emitTile(first, group, firstColumn); };
  Value visible = isGroupVisible(first, firstColumn);
  visible ? e.ifThen(visible, tile) : tile();
}

//===----------------------------------------------------------------------===//
// Blocks of rows
//===----------------------------------------------------------------------===//

void RowSums::clear(Emitter &e) const {
  for (Value sums : {features, values, logits})
    if (sums)
      e.loop(e.index(0), e.index(kRowBlock), 1, [&](Value slot) {
        e.loop(e.index(0), e.dim(sums, 1), e.width, [&](Value element) {
          e.storeVector(e.f32(0.0), sums, {slot, element});
        });
      });
}

void RowSums::write(Emitter &e, Value row, Value slot, Value isReal,
                    const Destinations &all, double scale) const {
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
  write(features, all.features, scale);
  if (values)
    write(values, all.values, 1.0);
  if (logits) {
    Value sum = e.reduceAdd(e.loadVector(logits, {slot, e.index(0)}));
    e.store(e.select(isReal, sum, e.constant(e.getF32Type(), 0.0)), all.sums,
            {row});
  }
}

void GradientKernel::emitRowBlock(Value firstRow) {
  Value zero = e.index(0);
  Value count = e.minSigned(e.sub(numRows, firstRow), e.index(kRowBlock));
  sums.clear(e);
  auto [begin, end] = role.logits.rule.getColumns(
      e, e.add(origin, firstRow), count, numColumns, blockColumns);
  e.loop(begin, end, blockColumns, [&](Value firstColumn) {
    packColumns(firstColumn);
    blockProducts->multiply(
        e, role.rows.features, packedFeatures, firstRow, count,
        role.columns.features, e.add(firstColumn, e.index(blockColumns)),
        [&](Value group) {
          return isGroupVisible(e.add(firstRow, group), firstColumn);
        });
    e.loop(zero, count, kGroupRows,
           [&](Value group) { emitGroup(firstRow, group, firstColumn); });
  });
  e.loop(zero, count, 1, [&](Value slot) {
    Value row = e.add(firstRow, slot);
    // A row that is masked has no gradient.
    sums.write(e, row, slot, role.isRowReal(row), views,
               op.getScale().convertToDouble());
  });
}

/// Makes the gradient of a bias 0: several heads and batches may add to it, and
/// hidden pairs do not.
static void clearBias(Emitter &e, Value bias, Value numRows, Value numColumns) {
  Value zero = e.index(0);
  e.loop(zero, e.dim(bias, 0), 1, [&](Value batch) {
    e.loop(zero, e.dim(bias, 1), 1, [&](Value head) {
      e.loop(zero, numRows, 1, [&](Value row) {
        e.loop(zero, numColumns, e.width, [&](Value column) {
          e.storeVector(e.f32(0.0), bias, {batch, head, row, column},
                        e.firstLanes(e.sub(numColumns, column)));
        });
      });
    });
  });
}

void GradientKernel::emit() {
  numRows = e.dim(rowFeatures, 2);
  numColumns = e.dim(columnFeatures, 2);
  if (!origin)
    origin = e.sub(numColumns, numRows);
  allocate();
  if (all.bias)
    clearBias(e, all.bias, numRows, numColumns);
  Value zero = e.index(0);
  e.loop(zero, e.dim(rowFeatures, 0), 1, [&](Value batch) {
    e.loop(zero, e.dim(rowFeatures, 1), 1, [&](Value head) {
      takeViews(batch, head);
      e.loop(zero, numRows, kRowBlock,
             [&](Value firstRow) { emitRowBlock(firstRow); });
    });
  });
  buffers.free();
}

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

/// The operands that the gradients of one role have.
template <typename OpTy>
static MixOperands getOperands(OpTy op) {
  return {op.getQ(),       op.getK(),          op.getLse(),
          op.getDelta(),   op.getV(),          op.getDmixed(),
          op.getKeyBias(), op.getBias(),       op.getQueryMask(),
          op.getKeyMask(), op.getQueryLevel(), op.getKeyLevel()};
}

/// Rows are queries.
GradientKernel::GradientKernel(Emitter &e, SoftmaxMixBackwardDqOp op)
    : GradientKernel(
          e, op, GradientRole(e, op, getOperands(op), false), op.getQ(),
          op.getK(),
          {op.getOut("dq"), Value(), op.getOut("sums"), op.getOut("dbias")},
          op.getOrigin()) {}

/// Rows are keys.
GradientKernel::GradientKernel(Emitter &e, SoftmaxMixBackwardDkvOp op)
    : GradientKernel(
          e, op, GradientRole(e, op, getOperands(op), true), op.getK(),
          op.getQ(),
          {op.getOut("dk"), op.getOut("dv"), op.getOut("sums"), Value()},
          op.getOrigin()) {}

void mlir::moe::populateSoftmaxMixBackwardToCPUPatterns(
    RewritePatternSet &patterns, const CPUTarget &options) {
  patterns.add<KernelPattern<SoftmaxMixBackwardDqOp, GradientKernel>,
               KernelPattern<SoftmaxMixBackwardDkvOp, GradientKernel>>(
      patterns.getContext(), options);
}
