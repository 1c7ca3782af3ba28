//===- SoftmaxMix.cpp - softmax_mix to threads ----------------------------===//

#include "SoftmaxMix.h"
#include "SoftmaxMixCopies.h"
#include "ThreadLowerings.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

#define DEBUG_TYPE "convert-moe-to-gpu"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

/// The most groups of columns, each of which computes the logits again.
static constexpr int64_t kMaxColumnGroups = 16;

/// The number of equal groups of at most `most` columns, or, where there is no
/// such number, of at most kMaxMixColumns; 0 if there is none.
static int64_t getNumColumnGroups(SoftmaxMixOp op,
                                  int64_t most = kMaxMixColumns) {
  if (!op.getV())
    return 1;
  int64_t columns = getShaped(op.getV()).getShape().back();
  if (ShapedType::isDynamic(columns))
    return 0;
  for (int64_t size : {most, kMaxMixColumns})
    for (int64_t groups = 1; groups <= kMaxColumnGroups; ++groups)
      if (columns % groups == 0 && columns / groups <= size)
        return groups;
  return 0;
}

/// The columns of values whose sums registers hold.
static int64_t getMostColumns(SoftmaxMixOp op, BlockShape block) {
  if (!op.getV() || !hasTensorTypes(op))
    return kMaxMixColumns;
  // Beside the parts of values that are no bf16 there is less room, and on some
  // chips where queries stay in shared memory.
  constexpr int64_t fewColumns = 160, fewFeatures = 512;
  bool hasTerms = !getShaped(op.getV()).getElementType().isBF16();
  bool isTight = block.fillsRegistersSooner &&
                 getShaped(op.getQ()).getDimSize(3) <= fewFeatures;
  return hasTerms || isTight ? fewColumns : kMaxMixColumns;
}

static bool hasThreadKernel(SoftmaxMixOp op) {
  return getNumColumnGroups(op) > 0;
}

/// `size` elements of the last dim of `buffer`, from `offset` on.
static Value takeColumns(WarpBuilder &b, Value buffer, Value offset,
                         int64_t size) {
  auto type = cast<MemRefType>(buffer.getType());
  int64_t last = type.getRank() - 1;
  SmallVector<OpFoldResult> offsets(type.getRank(), b.getIndexAttr(0)),
      steps(type.getRank(), b.getIndexAttr(1)),
      sizes = memref::getMixedSizes(b, b.getLoc(), buffer);
  offsets[last] = offset;
  sizes[last] = b.getIndexAttr(size);
  return memref::SubViewOp::create(b, buffer, offsets, sizes, steps);
}

/// The user may have expected the fastest kernel of the chip.
static void reportWithoutWgmma(SoftmaxMixOp op, bool hasForm) {
  remark::missed(op.getLoc(),
                 remark::RemarkOpts::name("Wgmma").category(DEBUG_TYPE))
      << (op->getName().getStringRef() + " runs without wgmma").str()
      << remark::reason(
             "{0}", hasForm
                        ? "its kernel shares a block with one of another shape"
                        : "its kernel expects queries and keys of one 16-bit "
                          "type, a multiple of 8 features that fit into shared "
                          "memory for 64 queries, and up to 256 columns of the "
                          "values");
}

namespace {
struct SoftmaxMixToThreads : OpRewritePattern<SoftmaxMixOp> {
  SoftmaxMixToThreads(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(SoftmaxMixOp op,
                                PatternRewriter &rewriter) const override {
    KernelConfigAttr config = getKernelConfig(op);
    if (!config)
      return rewriter.notifyMatchFailure(
          op, "expected a kernel configuration; run moe-select-kernel-config");
    if (config.getSchedule() == KernelSchedule::Wgmma) {
      emitMixOnWarpgroups(rewriter, op, config.getRows(), block.sharedBytes);
      rewriter.eraseOp(op);
      return success();
    }
    if (block.hasWgmma)
      reportWithoutWgmma(op,
                         !getWarpgroupShapes(op, block.sharedBytes).empty());
    if (block.numThreads != kMixThreads)
      return rewriter.notifyMatchFailure(op, [&](Diagnostic &diagnostic) {
        diagnostic << "expected blocks of " << kMixThreads << " threads, found "
                   << block.numThreads;
      });
    int64_t groups = getNumColumnGroups(op, getMostColumns(op, block));
    if (groups == 0)
      return rewriter.notifyMatchFailure(op, [&](Diagnostic &diagnostic) {
        diagnostic << "expected a static number of columns of the values, in "
                      "at most "
                   << kMaxColumnGroups << " equal groups of at most "
                   << kMaxMixColumns << ", found " << op.getV().getType();
      });
    WarpBuilder b(op.getLoc(), rewriter);
    if (groups == 1)
      emit(b, op);
    else
      emitGroups(b, op, groups);
    rewriter.eraseOp(op);
    return success();
  }

private:
  void emit(WarpBuilder &b, SoftmaxMixOp op) const {
    KernelConfigAttr config = getKernelConfig(op);
    int64_t sharedBytes =
        config.getSharedBytes() ? config.getSharedBytes() : block.sharedBytes;
    if (config.getSchedule() == KernelSchedule::Mma &&
        !getTensorShapes(op, sharedBytes).empty())
      emitMixOnTensorCores(b, op, config.getRows(), sharedBytes);
    else
      emitMixOnFloatUnits(b, op);
  }

  /// for each group: the op with the group's columns of values and results. All
  /// write the same log-sum-exps.
  void emitGroups(WarpBuilder &b, SoftmaxMixOp op, int64_t groups) const {
    int64_t columns = cast<MemRefType>(op.getV().getType()).getShape().back();
    int64_t width = columns / groups;
    auto mixColumns = [&](Value first) {
      IRMapping mapping;
      mapping.map(op.getV(), takeColumns(b, op.getV(), first, width));
      mapping.map(op.getMixedInit(),
                  takeColumns(b, op.getMixedInit(), first, width));
      auto group = cast<SoftmaxMixOp>(b.clone(*op, mapping));
      emit(b, group);
      group.erase();
    };
    // Registers: offsets that vary take some.
    if (groups == 2) {
      mixColumns(b.index(0));
      mixColumns(b.index(width));
    } else {
      b.loop(b.index(0), b.index(columns), width, mixColumns);
    }
  }

  BlockShape block;
};
} // namespace

/// Why no other op of the block can go on with what the kernel computes in the
/// shape `shape`; empty if one can, or none needs to.
static std::string whyOwnLoop(SoftmaxMixOp op, MixShape shape,
                              BlockShape block) {
  if (shape.numThreads != kMixThreads)
    return "its warpgroups give registers to each other";
  if (shape.sharedBytes == 0)
    return "its kernel takes the columns of the values in groups";
  int64_t bytes = shape.sharedBytes +
                  shape.tileRows * 4 * getShaped(op.getV()).getShape().back();
  if (bytes <= block.sharedBytes)
    return "";
  return llvm::formatv("a block would need {0} bytes of workgroup memory, and "
                       "has {1}",
                       bytes, block.sharedBytes);
}

/// Whether an op of the dialect reads what `op` mixes, row by row.
static bool feedsRows(SoftmaxMixOp op) {
  if (!op.getV() || op->getNumResults() == 0)
    return false;
  return llvm::any_of(op->getResult(0).getUsers(), [](Operation *user) {
    if (isa<tensor::CollapseShapeOp>(user) && user->hasOneUse())
      user = *user->user_begin();
    auto structured = dyn_cast<MoEStructuredOpInterface>(user);
    return structured && structured.getNumLeadingDims() > 0;
  });
}

static SmallVector<KernelConfigAttr> getConfigs(SoftmaxMixOp op,
                                                BlockShape block) {
  SmallVector<KernelConfigAttr> configs;
  bool feeds = feedsRows(op);
  auto add = [&](KernelSchedule schedule, MixShape shape) {
    std::string reason = feeds ? whyOwnLoop(op, shape, block) : "";
    // The user may have expected one kernel.
    if (configs.empty() && !reason.empty())
      remark::missed(op.getLoc(), remark::RemarkOpts::name("SelectKernelConfig")
                                      .category("moe-select-kernel-config"))
          << (op->getName().getStringRef() +
              " does not share its loop with what reads its rows")
                 .str()
          << remark::reason("{0}", reason);
    configs.push_back(KernelConfigAttr::get(
        op.getContext(), shape.tileRows, shape.numThreads, schedule,
        feeds && reason.empty() ? KernelLoop::Shared : KernelLoop::Own,
        shape.sharedBytes));
  };
  if (block.hasWgmma)
    for (MixShape shape : getWarpgroupShapes(op, block.sharedBytes))
      add(KernelSchedule::Wgmma, shape);
  SmallVector<MixShape> shapes = getTensorShapes(op, block.sharedBytes);
  MixShape plain = getFloatShape(op);
  // Groups of columns plan for themselves.
  if (hasTensorTypes(op) &&
      getNumColumnGroups(op, getMostColumns(op, block)) > 1)
    shapes = {MixShape{plain.numThreads,
                       shapes.empty() ? plain.tileRows : shapes[0].tileRows,
                       /*sharedBytes=*/0}};
  for (MixShape shape : shapes)
    add(KernelSchedule::Mma, shape);
  add(KernelSchedule::Float, plain);
  return configs;
}

void mlir::moe::addSoftmaxMixFacts(KernelFacts &facts, BlockShape block) {
  facts.addForms<SoftmaxMixOp>(
      hasThreadKernel,
      "a static number of columns of the values, in at most 16 equal "
      "groups of at most 256; else memory grows with the queries "
      "times the keys: pad the values with zeros");
  // A kernel that reads all keys for each tile wants tiles as large as its
  // registers.
  facts.addConfigs<SoftmaxMixOp>(
      [=](SoftmaxMixOp op) { return getConfigs(op, block); });
}

void mlir::moe::populateSoftmaxMixToThreadsPatterns(RewritePatternSet &patterns,
                                                    BlockShape block) {
  patterns.add<SoftmaxMixToThreads>(patterns.getContext(), block);
}
