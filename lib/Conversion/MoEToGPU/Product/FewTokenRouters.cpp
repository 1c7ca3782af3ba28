//===- FewTokenRouters.cpp - Routers of few tokens on all blocks ----------===//
//
// A loop over tiles of tokens,
//
//   for a tile of tokens: logits = h w^T (all features, all experts); select
//
// of a router of the schedule mma_split gets two loops beside it, which run
// instead of it up to kFewTokens tokens:
//
//   for tokens, features, experts   a block multiplies 32 tokens by a part of
//                                   the experts, a few chunks of 64 features,
//                                   all of which are on their way at once, and
//                                   leaves the sum of each chunk in
//                                   sums[token, chunk, expert]
//   for a token                     logits = sums of the chunks, in order;
//                                   select
//
// The sums of chunks and the order in which they are added are those of
// RowProducts.cpp, so that a token gets the same bits however many there are.
// What blocks of the two loops compute are linalg ops of the schedules
// chunk_products and chunk_sums (ChunkProducts.cpp). Unlike others of their
// kind they overwrite their output.
//
// A loop that has no iteration is no launch: which loops run the host sees from
// the number of tokens alone.
//
//===----------------------------------------------------------------------===//

#include "FewTokenRouters.h"
#include "ChunkProducts.h"
#include "RowProducts.h"

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Experts of a warp, or several times as many.
static constexpr int64_t kWarpExperts = 16;
/// More would not leave registers for the rest.
static constexpr int64_t kMaxWarpExperts = 128;
/// Fewer chunks are one block's work in no time.
static constexpr int64_t kMinChunks = 16;
/// Blocks that a cut should give: most multiprocessors get one.
static constexpr int64_t kWantedBlocks = 96;

//===----------------------------------------------------------------------===//
// The cut
//===----------------------------------------------------------------------===//

namespace {
/// How the weights are divided among blocks.
struct Cut {
  int64_t chunks, experts;
  /// Chunks and experts of a block.
  int64_t blockChunks, blockExperts;

  int64_t getSlices() const { return chunks / blockChunks; }
  int64_t getNumBlocks() const {
    return getSlices() * (experts / blockExperts);
  }
  int64_t getStageBytes() const {
    return (kChunkTokens + blockExperts) * kChunkBytes;
  }
};
} // namespace

/// Of the cuts into equal parts that give enough blocks one of the widest parts
/// of the experts, so that few blocks read the same tokens, and of these the
/// one of the fewest blocks; else the one of the most blocks.
static std::optional<Cut> planCut(int64_t features, int64_t experts,
                                  BlockShape block) {
  std::optional<Cut> best;
  constexpr int64_t granule = kChunkExpertWarps * kWarpExperts;
  int64_t chunks = features / kChunk;
  if (features % kChunk != 0 || chunks < kMinChunks || experts % granule != 0)
    return best;
  for (int64_t parts = 1; parts <= experts / granule; ++parts)
    for (int64_t slices = 1; slices <= chunks; ++slices) {
      if (chunks % slices != 0 || experts % (granule * parts) != 0)
        continue;
      Cut cut{chunks, experts, chunks / slices, experts / parts};
      if (cut.blockExperts / kChunkExpertWarps > kMaxWarpExperts ||
          cut.blockChunks * cut.getStageBytes() > block.sharedBytes)
        continue;
      if (!best || (best->getNumBlocks() < kWantedBlocks &&
                    cut.getNumBlocks() > best->getNumBlocks()))
        best = cut;
    }
  return best;
}

static std::optional<Cut> planCut(RouterLogitsOp op, BlockShape block) {
  auto w = cast<ShapedType>(op.getWeight().getType());
  if (cast<ShapedType>(op.getH().getType()).getRank() != 2 ||
      !planRowProducts(op.getH(), op.getWeight(), /*isTransposed=*/false,
                       kChunkTokens, block))
    return std::nullopt;
  return planCut(w.getDimSize(1), w.getDimSize(0), block);
}

bool mlir::moe::hasFewTokens(RouterLogitsOp op) {
  int64_t tokens = cast<ShapedType>(op.getH().getType()).getDimSize(0);
  return !ShapedType::isDynamic(tokens) && tokens <= kFewTokens;
}

bool mlir::moe::canSplitFewTokens(RouterLogitsOp op, BlockShape block) {
  int64_t tokens = cast<ShapedType>(op.getH().getType()).getDimSize(0);
  return (ShapedType::isDynamic(tokens) || hasFewTokens(op)) &&
         planCut(op, block).has_value();
}

//===----------------------------------------------------------------------===//
// Which loops are cut
//===----------------------------------------------------------------------===//

namespace {
/// A loop over tiles of tokens, and what it reads.
struct RouterLoop {
  scf::ForallOp loop;
  RouterLogitsOp logits;
  /// All tokens.
  Value tokens;
  Cut cut;

  int64_t getStep() { return *getConstantIntValue(loop.getMixedStep()[0]); }
};
} // namespace

static bool isDefinedOutside(Value value, scf::ForallOp loop) {
  return !loop->isAncestor(value.getParentBlock()->getParentOp());
}

/// The tokens of which `loop` takes `tile`, if its tiles may have kSummedRows
/// rows: those of known tokens have as many, others say how many they have.
static Value getAllTokens(scf::ForallOp loop, Value tile) {
  std::optional<int64_t> count =
      getConstantIntValue(loop.getMixedUpperBound()[0]);
  if (count && (*count > kFewTokens ||
                cast<MemRefType>(tile.getType()).getDimSize(0) != kSummedRows))
    return {};
  if (count == 1)
    return tile;
  auto view = tile.getDefiningOp<memref::SubViewOp>();
  if (!view || view.getType().getRank() != 2 ||
      view.getType().getDimSize(1) != view.getSourceType().getDimSize(1) ||
      view.getMixedOffsets()[0] != OpFoldResult(loop.getInductionVars()[0]))
    return {};
  auto rows = dyn_cast<Value>(view.getMixedSizes()[0]);
  if (!count && !(rows && rows.getDefiningOp<affine::AffineMinOp>()))
    return {};
  return view.getSource();
}

/// `loop` if it selects in the logits of tiles of tokens and does nothing else
/// that a block of few rows could not do.
static std::optional<RouterLoop> matchLoop(scf::ForallOp loop,
                                           BlockShape block) {
  RouterLogitsOp logits;
  for (auto op : loop.getBody()->getOps<MoEStructuredOpInterface>()) {
    auto found = dyn_cast<RouterLogitsOp>(op.getOperation());
    if (found ? bool(logits) : !isa<TopKRenormOp>(op.getOperation()))
      return std::nullopt;
    logits = found ? found : logits;
  }
  if (!logits || !hasSchedule(logits, KernelSchedule::MmaSplit) ||
      loop.getRank() != 1 ||
      !isConstantIntValue(loop.getMixedLowerBound()[0], 0) ||
      !getConstantIntValue(loop.getMixedStep()[0]) ||
      !isDefinedOutside(logits.getWeight(), loop))
    return std::nullopt;
  std::optional<Cut> cut = planCut(logits, block);
  Value tokens = getAllTokens(loop, logits.getH());
  if (!cut || !tokens || !isDefinedOutside(tokens, loop))
    return std::nullopt;
  return RouterLoop{loop, logits, tokens, *cut};
}

//===----------------------------------------------------------------------===//
// Loops
//===----------------------------------------------------------------------===//

static AffineMap getMap(ThreadBuilder &b, ArrayRef<unsigned> dims,
                        unsigned numDims) {
  return AffineMap::getMultiDimMapWithTargets(numDims, dims, b.getContext());
}

/// Tiles of `loop` that have at most `old` rows get at most `rows`.
static void useRows(scf::ForallOp loop, int64_t old, int64_t rows) {
  MLIRContext *context = loop.getContext();
  auto replaceBound = [&](AffineExpr expr) {
    return expr == getAffineConstantExpr(old, context)
               ? getAffineConstantExpr(rows, context)
               : expr;
  };
  loop.walk([&](affine::AffineMinOp op) {
    AffineMap map = op.getMap();
    if (llvm::is_contained(op.getOperands(), loop.getInductionVars()[0]))
      op.setMap(AffineMap::get(
          map.getNumDims(), map.getNumSymbols(),
          llvm::map_to_vector(map.getResults(), replaceBound), context));
  });
}

/// Rows of chunks: [rows, features] as [rows, chunks, features of one].
static Value splitIntoChunks(ThreadBuilder &b, Value rows, int64_t chunks) {
  auto type = cast<MemRefType>(rows.getType());
  OpFoldResult count = memref::getMixedSize(b, b.getLoc(), rows, 0);
  SmallVector<OpFoldResult> sizes{count, b.getIndexAttr(chunks),
                                  b.getIndexAttr(kChunk)};
  return memref::ExpandShapeOp::create(
      b, ArrayRef<int64_t>{type.getDimSize(0), chunks, kChunk}, rows,
      ArrayRef<ReassociationIndices>{{0}, {1, 2}}, sizes);
}

static Value cutOut(ThreadBuilder &b, Value buffer,
                    ArrayRef<OpFoldResult> offsets,
                    ArrayRef<OpFoldResult> sizes) {
  SmallVector<OpFoldResult> strides(offsets.size(), b.getIndexAttr(1));
  return memref::SubViewOp::create(b, buffer, offsets, sizes, strides);
}

static void setSchedule(Operation *op, int64_t rows, int64_t threads,
                        KernelSchedule schedule) {
  op->setAttr(kKernelConfigAttrName,
              KernelConfigAttr::get(op->getContext(), rows, threads, schedule,
                                    KernelLoop::Shared, /*shared_bytes=*/0));
}

/// The loop whose blocks leave the products of chunks in `sums`.
static void createProductLoop(ThreadBuilder &b, RouterLoop router, Value tokens,
                              Value sums) {
  OpBuilder::InsertionGuard guard(b);
  const Cut &cut = router.cut;
  MLIRContext *context = b.getContext();
  AffineExpr count = b.getAffineSymbolExpr(0), id = b.getAffineDimExpr(0);
  auto apply = [&](AffineExpr expr, Value operand) {
    return affine::makeComposedFoldedAffineApply(b, b.getLoc(), expr,
                                                 getAsOpFoldResult(operand));
  };
  Value block = createGrid(
      b, apply(count.ceilDiv(kChunkTokens) * cut.getNumBlocks(), tokens));

  int64_t parts = cut.experts / cut.blockExperts;
  OpFoldResult firstToken =
      apply(id.floorDiv(cut.getNumBlocks()) * kChunkTokens, block);
  AffineExpr slice = (id % cut.getNumBlocks()).floorDiv(parts);
  OpFoldResult firstFeature = apply(slice * (cut.blockChunks * kChunk), block);
  OpFoldResult firstChunk = apply(slice * cut.blockChunks, block);
  OpFoldResult firstExpert = apply(id % parts * cut.blockExperts, block);
  auto bound = AffineMap::get(
      1, 1, {count - id, getAffineConstantExpr(kChunkTokens, context)},
      context);
  OpFoldResult numTokens =
      affine::AffineMinOp::create(
          b, bound,
          ValueRange{getValueOrCreateConstantIndexOp(b, b.getLoc(), firstToken),
                     tokens})
          .getResult();

  OpFoldResult features = b.getIndexAttr(cut.blockChunks * kChunk);
  OpFoldResult experts = b.getIndexAttr(cut.blockExperts);
  Value h = cutOut(b, router.tokens, {firstToken, firstFeature},
                   {numTokens, features});
  Value w = cutOut(b, router.logits.getWeight(), {firstExpert, firstFeature},
                   {experts, features});
  Value out = cutOut(b, sums, {firstToken, firstChunk, firstExpert},
                     {numTokens, b.getIndexAttr(cut.blockChunks), experts});
  h = splitIntoChunks(b, h, cut.blockChunks);
  w = splitIntoChunks(b, w, cut.blockChunks);
  enum : unsigned { n, c, e, d };
  SmallVector<utils::IteratorType> iterators(3, utils::IteratorType::parallel);
  iterators.push_back(utils::IteratorType::reduction);
  auto op = linalg::GenericOp::create(
      b, ValueRange{h, w}, out,
      ArrayRef{getMap(b, {n, c, d}, 4), getMap(b, {e, c, d}, 4),
               getMap(b, {n, c, e}, 4)},
      iterators, [](OpBuilder &builder, Location loc, ValueRange values) {
        ThreadBuilder body(loc, builder);
        Type f32 = body.getF32Type();
        Value product = body.mul(arith::ExtFOp::create(body, f32, values[0]),
                                 arith::ExtFOp::create(body, f32, values[1]));
        linalg::YieldOp::create(body, body.add(values[2], product));
      });
  setSchedule(op, kChunkTokens, kChunkThreads, KernelSchedule::ChunkProducts);
}

/// The loop over tokens that adds up and selects: as `router`, but for where
/// the logits come from.
static void createSumLoop(ThreadBuilder &b, RouterLoop router, Value tokens,
                          Value sums) {
  OpBuilder::InsertionGuard guard(b);
  OpFoldResult zero = b.getIndexAttr(0);
  auto loop = scf::ForallOp::create(b, zero, getAsOpFoldResult(tokens),
                                    OpFoldResult(b.getIndexAttr(kSummedRows)),
                                    ValueRange(), router.loop.getMapping());
  IRMapping mapping;
  mapping.map(router.loop.getInductionVars(), loop.getInductionVars());
  b.setInsertionPointToStart(loop.getBody());
  for (Operation &op : router.loop.getBody()->without_terminator())
    b.clone(op, mapping);
  useRows(loop, router.getStep(), kSummedRows);

  auto logits =
      cast<RouterLogitsOp>(mapping.lookup(router.logits.getOperation()));
  b.setInsertionPoint(logits);
  OpFoldResult rows = memref::getMixedSize(b, b.getLoc(), logits.getH(), 0);
  SmallVector<Value> inputs{cutOut(b, sums,
                                   {loop.getInductionVars()[0], zero, zero},
                                   {rows, b.getIndexAttr(router.cut.chunks),
                                    b.getIndexAttr(router.cut.experts)})};
  enum : unsigned { n, e, c };
  SmallVector<AffineMap> maps{getMap(b, {n, c, e}, 3)};
  if (Value bias = logits.getBias()) {
    inputs.push_back(bias);
    maps.push_back(getMap(b, {e}, 3));
  }
  maps.push_back(getMap(b, {n, e}, 3));
  SmallVector<utils::IteratorType> iterators(2, utils::IteratorType::parallel);
  iterators.push_back(utils::IteratorType::reduction);
  auto op = linalg::GenericOp::create(
      b, inputs, logits.getOuts()[0], maps, iterators,
      [](OpBuilder &builder, Location loc, ValueRange values) {
        ThreadBuilder body(loc, builder);
        linalg::YieldOp::create(body, body.add(values.back(), values[0]));
      });
  setSchedule(op, kSummedRows, /*threads=*/0, KernelSchedule::ChunkSums);
  logits->erase();
}

/// `tokens` where they are few, or where they are not; 0 otherwise.
static Value countIf(ThreadBuilder &b, Value tokens, bool few) {
  AffineExpr isMany =
      isMore(b.getAffineDimExpr(0), b.getAffineConstantExpr(kFewTokens));
  Value factor =
      affine::AffineApplyOp::create(b, few ? 1 - isMany : isMany, tokens);
  return b.mul(tokens, factor);
}

static void cutLoop(RouterLoop router) {
  ImplicitLocOpBuilder builder(router.loop.getLoc(), router.loop);
  ThreadBuilder b(router.loop.getLoc(), builder);
  OpFoldResult bound = router.loop.getMixedUpperBound()[0];
  Value tokens = getValueOrCreateConstantIndexOp(b, b.getLoc(), bound);
  bool isKnown = isa<Attribute>(bound);
  Value few = tokens;
  if (!isKnown) {
    few = countIf(b, tokens, /*few=*/true);
    router.loop.getDynamicUpperBoundMutable().assign(
        countIf(b, tokens, /*few=*/false));
  }
  SmallVector<int64_t> shape{
      getConstantIntValue(bound).value_or(ShapedType::kDynamic),
      router.cut.chunks, router.cut.experts};
  Value sums =
      memref::AllocOp::create(b, MemRefType::get(shape, b.getF32Type()),
                              isKnown ? ValueRange() : ValueRange(few));
  createProductLoop(b, router, few, sums);
  createSumLoop(b, router, few, sums);
  if (isKnown)
    router.loop.erase();
}

/// The user may have expected the schedule, or asked for it.
static void reportUncut(scf::ForallOp loop) {
  for (auto op : loop.getOps<RouterLogitsOp>())
    if (hasSchedule(op, KernelSchedule::MmaSplit))
      remark::missed(op.getLoc(), remark::RemarkOpts::name("FewTokens")
                                      .category("moe-distribute-to-grid"))
          << (op->getName().getStringRef() +
              " is not cut into chunks for few tokens")
                 .str()
          << remark::reason(
                 "expected blocks of {0} threads, and a loop over tiles of the "
                 "tokens of one buffer that does nothing but select in the "
                 "logits",
                 kChunkThreads);
}

void mlir::moe::cutRoutersOfFewTokens(func::FuncOp function, BlockShape block) {
  for (auto loop : llvm::to_vector(function.getOps<scf::ForallOp>())) {
    if (std::optional<RouterLoop> router = matchLoop(loop, block))
      cutLoop(*router);
    else
      reportUncut(loop);
  }
}
