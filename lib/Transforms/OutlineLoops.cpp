//===- OutlineLoops.cpp - Functions of few loops --------------------------===//
//
// Moves each outermost scf.for of a function that has many of them into a
// private function, which equal loops share. LLVM's passes over loops look at
// all of a function for each of its loops: with hundreds of loops, as a step of
// a model has where nothing is worth many threads, they would take most of the
// time of a compilation.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"
#include "Outline.h"

#include "mlir/Dialect/SCF/IR/SCF.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEOUTLINELOOPSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

static LogicalResult outlineLoop(Outliner &outliner, scf::ForOp loop) {
  FailureOr<Context> context = outliner.capture(loop);
  if (failed(context))
    return failure();
  func::FuncOp body = outliner.makeFunction(
      loop, "_loop", {}, *context, [](func::FuncOp function, Operation *) {
        // LLVM moves a function with one caller back into it.
        Builder builder(function.getContext());
        function->setAttr("passthrough", builder.getStrArrayAttr({"noinline"}));
      });
  ImplicitLocOpBuilder builder(loop.getLoc(), loop);
  Value pointer = outliner.storeContext(builder, loop, *context);
  func::CallOp::create(builder, body, pointer);
  loop.erase();
  return success();
}

/// The loops among the ops of the body, without those that compute values.
static SmallVector<scf::ForOp> getOutermostLoops(func::FuncOp function) {
  SmallVector<scf::ForOp> loops;
  for (Block &block : function.getBody())
    for (auto loop : block.getOps<scf::ForOp>())
      if (loop.getNumResults() == 0)
        loops.push_back(loop);
  return loops;
}

namespace {
struct OutlineLoopsPass
    : mlir::moe::impl::MoEOutlineLoopsPassBase<OutlineLoopsPass> {
  using Base::Base;

  void runOnOperation() override {
    Outliner outliner(getOperation());
    for (auto function :
         llvm::to_vector(getOperation().getOps<func::FuncOp>())) {
      SmallVector<scf::ForOp> loops = getOutermostLoops(function);
      if (static_cast<int64_t>(loops.size()) < minLoops)
        continue;
      for (scf::ForOp loop : loops)
        if (failed(outlineLoop(outliner, loop)))
          return signalPassFailure();
      numOutlined += loops.size();
    }
    numShared += outliner.numShared;
  }
};
} // namespace
