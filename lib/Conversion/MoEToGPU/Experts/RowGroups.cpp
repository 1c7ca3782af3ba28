//===- RowGroups.cpp - The rows of experts, in groups ---------------------===//

#include "RowGroups.h"

#include "ThreadLowerings.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

RowGroups::RowGroups(WarpBuilder &b, GroupedLinearOp op, int64_t rows)
    : b(b), rows(rows), offsets(op.getOffsets()),
      numExperts(memref::DimOp::create(b, op.getW(), b.index(0))),
      numRows(memref::DimOp::create(b, op.getOuts()[0], b.index(0))) {
  numRuns = b.add(b.toI32(numExperts), b.i32(2));
  // A lane has neighbouring runs.
  perLane = b.div(b.add(numRuns, b.i32(kWarpSize - 1)), kWarpSize);
  firstRun = b.mul(b.lane(), perLane);
}

/// Where a run begins, and the one before it ends.
Value RowGroups::getBegin(Value run) {
  Value expert = b.sub(b.toIndex(run), b.index(1));
  expert = b.minSigned(b.maxSigned(expert, b.index(0)), numExperts);
  Value offset = b.toIndex(memref::LoadOp::create(b, offsets, expert));
  offset = b.minSigned(b.maxSigned(offset, b.index(0)), numRows);
  offset = b.toI32(offset);
  offset =
      b.select(b.compare(CmpIPredicate::eq, run, b.i32(0)), b.i32(0), offset);
  return b.select(b.less(run, numRuns), offset, b.toI32(numRows));
}

Value RowGroups::countGroups(Value begin, Value end) {
  Value size = b.maxSigned(b.sub(end, begin), b.i32(0));
  return b.div(b.add(size, b.i32(rows - 1)), rows);
}

std::pair<Value, Value> RowGroups::countOwnAndBefore() {
  Value first = getBegin(firstRun);
  SmallVector<Value> counted =
      b.loop(b.index(0), b.toIndex(perLane), 1, ValueRange{b.i32(0), first},
             [&](Value i, ValueRange carried) -> SmallVector<Value> {
               Value end =
                   getBegin(b.add(firstRun, b.add(b.toI32(i), b.i32(1))));
               return {b.add(carried[0], countGroups(carried[1], end)), end};
             });
  Value own = counted[0], sum = own, lane = b.lane();
  for (int64_t distance = 1; distance < kWarpSize; distance *= 2) {
    Value source = b.maxSigned(b.sub(lane, b.i32(distance)), b.i32(0));
    Value other = b.shuffleFrom(sum, source);
    sum = b.select(b.less(lane, b.i32(distance)), sum, b.add(sum, other));
  }
  return {own, b.sub(sum, own)};
}

RowGroup RowGroups::find(Value number) {
  Value none = b.i32(-1);
  Value before = counted ? counted : countOwnAndBefore().second;
  SmallVector<Value> found =
      b.loop(b.index(0), b.toIndex(perLane), 1,
             ValueRange{before, getBegin(firstRun), none, none, none},
             [&](Value i, ValueRange carried) -> SmallVector<Value> {
               Value run = b.add(firstRun, b.toI32(i)), begin = carried[1];
               Value end = getBegin(b.add(run, b.i32(1)));
               Value groups = countGroups(begin, end);
               Value place = b.sub(number, carried[0]);
               // As an unsigned number a negative one is large.
               Value isHere = b.compare(CmpIPredicate::ult, place, groups);
               Value first = b.add(begin, b.mul(place, b.i32(rows)));
               return {b.add(carried[0], groups), end,
                       b.select(isHere, run, carried[2]),
                       b.select(isHere, first, carried[3]),
                       b.select(isHere, end, carried[4])};
             });
  Value lanes = b.ballot(b.less(none, found[2]));
  // The lowest lane.
  Value below =
      b.both(b.sub(lanes, b.i32(1)), b.op<arith::XOrIOp>(lanes, b.i32(-1)));
  Value source = b.rem(b.countBits(below), kWarpSize);
  Value run = b.shuffleFrom(found[2], source);
  Value begin = b.shuffleFrom(found[3], source);
  Value end = b.shuffleFrom(found[4], source);
  end = b.minSigned(end, b.add(begin, b.i32(rows)));
  Value last = b.sub(numRuns, b.i32(1));
  Value isOfExpert = b.both(b.less(b.i32(0), run), b.less(run, last));
  Value expert = b.select(isOfExpert, b.sub(run, b.i32(1)), b.i32(0));
  return {expert, begin, end, b.compare(CmpIPredicate::ne, lanes, b.i32(0)),
          isOfExpert};
}

Value RowGroups::count() {
  auto [own, before] = countOwnAndBefore();
  counted = before;
  return b.shuffleFrom(b.add(own, before), b.i32(kWarpSize - 1));
}

Value RowGroups::getBound(ThreadBuilder &b, GroupedLinearOp op, int64_t rows) {
  Value numRows = memref::DimOp::create(b, op.getOuts()[0], b.index(0));
  Value numExperts = memref::DimOp::create(b, op.getW(), b.index(0));
  AffineExpr all = b.getAffineDimExpr(0), experts = b.getAffineDimExpr(1);
  AffineExpr runs = experts + 2;
  AffineExpr isMany = isMore(all, runs);
  auto apply = [&](AffineExpr expr) -> Value {
    return affine::AffineApplyOp::create(b, AffineMap::get(2, 0, expr),
                                         ValueRange{numRows, numExperts});
  };
  Value few = b.mul(apply(1 - isMany), numRows);
  Value many = b.mul(apply(isMany), apply(runs + all.floorDiv(rows)));
  return b.add(few, many);
}
