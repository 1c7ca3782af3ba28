//===- EraseHostAsserts.cpp - Assertions between the kernels of a GPU -----===//

#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/IR/Remarks.h"

#define DEBUG_TYPE "moe-erase-host-asserts"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEERASEHOSTASSERTSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

namespace {
struct MoEEraseHostAssertsPass
    : mlir::moe::impl::MoEEraseHostAssertsPassBase<MoEEraseHostAssertsPass> {
  using Base::Base;

  void runOnOperation() override {
    getOperation().walk([](AssertOp op) {
      if (!isa<func::FuncOp>(op->getParentOp()))
        return;
      remark::missed(op.getLoc(),
                     remark::RemarkOpts::name("Assert").category(DEBUG_TYPE))
          << ("not checked on a GPU: " + op.getMessage()).str()
          << remark::reason("the value lies between two kernels, and the host "
                            "would have to wait for it");
      op.erase();
    });
  }
};
} // namespace
