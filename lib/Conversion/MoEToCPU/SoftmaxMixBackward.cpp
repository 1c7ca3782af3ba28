//===- SoftmaxMixBackward.cpp - The sweeps of softmax_mix's gradient ------===//
//
// Matches moe.softmax_mix_backward_dq and moe.softmax_mix_backward_dkv on
// buffers with contiguous rows. One kernel serves both: its rows are queries
// and its columns keys, or the other way round. A block of columns is packed
// once for a block of rows, then groups of six rows meet it (r a row, c a
// column, a term of -inf hides its token):
//
//   p_rc  = exp(scale f_r.f_c + term_r + term_c + bias)     24 accumulators
//   dx_rc = p_rc (g_r.g_c - delta)                          24 accumulators
//   df_r += scale sum_c dx_rc f_c
//   dg_r += sum_c p_rc g_c              where rows are keys
//
// with features f (q or k), values g (dmixed or v), and terms -lse of a query
// and key_bias of a key: p is the softmax itself. Each sweep computes p again,
// so that no sum is shared between rows: the order of every sum is fixed, and
// memory is linear in the number of rows of a block.
//
// Blocks of columns start at multiples of their size, whatever the row, and a
// block without a visible column adds zeros: a row's gradient does not depend
// on its position in a tile, and skipping blocks is free.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixTiles.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

/// Rows that share one packing of a block of columns, a multiple of kGroupRows:
/// a little more than the rows of a tile.
static constexpr int64_t kRowBlock = 66;
/// Larger buffers do not go on the stack, whose size is the caller's.
static constexpr int64_t kMaxStackBytes = 256 * 1024;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

namespace {
/// The operands of a sweep, on buffers of all batches and heads or on views of
/// one; null where absent.
struct Operands {
  Value q, k, lse, delta, v, dmixed, keyBias, bias, queryMask, keyMask,
      queryLevel, keyLevel;
  /// The gradients of the rows' features and values, the sums of dx over the
  /// columns, and the gradient of the bias.
  Value dfeatures, dvalues, sums, dbias;
};

/// What the tokens of one side have.
struct Side {
  Value features, values, mask, level;
};

class SweepKernel {
public:
  /// `origin` is the column position of row 0; null for the default.
  SweepKernel(Emitter &e, MixLogitsOpInterface op, Operands all, Value origin,
              bool rowsAreKeys)
      : e(e), op(op), all(all), origin(origin), rowsAreKeys(rowsAreKeys),
        rule(op, rowsAreKeys), blockColumns(kColumnVectors * e.width) {}

  void emit();

private:
  Value allocateBuffer(ArrayRef<OpFoldResult> shape);
  void allocate();
  void clearBiasGradient();
  void takeViews(Value batch, Value head);
  void emitRowBlock(Value firstRow);

  void packColumns(Value firstColumn);
  void packColumnVector(Value firstColumn, int64_t vector);

  void emitGroup(Value firstRow, Value group, Value firstColumn);
  Value isRowReal(Value row);
  Value getRowTerm(Value row);
  Value getBias(Value row, Value firstColumn);
  void buildWeights(int64_t slot, Value row, Value firstColumn,
                    ArrayRef<Value> products);
  void buildGradients(int64_t slot, Value row, Value group,
                      ArrayRef<Value> products);
  void addBiasGradient(int64_t slot, Value row, Value firstColumn);

  void writeRow(Value firstRow, Value slot);

  Emitter &e;
  MixLogitsOpInterface op;
  Operands all, views;
  Value origin;
  const bool rowsAreKeys;
  PositionRule rule;
  const int64_t blockColumns;

  Value numRows, numColumns;
  Side rows, columns;
  // The packed block of columns: transposed, row by row, and one number a
  // column. Its terms are -inf for columns that no row may see.
  Value packedFeatures, packedValues, featureRows, valueRows;
  Value packedTerms, packedDeltas, packedLevels;
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

/// An f32 buffer that lives as long as the kernel runs.
Value SweepKernel::allocateBuffer(ArrayRef<OpFoldResult> shape) {
  int64_t bytes = sizeof(float);
  bool isStatic = true;
  for (OpFoldResult size : shape) {
    std::optional<int64_t> constant = getConstantIntValue(size);
    isStatic &= constant.has_value();
    bytes *= constant.value_or(1);
  }
  if (isStatic && bytes <= kMaxStackBytes)
    return e.scratch(shape, e.getF32Type());
  SmallVector<int64_t> sizes;
  Values dynamicSizes;
  dispatchIndexOpFoldResults(shape, dynamicSizes, sizes);
  heapBuffers.push_back(
      memref::AllocOp::create(e, MemRefType::get(sizes, e.getF32Type()),
                              dynamicSizes, e.getI64IntegerAttr(64)));
  return heapBuffers.back();
}

void SweepKernel::allocate() {
  OpFoldResult width = getSize(e, all.q, 3),
               block = e.getIndexAttr(blockColumns);
  OpFoldResult rowBlock = e.getIndexAttr(kRowBlock);
  OpFoldResult group = e.getIndexAttr(kGroupRows);
  OpFoldResult padded = padToVectors(e, width);
  packedFeatures = allocateBuffer({width, block});
  featureRows = allocateBuffer({block, padded});
  featureSums = allocateBuffer({rowBlock, padded});
  packedTerms = allocateBuffer({block});
  if (rowsAreKeys)
    packedDeltas = allocateBuffer({block});
  if (all.keyLevel)
    packedLevels = allocateBuffer({block});
  weights = allocateBuffer({group, block});
  gradients = allocateBuffer({group, block});
  if (all.sums)
    logitSums = allocateBuffer({rowBlock, e.getIndexAttr(e.width)});
  if (!all.v)
    return;
  OpFoldResult numValues = getSize(e, all.v, 2);
  packedValues = allocateBuffer({numValues, block});
  if (all.dvalues) {
    valueRows = allocateBuffer({block, padToVectors(e, numValues)});
    valueSums = allocateBuffer({rowBlock, padToVectors(e, numValues)});
  }
}

void SweepKernel::takeViews(Value batch, Value head) {
  auto view = [&](Value memref, ValueRange indices) {
    return memref ? sliceLeading(e, memref, indices) : Value();
  };
  auto viewBias = [&](Value memref) -> Value {
    if (!memref)
      return {};
    // A dim of 1 is broadcast.
    auto type = cast<MemRefType>(memref.getType());
    Value zero = e.index(0);
    return view(memref, {type.getDimSize(0) == 1 ? zero : batch,
                         type.getDimSize(1) == 1 ? zero : head});
  };
  views.q = view(all.q, {batch, head});
  views.k = view(all.k, {batch, head});
  views.lse = view(all.lse, {batch, head});
  views.delta = view(all.delta, {batch, head});
  views.v = view(all.v, {batch});
  views.dmixed = view(all.dmixed, {batch, head});
  views.keyBias = view(all.keyBias, {batch, head});
  views.bias = viewBias(all.bias);
  views.queryMask = view(all.queryMask, {batch});
  views.keyMask = view(all.keyMask, {batch});
  views.queryLevel = view(all.queryLevel, {batch});
  views.keyLevel = view(all.keyLevel, {batch});
  views.dfeatures = view(all.dfeatures, {batch, head});
  views.dvalues = view(all.dvalues, {batch, head});
  views.sums = view(all.sums, {batch, head});
  views.dbias = viewBias(all.dbias);
  rows = {views.q, views.dmixed, views.queryMask, views.queryLevel};
  columns = {views.k, views.v, views.keyMask, views.keyLevel};
  if (rowsAreKeys)
    std::swap(rows, columns);
}

/// Several heads and batches may add to one bias, and hidden pairs to none.
void SweepKernel::clearBiasGradient() {
  Value zero = e.index(0);
  e.loop(zero, e.dim(all.dbias, 0), 1, [&](Value batch) {
    e.loop(zero, e.dim(all.dbias, 1), 1, [&](Value head) {
      e.loop(zero, numRows, 1, [&](Value row) {
        e.loop(zero, numColumns, e.width, [&](Value column) {
          e.storeVector(e.f32(0.0), all.dbias, {batch, head, row, column},
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
  for (int64_t vector = 0; vector < kColumnVectors; ++vector)
    packColumnVector(e.add(firstColumn, e.index(vector * e.width)), vector);
  packRows(e, columns.features, firstColumn, blockColumns, packedTerms,
           featureRows);
  if (valueRows)
    packRows(e, columns.values, firstColumn, blockColumns, packedTerms,
             valueRows);
}

/// Packs one vector of columns; those that no row sees have the term -inf and
/// zeros for the rest.
void SweepKernel::packColumnVector(Value firstColumn, int64_t vector) {
  Value slot = e.index(vector * e.width);
  Value zero = e.f32(0.0), hidden = e.f32(-kInfinity);
  Values tokens = clampRows(e, firstColumn, e.width, numColumns);
  Value isReal = e.firstLanes(e.sub(numColumns, firstColumn));
  Value exists = isReal;
  if (columns.mask)
    isReal = e.both(isReal, loadLanes(e, columns.mask, tokens));

  Value term = zero;
  if (rowsAreKeys) {
    // A query that sees no key has lse = -inf.
    Value lse = e.loadFloats(views.lse, {firstColumn}, exists);
    isReal = e.both(isReal, e.compare(arith::CmpFPredicate::UNE, lse, hidden));
    term = e.sub(zero, lse);
    Value delta = e.loadFloats(views.delta, {firstColumn}, exists);
    e.storeVector(e.select(isReal, delta, zero), packedDeltas, {slot});
  } else if (views.keyBias) {
    term = e.loadFloats(views.keyBias, {firstColumn}, exists);
  }
  e.storeVector(e.select(isReal, term, hidden), packedTerms, {slot});
  if (columns.level)
    e.storeVector(e.loadFloats(columns.level, {firstColumn}, exists),
                  packedLevels, {slot});
  packTransposed(e, columns.features, tokens, isReal, packedFeatures, slot);
  if (columns.values)
    packTransposed(e, columns.values, tokens, isReal, packedValues, slot);
}

//===----------------------------------------------------------------------===//
// A group of rows and a block of columns
//===----------------------------------------------------------------------===//

/// Whether a row has a gradient: not a masked token, nor a query that sees no
/// key.
Value SweepKernel::isRowReal(Value row) {
  Value isReal = e.constantInt(e.getI1Type(), 1);
  if (rows.mask)
    isReal = e.load(rows.mask, {row});
  if (rowsAreKeys)
    return isReal;
  Value hidden = e.constant(e.getF32Type(), -kInfinity);
  return e.both(isReal, e.compare(arith::CmpFPredicate::UNE,
                                  e.load(views.lse, {row}), hidden));
}

/// The part of the exponent that a row has; null for 0.
Value SweepKernel::getRowTerm(Value row) {
  if (rowsAreKeys)
    return views.keyBias ? e.load(views.keyBias, {row}) : Value();
  Type f32 = e.getF32Type();
  Value lse = e.load(views.lse, {row}), hidden = e.constant(f32, -kInfinity);
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, lse, hidden);
  return e.select(isEmpty, hidden, e.sub(e.constant(f32, 0.0), lse));
}

/// The bias between a row and a vector of columns.
Value SweepKernel::getBias(Value row, Value firstColumn) {
  if (!rowsAreKeys)
    return e.loadFloats(views.bias, {row, firstColumn},
                        e.firstLanes(e.sub(numColumns, firstColumn)));
  Values lanes;
  for (Value column : clampRows(e, firstColumn, e.width, numColumns))
    lanes.push_back(e.toF32(e.load(views.bias, {column, row})));
  return vector::FromElementsOp::create(e, e.floats(), lanes);
}

/// p of one row, from the products of features.
void SweepKernel::buildWeights(int64_t slot, Value row, Value firstColumn,
                               ArrayRef<Value> products) {
  Value hidden = e.f32(-kInfinity);
  Value rowTerm = getRowTerm(row);
  Value scale = e.f32(op.getScale().convertToDouble());
  Value position = e.add(origin, row);
  for (auto [vector, product] : llvm::enumerate(products)) {
    Value offset = e.index(vector * e.width);
    Value column = e.add(firstColumn, offset);
    Value term = e.loadVector(packedTerms, {offset});
    Value x = e.fma(product, scale, term);
    if (rowTerm)
      x = e.add(x, e.splat(rowTerm));
    Value visible = rule.getVisible(e, position, column);
    if (rows.level) {
      Value own = e.splat(e.load(rows.level, {row}));
      Value levels = e.loadVector(packedLevels, {offset});
      if (rowsAreKeys)
        std::swap(own, levels);
      visible =
          e.both(visible, e.compare(arith::CmpFPredicate::OLE, levels, own));
    }
    if (views.bias) {
      x = e.add(x, getBias(row, column));
      // A bias at a hidden pair may be anything.
      visible =
          e.both(visible, e.compare(arith::CmpFPredicate::UNE, term, hidden));
    }
    if (visible)
      x = e.select(visible, x, hidden);
    e.storeVector(e.exp(x), weights, {e.index(slot), offset});
  }
}

/// dx of one row, from p and the products of values, and their sum.
void SweepKernel::buildGradients(int64_t slot, Value row, Value group,
                                 ArrayRef<Value> products) {
  Value ownDelta = rowsAreKeys ? Value() : e.splat(e.load(views.delta, {row}));
  Values sums;
  for (int64_t vector = 0; vector < kColumnVectors; ++vector) {
    Value offset = e.index(vector * e.width);
    Value delta = ownDelta ? ownDelta : e.loadVector(packedDeltas, {offset});
    Value product = products.empty() ? e.f32(0.0) : products[vector];
    Value weight = e.loadVector(weights, {e.index(slot), offset});
    sums.push_back(e.mul(weight, e.sub(product, delta)));
    e.storeVector(sums.back(), gradients, {e.index(slot), offset});
  }
  if (!logitSums)
    return;
  Values position{e.add(group, e.index(slot)), e.index(0)};
  Value total = e.add(e.loadVector(logitSums, position), sumVectors(e, sums));
  e.storeVector(total, logitSums, position);
}

void SweepKernel::addBiasGradient(int64_t slot, Value row, Value firstColumn) {
  for (int64_t vector = 0; vector < kColumnVectors; ++vector) {
    Value offset = e.index(vector * e.width);
    Value column = e.add(firstColumn, offset);
    Value exists = e.firstLanes(e.sub(numColumns, column));
    Value old = e.loadFloats(views.dbias, {row, column}, exists);
    Value dx = e.loadVector(gradients, {e.index(slot), offset});
    e.storeVector(e.add(old, dx), views.dbias, {row, column}, exists);
  }
}

/// `group` is the first of six slots of the row block's sums.
void SweepKernel::emitGroup(Value firstRow, Value group, Value firstColumn) {
  Value first = e.add(firstRow, group);
  auto body = [&] {
    // Slots behind the last row repeat it; nobody reads their sums.
    Values tokens = clampRows(e, first, kGroupRows, numRows);
    Tile products = multiplyTile(e, rows.features, tokens, packedFeatures);
    for (int64_t slot = 0; slot < kGroupRows; ++slot)
      buildWeights(slot, tokens[slot], firstColumn, products[slot]);
    Tile valueProducts(kGroupRows);
    if (rows.values)
      valueProducts = multiplyTile(e, rows.values, tokens, packedValues);
    for (int64_t slot = 0; slot < kGroupRows; ++slot)
      buildGradients(slot, tokens[slot], group, valueProducts[slot]);
    if (views.dbias)
      for (int64_t slot = 0; slot < kGroupRows; ++slot) {
        Value row = e.add(first, e.index(slot));
        // A row behind the last must not be added twice.
        Value exists = e.compare(arith::CmpIPredicate::slt, row, numRows);
        e.ifThen(e.both(exists, isRowReal(tokens[slot])),
                 [&] { addBiasGradient(slot, row, firstColumn); });
      }
    accumulateTile(e, gradients, featureRows, featureSums, group, {},
                   getSize(e, rows.features, 1));
    if (valueSums)
      accumulateTile(e, weights, valueRows, valueSums, group, {},
                     getSize(e, rows.values, 1));
  };
  Value position = e.add(origin, first);
  if (Value visible =
          rule.isGroupVisible(e, position, firstColumn, blockColumns))
    e.ifThen(visible, body);
  else
    body();
}

//===----------------------------------------------------------------------===//
// Blocks of rows
//===----------------------------------------------------------------------===//

/// The gradients of one row from its sums.
void SweepKernel::writeRow(Value firstRow, Value slot) {
  Value row = e.add(firstRow, slot);
  Value isReal = isRowReal(row);
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
  write(featureSums, views.dfeatures, op.getScale().convertToDouble());
  if (valueSums)
    write(valueSums, views.dvalues, 1.0);
  if (logitSums) {
    Value sum = e.reduceAdd(e.loadVector(logitSums, {slot, e.index(0)}));
    e.store(e.select(isReal, sum, e.constant(e.getF32Type(), 0.0)), views.sums,
            {row});
  }
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
  auto [begin, end] = rule.getRange(e, e.add(origin, firstRow), count,
                                    numColumns, blockColumns);
  e.loop(begin, end, blockColumns, [&](Value firstColumn) {
    packColumns(firstColumn);
    e.loop(zero, count, kGroupRows,
           [&](Value group) { emitGroup(firstRow, group, firstColumn); });
  });
  e.loop(zero, count, 1, [&](Value slot) { writeRow(firstRow, slot); });
}

void SweepKernel::emit() {
  Value numQueries = e.dim(all.q, 2), numKeys = e.dim(all.k, 2);
  numRows = rowsAreKeys ? numKeys : numQueries;
  numColumns = rowsAreKeys ? numQueries : numKeys;
  if (!origin)
    origin = e.sub(numColumns, numRows);
  allocate();
  if (all.dbias)
    clearBiasGradient();
  Value zero = e.index(0);
  e.loop(zero, e.dim(all.q, 0), 1, [&](Value batch) {
    e.loop(zero, e.dim(all.q, 1), 1, [&](Value head) {
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

/// The operands that both sweeps have; `sums` where it is asked for.
template <typename OpTy>
static Operands getOperands(OpTy op) {
  Operands all;
  all.q = op.getQ();
  all.k = op.getK();
  all.lse = op.getLse();
  all.delta = op.getDelta();
  all.v = op.getV();
  all.dmixed = op.getDmixed();
  all.keyBias = op.getKeyBias();
  all.bias = op.getBias();
  all.queryMask = op.getQueryMask();
  all.keyMask = op.getKeyMask();
  all.queryLevel = op.getQueryLevel();
  all.keyLevel = op.getKeyLevel();
  all.sums = op.getOut("sums");
  return all;
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
    Operands all = getOperands(op);
    all.dfeatures = op.getOut("dq");
    all.dbias = op.getOut("dbias");
    Emitter emitter(op.getLoc(), rewriter, options.vectorWidth);
    SweepKernel(emitter, op, all, op.getOrigin(), /*rowsAreKeys=*/false).emit();
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
    Operands all = getOperands(op);
    all.dfeatures = op.getOut("dk");
    all.dvalues = op.getOut("dv");
    Emitter emitter(op.getLoc(), rewriter, options.vectorWidth);
    SweepKernel(emitter, op, all, op.getOrigin(), /*rowsAreKeys=*/true).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateSoftmaxMixBackwardToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<DqToVector, DkvToVector>(patterns.getContext(), options);
}
