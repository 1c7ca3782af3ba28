//===- TopKGates.cpp - The gates of a row ---------------------------------===//

#include "TopKGates.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"
#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

/// The widest access of a thread.
static constexpr int64_t kAccessBytes = 16;

/// values / (sum of all lanes' values + floor), or 0 where the sum is 0 (E7).
/// Without a floor the sum is that of a softmax, in [1, k], whose reciprocal
/// one instruction gives to 1 ulp.
SmallVector<Value> SlotGates::renormalise(ArrayRef<Value> values, Value floor) {
  Value sum = values.front();
  for (Value value : values.drop_front())
    sum = b.add(sum, value);
  sum = row.reduceSum(sum);
  Value isEmpty = b.compare(CmpFPredicate::OEQ, sum, b.f32(0.0));
  SmallVector<Value> gates;
  if (!floor) {
    Value inverse = b.select(isEmpty, b.f32(0.0), b.reciprocal(sum));
    for (Value value : values)
      gates.push_back(b.mul(value, inverse));
    return gates;
  }
  Value divisor = b.select(isEmpty, b.f32(1.0), b.add(sum, floor));
  for (Value value : values)
    gates.push_back(b.select(isEmpty, b.f32(0.0), b.div(value, divisor)));
  return gates;
}

SmallVector<Value> SlotGates::compute() {
  Value zero = b.f32(0.0), lowest = b.negInfinity();
  // t = the logits whose softmax the gates are, or v = the chosen scores;
  // slots without a gate have t = -inf, v = 0.
  SmallVector<Value> values;
  for (int64_t slot = 0; slot < row.shape.slotsPerLane; ++slot) {
    Value expert = slots.chosen[slot];
    if (row.op.getForced())
      expert = b.select(slots.hasGate[slot], expert, b.i32(0));
    Value x = slots.chosenScores.empty() ? scores.loadScore(expert)
                                         : slots.chosenScores[slot];
    Value counts = b.compare(CmpFPredicate::UNE, x, lowest);
    if (slots.hasGate[slot])
      counts = b.both(counts, slots.hasGate[slot]);
    if (slots.isSlot[slot])
      counts = b.both(counts, slots.isSlot[slot]);
    Value value = row.form.gatesFromLogits
                      ? buildLogScore(b, row.form.function, x)
                      : scores.score(x);
    values.push_back(
        b.select(counts, value, row.form.gatesFromLogits ? lowest : zero));
  }
  if (!row.form.gatesFromLogits) {
    if (!row.op.getRenorm())
      return values;
    double eps = row.op.getEps().convertToDouble();
    return renormalise(values, b.f32(eps));
  }
  Value highest = values.front();
  for (Value t : ArrayRef(values).drop_front())
    highest = row.maximum(highest, t);
  highest = finiteOrZero(b, row.reduceMax(highest));
  for (Value &t : values)
    t = b.exp(b.sub(t, highest));
  return renormalise(values, {});
}

/// Whether the slots of a lane are stored by one access.
bool SlotGates::hasWideStores() {
  auto gates = cast<MemRefType>(row.op.getGatesInit().getType());
  auto indices = cast<MemRefType>(row.op.getIndicesInit().getType());
  auto isRowMajor = [&](MemRefType type) {
    SmallVector<int64_t> strides;
    int64_t offset;
    return succeeded(type.getStridesAndOffset(strides, offset)) &&
           strides.back() == 1 &&
           (strides.size() < 2 ||
            strides[strides.size() - 2] == row.numSelected);
  };
  return row.shape.slotsPerLane > 1 &&
         llvm::isPowerOf2_64(row.shape.slotsPerLane) &&
         row.numSelected % row.shape.slotsPerLane == 0 && isRowMajor(gates) &&
         isRowMajor(indices);
}

/// Stores the slots of the lane that are choices.
void SlotGates::storeEach(ArrayRef<Value> values, Value memref, Value isRow) {
  for (auto [slot, value] : llvm::enumerate(values)) {
    Value stores =
        slots.isSlot[slot] ? b.both(isRow, slots.isSlot[slot]) : isRow;
    auto ifStores = scf::IfOp::create(b, stores, /*withElseRegion=*/false);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(ifStores.thenBlock());
    memref::StoreOp::create(b, value, memref,
                            row.at(memref, 1, row.rankOf(slot)));
  }
}

/// One access of the slots of a lane, all of which are choices or none.
static void storeTogether(ThreadBuilder &b, ArrayRef<Value> values,
                          Value memref, ValueRange place) {
  int64_t size = values.size();
  Type type = values.front().getType();
  Value vector =
      vector::FromElementsOp::create(b, VectorType::get({size}, type), values);
  int64_t bytes = size * getElementBytes(type);
  vector::StoreOp::create(b, vector, memref, place, /*nontemporal=*/false,
                          llvm::MaybeAlign(std::min(bytes, kAccessBytes)));
}

/// A forced id in the type of the indices; -1 where that does not hold it: cut
/// off, it could name an expert.
Value SlotGates::asIndex(Value id, Type type) {
  Value index = b.castInt(id, type);
  if (id.getType().getIntOrFloatBitWidth() <= type.getIntOrFloatBitWidth())
    return index;
  Value fits = b.compare(CmpIPredicate::eq, b.castInt(index, id.getType()), id);
  return b.select(fits, index, b.castInt(b.i32(-1), type));
}

void SlotGates::store(ArrayRef<Value> gates, Value isRow) {
  // A masked token selects nothing (E10).
  Value isToken;
  if (Value mask = row.op.getMask())
    isToken = memref::LoadOp::create(b, mask, row.at(mask, 0, {}));
  double scale = row.op.getRouteScale().convertToDouble();
  Type type = getElementTypeOrSelf(row.op.getIndicesInit().getType());
  SmallVector<Value> finalGates, finalExperts;
  for (auto [slot, gate] : llvm::enumerate(gates)) {
    Value finalGate = scale == 1.0 ? gate : b.mul(gate, b.f32(scale));
    finalGate = b.select(scores.getHasNaN(), b.nan(), finalGate); // E3
    // A place that is forced to be none has gate 0 in any row, whatever the sum
    // of the gates is.
    if (row.op.getForced())
      finalGate = b.select(slots.hasGate[slot], finalGate, b.f32(0.0));
    Value finalExpert = row.op.getForced()
                            ? asIndex(slots.forced[slot], type)
                            : b.castInt(slots.chosen[slot], type);
    if (isToken) {
      Value none = b.castInt(b.i32(-1), type);
      finalGate = b.select(isToken, finalGate, b.f32(0.0));
      finalExpert = b.select(isToken, finalExpert, none);
    }
    finalGates.push_back(finalGate);
    finalExperts.push_back(finalExpert);
  }
  if (!hasWideStores()) {
    storeEach(finalGates, row.op.getGatesInit(), isRow);
    return storeEach(finalExperts, row.op.getIndicesInit(), isRow);
  }
  Value stores = slots.isSlot[0] ? b.both(isRow, slots.isSlot[0]) : isRow;
  auto ifStores = scf::IfOp::create(b, stores, /*withElseRegion=*/false);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(ifStores.thenBlock());
  SmallVector<Value> place = row.at(row.op.getGatesInit(), 1, row.rankOf(0));
  storeTogether(b, finalGates, row.op.getGatesInit(), place);
  storeTogether(b, finalExperts, row.op.getIndicesInit(), place);
}
