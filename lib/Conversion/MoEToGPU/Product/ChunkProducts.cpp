//===- ChunkProducts.cpp - Products of chunks, and their sums -------------===//

#include "ChunkProducts.h"

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

namespace {
/// A block of the first loop.
class ChunkProducts {
public:
  ChunkProducts(WarpBuilder &b, linalg::GenericOp op);
  void emit();

private:
  void startCopies();
  void multiply(int64_t chunk);
  void store(int64_t chunk, ValueRange products);

  WarpBuilder &b;
  Value h, w, out;
  /// Of the block, and of a warp.
  int64_t chunks, experts, warpExperts;
  int64_t stageBytes;
  Value lane, numTokens, stages;
  /// The first token and expert of the warp.
  Value warpToken, warpExpert;
};
} // namespace

ChunkProducts::ChunkProducts(WarpBuilder &b, linalg::GenericOp op)
    : b(b), h(op.getInputs()[0]), w(op.getInputs()[1]), out(op.getOutputs()[0]),
      lane(b.lane()) {
  ArrayRef<int64_t> shape = cast<MemRefType>(w.getType()).getShape();
  experts = shape[0];
  chunks = shape[1];
  warpExperts = experts / kChunkExpertWarps;
  stageBytes = (kChunkTokens + experts) * kChunkBytes;
  numTokens = memref::DimOp::create(b, h, b.index(0));
  stages = b.reserveShared(chunks * stageBytes);
  Value warp = b.div(b.thread(), kWarpSize);
  warpToken = b.mul(b.div(warp, kChunkExpertWarps), b.i32(16));
  warpExpert = b.mul(b.rem(warp, kChunkExpertWarps), b.i32(warpExperts));
}

/// Everything is on its way before anything is multiplied.
void ChunkProducts::startCopies() {
  ChunkCopies copies{b, chunks * kChunk, b.thread(), kChunkThreads};
  Value zero = b.index(0), last = b.sub(numTokens, b.index(1));
  auto getToken = [&](Value place) -> ChunkCopies::Row {
    Value token = b.toIndex(place);
    return {b.addressOf(h, {b.minSigned(token, last), zero, zero}),
            /*offset=*/{}, b.less(token, numTokens)};
  };
  auto getExpert = [&](Value place) -> ChunkCopies::Row {
    return {b.addressOf(w, {b.toIndex(place), zero, zero}), /*offset=*/{},
            b.boolean(true)};
  };
  SmallVector<ChunkCopies::Row> tokens = copies.getRows(kChunkTokens, getToken);
  SmallVector<ChunkCopies::Row> weights = copies.getRows(experts, getExpert);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    Value stage = b.at(stages, chunk * stageBytes);
    copies.copy(tokens, stage, b.i32(chunk));
    copies.copy(weights, b.at(stage, kChunkTokens * kChunkBytes), b.i32(chunk));
    b.commitCopies();
  }
}

/// Each token and expert of the lane's fragments: two neighbouring experts at a
/// time.
void ChunkProducts::store(int64_t chunk, ValueRange products) {
  Type pair = VectorType::get({2}, b.getF32Type());
  Value laneExpert = b.add(warpExpert, b.mul(b.rem(lane, 4), b.i32(2)));
  for (int64_t half = 0; half < 2; ++half) {
    Value token =
        b.toIndex(b.add(b.add(warpToken, b.div(lane, 4)), b.i32(8 * half)));
    b.ifThen(b.less(token, numTokens), [&] {
      Value place =
          b.addressOf(out, {token, b.index(chunk), b.toIndex(laneExpert)});
      for (int64_t fragment = 0; fragment < warpExperts / 8; ++fragment) {
        Value both = vector::FromElementsOp::create(
            b, pair, products.slice(4 * fragment + 2 * half, 2));
        b.store(both, b.at(place, 8 * 4 * fragment), /*alignment=*/8);
      }
    });
  }
}

void ChunkProducts::multiply(int64_t chunk) {
  b.waitForCopies(chunks - 1 - chunk);
  b.barrier();
  Value tokens = b.at(stages, chunk * stageBytes);
  Value weights = b.at(tokens, kChunkTokens * kChunkBytes);
  auto loadLeft = [&](int64_t, int64_t step) {
    return b.loadLeft(tokens, warpToken, b.i32(2 * step), kChunkBytes);
  };
  auto loadRight = [&](int64_t pair, int64_t step) {
    return b.loadRight(weights, warpExpert, b.i32(2 * step), kChunkBytes,
                       pair * 16 * kChunkBytes);
  };
  SmallVector<Value> zeros(warpExperts / 2, b.f32(0.0));
  store(chunk,
        addChunkProducts(b, getElementTypeOrSelf(h.getType()), /*numLeft=*/1,
                         loadLeft, warpExperts / 16, loadRight, zeros));
}

void ChunkProducts::emit() {
  startCopies();
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    multiply(chunk);
}

namespace {
struct ChunkProductsToThreads : OpRewritePattern<linalg::GenericOp> {
  ChunkProductsToThreads(MLIRContext *context)
      : OpRewritePattern(context, /*benefit=*/3) {}

  LogicalResult matchAndRewrite(linalg::GenericOp op,
                                PatternRewriter &rewriter) const override {
    if (!hasSchedule(op, KernelSchedule::ChunkProducts))
      return rewriter.notifyMatchFailure(op, "expected products of chunks");
    WarpBuilder b(op.getLoc(), rewriter);
    ChunkProducts(b, op).emit();
    rewriter.eraseOp(op);
    return success();
  }
};
} // namespace

//===----------------------------------------------------------------------===//
// Sums
//===----------------------------------------------------------------------===//

/// Chunks whose loads are in flight together.
static constexpr int64_t kChunksAtATime = 56;

namespace {
/// Each thread adds up two neighbouring experts of a token at a time.
struct ChunkSumsToThreads : OpRewritePattern<linalg::GenericOp> {
  ChunkSumsToThreads(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context, /*benefit=*/3), block(block) {}

  LogicalResult matchAndRewrite(linalg::GenericOp op,
                                PatternRewriter &rewriter) const override {
    if (!hasSchedule(op, KernelSchedule::ChunkSums))
      return rewriter.notifyMatchFailure(op, "expected sums of chunks");
    WarpBuilder b(op.getLoc(), rewriter);
    Value sums = op.getInputs()[0], z = op.getOutputs()[0];
    ArrayRef<int64_t> shape = cast<MemRefType>(sums.getType()).getShape();
    int64_t pairs = shape[2] / 2;
    Value count =
        b.mul(memref::DimOp::create(b, z, b.index(0)), b.index(pairs));
    Workers workers = Workers::ofBlock(b, block);
    b.loop(workers.thread, count, workers.count, [&](Value item) {
      Value row = b.op<arith::DivUIOp>(item, b.index(pairs));
      Value expert =
          b.mul(b.op<arith::RemUIOp>(item, b.index(pairs)), b.index(2));
      Value place = b.addressOf(sums, {row, b.index(0), expert});
      SmallVector<Value> totals = addChunks(b, place, shape[1], 4 * shape[2]);
      for (int64_t i = 0; i < 2; ++i) {
        Value position = b.add(expert, b.index(i)), total = totals[i];
        if (op.getNumDpsInputs() > 1)
          total = b.add(total, b.loadF32(op.getInputs()[1], position));
        memref::StoreOp::create(b, total, z, ValueRange{row, position});
      }
    });
    rewriter.eraseOp(op);
    return success();
  }

private:
  /// Adds pairs of f32 that lie `distance` bytes apart to zeros, in order.
  static SmallVector<Value> addChunks(WarpBuilder &b, Value place,
                                      int64_t chunks, int64_t distance) {
    Type pair = VectorType::get({2}, b.getF32Type());
    auto add = [&](Value first, int64_t number, ValueRange old) {
      SmallVector<Value> loaded, next(old);
      for (int64_t i = 0; i < number; ++i)
        loaded.push_back(b.load(pair, b.at(first, i * distance), 8));
      for (Value value : loaded)
        for (int64_t i = 0; i < 2; ++i)
          next[i] = b.add(next[i], vector::ExtractOp::create(b, value, i));
      return next;
    };
    int64_t rest = chunks % kChunksAtATime, whole = chunks - rest;
    SmallVector<Value> totals = b.loop(
        b.index(0), b.index(whole), kChunksAtATime,
        ValueRange{b.f32(0.0), b.f32(0.0)}, [&](Value chunk, ValueRange old) {
          Value offset = b.mul(b.toI32(chunk), b.i32(distance));
          return add(b.at(place, offset), kChunksAtATime, old);
        });
    return add(b.at(place, whole * distance), rest, totals);
  }

  BlockShape block;
};
} // namespace

void mlir::moe::populateChunkProductToThreadsPatterns(
    RewritePatternSet &patterns, BlockShape block) {
  patterns.add<ChunkProductsToThreads>(patterns.getContext());
  patterns.add<ChunkSumsToThreads>(patterns.getContext(), block);
}
