//===- SoftmaxMix.cpp - softmax_mix to threads ----------------------------===//

#include "SoftmaxMix.h"
#include "Schedules.h"
#include "SoftmaxMixCopies.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

using namespace mlir;
using namespace mlir::moe;

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

/// Calls `emit` with the op, or with one op for each of `groups` groups of its
/// columns of values and results. All groups write the same log-sum-exps.
static void forEachColumnGroup(WarpBuilder &b, SoftmaxMixOp op, int64_t groups,
                               function_ref<void(SoftmaxMixOp)> emit) {
  if (groups == 1)
    return emit(op);
  int64_t columns = cast<MemRefType>(op.getV().getType()).getShape().back();
  int64_t width = columns / groups;
  auto mixColumns = [&](Value first) {
    IRMapping mapping;
    mapping.map(op.getV(), takeColumns(b, op.getV(), first, width));
    mapping.map(op.getMixedInit(),
                takeColumns(b, op.getMixedInit(), first, width));
    auto group = cast<SoftmaxMixOp>(b.clone(*op, mapping));
    emit(group);
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

static KernelConfigAttr makeConfig(SoftmaxMixOp op, KernelSchedule schedule,
                                   MixShape shape, BlockShape block) {
  bool isShared = feedsRows(op) && whyOwnLoop(op, shape, block).empty();
  return KernelConfigAttr::get(
      op.getContext(), shape.tileRows, shape.numThreads, schedule,
      isShared ? KernelLoop::Shared : KernelLoop::Own, shape.sharedBytes);
}

static SmallVector<KernelChoice<SoftmaxMixOp>>
getWarpgroupChoices(SoftmaxMixOp op, BlockShape block) {
  if (!block.hasWgmma)
    return {};
  return llvm::map_to_vector(
      planMixOnWarpgroups(op, block.sharedBytes), [&](const MixPlan &plan) {
        return KernelChoice<SoftmaxMixOp>{
            makeConfig(op, KernelSchedule::Wgmma, plan.shape, block),
            plan.emit};
      });
}

static constexpr StringLiteral kWgmmaRequirement =
    "queries and keys of one 16-bit type, a multiple of 8 features that fit "
    "into shared memory for 64 queries, and up to 256 columns of the values, "
    "on a chip with wgmma";

/// The user may have expected the fastest kernel of the chip.
static void reportWithoutWgmma(SoftmaxMixOp op, BlockShape block) {
  if (!block.hasWgmma || !getWarpgroupChoices(op, block).empty())
    return;
  remark::missed(op.getLoc(), remark::RemarkOpts::name("Wgmma").category(
                                  "convert-moe-to-gpu"))
      << (op->getName().getStringRef() + " runs without wgmma").str()
      << remark::reason("its kernel expects {0}", kWgmmaRequirement);
}

/// Takes the columns of the values in groups, each by `plan`.
static KernelChoice<SoftmaxMixOp> chooseGroups(SoftmaxMixOp op,
                                               KernelSchedule schedule,
                                               const MixPlan &plan,
                                               BlockShape block) {
  int64_t groups = getNumColumnGroups(op, getMostColumns(op, block));
  return {makeConfig(op, schedule, plan.shape, block),
          [=](WarpBuilder &b, SoftmaxMixOp op) {
            reportWithoutWgmma(op, block);
            forEachColumnGroup(b, op, groups, [&](SoftmaxMixOp group) {
              plan.emit(b, group);
            });
          }};
}

/// The plan for `columns` columns of the values, of which the kernel takes
/// `groups` groups one after the other: that of no more rows than all columns
/// would have.
static SmallVector<MixPlan> planGroups(SoftmaxMixOp op, int64_t columns,
                                       int64_t groups, BlockShape block) {
  SmallVector<MixPlan> whole =
      planMixOnTensorCores(op, columns, block.sharedBytes);
  SmallVector<MixPlan> plans =
      planMixOnTensorCores(op, columns / groups, block.sharedBytes);
  if (plans.empty())
    return {};
  MixShape shape = planMixOnFloatUnits(op).shape;
  shape.sharedBytes = 0;
  if (!whole.empty())
    shape.tileRows = whole.front().shape.tileRows;
  auto *fits = llvm::find_if(plans, [&](const MixPlan &plan) {
    return plan.shape.tileRows <= shape.tileRows;
  });
  return {{shape, (fits == plans.end() ? plans.front() : *fits).emit}};
}

static SmallVector<KernelChoice<SoftmaxMixOp>>
getTensorChoices(SoftmaxMixOp op, BlockShape block) {
  if (!hasTensorTypes(op) || !hasThreadKernel(op))
    return {};
  int64_t columns = getNumColumns(op);
  int64_t groups = getNumColumnGroups(op, getMostColumns(op, block));
  SmallVector<MixPlan> plans =
      groups > 1 ? planGroups(op, columns, groups, block)
                 : planMixOnTensorCores(op, columns, block.sharedBytes);
  return llvm::map_to_vector(plans, [&](const MixPlan &plan) {
    return chooseGroups(op, KernelSchedule::Mma, plan, block);
  });
}

static SmallVector<KernelChoice<SoftmaxMixOp>>
getFloatChoices(SoftmaxMixOp op, BlockShape block) {
  if (!hasThreadKernel(op))
    return {};
  return {
      chooseGroups(op, KernelSchedule::Float, planMixOnFloatUnits(op), block)};
}

static constexpr Schedule<SoftmaxMixOp> kSchedules[] = {
    {KernelSchedule::Wgmma, kWgmmaRequirement, getWarpgroupChoices},
    {KernelSchedule::Mma,
     "queries and keys of one 16-bit type, and a multiple of 8 features whose "
     "rows start at multiples of 16 bytes",
     getTensorChoices},
    {KernelSchedule::Float,
     "a static number of columns of the values, in at most 16 equal groups of "
     "at most 256",
     getFloatChoices},
};

ArrayRef<Schedule<SoftmaxMixOp>> mlir::moe::getSoftmaxMixSchedules() {
  return kSchedules;
}

/// The user may have expected one kernel.
static void reportOwnLoop(SoftmaxMixOp op, KernelConfigAttr best,
                          BlockShape block) {
  if (!feedsRows(op) || best.getLoop() == KernelLoop::Shared)
    return;
  MixShape shape{best.getThreads(), best.getRows(), best.getSharedBytes()};
  remark::missed(op.getLoc(), remark::RemarkOpts::name("SelectKernelConfig")
                                  .category("moe-select-kernel-config"))
      << (op->getName().getStringRef() +
          " does not share its loop with what reads its rows")
             .str()
      << remark::reason("{0}", whyOwnLoop(op, shape, block));
}

void mlir::moe::addSoftmaxMixFacts(KernelFacts &facts, BlockShape block) {
  facts.addForms<SoftmaxMixOp>(
      hasThreadKernel,
      "a static number of columns of the values, in at most 16 equal "
      "groups of at most 256; else memory grows with the queries "
      "times the keys: pad the values with zeros");
  // A kernel that reads all keys for each tile wants tiles as large as its
  // registers.
  facts.addConfigs<SoftmaxMixOp>([=](SoftmaxMixOp op) {
    SmallVector<KernelConfigAttr> configs =
        getConfigs(getSoftmaxMixSchedules(), op, block);
    reportOwnLoop(op, configs.front(), block);
    return configs;
  });
}

void mlir::moe::populateSoftmaxMixToThreadsPatterns(RewritePatternSet &patterns,
                                                    BlockShape block) {
  patterns.add<ScheduleToThreads<SoftmaxMixOp>>(
      patterns.getContext(), getSoftmaxMixSchedules(), block);
}
