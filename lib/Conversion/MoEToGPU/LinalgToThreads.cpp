//===- LinalgToThreads.cpp - Loop nests of linalg to threads --------------===//
//
// Any linalg op on buffers, by its maps, its iterators and its body alone. The
// points of the parallel dims are dealt out in turns:
//
//   no reduction               a thread a point
//   a reduction that combines  a warp a point: lane l folds the terms l,
//                              l + 32, ... into a neutral start, then the
//                              lanes' results are combined pairwise, then
//                              what the output held
//   any other reduction        a thread a point, the terms in their order
//
// The order of a sum depends on the sizes of the op only, not on the number of
// threads, nor on where a tile lies.
//
// A reduction over many terms into few points would occupy few warps; it is cut
// into parts, one a block, whose results a second kernel combines in order.
//
//===----------------------------------------------------------------------===//

#include "Emit/ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Workers
//===----------------------------------------------------------------------===//

Workers Workers::ofBlock(ThreadBuilder &b, BlockShape block) {
  return {gpu::ThreadIdOp::create(b, gpu::Dimension::x), block.numThreads};
}

Workers Workers::ofGrid(ThreadBuilder &b, BlockShape block, Value blockId,
                        int64_t numBlocks) {
  Value thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  return {b.add(b.mul(blockId, b.index(block.numThreads)), thread),
          numBlocks * block.numThreads};
}

//===----------------------------------------------------------------------===//
// Combiners
//===----------------------------------------------------------------------===//

/// The op that folds a term into output `number`: the body computes
///   acc' = acc op term    or    acc' = condition ? acc op term : acc
/// where neither the term nor the condition looks at acc, and the op is
/// associative with a neutral element. Null if it does anything else.
static Operation *getCombiner(linalg::LinalgOp op, unsigned number) {
  Value acc = op.getRegionOutputArgs()[number];
  Operation *yield = op.getBlock()->getTerminator();
  Operation *combiner = yield->getOperand(number).getDefiningOp();
  unsigned uses = 1;
  if (auto select = dyn_cast_or_null<arith::SelectOp>(combiner)) {
    bool keepsIfTrue = select.getTrueValue() == acc;
    if ((!keepsIfTrue && select.getFalseValue() != acc) || !select->hasOneUse())
      return nullptr;
    combiner = (keepsIfTrue ? select.getFalseValue() : select.getTrueValue())
                   .getDefiningOp();
    ++uses;
  }
  if (!combiner || combiner->getBlock() != op.getBlock() ||
      combiner->getNumOperands() != 2 || !combiner->hasOneUse() ||
      !llvm::is_contained(combiner->getOperands(), acc) ||
      llvm::range_size(acc.getUses()) != uses ||
      !arith::getNeutralElement(combiner))
    return nullptr;
  return combiner;
}

static SmallVector<Operation *> getCombiners(linalg::LinalgOp op) {
  SmallVector<Operation *> combiners;
  for (unsigned number = 0; number < op.getNumDpsInits(); ++number)
    combiners.push_back(getCombiner(op, number));
  return combiners;
}

bool mlir::moe::hasCombinableReduction(linalg::LinalgOp op) {
  return op.getNumReductionLoops() > 0 && op.hasPureBufferSemantics() &&
         !llvm::is_contained(getCombiners(op), nullptr);
}

/// lhs combiner rhs.
static Value combine(ThreadBuilder &b, Operation *combiner, Value lhs,
                     Value rhs) {
  OperationState state(b.getLoc(), combiner->getName(), {lhs, rhs},
                       combiner->getResultTypes(), combiner->getAttrs());
  return b.create(state)->getResult(0);
}

/// shuffleXor for any scalar: integers narrower than 32 bits travel in 32, and
/// 16-bit floats as their bits.
static Value exchange(ThreadBuilder &b, Value value, int64_t distance) {
  Type type = value.getType();
  if (type.isIndex()) {
    Value wide = arith::IndexCastOp::create(b, b.getI64Type(), value);
    return arith::IndexCastOp::create(b, type, b.shuffleXor(wide, distance));
  }
  unsigned width = type.getIntOrFloatBitWidth();
  if (width >= 32)
    return b.shuffleXor(value, distance);
  Type bits = b.getIntegerType(width);
  Value wide =
      isa<FloatType>(type) ? arith::BitcastOp::create(b, bits, value) : value;
  wide = arith::ExtUIOp::create(b, b.getI32Type(), wide);
  wide = arith::TruncIOp::create(b, bits, b.shuffleXor(wide, distance));
  return isa<FloatType>(type) ? arith::BitcastOp::create(b, type, wide) : wide;
}

//===----------------------------------------------------------------------===//
// Nest
//===----------------------------------------------------------------------===//

namespace {
/// The iteration space of an op, its parallel dims and its reduction dims each
/// in one flat range.
class Nest {
public:
  Nest(ThreadBuilder &b, linalg::LinalgOp op);

  Value getNumPoints(ThreadBuilder &b) { return flatSize(b, parallel); }
  Value getNumTerms(ThreadBuilder &b) { return flatSize(b, reduction); }
  bool hasReduction() const { return !reduction.empty(); }
  /// Whether a warp is worth its lanes.
  bool hasManyTerms();

  /// The iteration of a point; the reduction dims are unset.
  SmallVector<Value> getPoint(ThreadBuilder &b, Value flat) {
    SmallVector<Value> iteration(sizes.size());
    place(b, parallel, flat, iteration);
    return iteration;
  }
  /// Folds the terms first, first + step, ... below `end` into `start`.
  SmallVector<Value> fold(ThreadBuilder &b, ArrayRef<Value> point, Value first,
                          Value end, Value step, ValueRange start);
  /// The body once, at a full iteration.
  SmallVector<Value> runBody(ThreadBuilder &b, ArrayRef<Value> iteration,
                             ValueRange outs);
  /// What output `number` holds at a point. Null if the body never looks at it.
  Value loadOut(ThreadBuilder &b, unsigned number, ArrayRef<Value> point);
  void storeOuts(ThreadBuilder &b, ArrayRef<Value> point, ValueRange values);
  /// Where `operand` is accessed in an iteration.
  SmallVector<Value> getIndices(ThreadBuilder &b, OpOperand &operand,
                                ArrayRef<Value> iteration);

  linalg::LinalgOp op;

private:
  Value flatSize(ThreadBuilder &b, ArrayRef<unsigned> dims);
  /// Sets `dims` of an iteration from their flat number.
  void place(ThreadBuilder &b, ArrayRef<unsigned> dims, Value flat,
             MutableArrayRef<Value> iteration);

  SmallVector<Value> sizes;
  SmallVector<unsigned> parallel, reduction;
};
} // namespace

Nest::Nest(ThreadBuilder &b, linalg::LinalgOp op) : op(op) {
  for (Range range : op.createLoopRanges(b, b.getLoc()))
    sizes.push_back(getValueOrCreateConstantIndexOp(b, b.getLoc(), range.size));
  op.getParallelDims(parallel);
  op.getReductionDims(reduction);
}

bool Nest::hasManyTerms() {
  SmallVector<int64_t> ranges = op.getStaticLoopRanges();
  int64_t terms = 1;
  for (unsigned dim : reduction) {
    if (ShapedType::isDynamic(ranges[dim]))
      return true;
    terms *= ranges[dim];
  }
  return terms >= kWarpSize;
}

Value Nest::flatSize(ThreadBuilder &b, ArrayRef<unsigned> dims) {
  Value size = b.index(1);
  for (unsigned dim : dims)
    size = b.mul(size, sizes[dim]);
  return size;
}

void Nest::place(ThreadBuilder &b, ArrayRef<unsigned> dims, Value flat,
                 MutableArrayRef<Value> iteration) {
  for (unsigned dim : llvm::reverse(dims.drop_front(dims.empty() ? 0 : 1))) {
    iteration[dim] = b.op<arith::RemUIOp>(flat, sizes[dim]);
    flat = b.op<arith::DivUIOp>(flat, sizes[dim]);
  }
  if (!dims.empty())
    iteration[dims.front()] = flat;
}

SmallVector<Value> Nest::getIndices(ThreadBuilder &b, OpOperand &operand,
                                    ArrayRef<Value> iteration) {
  SmallVector<Value> indices;
  AffineMap map = op.getMatchingIndexingMap(&operand);
  SmallVector<OpFoldResult> dims;
  // A dim that the operand is not indexed by may be unset.
  for (Value dim : iteration)
    dims.push_back(dim ? OpFoldResult(dim) : b.getIndexAttr(0));
  for (AffineExpr expr : map.getResults())
    indices.push_back(getValueOrCreateConstantIndexOp(
        b, b.getLoc(),
        affine::makeComposedFoldedAffineApply(
            b, b.getLoc(), AffineMap::get(map.getNumDims(), 0, expr), dims)));
  return indices;
}

SmallVector<Value> Nest::runBody(ThreadBuilder &b, ArrayRef<Value> iteration,
                                 ValueRange outs) {
  IRMapping mapping;
  for (OpOperand *input : op.getDpsInputOperands()) {
    BlockArgument argument = op.getMatchingBlockArgument(input);
    if (argument.use_empty())
      continue;
    mapping.map(argument,
                isa<MemRefType>(input->get().getType())
                    ? memref::LoadOp::create(b, input->get(),
                                             getIndices(b, *input, iteration))
                          .getResult()
                    : input->get());
  }
  for (auto [argument, out] : llvm::zip_equal(op.getRegionOutputArgs(), outs))
    if (out)
      mapping.map(argument, out);
  for (Operation &nested : op.getBlock()->without_terminator()) {
    if (auto index = dyn_cast<linalg::IndexOp>(nested))
      mapping.map(index.getResult(), iteration[index.getDim()]);
    else
      b.clone(nested, mapping);
  }
  return llvm::map_to_vector(
      op.getBlock()->getTerminator()->getOperands(),
      [&](Value value) { return mapping.lookupOrDefault(value); });
}

Value Nest::loadOut(ThreadBuilder &b, unsigned number, ArrayRef<Value> point) {
  OpOperand *out = op.getDpsInitOperand(number);
  if (!op.payloadUsesValueFromOperand(out))
    return {};
  return memref::LoadOp::create(b, out->get(), getIndices(b, *out, point));
}

void Nest::storeOuts(ThreadBuilder &b, ArrayRef<Value> point,
                     ValueRange values) {
  for (auto [number, value] : llvm::enumerate(values)) {
    OpOperand *out = op.getDpsInitOperand(number);
    memref::StoreOp::create(b, value, out->get(), getIndices(b, *out, point));
  }
}

SmallVector<Value> Nest::fold(ThreadBuilder &b, ArrayRef<Value> point,
                              Value first, Value end, Value step,
                              ValueRange start) {
  auto loop = scf::ForOp::create(
      b, first, end, step, start,
      [&](OpBuilder &builder, Location loc, Value term, ValueRange acc) {
        ThreadBuilder body(loc, builder);
        SmallVector<Value> iteration(point);
        place(body, reduction, term, iteration);
        scf::YieldOp::create(body, runBody(body, iteration, acc));
      });
  return llvm::to_vector_of<Value>(loop.getResults());
}

//===----------------------------------------------------------------------===//
// Points
//===----------------------------------------------------------------------===//

/// A loop over every `step`-th flat number below `count`, from `first` on;
/// `body` gets the point.
static void
forEachPoint(ThreadBuilder &b, Nest &nest, Value first, int64_t step,
             function_ref<void(ThreadBuilder &, ArrayRef<Value>)> body) {
  Value count = nest.getNumPoints(b);
  auto loop = scf::ForOp::create(b, first, count, b.index(step));
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(loop.getBody());
  body(b, nest.getPoint(b, loop.getInductionVar()));
}

/// Folds the terms [begin, end) of a point over the lanes of the warp; every
/// lane gets the results.
static SmallVector<Value> foldOverLanes(ThreadBuilder &b, Nest &nest,
                                        ArrayRef<Operation *> combiners,
                                        ArrayRef<Value> point, Value lane,
                                        Value begin, Value end) {
  SmallVector<Value> neutral;
  for (Operation *combiner : combiners)
    neutral.push_back(
        arith::ConstantOp::create(b, *arith::getNeutralElement(combiner)));
  SmallVector<Value> sums =
      nest.fold(b, point, b.add(begin, lane), end, b.index(kWarpSize), neutral);
  for (auto [sum, combiner] : llvm::zip_equal(sums, combiners))
    for (int64_t distance = 1; distance < kWarpSize; distance *= 2)
      sum = combine(b, combiner, sum, exchange(b, sum, distance));
  return sums;
}

static Value isFirstLane(ThreadBuilder &b, Value lane) {
  return b.compare(arith::CmpIPredicate::eq, lane, b.index(0));
}

/// A warp a point. `initial` is what the sums start from, if not from nothing;
/// every lane reads it, so that no lane may store before all have. `store` is
/// called in the first lane only.
static void emitWarpAPoint(
    ThreadBuilder &b, Nest &nest, ArrayRef<Operation *> combiners,
    Workers workers, Value begin, Value end,
    function_ref<SmallVector<Value>(ThreadBuilder &, ArrayRef<Value>)> initial,
    function_ref<void(ThreadBuilder &, ArrayRef<Value>, ValueRange)> store) {
  Value lane = b.op<arith::RemUIOp>(workers.thread, b.index(kWarpSize));
  Value warp = b.op<arith::DivUIOp>(workers.thread, b.index(kWarpSize));
  forEachPoint(b, nest, warp, workers.count / kWarpSize,
               [&](ThreadBuilder &b, ArrayRef<Value> point) {
                 SmallVector<Value> starts = initial(b, point);
                 SmallVector<Value> sums =
                     foldOverLanes(b, nest, combiners, point, lane, begin, end);
                 for (auto [i, start] : llvm::enumerate(starts))
                   sums[i] = combine(b, combiners[i], start, sums[i]);
                 b.syncWarp();
                 auto ifStores = scf::IfOp::create(b, isFirstLane(b, lane),
                                                   /*withElseRegion=*/false);
                 b.setInsertionPointToStart(ifStores.thenBlock());
                 store(b, point, sums);
               });
}

/// A thread a point, the terms in their order.
static void emitThreadAPoint(ThreadBuilder &b, Nest &nest, Workers workers) {
  forEachPoint(
      b, nest, workers.thread, workers.count,
      [&](ThreadBuilder &b, ArrayRef<Value> point) {
        SmallVector<Value> outs;
        for (unsigned i = 0; i < nest.op.getNumDpsInits(); ++i)
          outs.push_back(nest.loadOut(b, i, point));
        if (!nest.hasReduction()) {
          outs = nest.runBody(b, point, outs);
        } else {
          // An output that the body ignores still needs a start.
          for (auto [i, out] : llvm::enumerate(outs))
            if (!out)
              out = arith::ConstantOp::create(
                  b, b.getZeroAttr(nest.op.getRegionOutputArgs()[i].getType()));
          outs = nest.fold(b, point, b.index(0), nest.getNumTerms(b),
                           b.index(1), outs);
        }
        nest.storeOuts(b, point, outs);
      });
}

void mlir::moe::emitLinalgForThreads(ThreadBuilder &b, linalg::LinalgOp op,
                                     Workers workers) {
  Nest nest(b, op);
  if (!hasCombinableReduction(op) || !nest.hasManyTerms())
    return emitThreadAPoint(b, nest, workers);
  SmallVector<Operation *> combiners = getCombiners(op);
  emitWarpAPoint(
      b, nest, combiners, workers, b.index(0), nest.getNumTerms(b),
      [&](ThreadBuilder &b, ArrayRef<Value> point) {
        SmallVector<Value> outs;
        for (unsigned i = 0; i < op.getNumDpsInits(); ++i)
          outs.push_back(nest.loadOut(b, i, point));
        return outs;
      },
      [&](ThreadBuilder &b, ArrayRef<Value> point, ValueRange sums) {
        nest.storeOuts(b, point, sums);
      });
}

//===----------------------------------------------------------------------===//
// Parts of a reduction
//===----------------------------------------------------------------------===//

void mlir::moe::emitPartialReduction(ThreadBuilder &b, linalg::LinalgOp op,
                                     BlockShape block, Value part,
                                     int64_t numParts, ValueRange partials) {
  Nest nest(b, op);
  // Parts of equal length; the last ones may be short or empty.
  Value numTerms = nest.getNumTerms(b);
  Value length = b.op<arith::DivUIOp>(b.add(numTerms, b.index(numParts - 1)),
                                      b.index(numParts));
  Value begin = b.op<arith::MinUIOp>(b.mul(part, length), numTerms);
  Value end = b.op<arith::MinUIOp>(b.add(begin, length), numTerms);
  emitWarpAPoint(
      b, nest, getCombiners(op), Workers::ofBlock(b, block), begin, end,
      [](ThreadBuilder &, ArrayRef<Value>) { return SmallVector<Value>(); },
      [&](ThreadBuilder &b, ArrayRef<Value> point, ValueRange sums) {
        for (auto [i, sum] : llvm::enumerate(sums)) {
          SmallVector<Value> place{part};
          llvm::append_range(
              place, nest.getIndices(b, *op.getDpsInitOperand(i), point));
          memref::StoreOp::create(b, sum, partials[i], place);
        }
      });
}

void mlir::moe::emitCombineParts(ThreadBuilder &b, linalg::LinalgOp op,
                                 Workers workers, int64_t numParts,
                                 ValueRange partials) {
  Nest nest(b, op);
  SmallVector<Operation *> combiners = getCombiners(op);
  forEachPoint(
      b, nest, workers.thread, workers.count,
      [&](ThreadBuilder &b, ArrayRef<Value> point) {
        SmallVector<Value> outs;
        for (unsigned i = 0; i < op.getNumDpsInits(); ++i)
          outs.push_back(nest.loadOut(b, i, point));
        auto loop = scf::ForOp::create(
            b, b.index(0), b.index(numParts), b.index(1), outs,
            [&](OpBuilder &builder, Location loc, Value part, ValueRange acc) {
              ThreadBuilder body(loc, builder);
              SmallVector<Value> next;
              for (auto [i, sum] : llvm::enumerate(acc)) {
                SmallVector<Value> place{part};
                llvm::append_range(
                    place,
                    nest.getIndices(body, *op.getDpsInitOperand(i), point));
                Value value = memref::LoadOp::create(body, partials[i], place);
                next.push_back(combine(body, combiners[i], sum, value));
              }
              scf::YieldOp::create(body, next);
            });
        nest.storeOuts(b, point, loop.getResults());
      });
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

namespace {
struct LinalgToThreads : OpInterfaceRewritePattern<linalg::LinalgOp> {
  LinalgToThreads(MLIRContext *context, BlockShape block)
      : OpInterfaceRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(linalg::LinalgOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    ThreadBuilder b(op.getLoc(), rewriter);
    emitLinalgForThreads(b, op, Workers::ofBlock(b, block));
    rewriter.eraseOp(op);
    return success();
  }

  BlockShape block;
};
} // namespace

void mlir::moe::populateLinalgToThreadsPatterns(RewritePatternSet &patterns,
                                                BlockShape block) {
  patterns.add<LinalgToThreads>(patterns.getContext(), block);
}
