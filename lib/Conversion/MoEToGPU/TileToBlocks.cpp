//===- TileToBlocks.cpp - Tile rows to the blocks of a grid ---------------===//

#include "ThreadLowerings.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "mlir/Pass/PassManager.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOETILETOBLOCKSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// The bytes that a row of `value` takes, as far as they are known: the last
/// dim is never cut.
static int64_t getRowBytes(Value value) {
  auto type = dyn_cast<RankedTensorType>(value.getType());
  if (!type || type.getRank() < 2 || !type.getElementType().isIntOrFloat() ||
      type.isDynamicDim(type.getRank() - 1))
    return 0;
  int64_t width = llvm::divideCeil(type.getElementTypeBitWidth(), 8);
  return type.getShape().back() * width;
}

namespace {
struct TileToBlocksPass
    : public mlir::moe::impl::MoETileToBlocksPassBase<TileToBlocksPass> {
  using Base::Base;

  void runOnOperation() override {
    int64_t rowBytes = 0;
    getOperation().walk([&](TilingInterface op) {
      for (Value result : op->getResults())
        if (llvm::any_of(result.getUsers(), llvm::IsaPred<TilingInterface>))
          rowBytes += getRowBytes(result);
    });
    int64_t rows = maxRows;
    while (rows > 1 && rows * rowBytes > kMaxStaticWorkgroupBytes)
      rows /= 2;

    // A kernel that reads all keys for each tile wants tiles as large as its
    // registers.
    Builder b(&getContext());
    getOperation().walk([&](SoftmaxMixOp op) {
      op->setAttr(kTileRowsAttrName,
                  b.getI64IntegerAttr(getMixTileRows(op, sharedBytes)));
    });

    MoETileAndFusePassOptions options;
    options.tileSize = rows;
    options.gpuBlocks = true;
    OpPassManager tile(getOperation()->getName());
    tile.addPass(createMoETileAndFusePass(options));
    if (failed(runPipeline(tile, getOperation())))
      signalPassFailure();
  }
};
} // namespace
