//===- DispersionPlan.cpp - How mad_dispersion is cut ---------------------===//

#include "DispersionPlan.h"

#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Clusters of a range: the tables of a block of 16 warps take 128 KiB.
static constexpr int64_t kMaxRange = 64;
/// Bytes of a row that a slab has: a line of the cache.
static constexpr int64_t kSlabBytes = 128;
/// Warps of a block, and where its tables would not fit.
static constexpr int64_t kWarps = 16, kFewWarps = 8;
/// Tokens of a block before there is another part, at most and at least.
static constexpr int64_t kMaxTokens = 2048, kMinTokens = 128;
/// Clusters of 8 blocks, and of 6, that run at once where each block fills a
/// multiprocessor, as an H100's driver counts them. 16 and 17 slabs take the
/// small ones: of 16 large ones the last waited for all others (52.8 us, not
/// 40).
static constexpr int64_t kClustersAtOnce = 15, kMostSmallClusters = 17,
                         kSmallCluster = 6;
/// Blocks that combine parts, for each part but one.
static constexpr int64_t kCombiningBlocks = 16;

/// A part moves five tables: its totals out and in twice, the means in. With
/// blocks of so many tokens in a cluster of 8 they are 2 % of the rows, which
/// are read twice.
int64_t DispersionPlan::getMinTokens(MadDispersionOp op,
                                     int64_t clusters) const {
  int64_t rowBytes = getElementBytes(getElementTypeOrSelf(op.getH().getType()));
  int64_t tokens =
      llvm::divideCeil(60 * 5 * clusters * sizeof(float), 2 * rowBytes * 8);
  return std::clamp(tokens, kMinTokens, kMaxTokens);
}

DispersionPlan::DispersionPlan(ThreadBuilder &b, MadDispersionOp op,
                               BlockShape given)
    : block(given) {
  auto h = cast<MemRefType>(op.getH().getType());
  auto table = cast<MemRefType>(op.getOuts()[0].getType());
  int64_t clusters = table.isDynamicDim(0)
                         ? kMaxRange
                         : std::max<int64_t>(table.getDimSize(0), 1);
  range = std::min(clusters, kMaxRange);
  slab = std::max(kSlabBytes / getElementBytes(h.getElementType()), kWarpSize);
  int64_t columns = h.getDimSize(1), mostTokens = kMaxTokens;
  int64_t slabsOfRow =
      ShapedType::isDynamic(columns) ? 0 : llvm::divideCeil(columns, slab);
  if (block.clusterBlocks > kSmallCluster && slabsOfRow > kClustersAtOnce &&
      slabsOfRow <= kMostSmallClusters) {
    mostTokens =
        llvm::divideCeil(mostTokens * block.clusterBlocks, kSmallCluster);
    block.clusterBlocks = kSmallCluster;
  }
  // Tables, means, the list, and what else there is.
  auto getBytes = [&](int64_t warps) {
    return 4 * ((warps * kWarpSize + slab) * (range + 1) + mostTokens) + 4096;
  };
  int64_t warps = getBytes(kWarps) <= block.sharedBytes ? kWarps : kFewWarps;
  block.numThreads = warps * kWarpSize;
  subparts = block.numThreads / slab;
  // With few slabs, parts make up for them.
  int64_t perBlock = mostTokens;
  if (slabsOfRow > 0)
    perBlock =
        std::clamp(256 * slabsOfRow, getMinTokens(op, clusters), mostTokens);
  maxTokens = perBlock + 1;

  auto evaluate = [&](AffineExpr expr, Value buffer, int64_t dim) {
    return affine::makeComposedFoldedAffineApply(
        b, b.getLoc(), expr,
        {memref::getMixedSize(b, b.getLoc(), buffer, dim)});
  };
  AffineExpr size = b.getAffineSymbolExpr(0);
  AffineExpr more = size.floorDiv(perBlock * block.clusterBlocks + 1);
  numRanges = evaluate(size.ceilDiv(range), op.getOuts()[0], 0);
  numSlabs = evaluate(size.ceilDiv(slab), op.getOuts()[0], 1);
  numParts = evaluate(more + 1, op.getH(), 0);
  numDeviating = evaluate(more * 2, op.getH(), 0);
  numCombining = evaluate(more * kCombiningBlocks, op.getH(), 0);
  auto getValue = [&](OpFoldResult size) {
    return getValueOrCreateConstantIndexOp(b, b.getLoc(), size);
  };
  slabs = getValue(numSlabs);
  parts = getValue(numParts);
  combining = getValue(numCombining);
}
