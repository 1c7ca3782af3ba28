//===- ConvertToSoftmaxMix.cpp - Write mixing ops with softmax_mix --------===//
//
// Every op that is a softmax over tokens says through MixingOpInterface how it
// is written with moe.softmax_mix; this pass asks. Results change by the
// rounding of sums only: the algebra that an op may use (a likelihood as extra
// features, its normaliser as a key bias) is exact over the reals.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"
#include "MoE/Transforms/WantedKernelConfigs.h"

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

//===----------------------------------------------------------------------===//
// Mixes of the same logits
//===----------------------------------------------------------------------===//

/// Whether both ops have the softmax of the same logits.
static bool haveSameLogits(SoftmaxMixOp a, SoftmaxMixOp b) {
  auto getOperands = [](SoftmaxMixOp op) -> std::array<Value, 9> {
    return {op.getQ(),        op.getK(),          op.getKeyBias(),
            op.getBias(),     op.getQueryMask(),  op.getKeyMask(),
            op.getKeyLevel(), op.getQueryLevel(), op.getOrigin()};
  };
  return getOperands(a) == getOperands(b) && a.getScale() == b.getScale() &&
         a.getVisibility() == b.getVisibility() &&
         a.getPrecision() == b.getPrecision();
}

/// The mix with values that has the logits of `rows` and comes before it.
static SoftmaxMixOp findMixBefore(SoftmaxMixOp rows) {
  for (Operation *user : rows.getQ().getUsers()) {
    auto mix = dyn_cast<SoftmaxMixOp>(user);
    if (mix && mix.getV() && mix.hasPureTensorSemantics() &&
        mix->getBlock() == rows->getBlock() && mix->isBeforeInBlock(rows) &&
        haveSameLogits(mix, rows))
      return mix;
  }
  return {};
}

/// `mix` with the entropies of its rows.
static SoftmaxMixOp addEntropies(RewriterBase &rewriter, SoftmaxMixOp mix) {
  if (mix.getWithEntropy())
    return mix;
  Location loc = mix.getLoc();
  rewriter.setInsertionPoint(mix);
  Value init = tensor::EmptyOp::create(
      rewriter, loc, tensor::getMixedSizes(rewriter, loc, mix.getLseInit()),
      rewriter.getF32Type());
  SmallVector<Value> outs(mix.getOuts());
  outs.push_back(init);
  auto both = SoftmaxMixOp::create(
      rewriter, loc, TypeRange(ValueRange(outs)), mix.getQ(), mix.getK(),
      mix.getV(), mix.getKeyBias(), mix.getBias(), mix.getQueryMask(),
      mix.getKeyMask(), mix.getQueryLevel(), mix.getKeyLevel(), mix.getOrigin(),
      outs, mix.getScale(), mix.getVisibility(), /*with_entropy=*/true,
      mix.getPrecision());
  rewriter.replaceOp(mix, both.getResults().take_front(mix.getNumResults()));
  return both;
}

/// A mix without values, which only tells how sure its rows are, takes that
/// from a mix with values of the same logits: attention emits its entropies.
static bool takeRowsFromMix(RewriterBase &rewriter, SoftmaxMixOp rows) {
  SoftmaxMixOp mix = findMixBefore(rows);
  if (!mix)
    return false;
  if (rows.getWithEntropy())
    mix = addEntropies(rewriter, mix);
  remark::passed(mix.getLoc(),
                 remark::RemarkOpts::name("EmitEntropies").category(DEBUG_TYPE))
      << "the attention emits the log-sum-exps and entropies of its rows";
  rewriter.replaceOp(rows, mix.getResults().slice(1, rows.getNumResults()));
  return true;
}

namespace {
/// The mixes and their gradients that a conversion makes.
struct NewMixes : OpBuilder::Listener, SmallVector<Operation *> {
  void notifyOperationInserted(Operation *op, OpBuilder::InsertPoint) override {
    if (isa<MixLogitsOpInterface>(op))
      push_back(op);
  }
};

struct MoEConvertToSoftmaxMixPass
    : public mlir::moe::impl::MoEConvertToSoftmaxMixPassBase<
          MoEConvertToSoftmaxMixPass> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<MixingOpInterface> worklist;
    getOperation()->walk([&](MixingOpInterface op) { worklist.push_back(op); });
    NewMixes newMixes;
    IRRewriter rewriter(&getContext(), &newMixes);
    bool isGPU = isForGPU(getOperation());
    for (MixingOpInterface op : worklist) {
      KernelConfigAttr wanted = getWantedKernelConfig(op);
      // Only CPUs have kernels of the op itself, which take pairs once.
      if (isGPU && getKernelConfig(op))
        op->removeAttr(kKernelConfigAttrName);
      rewriter.setInsertionPoint(op);
      newMixes.clear();
      FailureOr<SmallVector<Value>> results = op.convertToSoftmaxMix(rewriter);
      if (failed(results)) {
        ++numRefused;
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
      // What asks for another kernel than the op's own.
      if (wanted &&
          (isGPU || wanted.getSchedule() != KernelSchedule::PairsOnce))
        for (Operation *mix : newMixes)
          mix->setAttr(kKernelConfigAttrName, wanted);
      rewriter.replaceOp(op, *results);
    }
    SmallVector<SoftmaxMixOp> rowsOnly;
    getOperation()->walk([&](SoftmaxMixOp mix) {
      if (!mix.getV() && mix.hasPureTensorSemantics())
        rowsOnly.push_back(mix);
    });
    for (SoftmaxMixOp rows : rowsOnly)
      if (takeRowsFromMix(rewriter, rows))
        ++numShared;
  }
};
} // namespace
