//===- Contraction.cpp - Matrix products on vectors -----------------------===//
//
// Matches linalg ops on buffers that are contractions with one reduction dim:
// out[m.., n] += a[m.., k] b[.., k, n], f32 accumulators, f32 or 16-bit inputs.
// Dims of the output that are not the innermost row and column become loops.
//
// Two register tiles, by how b lies in memory:
//   b contiguous along n   6 rows x 4 vectors of columns, one step of k at a
//                          time: out += splat(a) * b
//   a, b contiguous along k   6 rows x 4 columns, one vector of k at a time;
//                          lanes are added at the end
// (4 is 2 with 16 vector registers).
//
// A small b that is contiguous along k, and as wide as a tile, is transposed
// first and takes the former: with few steps of k, adding lanes is half of the
// work.
//
// Each output element is summed in an order that k alone decides: not its
// position in a tile, not the number of rows. Rows and columns behind the last
// are computed again as the last, or masked.
//
//===----------------------------------------------------------------------===//

#include "Emitter.h"
#include "Patterns.h"

#include "MoE/Support/MultiplyAdd.h"
#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr int64_t kTileRows = 6;
/// The largest b that is transposed for every tile of rows, and the most steps:
/// a sum of more products in a row loses accuracy that one a lane keeps.
static constexpr int64_t kTransposedElements = 8192;
static constexpr int64_t kTransposedSteps = 64;

//===----------------------------------------------------------------------===//
// Recognising a contraction
//===----------------------------------------------------------------------===//

namespace {
/// An operand of rank two or less, seen as a matrix of named dims.
struct Matrix {
  Value memref;
  /// The loop dims of `memref`'s dims, outermost first.
  SmallVector<unsigned> dims;

  bool spans(unsigned dim) const { return llvm::is_contained(dims, dim); }
  bool isContiguousAlong(unsigned dim) const {
    return !dims.empty() && dims.back() == dim &&
           isInnermostContiguous(memref.getType());
  }
  /// Indices for the given positions of loop dims; dims without one are taken
  /// at 0 (their size is 1: they were sliced).
  Values indices(ArrayRef<std::pair<unsigned, Value>> positions) const {
    Values result;
    for (unsigned dim : dims)
      for (auto [other, position] : positions)
        if (other == dim)
          result.push_back(position);
    return result;
  }
};

/// out[.., m, n] += a[.., m, k] b[.., k, n]; a missing m or n has size 1.
struct Contraction {
  Matrix a, b, out;
  unsigned k;
  std::optional<unsigned> m, n;
  /// Dims of the output that become loops.
  SmallVector<unsigned> outer;
};
} // namespace

static FailureOr<Contraction> matchContraction(linalg::LinalgOp op,
                                               PatternRewriter &rewriter) {
  auto fail = [&](const char *reason) {
    return rewriter.notifyMatchFailure(op, reason);
  };
  if (!op.hasPureBufferSemantics() || op.getNumDpsInputs() != 2 ||
      op.getNumDpsInits() != 1 || !isMultiplyAdd(op))
    return fail("expected out + a * b on buffers with f32 sums");
  FailureOr<linalg::ContractionDimensions> dims =
      linalg::inferContractionDims(op);
  if (failed(dims) || dims->k.size() != 1)
    return fail("expected a contraction over one dim");

  Contraction result;
  auto read = [&](OpOperand &operand, Matrix &matrix) {
    matrix.memref = operand.get();
    for (AffineExpr expr : op.getMatchingIndexingMap(&operand).getResults()) {
      auto dim = dyn_cast<AffineDimExpr>(expr);
      if (!dim)
        return false;
      matrix.dims.push_back(dim.getPosition());
    }
    return true;
  };
  if (!read(op->getOpOperand(0), result.a) ||
      !read(op->getOpOperand(1), result.b) ||
      !read(op->getOpOperand(2), result.out))
    return fail("expected operands indexed by dims");
  result.k = dims->k.front();
  // The operand with the innermost dim of the output is b.
  if (!result.out.dims.empty() && result.a.spans(result.out.dims.back()) &&
      !result.b.spans(result.out.dims.back()))
    std::swap(result.a, result.b);
  for (unsigned dim : llvm::reverse(result.out.dims)) {
    bool inA = result.a.spans(dim), inB = result.b.spans(dim);
    if (!result.n && inB && !inA)
      result.n = dim;
    else if (!result.m && inA && !inB)
      result.m = dim;
    else
      result.outer.insert(result.outer.begin(), dim);
  }
  return result;
}

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

namespace {
class ContractionKernel {
public:
  ContractionKernel(Emitter &e, Contraction contraction)
      : e(e), c(std::move(contraction)),
        broadcastVectors(e.target.vectorRegisters >= 32 ? 4 : 2),
        dotColumns(broadcastVectors) {}

  LogicalResult emit();

private:
  Value getDimSize(unsigned dim);
  void dropOuterDim(Matrix &matrix, unsigned dim, Value position);
  void emitOuter(ArrayRef<unsigned> dims);

  bool paysToTranspose();
  void transpose();
  void transposeBlock(Value target, Value column, Value step, int64_t numSteps);
  void emitBroadcast();
  void emitBroadcastTile(Value row, Value column, int64_t numVectors);
  void emitDots();
  void emitDotTile(Value row, Value column);

  Values at(const Matrix &matrix, Value row, Value column, Value step) {
    SmallVector<std::pair<unsigned, Value>> positions{{c.k, step}};
    if (c.m)
      positions.push_back({*c.m, row});
    if (c.n)
      positions.push_back({*c.n, column});
    return matrix.indices(positions);
  }

  Emitter &e;
  Contraction c;
  const int64_t broadcastVectors, dotColumns;
  Value numRows, numColumns, numSteps;
};
} // namespace

Value ContractionKernel::getDimSize(unsigned dim) {
  for (const Matrix *matrix : {&c.out, &c.a, &c.b})
    for (auto [position, other] : llvm::enumerate(matrix->dims))
      if (other == dim)
        return e.dim(matrix->memref, position);
  llvm_unreachable("every loop dim of a contraction is a dim of an operand");
}

/// The part of `matrix` at one position of an outer dim.
void ContractionKernel::dropOuterDim(Matrix &matrix, unsigned dim,
                                     Value position) {
  if (!matrix.spans(dim))
    return;
  auto type = cast<MemRefType>(matrix.memref.getType());
  SmallVector<OpFoldResult> offsets, sizes;
  SmallVector<OpFoldResult> strides(type.getRank(), e.getIndexAttr(1));
  SmallVector<int64_t> shape;
  SmallVector<unsigned> rest;
  for (auto [i, other] : llvm::enumerate(matrix.dims)) {
    bool dropped = other == dim;
    offsets.push_back(dropped ? OpFoldResult(position)
                              : OpFoldResult(e.getIndexAttr(0)));
    sizes.push_back(dropped ? OpFoldResult(e.getIndexAttr(1))
                            : getSize(e, matrix.memref, i));
    if (dropped)
      continue;
    shape.push_back(type.getDimSize(i));
    rest.push_back(other);
  }
  auto sliceType = memref::SubViewOp::inferRankReducedResultType(
      shape, type, offsets, sizes, strides);
  matrix.memref = memref::SubViewOp::create(e, sliceType, matrix.memref,
                                            offsets, sizes, strides);
  matrix.dims = rest;
}

/// Loops over the outer dims, then the product of two matrices.
void ContractionKernel::emitOuter(ArrayRef<unsigned> dims) {
  if (!dims.empty()) {
    e.loop(e.index(0), getDimSize(dims.front()), 1, [&](Value position) {
      Contraction saved = c;
      for (Matrix *matrix : {&c.a, &c.b, &c.out})
        dropOuterDim(*matrix, dims.front(), position);
      emitOuter(dims.drop_front());
      c = std::move(saved);
    });
    return;
  }
  numRows = c.m ? getDimSize(*c.m) : e.index(1);
  numColumns = c.n ? getDimSize(*c.n) : e.index(1);
  numSteps = getDimSize(c.k);
  if (paysToTranspose())
    transpose();
  if (c.n && c.b.isContiguousAlong(*c.n) && c.out.isContiguousAlong(*c.n))
    emitBroadcast();
  else
    emitDots();
}

/// The sizes of b alone decide, so that the order of a sum does not depend on
/// the number of rows.
bool ContractionKernel::paysToTranspose() {
  if (!c.m || !c.n || c.b.dims != SmallVector<unsigned>{*c.n, c.k} ||
      !c.b.isContiguousAlong(c.k) || !c.out.isContiguousAlong(*c.n))
    return false;
  auto type = cast<MemRefType>(c.b.memref.getType());
  return type.hasStaticShape() &&
         type.getDimSize(0) >= broadcastVectors * e.width &&
         type.getDimSize(1) <= kTransposedSteps &&
         type.getNumElements() <= kTransposedElements;
}

/// Replaces b[n, k] by a copy that is contiguous along n.
void ContractionKernel::transpose() {
  ArrayRef<int64_t> shape = cast<MemRefType>(c.b.memref.getType()).getShape();
  int64_t columns = llvm::alignTo(shape[0], e.width), steps = shape[1];
  int64_t wholeEnd = steps - steps % e.width;
  Value transposed = e.scratch({e.getIndexAttr(steps), e.getIndexAttr(columns)},
                               e.getF32Type());
  e.loop(e.index(0), e.index(columns), e.width, [&](Value column) {
    e.loop(e.index(0), e.index(wholeEnd), e.width, [&](Value step) {
      transposeBlock(transposed, column, step, e.width);
    });
    if (wholeEnd < steps)
      transposeBlock(transposed, column, e.index(wholeEnd), steps - wholeEnd);
  });
  c.b = {transposed, {c.k, *c.n}};
}

/// A vector of columns, `numSteps` steps of each.
void ContractionKernel::transposeBlock(Value target, Value column, Value step,
                                       int64_t numSteps) {
  Value mask = numSteps < e.width ? e.firstLanes(e.index(numSteps)) : Value();
  Values rows;
  for (Value position : clampRows(e, column, e.width, numColumns))
    rows.push_back(e.loadFloats(c.b.memref, {position, step}, mask));
  Values transposed = transposeLanes(e, rows);
  for (int64_t i = 0; i < numSteps; ++i)
    e.storeVector(transposed[i], target, {e.add(step, e.index(i)), column});
}

/// Rows of a times vectors of b: whole groups of four vectors, then one vector
/// at a time.
void ContractionKernel::emitBroadcast() {
  int64_t wide = broadcastVectors * e.width;
  Value wideEnd = e.sub(numColumns, e.rest(numColumns, wide));
  e.loop(e.index(0), wideEnd, wide, [&](Value column) {
    e.loop(e.index(0), numRows, kTileRows, [&](Value row) {
      emitBroadcastTile(row, column, broadcastVectors);
    });
  });
  e.loop(wideEnd, numColumns, e.width, [&](Value column) {
    e.loop(e.index(0), numRows, kTileRows,
           [&](Value row) { emitBroadcastTile(row, column, 1); });
  });
}

/// One tile of at most six rows. A tile of one vector masks its columns.
void ContractionKernel::emitBroadcastTile(Value row, Value column,
                                          int64_t numVectors) {
  Values rows = clampRows(e, row, kTileRows, numRows);
  Value mask =
      numVectors == 1 ? e.firstLanes(e.sub(numColumns, column)) : Value();
  Value zero = e.index(0);
  Values columns, initial;
  for (int64_t vector = 0; vector < numVectors; ++vector)
    columns.push_back(e.add(column, e.index(vector * e.width)));
  for (Value position : rows)
    for (Value first : columns)
      initial.push_back(
          e.loadFloats(c.out.memref, at(c.out, position, first, zero), mask));
  Values sums = e.loop(
      zero, numSteps, 1, initial,
      [&](Value step, ValueRange carried) -> Values {
        Values right, next;
        for (Value first : columns)
          right.push_back(
              e.loadFloats(c.b.memref, at(c.b, row, first, step), mask));
        for (auto [i, position] : llvm::enumerate(rows)) {
          Value left = e.splat(
              e.toF32(e.load(c.a.memref, at(c.a, position, column, step))));
          for (auto [j, value] : llvm::enumerate(right))
            next.push_back(e.fma(left, value, carried[i * numVectors + j]));
        }
        return next;
      });
  // A row behind the last holds the same sums as the last.
  for (auto [i, position] : llvm::enumerate(rows))
    for (auto [j, first] : llvm::enumerate(columns))
      e.storeVector(sums[i * numVectors + j], c.out.memref,
                    at(c.out, position, first, zero), mask);
}

/// The sum of the lanes of each vector: as many vectors as there are lanes are
/// transposed and added, in half the steps of one reduction each.
static Values addLanes(Emitter &e, ArrayRef<Value> vectors) {
  Values totals;
  for (size_t first = 0; first < vectors.size(); first += e.width) {
    ArrayRef<Value> group = vectors.drop_front(first).take_front(e.width);
    Values rows(group);
    rows.resize(e.width, e.f32(0.0));
    Values columns = transposeLanes(e, rows);
    for (size_t half = columns.size() / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i)
        columns[i] = e.add(columns[i], columns[half + i]);
    for (size_t i = 0; i < group.size(); ++i)
      totals.push_back(vector::ExtractOp::create(
          e, columns.front(), ArrayRef<int64_t>{static_cast<int64_t>(i)}));
  }
  return totals;
}

void ContractionKernel::emitDots() {
  e.loop(e.index(0), numRows, kTileRows, [&](Value row) {
    e.loop(e.index(0), numColumns, dotColumns,
           [&](Value column) { emitDotTile(row, column); });
  });
}

/// A tile of dot products.
void ContractionKernel::emitDotTile(Value row, Value column) {
  Values rows = clampRows(e, row, kTileRows, numRows);
  Values columns = clampRows(e, column, dotColumns, numColumns);
  Value zero = e.index(0);
  auto multiply = [&](Value step, Value mask, ValueRange carried) {
    Values left, right, next;
    for (Value position : rows)
      left.push_back(
          e.loadFloats(c.a.memref, at(c.a, position, column, step), mask));
    for (Value position : columns)
      right.push_back(
          e.loadFloats(c.b.memref, at(c.b, row, position, step), mask));
    for (auto [i, x] : llvm::enumerate(left))
      for (auto [j, y] : llvm::enumerate(right))
        next.push_back(e.fma(x, y, carried[i * dotColumns + j]));
    return next;
  };
  Value rest = e.rest(numSteps, e.width);
  Value wholeEnd = e.sub(numSteps, rest);
  Values sums = e.loop(zero, wholeEnd, e.width,
                       Values(kTileRows * dotColumns, e.f32(0.0)),
                       [&](Value step, ValueRange carried) {
                         return multiply(step, Value(), carried);
                       });
  Value hasRest = e.compare(arith::CmpIPredicate::ne, rest, zero);
  sums = e.ifElse(
      hasRest, TypeRange(ValueRange(sums)),
      [&] { return multiply(wholeEnd, e.firstLanes(rest), sums); },
      [&] { return sums; });

  // All sums are added to the old values before any is written: a row behind
  // the last is the last again, and must not be added twice.
  SmallVector<std::pair<Value, Values>> results;
  Values totals = addLanes(e, sums);
  for (auto [i, r] : llvm::enumerate(rows))
    for (auto [j, col] : llvm::enumerate(columns)) {
      Values position = at(c.out, r, col, zero);
      Value total =
          e.add(e.load(c.out.memref, position), totals[i * dotColumns + j]);
      results.push_back({total, position});
    }
  for (auto &[total, position] : results)
    e.store(total, c.out.memref, position);
}

LogicalResult ContractionKernel::emit() {
  bool isBroadcast =
      c.n && c.b.isContiguousAlong(*c.n) && c.out.isContiguousAlong(*c.n);
  bool isDot = c.a.isContiguousAlong(c.k) && c.b.isContiguousAlong(c.k);
  if (!isBroadcast && !isDot)
    return failure();
  emitOuter(c.outer);
  return success();
}

namespace {
/// A contraction on buffers -> register tiles of fused multiply-adds.
struct ContractionToVector : OpInterfaceRewritePattern<linalg::LinalgOp> {
  ContractionToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpInterfaceRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(linalg::LinalgOp op,
                                PatternRewriter &rewriter) const override {
    FailureOr<Contraction> contraction = matchContraction(op, rewriter);
    if (failed(contraction))
      return failure();
    Emitter emitter(op.getLoc(), rewriter, options);
    if (failed(ContractionKernel(emitter, *contraction).emit()))
      return rewriter.notifyMatchFailure(
          op, "expected b contiguous along n, or a and b along k");
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateContractionToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<ContractionToVector>(patterns.getContext(), options);
}
