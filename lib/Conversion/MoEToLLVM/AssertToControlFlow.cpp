//===- AssertToControlFlow.cpp - moe.assert in kernels of a GPU -----------===//

#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/Dialect/ControlFlow/IR/ControlFlow.h"
#include "mlir/Dialect/ControlFlow/IR/ControlFlowOps.h"

namespace mlir::moe {
#define GEN_PASS_DEF_CONVERTMOEASSERTTOCFPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

namespace {
struct ConvertMoEAssertToCFPass
    : mlir::moe::impl::ConvertMoEAssertToCFPassBase<ConvertMoEAssertToCFPass> {
  using Base::Base;

  void runOnOperation() override {
    getOperation()->walk([](AssertOp op) {
      OpBuilder builder(op);
      cf::AssertOp::create(builder, op.getLoc(), op.getCondition(),
                           op.getMessage());
      op.erase();
    });
  }
};
} // namespace
