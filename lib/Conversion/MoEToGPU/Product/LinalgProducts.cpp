//===- LinalgProducts.cpp - Products of rows in linalg to threads ---------===//
//
// The layers of experts come as linalg ops over bf16 or f16 rows,
//
//   out[.., n] += sum over d of left[.., d] right[n, d], or right[d, n]
//
// with sums in f32. Where tensor cores can multiply them they do; the rest is
// left to LinalgToThreads.cpp.
//
//===----------------------------------------------------------------------===//

#include "LinalgProducts.h"
#include "RowProducts.h"

#include "MoE/Support/MultiplyAdd.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;

bool mlir::moe::hasProductMaps(linalg::LinalgOp op, bool isTransposed) {
  if (op.getNumDpsInputs() != 2 || op.getNumDpsInits() != 1 ||
      op.getNumReductionLoops() != 1 || op.getNumLoops() < 3)
    return false;
  unsigned n = op.getNumLoops() - 2, d = n + 1;
  if (op.getIteratorTypesArray()[d] != utils::IteratorType::reduction)
    return false;
  SmallVector<unsigned> left = llvm::to_vector(llvm::seq(n)), out = left;
  left.push_back(d);
  out.push_back(n);
  auto getMap = [&](ArrayRef<unsigned> dims) {
    return AffineMap::getMultiDimMapWithTargets(d + 1, dims, op.getContext());
  };
  AffineMap right = isTransposed ? getMap({d, n}) : getMap({n, d});
  return llvm::equal(op.getIndexingMapsArray(),
                     ArrayRef{getMap(left), right, getMap(out)});
}

namespace {
struct LinalgProductToThreads : OpInterfaceRewritePattern<linalg::LinalgOp> {
  LinalgProductToThreads(MLIRContext *context, BlockShape block)
      : OpInterfaceRewritePattern(context, /*benefit=*/2), block(block) {}

  LogicalResult matchAndRewrite(linalg::LinalgOp op,
                                PatternRewriter &rewriter) const override {
    bool isTransposed = hasProductMaps(op, /*isTransposed=*/true);
    if (!op.hasPureBufferSemantics() ||
        (!isTransposed && !hasProductMaps(op, /*isTransposed=*/false)) ||
        !isMultiplyAdd(op))
      return rewriter.notifyMatchFailure(op, "expected a product of rows");
    Value left = op.getDpsInputOperand(0)->get();
    Value right = op.getDpsInputOperand(1)->get();
    Value out = op.getDpsInitOperand(0)->get();
    int64_t columns =
        cast<MemRefType>(right.getType()).getDimSize(isTransposed ? 1 : 0);
    int64_t rows = getProductRows(columns);
    std::optional<RowProductPlan> plan =
        planRowProducts(left, right, isTransposed, rows, block);
    if (!plan)
      return rewriter.notifyMatchFailure(
          op, "expected rows of whole units in global memory");
    WarpBuilder b(op.getLoc(), rewriter);
    // A plan for the rows that there are, where their number has a bound.
    if (std::optional<int64_t> most =
            getMaxRows(getNumRows(b, left, /*numInner=*/1)))
      if (auto own = planRowProducts(left, right, isTransposed, *most, block))
        plan = own;
    emitRowProducts(
        b, left, right, *plan, [&](Value row, Value column, Value product) {
          SmallVector<Value> place = getRowIndices(b, out, /*numInner=*/1, row);
          place.push_back(column);
          Value old = memref::LoadOp::create(b, out, place);
          memref::StoreOp::create(b, b.add(old, product), out, place);
        });
    rewriter.eraseOp(op);
    return success();
  }

  BlockShape block;
};
} // namespace

void mlir::moe::populateLinalgProductToThreadsPatterns(
    RewritePatternSet &patterns, BlockShape block) {
  patterns.add<LinalgProductToThreads>(patterns.getContext(), block);
}
