//===- ExpandCopies.cpp - Copy strided buffers by loops -------------------===//
//
// Matches memref.copy with a side that is not contiguous:
//
//   memref.copy %a, %b : memref<?xf32, strided<[2]>> to memref<?xf32>
//
// becomes linalg.copy, and with it a loop nest. A copy between contiguous
// buffers stays: it is a memcpy.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEEXPANDCOPIESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

static bool isContiguous(Value buffer) {
  auto type = dyn_cast<MemRefType>(buffer.getType());
  return type && type.getLayout().isIdentity();
}

namespace {
struct ExpandCopiesPass
    : public mlir::moe::impl::MoEExpandCopiesPassBase<ExpandCopiesPass> {
  using Base::Base;

  void runOnOperation() override {
    getOperation().walk([](memref::CopyOp op) {
      if (isContiguous(op.getSource()) && isContiguous(op.getTarget()))
        return;
      OpBuilder builder(op);
      linalg::CopyOp::create(builder, op.getLoc(), op.getSource(),
                             op.getTarget());
      op.erase();
    });
  }
};
} // namespace
