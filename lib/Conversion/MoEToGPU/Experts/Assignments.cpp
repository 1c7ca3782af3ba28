//===- Assignments.cpp - The assignments that dispatch places -------------===//

#include "Assignments.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;

/// The grid of the loop that counts is a multiple of this: whole clusters on
/// every chip.
static constexpr int64_t kBlockStep = 8;
/// Tiles that one block places sooner than two launches do.
static constexpr int64_t kTilesOfOneBlock = 2;
/// Blocks with parts, at most: each reads what all clusters have counted.
static constexpr int64_t kMaxBlocks = 256, kMaxBlocksWithoutClusters = 64;

int64_t mlir::moe::getNumExperts(DispatchOp op) {
  return cast<ShapedType>(op.getCountsInit().getType()).getDimSize(0);
}

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

AssignmentParts::AssignmentParts(ThreadBuilder &b, DispatchOp op,
                                 BlockShape block)
    : clusterSize(block.clusterBlocks) {
  assert(kBlockStep % clusterSize == 0);
  Location loc = b.getLoc();
  SmallVector<OpFoldResult> sizes{
      memref::getMixedSize(b, loc, op.getIndices(), 0),
      memref::getMixedSize(b, loc, op.getIndices(), 1)};
  AffineExpr assignments = b.getAffineSymbolExpr(0) * b.getAffineSymbolExpr(1);
  AffineExpr tiles =
      assignments.ceilDiv(kAssignmentsAtATime * block.numThreads);
  AffineExpr steps =
      (tiles + (kBlockStep - 1 - kTilesOfOneBlock)).floorDiv(kBlockStep);
  auto evaluate = [&](AffineExpr expr) {
    return affine::makeComposedFoldedAffineApply(b, loc, expr, sizes);
  };
  numBlocks = evaluate(steps * kBlockStep);
  numClusters = evaluate(steps * (kBlockStep / clusterSize));
  blocks = getValueOrCreateConstantIndexOp(b, loc, numBlocks);
  count = getValueOrCreateConstantIndexOp(b, loc, evaluate(assignments));
  int64_t most = clusterSize > 1 ? kMaxBlocks : kMaxBlocksWithoutClusters;
  used = b.op<arith::MinUIOp>(blocks, b.index(most));
}

std::pair<Value, Value> AssignmentParts::get(ThreadBuilder &b,
                                             Value number) const {
  // A single part where no block has counted. Whole warps have a part.
  return getPart(b, count, number, b.op<arith::MaxUIOp>(used, b.index(1)),
                 kWarpSize);
}

//===----------------------------------------------------------------------===//
// Assignments
//===----------------------------------------------------------------------===//

BlockOfAssignments::BlockOfAssignments(ThreadBuilder &b, DispatchOp op,
                                       BlockShape block)
    : b(b), op(op), block(block), experts(getNumExperts(op)),
      tile(kAssignmentsAtATime * block.numThreads) {
  thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  numTokens = b.toI32(memref::DimOp::create(b, op.getIndices(), b.index(0)));
}

/// The entry of the expert map, -1 for a logical expert that has none.
Value BlockOfAssignments::readPhysical(Value logical) {
  Value map = op.getExpertMap();
  Value size =
      b.castInt(memref::DimOp::create(b, map, b.index(0)), logical.getType());
  auto read = scf::IfOp::create(
      b, less(logical, size),
      [&](OpBuilder &nested, Location loc) {
        ThreadBuilder inner(loc, nested);
        Value physical =
            memref::LoadOp::create(inner, map, inner.toIndex(logical));
        scf::YieldOp::create(inner, physical);
      },
      [&](OpBuilder &nested, Location loc) {
        ThreadBuilder inner(loc, nested);
        scf::YieldOp::create(
            inner, inner.constantInt(getElementTypeOrSelf(map.getType()), -1));
      });
  return read.getResult(0);
}

Assignment BlockOfAssignments::readOne(Value number, Value end) {
  Assignment a;
  a.exists = less(number, end);
  // What lies behind the end reads the last one; there is one.
  number = b.toI32(b.op<arith::MinUIOp>(number, b.sub(end, b.index(1))));
  Value place = b.op<arith::DivUIOp>(number, numTokens);
  a.token = b.toIndex(b.sub(number, b.mul(place, numTokens)));
  a.place = b.toIndex(place);
  Value expert =
      memref::LoadOp::create(b, op.getIndices(), ValueRange{a.token, a.place});
  if (op.getExpertMap())
    expert = readPhysical(expert);
  // Compared as given, for an i64 may be far out of range; a negative number is
  // large.
  Type type = expert.getType();
  a.isAsking = b.both(a.exists, less(expert, b.constantInt(type, experts)));
  if (Value mask = op.getMask())
    a.isAsking = b.both(a.isAsking, memref::LoadOp::create(b, mask, a.token));
  a.expert = b.select(a.isAsking, b.toI32(expert), b.i32(experts));
  return a;
}

SmallVector<Assignment> BlockOfAssignments::read(Value first, int64_t stride,
                                                 Value end) {
  SmallVector<Assignment> assignments;
  for (int64_t i = 0; i < kAssignmentsAtATime; ++i)
    assignments.push_back(readOne(b.add(first, b.index(i * stride)), end));
  return assignments;
}

void BlockOfAssignments::countExperts(Value begin, Value end, Value counts) {
  forEachExpert([&](Value expert) { store(b.i32(0), counts, expert); });
  barrier();
  b.loop(begin, end, tile, [&](Value first) {
    for (const Assignment &a :
         read(b.add(first, thread), block.numThreads, end))
      b.ifThen(a.isAsking, [&] { b.atomicAdd(counts, a.expert, b.i32(1)); });
  });
}
