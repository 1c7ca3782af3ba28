//===- ConvertToSoftmaxMix.cpp - Write mixing ops with softmax_mix --------===//
//
// Every op that is a softmax over tokens says through MixingOpInterface how it
// is written with moe.softmax_mix; this pass asks. Results change by the
// rounding of sums only: the algebra that an op may use (a likelihood as extra
// features, its normaliser as a key bias) is exact over the reals.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Remarks.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOECONVERTTOSOFTMAXMIXPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

#define DEBUG_TYPE "moe-convert-to-softmax-mix"

using namespace mlir;
using namespace mlir::moe;

namespace {
struct MoEConvertToSoftmaxMixPass
    : public mlir::moe::impl::MoEConvertToSoftmaxMixPassBase<
          MoEConvertToSoftmaxMixPass> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<MixingOpInterface> worklist;
    getOperation()->walk([&](MixingOpInterface op) { worklist.push_back(op); });
    IRRewriter rewriter(&getContext());
    for (MixingOpInterface op : worklist) {
      rewriter.setInsertionPoint(op);
      if (sweepOnce)
        op->setAttr(kSweepOnceAttrName, rewriter.getUnitAttr());
      FailureOr<SmallVector<Value>> results = op.convertToSoftmaxMix(rewriter);
      if (failed(results)) {
        ++numRefused;
        op->removeAttr(kSweepOnceAttrName);
        remark::missed(op->getLoc(),
                       remark::RemarkOpts::name("ConvertToSoftmaxMix")
                           .category(DEBUG_TYPE))
            << op->getName().getStringRef() << ": "
            << remark::reason("its conversion needs intermediate tensors and "
                              "it works on buffers; convert before "
                              "bufferization");
        continue;
      }
      ++numConverted;
      rewriter.replaceOp(op, *results);
    }
  }
};
} // namespace
