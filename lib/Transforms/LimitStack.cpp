//===- LimitStack.cpp - Large buffers from the stack to the heap ----------===//
//
// Runs behind the outlining of parallel loops, whose bodies are functions that
// run on threads of their own. Upstream's promote-buffers-to-stack goes the
// other way, and earlier.
//
//===----------------------------------------------------------------------===//

#include "MoE/Support/ElementBytes.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/ADT/STLExtras.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOELIMITSTACKPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

static int64_t getBytes(memref::AllocaOp alloca) {
  MemRefType type = alloca.getType();
  Type element = type.getElementType();
  int64_t bytes = type.getNumElements();
  if (auto vector = dyn_cast<VectorType>(element)) {
    bytes *= vector.getNumElements();
    element = vector.getElementType();
  }
  return bytes * getElementBytes(element);
}

/// A block that gives a buffer to the ops around it may give this one.
static bool endsWithItsBlock(memref::AllocaOp alloca) {
  Operation *terminator = alloca->getBlock()->getTerminator();
  return llvm::none_of(terminator->getOperandTypes(),
                       llvm::IsaPred<BaseMemRefType>);
}

static void moveToHeap(memref::AllocaOp alloca) {
  OpBuilder builder(alloca);
  auto alloc = memref::AllocOp::create(
      builder, alloca.getLoc(), alloca.getType(), alloca.getDynamicSizes(),
      alloca.getSymbolOperands(), alloca.getAlignmentAttr());
  builder.setInsertionPoint(alloca->getBlock()->getTerminator());
  memref::DeallocOp::create(builder, alloca.getLoc(), alloc);
  alloca.replaceAllUsesWith(alloc.getResult());
  alloca.erase();
}

namespace {
struct LimitStackPass : mlir::moe::impl::MoELimitStackPassBase<LimitStackPass> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<memref::AllocaOp> sized, others;
    getOperation().walk([&](memref::AllocaOp alloca) {
      if (endsWithItsBlock(alloca))
        (alloca.getType().hasStaticShape() ? sized : others).push_back(alloca);
    });
    llvm::stable_sort(sized, [](memref::AllocaOp a, memref::AllocaOp b) {
      return getBytes(a) < getBytes(b);
    });
    int64_t bytes = 0;
    for (memref::AllocaOp alloca : sized)
      if ((bytes += getBytes(alloca)) > maxBytes)
        others.push_back(alloca);
    llvm::for_each(others, moveToHeap);
    numMoved += others.size();
  }
};
} // namespace
