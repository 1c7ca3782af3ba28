//===- TileToBlocks.cpp - Tile rows to the blocks of a grid ---------------===//

#include "KernelFacts.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Support/ElementBytes.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Transforms/Passes.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOETILETOBLOCKSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// The bytes that `value` takes, as far as its size has a bound; without one
/// another pass reports the buffer.
static int64_t getMaxBytes(Value value) {
  auto type = cast<RankedTensorType>(value.getType());
  if (!type.getElementType().isIntOrIndexOrFloat())
    return 0;
  int64_t bytes = getElementBytes(type.getElementType());
  for (auto [dim, size] : llvm::enumerate(type.getShape())) {
    FailureOr<int64_t> bound = size;
    if (ShapedType::isDynamic(size))
      bound = ValueBoundsConstraintSet::computeConstantBound(
          presburger::BoundType::UB, {value, static_cast<int64_t>(dim)},
          /*stopCondition=*/nullptr, /*closedUB=*/true);
    bytes *= failed(bound) ? 0 : *bound;
  }
  return bytes;
}

/// The memory that the ops of a loop over blocks hand on in: the destinations
/// that do not end up as a part of the loop's results.
static int64_t getWorkgroupBytes(scf::ForallOp forall) {
  llvm::SetVector<Value> roots, stored;
  for (Operation &nested : forall.getBody()->without_terminator()) {
    auto op = dyn_cast<DestinationStyleOpInterface>(nested);
    if (!op)
      continue;
    for (OpResult result : op->getResults()) {
      Value root = result;
      while (auto producer = root.getDefiningOp<DestinationStyleOpInterface>())
        root = producer.getTiedOpOperand(cast<OpResult>(root))->get();
      roots.insert(root);
      if (llvm::any_of(result.getUsers(),
                       llvm::IsaPred<tensor::ParallelInsertSliceOp>))
        stored.insert(root);
    }
  }
  int64_t bytes = 0;
  for (Value root : roots)
    if (!stored.contains(root))
      bytes += getMaxBytes(root);
  return bytes;
}

static int64_t getWorkgroupBytes(func::FuncOp function) {
  int64_t most = 0;
  function.walk([&](scf::ForallOp forall) {
    most = std::max(most, getWorkgroupBytes(forall));
  });
  return most;
}

namespace {
struct TileToBlocksPass
    : public mlir::moe::impl::MoETileToBlocksPassBase<TileToBlocksPass> {
  using Base::Base;

  /// How much memory a row needs shows once its ops are decomposed, so tilings
  /// are tried, each on the function as it was.
  void runOnOperation() override {
    func::FuncOp function = getOperation();
    if (maxRows < 1) {
      function.emitError() << "expected max-rows to be at least 1, found "
                           << maxRows.getValue();
      return signalPassFailure();
    }
    for (int64_t rows = maxRows;; rows /= 2) {
      OwningOpRef<func::FuncOp> original = function.clone();
      if (failed(tile(rows)))
        return signalPassFailure();
      if (rows <= 1 || getWorkgroupBytes(function) <= kMaxStaticWorkgroupBytes)
        return;
      function.getBody().takeBody(original->getBody());
    }
  }

private:
  LogicalResult tile(int64_t rows) {
    mapLoopsToBlocks(getOperation());
    decomposeCompositeLinalg(getOperation());
    decomposeUnboundedOps(getOperation());
    Builder b(&getContext());
    KernelFacts facts(&getContext());
    BlockShape block;
    block.sharedBytes = sharedBytes;
    block.hasWgmma = hasWgmma;
    getOperation().walk([&](MoEStructuredOpInterface op) {
      if (std::optional<int64_t> own = facts.getTileRows(op, block))
        op->setAttr(kTileRowsAttrName, b.getI64IntegerAttr(*own));
      // What is shared shrinks with the other tiles.
      if (std::optional<int64_t> wish = facts.getSharedTileRows(op, block))
        op->setAttr(
            kSharedTileRowsAttrName,
            b.getI64IntegerAttr(std::max<int64_t>(*wish * rows / maxRows, 1)));
    });
    MoETileAndFusePassOptions options;
    options.tileSize = rows;
    options.gpuBlocks = true;
    OpPassManager manager(getOperation()->getName());
    manager.addPass(createMoETileAndFusePass(options));
    manager.addPass(createMoEDecomposeForGPUPass());
    manager.addPass(createCanonicalizerPass());
    manager.addPass(createCSEPass());
    return runPipeline(manager, getOperation());
  }
};
} // namespace
