//===- GroupedLinearResults.cpp - From sums to rows of y ------------------===//
//
// Bias, gate and activation are applied to the sums of a tile in registers. Of
// 16-bit results the lanes of each four exchange what they have, so that a lane
// stores whole units; others are stored one by one.
//
//===----------------------------------------------------------------------===//

#include "GroupedLinearResults.h"

#include "MoE/Dialect/MoE/IR/ExpertActivations.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Columns of a fragment of sums.
static constexpr int64_t kFragment = 8;

TileResults::TileResults(WarpBuilder &b, GroupedLinearOp op,
                         const TilePlan &plan, Value firstRow, Value lane,
                         const TileOfRows &tile)
    : b(b), op(op), plan(plan), tile(tile),
      element(getElementTypeOrSelf(op.getOuts()[0])),
      firstColumn(b.mul(tile.columnTile, b.i32(plan.getWidth()))),
      quadLane(b.rem(lane, 4)) {
  rows[0] = b.add(firstRow, b.div(lane, 4));
  rows[1] = b.add(rows[0], b.i32(8));
}

/// Whether four fragments of a row are whole units.
bool TileResults::hasUnits() const {
  return !plan.isExact && !plan.hasPairs && plan.numOfY % kFragment == 0;
}

/// Those of y, or of pairs of gates and factors.
int64_t TileResults::getNumFragments() const {
  return plan.isGated && !plan.hasPairs ? plan.columns / 2 / kFragment
                                        : plan.columns / kFragment;
}

void TileResults::store(ArrayRef<Value> sums) {
  for (int64_t row = 0; row < 2; ++row)
    if (hasUnits())
      storeUnits(sums, row);
    else
      storeElements(sums, row);
}

/// The column of y of the lane's number `i` of a fragment.
Value TileResults::getColumn(int64_t fragment, int64_t i) {
  int64_t columns = plan.hasPairs ? 1 : 2;
  Value own = b.add(b.mul(quadLane, b.i32(columns)), b.i32(i));
  return b.add(firstColumn, b.add(own, b.i32(fragment * 4 * columns)));
}

/// Adds the bias of the sum's weight row: the gate (0) or the factor (1) of
/// column `i` of a fragment of y.
Value TileResults::addBias(Value sum, int64_t weightRow, int64_t fragment,
                           int64_t i) {
  if (!op.getBias())
    return sum;
  Value column = b.toIndex(getColumn(fragment, i));
  if (plan.hasRest())
    column = b.minSigned(column, b.index(plan.numOfY - 1));
  if (op.getGate() == GateLayout::Interleaved)
    column = b.add(b.mul(column, b.index(2)), b.index(weightRow));
  else
    column = b.add(column, b.index(weightRow * plan.numOfY));
  return b.add(sum, b.loadF32(op.getBias(), {b.toIndex(tile.expert), column}));
}

SmallVector<Value> TileResults::getResults(ArrayRef<Value> sums,
                                           int64_t fragment, int64_t row) {
  int64_t count = plan.hasPairs ? 1 : 2;
  if (sums.empty())
    return SmallVector<Value>(count, b.f32(0.0));
  SmallVector<Value> results;
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = 4 * fragment + 2 * row + i;
    Value low = addBias(sums[at], /*weightRow=*/0, fragment, i);
    if (!plan.isGated) {
      results.push_back(buildActivation(b, op, low));
      continue;
    }
    Value high = sums[plan.hasPairs ? at + 1 : at + sums.size() / 2];
    high = addBias(high, /*weightRow=*/1, fragment, i);
    results.push_back(buildGatedActivation(b, op, low, high));
  }
  return results;
}

/// Two f32 rounded to 16 bits in one register.
Value TileResults::packPair(ArrayRef<Value> pair) {
  if (element.isBF16())
    return b.packBF16(pair[0], pair[1]);
  Value both = LLVM::UndefOp::create(b, VectorType::get({2}, b.getF16Type()));
  for (auto [i, value] : llvm::enumerate(pair)) {
    Value half = arith::TruncFOp::create(b, b.getF16Type(), value);
    both = LLVM::InsertElementOp::create(b, both, half,
                                         b.i32(static_cast<int64_t>(i)));
  }
  return LLVM::BitcastOp::create(b, b.getI32Type(), both);
}

/// Lane i of each four gets what they have as number i, in their order.
static void transposeInQuads(WarpBuilder &b, Value quadLane,
                             MutableArrayRef<Value> values) {
  for (int64_t distance : {1, 2}) {
    Value isUpper = b.compare(CmpIPredicate::ne,
                              b.both(quadLane, b.i32(distance)), b.i32(0));
    for (int64_t low : {0, 1, 2, 3}) {
      if (low & distance)
        continue;
      Value &first = values[low], &second = values[low + distance];
      Value sent = b.select(isUpper, first, second);
      Value received = b.shuffleXor(sent, distance);
      first = b.select(isUpper, received, first);
      second = b.select(isUpper, second, received);
    }
  }
}

/// Four fragments at a time, so that a lane has whole units: those of the
/// fragment of its number.
void TileResults::storeUnits(ArrayRef<Value> sums, int64_t row) {
  Value own = b.add(firstColumn, b.mul(quadLane, b.i32(kFragment)));
  Value isReal = b.less(rows[row], tile.end);
  Value to =
      b.addressOf(op.getOuts()[0], {b.toIndex(rows[row]), b.toIndex(own)});
  for (int64_t first = 0; first < getNumFragments(); first += 4) {
    SmallVector<Value> packed;
    for (int64_t i = 0; i < 4; ++i)
      packed.push_back(packPair(getResults(sums, first + i, row)));
    transposeInQuads(b, quadLane, packed);
    Value unit = LLVM::UndefOp::create(b, VectorType::get({4}, b.getI32Type()));
    for (int64_t i = 0; i < 4; ++i)
      unit = LLVM::InsertElementOp::create(b, unit, packed[i], b.i32(i));
    Value exists = isReal;
    if (plan.hasRest())
      exists = b.both(exists, b.less(b.add(own, b.i32(first * kFragment)),
                                     b.i32(plan.numOfY)));
    b.ifThen(exists, [&] {
      b.store(unit, b.at(to, 2 * first * kFragment), kUnitBytes);
    });
  }
}

void TileResults::storeElements(ArrayRef<Value> sums, int64_t row) {
  Value isReal = b.less(rows[row], tile.end);
  for (int64_t fragment = 0; fragment < getNumFragments(); ++fragment)
    for (auto [i, result] : llvm::enumerate(getResults(sums, fragment, row))) {
      Value column = getColumn(fragment, static_cast<int64_t>(i));
      Value exists = isReal;
      if (plan.hasRest())
        exists = b.both(exists, b.less(column, b.i32(plan.numOfY)));
      b.ifThen(exists, [&] {
        Value y = result;
        if (!element.isF32())
          y = arith::TruncFOp::create(b, element, y);
        memref::StoreOp::create(
            b, y, op.getOuts()[0],
            ValueRange{b.toIndex(rows[row]), b.toIndex(column)});
      });
    }
}
