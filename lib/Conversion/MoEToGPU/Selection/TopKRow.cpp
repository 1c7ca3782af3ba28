//===- TopKRow.cpp - A row and the lanes that share it --------------------===//
//
// TopKSelection.h describes the algorithm.
//
//===----------------------------------------------------------------------===//

#include "ThreadLowerings.h"
#include "TopKSelection.h"

#include "MoE/Dialect/MoE/IR/ChoiceOrder.h"
#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// The widest access of a thread.
static constexpr int64_t kAccessBytes = 16;

//===----------------------------------------------------------------------===//
// Form and shape
//===----------------------------------------------------------------------===//

static bool isNarrow(TopKRenormOp op) {
  return getElementTypeOrSelf(op.getScores().getType())
             .getIntOrFloatBitWidth() == 16;
}

SelectionForm::SelectionForm(TopKRenormOp op)
    : function(op.getScoreFunction()),
      choosesByScores(isOrderedByGivenScores(op)),
      hasPackedKeys(choosesByScores && op.getNGroup() == 1 && isNarrow(op)),
      gatesFromLogits(op.getRenorm() && op.getEps().convertToDouble() == 0.0 &&
                      hasLogScore(function)),
      needsRowSoftmax(
          function == ScoreFunction::Softmax &&
          !(gatesFromLogits && (choosesByScores || op.getForced()))) {}

/// The experts that one access of a row can read, whichever they are: 1 unless
/// every row starts at a multiple of the access.
static int64_t getAccessWidth(TopKRenormOp op) {
  Type scores = op.getScores().getType();
  int64_t width =
      kAccessBytes * 8 / getElementTypeOrSelf(scores).getIntOrFloatBitWidth();
  auto type = dyn_cast<MemRefType>(scores);
  if (!type) // Before bufferization: what it will be.
    return op.getNumExperts() % width == 0 ? width : 1;
  SmallVector<int64_t> strides;
  int64_t offset;
  if (failed(type.getStridesAndOffset(strides, offset)) || strides.back() != 1)
    return 1;
  // A tile starts at a row.
  bool isAligned =
      op.getNumExperts() % width == 0 &&
      llvm::all_of(ArrayRef(strides).drop_back(), [&](int64_t stride) {
        return ShapedType::isDynamic(stride) ? strides.size() > 2
                                             : stride % width == 0;
      });
  return isAligned ? width : 1;
}

/// Few lanes mean few exchanges, many mean short lists and few registers: 16
/// keys a lane up to 4 lanes, then up to 64 packed keys or 32 wide ones, and no
/// fewer lanes than the block has for each row.
LaneShape::LaneShape(TopKRenormOp op, int64_t availableLanes) {
  int64_t numExperts = op.getNumExperts();
  width = getAccessWidth(op);
  auto perLane = [&](int64_t keys) -> int64_t {
    return llvm::divideCeil(numExperts, keys);
  };
  int64_t maxKeys = SelectionForm(op).hasPackedKeys ? 64 : 32;
  int64_t wanted = std::max(std::min<int64_t>(perLane(16), 4),
                            std::max(perLane(maxKeys), availableLanes));
  wanted = std::min<int64_t>(wanted, llvm::divideCeil(numExperts, width));
  lanes = std::min<int64_t>(llvm::PowerOf2Ceil(wanted), kWarpSize);
  keysPerLane = llvm::divideCeil(numExperts, lanes * width) * width;
  slotsPerLane = llvm::divideCeil(op.getNumSelected(), lanes);
}

//===----------------------------------------------------------------------===//
// Lanes
//===----------------------------------------------------------------------===//

SmallVector<Value> RowLanes::at(Value memref, int64_t numInner,
                                Value inner) const {
  SmallVector<Value> indices = getRowIndices(b, memref, numInner, row);
  if (numInner == 1)
    indices.push_back(b.toIndex(inner));
  return indices;
}

Value RowLanes::anyLane(Value condition) const {
  if (shape.lanes == kWarpSize)
    return b.compare(CmpIPredicate::ne, b.ballot(condition), b.i32(0));
  Value flag = arith::ExtUIOp::create(b, b.getI32Type(), condition);
  flag = b.reduceLanes(flag, shape.lanes,
                       [&](Value l, Value r) { return b.either(l, r); });
  return b.compare(CmpIPredicate::ne, flag, b.i32(0));
}

RowSlots::RowSlots(RowLanes &row) {
  const LaneShape &shape = row.shape;
  ThreadBuilder &b = row.b;
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    int64_t highest = (shape.lanes - 1) * shape.slotsPerLane + slot;
    isSlot.push_back(highest < row.numSelected
                         ? Value()
                         : b.compare(CmpIPredicate::slt, row.rankOf(slot),
                                     b.i32(row.numSelected)));
  }
}
