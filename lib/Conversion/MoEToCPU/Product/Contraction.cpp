//===- Contraction.cpp - Matrix products on vectors -----------------------===//
//
// Matches linalg ops on buffers that are contractions with one reduction dim:
// out[m.., n] += a[m.., k] b[.., k, n], f32 accumulators, f32 or 16-bit inputs.
// Dims of the output that are not the innermost row and column become loops.
//
// b is read where it lies, contiguous along n or k; ProductCore does the rest.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"
#include "ProductCore.h"

#include "MoE/Support/MultiplyAdd.h"
#include "MoE/Transforms/Transforms.h"
#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

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
  ContractionKernel(Emitter &e, Contraction contraction, bool inParallel)
      : e(e), c(std::move(contraction)), inParallel(inParallel) {}

  LogicalResult emit();

private:
  Value getDimSize(unsigned dim);
  void dropOuterDim(Matrix &matrix, unsigned dim, Value position);
  void emitOuter(ArrayRef<unsigned> dims);
  void emitProduct();
  void emitDot();

  Values at(const Matrix &matrix, Value row, Value column, Value k) {
    SmallVector<std::pair<unsigned, Value>> positions{{c.k, k}};
    if (c.m)
      positions.push_back({*c.m, row});
    if (c.n)
      positions.push_back({*c.n, column});
    return matrix.indices(positions);
  }

  Emitter &e;
  Contraction c;
  /// Whether panels may be shared among threads.
  const bool inParallel;
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
  if (c.n)
    emitProduct();
  else
    emitDot();
}

void ContractionKernel::emitProduct() {
  Value zero = e.index(0);
  Value numRows = c.m ? getDimSize(*c.m) : e.index(1);
  ProductLhs lhs{c.a.memref,
                 [&](Value row, Value k) { return at(c.a, row, zero, k); },
                 c.a.isContiguousAlong(c.k)};
  ProductRhs rhs{
      c.b.memref,
      [&](Value k, Value column) { return at(c.b, zero, column, k); },
      c.b.isContiguousAlong(*c.n) ? RhsLayout::NContiguous
                                  : RhsLayout::KContiguous};
  ProductSums sums{c.out.memref, [&](Value row, Value column, bool) {
                     return at(c.out, row, column, zero);
                   }};
  PanelShape shape(e, getDimSize(*c.n));
  auto multiply = [&](Value, Value first, Value end) {
    shape.forEachGroup(first, end, [&](const PanelGroup &group) {
      ProductProblem problem(e, lhs, rhs, sums, shape, getDimSize(c.k));
      multiplyGroup(problem, {zero, numRows}, group);
    });
  };
  if (inParallel)
    forEachPartOfPanels(e, e.index(1), shape.getNumPanels(), multiply);
  else
    multiply(zero, zero, shape.getNumPanels());
}

/// One sum, of vectors of products.
void ContractionKernel::emitDot() {
  Value zero = e.index(0), numK = getDimSize(c.k);
  auto multiply = [&](Value k, Value mask, Value sum) {
    return e.fma(e.loadFloats(c.a.memref, at(c.a, zero, zero, k), mask),
                 e.loadFloats(c.b.memref, at(c.b, zero, zero, k), mask), sum);
  };
  Value rest = e.rest(numK, e.width), wholeEnd = e.sub(numK, rest);
  Value sum = e.loop(zero, wholeEnd, e.width, Values{e.f32(0.0)},
                     [&](Value k, ValueRange carried) -> Values {
                       return {multiply(k, Value(), carried[0])};
                     })[0];
  sum = e.ifElse(
      e.compare(arith::CmpIPredicate::ne, rest, zero), sum.getType(),
      [&]() -> Values { return {multiply(wholeEnd, e.firstLanes(rest), sum)}; },
      [&]() -> Values { return {sum}; })[0];
  Values position = at(c.out, zero, zero, zero);
  e.store(e.add(e.load(c.out.memref, position), e.reduceAdd(sum)), c.out.memref,
          position);
}

LogicalResult ContractionKernel::emit() {
  // A vector of rows is one of columns.
  if (!c.n && c.m) {
    std::swap(c.a, c.b);
    std::swap(c.n, c.m);
  }
  bool isKContiguous = c.b.isContiguousAlong(c.k);
  bool hasPanels = c.n && c.out.isContiguousAlong(*c.n) &&
                   (c.b.isContiguousAlong(*c.n) || isKContiguous);
  bool isDot = !c.n && c.a.isContiguousAlong(c.k) && isKContiguous;
  if (!hasPanels && !isDot)
    return failure();
  emitOuter(c.outer);
  return success();
}

namespace {
/// A contraction on buffers -> register tiles of fused multiply-adds.
struct ContractionToVector : OpInterfaceRewritePattern<linalg::LinalgOp> {
  ContractionToVector(MLIRContext *context, const CPUTarget &options)
      : OpInterfaceRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(linalg::LinalgOp op,
                                PatternRewriter &rewriter) const override {
    FailureOr<Contraction> contraction = matchContraction(op, rewriter);
    if (failed(contraction))
      return failure();
    Emitter emitter(op.getLoc(), rewriter, options);
    // What is in a tile runs on that tile's thread.
    bool inParallel = !op->getParentOfType<scf::ForallOp>();
    if (failed(ContractionKernel(emitter, *contraction, inParallel).emit()))
      return rewriter.notifyMatchFailure(
          op, "expected out contiguous along n, and b along n or k");
    rewriter.eraseOp(op);
    return success();
  }

  CPUTarget options;
};
} // namespace

//===----------------------------------------------------------------------===//
// Facts
//===----------------------------------------------------------------------===//

/// Weights of so many columns and elements are made panels once for all rows,
/// and threads share the columns. Those of routers have fewer columns: they
/// stay in the loop over rows, with the selection.
static constexpr int64_t kWholeColumns = 512;
static constexpr int64_t kWholeElements = 1 << 17;

static SmallVector<KernelConfigAttr>
getContractionConfigs(linalg::LinalgOp op) {
  if (op.getNumDpsInputs() != 2 || op.getNumDpsInits() != 1 ||
      !isMultiplyAdd(op))
    return {};
  FailureOr<linalg::ContractionDimensions> dims =
      linalg::inferContractionDims(op);
  if (failed(dims) || dims->k.size() != 1 || !dims->batch.empty() ||
      dims->n.size() != 1 || (dims->m.size() > 1 && !canJoinRows(op)))
    return {};
  SmallVector<int64_t> sizes = op.getStaticLoopRanges();
  int64_t columns = sizes[dims->n.front()], numK = sizes[dims->k.front()];
  if (ShapedType::isDynamic(columns) || ShapedType::isDynamic(numK) ||
      columns < kWholeColumns || columns * numK < kWholeElements)
    return {};
  return {KernelConfigAttr::get(op.getContext(), /*rows=*/0, /*threads=*/0,
                                KernelSchedule::Any, KernelLoop::Kernel,
                                /*shared_bytes=*/0)};
}

void mlir::moe::addContractionFacts(KernelFacts &facts) {
  facts.addConfigs<linalg::GenericOp>(getContractionConfigs);
  facts.addConfigs<linalg::MatmulOp>(getContractionConfigs);
}

void mlir::moe::populateContractionToCPUPatterns(RewritePatternSet &patterns,
                                                 const CPUTarget &options) {
  patterns.add<ContractionToVector>(patterns.getContext(), options);
}
