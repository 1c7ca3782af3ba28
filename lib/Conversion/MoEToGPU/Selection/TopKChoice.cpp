//===- TopKChoice.cpp - The experts chosen in a row -----------------------===//
//
// TopKSelection.h describes the algorithm.
//
//===----------------------------------------------------------------------===//

#include "TopKChoice.h"
#include "TopKGroups.h"
#include "TopKKeys.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Wide keys that a lane sorts; more would not stay in registers.
static constexpr int64_t kMaxWideSort = 16;

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

static Value noKey(ThreadBuilder &b, bool isPacked) {
  return arith::ConstantOp::create(
      b, b.getIntegerAttr(b.getIntegerType(isPacked ? 32 : 64), 0));
}

/// The keys of the lane as if it were the first: `addLane` makes up for it.
SmallVector<Value> ExpertChoice::makePackedKeys() {
  PackedKeys layout(b, getElementTypeOrSelf(row.op.getScores().getType()));
  SmallVector<Value> ordered = llvm::map_to_vector(
      scores.getNegated(), [&](Value word) { return layout.order(word); });
  SmallVector<Value> keys;
  int64_t perWord = row.shape.width > 1 ? 2 : 1;
  for (int64_t j = 0; j < row.shape.keysPerLane; ++j) {
    Value key = layout.make(ordered[j / perWord], j % perWord == 1,
                            row.shape.getFirstExpert(j));
    if (Value isExpert = scores.exists(j))
      key = b.select(isExpert, key, noKey(b, true));
    keys.push_back(key);
  }
  return keys;
}

SmallVector<Value> ExpertChoice::makeWideKeys(ArrayRef<Value> choice) {
  SmallVector<Value> keys, dropped;
  if (row.op.getNGroup() > 1)
    dropped = ExpertGroups(row, scores, choice).findDropped();
  for (int64_t j = 0; j < row.shape.keysPerLane; ++j) {
    Value key = WideKeys::make(b, choice[j], scores.getExperts()[j]);
    if (Value isExpert = scores.exists(j))
      key = b.select(isExpert, key, noKey(b, false));
    // The groups that stay have k experts or more: no such key is chosen.
    if (!dropped.empty())
      key = b.select(dropped[j], noKey(b, false), key);
    keys.push_back(key);
  }
  return keys;
}

SmallVector<Value> ExpertChoice::keepHighestOfLane(ArrayRef<Value> keys) {
  size_t size = llvm::PowerOf2Ceil(row.numSelected);
  SmallVector<Value> kept;
  for (size_t first = 0; first < keys.size(); first += size) {
    SmallVector<Value> next(
        keys.slice(first, std::min(size, keys.size() - first)));
    next.resize(size, noKey(b, row.form.hasPackedKeys));
    sortKeys(b, next);
    if (kept.empty())
      kept = next;
    else
      keepHighest(b, kept, next);
  }
  return kept;
}

/// The experts of lane l are l * width further, so their inverted indices as
/// much lower. The key of no expert stays 0.
void ExpertChoice::addLane(MutableArrayRef<Value> kept) {
  if (row.shape.lanes == 1)
    return;
  int64_t certain = row.shape.keysPerLane;
  for (int64_t j = 0; j < row.shape.keysPerLane; ++j)
    if (scores.exists(j))
      --certain;
  Value distance = b.mul(row.lane, b.i32(row.shape.width));
  for (auto [i, key] : llvm::enumerate(kept)) {
    if (static_cast<int64_t>(i) >= certain)
      key = b.op<arith::MaxUIOp>(key, distance);
    key = b.sub(key, distance);
  }
}

//===----------------------------------------------------------------------===//
// Selection
//===----------------------------------------------------------------------===//

void ExpertChoice::select() {
  scores.findNaN();
  SmallVector<Value> keys = row.form.hasPackedKeys
                                ? makePackedKeys()
                                : makeWideKeys(scores.getChoiceScores());
  if (!row.form.hasPackedKeys &&
      static_cast<int64_t>(llvm::PowerOf2Ceil(row.numSelected)) > kMaxWideSort)
    return selectByRounds(std::move(keys));
  SmallVector<Value> kept = keepHighestOfLane(keys);
  if (row.form.hasPackedKeys)
    addLane(kept);
  for (int64_t distance = 1; distance < row.shape.lanes; distance *= 2) {
    SmallVector<Value> others = llvm::map_to_vector(
        kept, [&](Value key) { return b.shuffleXor(key, distance); });
    keepHighest(b, kept, others);
  }
  // The key of each slot, out of the list that every lane has.
  SmallVector<Value> ofSlots;
  for (int64_t slot = 0; slot < row.shape.slotsPerLane; ++slot) {
    Value key = kept[slot];
    for (int64_t other = 1; other < row.shape.lanes; ++other) {
      int64_t rank = other * row.shape.slotsPerLane + slot;
      if (rank >= row.numSelected)
        break;
      Value isOther = b.compare(CmpIPredicate::eq, row.lane, b.i32(other));
      key = b.select(isOther, kept[rank], key);
    }
    ofSlots.push_back(key);
  }
  takeSlots(ofSlots);
}

/// for rank in 0..k:
///   best = max of all keys of the group        (in registers, then shuffles)
///   the key equal to best becomes 0            (keys are distinct)
///   the lane that owns the slot of `rank` keeps best
///
/// For so many keys of 64 bits that a sorted list would not stay in registers.
void ExpertChoice::selectByRounds(SmallVector<Value> keys) {
  Value none = noKey(b, row.form.hasPackedKeys);
  int64_t numKeys = keys.size();
  SmallVector<Value> state = std::move(keys);
  state.append(row.shape.slotsPerLane, none);
  auto loop = scf::ForOp::create(
      b, b.i32(0), b.i32(row.numSelected), b.i32(1), state,
      [&](OpBuilder &builder, Location loc, Value rank, ValueRange carried) {
        ThreadBuilder body(loc, builder);
        auto higher = [&](Value l, Value r) {
          return body.op<arith::MaxUIOp>(l, r);
        };
        SmallVector<Value> next(carried);
        Value best = next.front();
        for (Value key : ArrayRef(next).slice(1, numKeys - 1))
          best = higher(best, key);
        best = body.reduceLanes(best, row.shape.lanes, higher);
        for (Value &key : MutableArrayRef(next).take_front(numKeys))
          key = body.select(body.compare(CmpIPredicate::eq, key, best), none,
                            key);
        Value firstRank = body.mul(row.lane, body.i32(row.shape.slotsPerLane));
        for (int64_t slot = 0; slot < row.shape.slotsPerLane; ++slot) {
          Value owned = body.add(firstRank, body.i32(slot));
          Value isOwner = body.compare(CmpIPredicate::eq, owned, rank);
          next[numKeys + slot] =
              body.select(isOwner, best, next[numKeys + slot]);
        }
        scf::YieldOp::create(body, next);
      });
  takeSlots(llvm::to_vector_of<Value>(loop.getResults().drop_front(numKeys)));
}

void ExpertChoice::takeSlots(ArrayRef<Value> keys) {
  PackedKeys packed(b, getElementTypeOrSelf(row.op.getScores().getType()));
  for (auto [slot, key] : llvm::enumerate(keys)) {
    Value expert = row.form.hasPackedKeys ? packed.expertOf(key)
                                          : WideKeys::expertOf(b, key);
    // A slot past k may have the key of no expert, whose index is out of range.
    if (slots.isSlot[slot])
      expert = b.select(slots.isSlot[slot], expert, b.i32(0));
    slots.chosen.push_back(expert);
    slots.hasGate.push_back(row.form.choosesByScores
                                ? Value()
                                : b.negate(WideKeys::isExcluded(b, key)));
    if (row.form.choosesByScores)
      slots.chosenScores.push_back(row.form.hasPackedKeys
                                       ? packed.scoreOf(key)
                                       : WideKeys::scoreOf(b, key));
  }
}

void ExpertChoice::readForced() {
  for (int64_t slot = 0; slot < row.shape.slotsPerLane; ++slot) {
    Value rank = row.rankOf(slot);
    if (slots.isSlot[slot])
      rank = b.minSigned(rank, b.i32(row.numSelected - 1));
    Value expert = memref::LoadOp::create(b, row.op.getForced(),
                                          row.at(row.op.getForced(), 1, rank));
    Value limit = arith::ConstantOp::create(
        b, b.getIntegerAttr(expert.getType(), row.numExperts));
    slots.hasGate.push_back(b.compare(CmpIPredicate::ult, expert, limit));
    slots.forced.push_back(expert);
    slots.chosen.push_back(b.castInt(expert, b.getI32Type()));
  }
}
