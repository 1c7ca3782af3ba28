//===- OutlineParallel.cpp - Parallel loops to calls of the runtime -------===//
//
// Turns each outermost scf.forall into a private function over a range of
// iterations and a call of the runtime's
//
//   void moe_parallel_for(int64_t count,
//                         void (*body)(int64_t begin, int64_t end, void *ctx),
//                         void *ctx);
//
// which may run disjoint ranges in any order and on any thread. Iterations of a
// forall write disjoint memory, so bits do not change with the number of
// threads. Foralls inside a body, and all of them where a caller wants no
// threads, become loops.
//
// Most of a model's code is in these functions, which equal loops share: all
// that follows has half as much to do for two equal layers.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"
#include "Outline.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/SCF/Transforms/Transforms.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEOUTLINEPARALLELPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

static constexpr StringLiteral kRuntimeName = "moe_parallel_for";

//===----------------------------------------------------------------------===//
// Iterations
//===----------------------------------------------------------------------===//

namespace {
/// The iterations of a forall as one range: lower bound, step and number of
/// iterations of each dim, outermost first.
struct IterationSpace {
  SmallVector<Value> lower, step, count;
  Value total;
};
} // namespace

static IterationSpace getIterationSpace(ImplicitLocOpBuilder &builder,
                                        scf::ForallOp forall) {
  IterationSpace space;
  space.total = arith::ConstantIndexOp::create(builder, 1);
  for (auto [lower, upper, step] :
       llvm::zip_equal(forall.getMixedLowerBound(), forall.getMixedUpperBound(),
                       forall.getMixedStep())) {
    auto get = [&](OpFoldResult value) {
      return getValueOrCreateConstantIndexOp(builder, builder.getLoc(), value);
    };
    space.lower.push_back(get(lower));
    space.step.push_back(get(step));
    Value extent =
        arith::SubIOp::create(builder, get(upper), space.lower.back());
    space.count.push_back(
        arith::CeilDivSIOp::create(builder, extent, space.step.back()));
    space.total =
        arith::MulIOp::create(builder, space.total, space.count.back());
  }
  return space;
}

/// The induction variables of iteration `linear`.
static SmallVector<Value> getInductionVars(ImplicitLocOpBuilder &builder,
                                           const IterationSpace &space,
                                           Value linear) {
  SmallVector<Value> variables(space.count.size());
  for (size_t dim = space.count.size(); dim-- > 0;) {
    Value position = linear;
    if (dim > 0) {
      position = arith::RemSIOp::create(builder, linear, space.count[dim]);
      linear = arith::DivSIOp::create(builder, linear, space.count[dim]);
    }
    variables[dim] = arith::AddIOp::create(
        builder, space.lower[dim],
        arith::MulIOp::create(builder, position, space.step[dim]));
  }
  return variables;
}

//===----------------------------------------------------------------------===//
// Outlining
//===----------------------------------------------------------------------===//

/// Replaces a forall in `function`, whose first arguments are a range of
/// iterations, by a loop over that range:
///
///   for %i = %begin to %end { body(delinearize %i) }
static void runRange(func::FuncOp function, scf::ForallOp forall) {
  ImplicitLocOpBuilder builder(forall.getLoc(), forall);
  // The bounds are computed again from the captured values.
  IterationSpace space = getIterationSpace(builder, forall);
  Type index = builder.getIndexType();
  Value begin =
      arith::IndexCastOp::create(builder, index, function.getArgument(0));
  Value end =
      arith::IndexCastOp::create(builder, index, function.getArgument(1));
  Value one = arith::ConstantIndexOp::create(builder, 1);
  auto loop = scf::ForOp::create(builder, begin, end, one);
  builder.setInsertionPointToStart(loop.getBody());
  SmallVector<Value> variables =
      getInductionVars(builder, space, loop.getInductionVar());
  IRRewriter rewriter(builder);
  rewriter.eraseOp(forall.getTerminator());
  rewriter.inlineBlockBefore(forall.getBody(), loop.getBody()->getTerminator(),
                             variables);
  rewriter.eraseOp(forall);
}

static LogicalResult outlineForall(Outliner &outliner, scf::ForallOp forall) {
  FailureOr<Context> context = outliner.capture(forall);
  if (failed(context))
    return failure();
  ImplicitLocOpBuilder builder(forall.getLoc(), forall);
  Type i64 = builder.getI64Type();
  func::FuncOp body =
      outliner.makeFunction(forall, "_parallel", {i64, i64}, *context,
                            [](func::FuncOp function, Operation *isolated) {
                              runRange(function, cast<scf::ForallOp>(isolated));
                            });
  Value pointer = outliner.storeContext(builder, forall, *context);
  IterationSpace space = getIterationSpace(builder, forall);
  Value count = arith::IndexCastOp::create(builder, i64, space.total);
  Value address = func::ConstantOp::create(
      builder, body.getFunctionType(),
      FlatSymbolRefAttr::get(builder.getContext(), body.getName()));
  Type pointerType = pointer.getType();
  func::FuncOp run =
      outliner.declare(kRuntimeName, {i64, pointerType, pointerType});
  func::CallOp::create(
      builder, run,
      ValueRange{count, castTo(builder, pointerType, address), pointer});
  forall.erase();
  return success();
}

/// Moves static allocas of `block` to the entry of `function`: in a loop they
/// would grow the stack with each iteration.
static void hoistAllocas(func::FuncOp function) {
  Block &entry = function.getBody().front();
  SmallVector<memref::AllocaOp> allocas;
  function.walk([&](memref::AllocaOp alloca) {
    if (alloca->getNumOperands() == 0 &&
        !alloca->getParentOfType<memref::AllocaScopeOp>())
      allocas.push_back(alloca);
  });
  for (memref::AllocaOp alloca : allocas)
    alloca->moveBefore(&entry, entry.begin());
}

namespace {
struct OutlineParallelPass
    : mlir::moe::impl::MoEOutlineParallelPassBase<OutlineParallelPass> {
  using Base::Base;

  void runOnOperation() override {
    if (failed(verifyBuffers()))
      return signalPassFailure();
    if (threads && failed(outlineOutermost()))
      return signalPassFailure();
    eraseUnusedThreadCount();
    SmallVector<scf::ForallOp> rest;
    getOperation().walk([&](scf::ForallOp forall) { rest.push_back(forall); });
    IRRewriter rewriter(&getContext());
    for (scf::ForallOp forall : rest) {
      rewriter.setInsertionPoint(forall);
      if (failed(scf::forallToForLoop(rewriter, forall)))
        return signalPassFailure();
    }
    for (auto function : getOperation().getOps<func::FuncOp>())
      if (!function.isExternal())
        hoistAllocas(function);
  }

private:
  LogicalResult verifyBuffers() {
    WalkResult result = getOperation()->walk([](scf::ForallOp forall) {
      if (forall.getNumResults() == 0)
        return WalkResult::advance();
      emitError(forall.getLoc(), "expected a parallel loop on buffers, found "
                                 "one with results; bufferize first");
      return WalkResult::interrupt();
    });
    return failure(result.wasInterrupted());
  }

  void eraseUnusedThreadCount() {
    auto function = getOperation().lookupSymbol<func::FuncOp>(kThreadCountName);
    if (function && SymbolTable::symbolKnownUseEmpty(function, getOperation()))
      function.erase();
  }

  LogicalResult outlineOutermost() {
    Outliner outliner(getOperation());
    SmallVector<scf::ForallOp> outermost;
    getOperation().walk<WalkOrder::PreOrder>([&](scf::ForallOp forall) {
      outermost.push_back(forall);
      return WalkResult::skip();
    });
    for (scf::ForallOp forall : outermost) {
      if (failed(outlineForall(outliner, forall)))
        return failure();
      ++numOutlined;
    }
    numShared += outliner.numShared;
    return success();
  }
};
} // namespace
