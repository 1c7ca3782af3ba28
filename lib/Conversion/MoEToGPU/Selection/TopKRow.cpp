//===- TopKRow.cpp - Scores of a row and the experts chosen ---------------===//
//
// TopKSelection.h describes the algorithm.
//
//===----------------------------------------------------------------------===//

#include "ThreadLowerings.h"
#include "TopKSelection.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

#include "MoE/Dialect/MoE/IR/ChoiceOrder.h"

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
/// Wide keys that a lane sorts; more would not stay in registers.
static constexpr int64_t kMaxWideSort = 16;

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
// Scores
//===----------------------------------------------------------------------===//

SmallVector<Value> RowSelection::at(Value memref, int64_t numInner,
                                    Value inner) {
  SmallVector<Value> indices = getRowIndices(b, memref, numInner, row);
  if (numInner == 1)
    indices.push_back(b.toIndex(inner));
  return indices;
}

Value RowSelection::loadScore(Value expert) {
  return b.loadF32(op.getScores(), at(op.getScores(), 1, expert));
}

/// Whether the lane's j-th expert exists; null if it always does. The experts
/// of one access exist together.
Value RowSelection::exists(int64_t j) {
  int64_t first = shape.getFirstExpert(j);
  if (first + (shape.lanes - 1) * shape.width < numExperts)
    return {};
  return b.compare(CmpIPredicate::slt, experts[j], b.i32(numExperts));
}

/// Loads the scores as vectors of `width`; an access past the end reads the
/// last ones, which are ignored.
void RowSelection::loadScores() {
  Value scoresIn = op.getScores();
  Type element = getElementTypeOrSelf(scoresIn.getType());
  int64_t width = shape.width;
  for (int64_t j = 0; j < shape.keysPerLane; ++j)
    experts.push_back(
        b.add(b.mul(lane, b.i32(width)), b.i32(shape.getFirstExpert(j))));
  for (int64_t j = 0; j < shape.keysPerLane; j += width) {
    Value first = experts[j];
    if (exists(j))
      first = b.minSigned(first, b.i32(numExperts - width));
    SmallVector<Value> place = at(scoresIn, 1, first);
    if (width == 1 && !form.hasPackedKeys) {
      scores.push_back(b.loadF32(scoresIn, place));
    } else if (width == 1) {
      Value bits = memref::LoadOp::create(b, scoresIn, place);
      bits = arith::BitcastOp::create(b, b.getI16Type(), bits);
      words.push_back(arith::ExtUIOp::create(b, b.getI32Type(), bits));
    } else {
      Value loaded = vector::LoadOp::create(
          b, VectorType::get({width}, element), scoresIn, place,
          /*nontemporal=*/false, llvm::MaybeAlign(kAccessBytes));
      Type word = element.isF32() ? element : Type(b.getI32Type());
      constexpr int64_t wordsPerAccess = kAccessBytes / 4;
      loaded = element.isF32()
                   ? loaded
                   : vector::BitCastOp::create(
                         b, VectorType::get({wordsPerAccess}, word), loaded);
      for (int64_t i = 0; i < wordsPerAccess; ++i)
        (element.isF32() ? scores : words)
            .push_back(vector::ExtractOp::create(b, loaded, i));
    }
  }
  if (!words.empty() && (!form.hasPackedKeys || form.needsRowSoftmax))
    widenWords();
}

/// The scores in the words as f32.
void RowSelection::widenWords() {
  Type element = getElementTypeOrSelf(op.getScores().getType());
  auto widen = [&](Value upperBits) -> Value {
    if (element.isBF16())
      return arith::BitcastOp::create(b, b.getF32Type(), upperBits);
    Value half = arith::TruncIOp::create(
        b, b.getI16Type(), b.op<arith::ShRUIOp>(upperBits, b.i32(16)));
    half = arith::BitcastOp::create(b, b.getF16Type(), half);
    return arith::ExtFOp::create(b, b.getF32Type(), half);
  };
  for (Value word : words) {
    scores.push_back(widen(b.op<arith::ShLIOp>(word, b.i32(16))));
    if (shape.width > 1)
      scores.push_back(widen(b.both(word, b.i32(0xffff0000))));
  }
}

Value RowSelection::anyLane(Value condition) {
  if (shape.lanes == kWarpSize)
    return b.compare(CmpIPredicate::ne, b.ballot(condition), b.i32(0));
  Value flag = arith::ExtUIOp::create(b, b.getI32Type(), condition);
  flag = b.reduceLanes(flag, shape.lanes,
                       [&](Value l, Value r) { return b.either(l, r); });
  return b.compare(CmpIPredicate::ne, flag, b.i32(0));
}

/// Scores past the end repeat others of the row.
void RowSelection::findNaN() {
  if (!form.hasPackedKeys) {
    Value any = b.boolean(false);
    for (Value x : scores)
      any = b.either(any, b.isNaN(x));
    hasNaN = anyLane(any);
    return;
  }
  PackedKeys keys(b, getElementTypeOrSelf(op.getScores().getType()));
  for (Value word : words)
    negated.push_back(keys.negate(word));
  Value seen = negated.front();
  for (Value word : ArrayRef(negated).drop_front())
    seen = keys.mergeNaN(seen, word);
  hasNaN = anyLane(keys.hasNaN(seen));
}

void RowSelection::computeRowSoftmax() {
  if (!form.needsRowSoftmax)
    return;
  Value highest = scores.front();
  for (Value x : ArrayRef(scores).drop_front())
    highest = maximum(highest, x);
  rowMax = finiteOrZero(reduceMax(highest));
  rowSum = b.f32(0.0);
  for (auto [j, x] : llvm::enumerate(scores)) {
    Value weight = b.exp(b.sub(x, rowMax));
    if (Value isExpert = exists(j))
      weight = b.select(isExpert, weight, b.f32(0.0));
    rowSum = b.add(rowSum, weight);
  }
  rowSum = reduceSum(rowSum);
}

//===----------------------------------------------------------------------===//
// Selection
//===----------------------------------------------------------------------===//

static Value noKey(ThreadBuilder &b, bool isPacked) {
  return arith::ConstantOp::create(
      b, b.getIntegerAttr(b.getIntegerType(isPacked ? 32 : 64), 0));
}

/// The keys of the lane as if it were the first: `addLane` makes up for it.
SmallVector<Value> RowSelection::makePackedKeys() {
  PackedKeys layout(b, getElementTypeOrSelf(op.getScores().getType()));
  SmallVector<Value> ordered = llvm::map_to_vector(
      negated, [&](Value word) { return layout.order(word); });
  SmallVector<Value> keys;
  int64_t perWord = shape.width > 1 ? 2 : 1;
  for (int64_t j = 0; j < shape.keysPerLane; ++j) {
    Value key = layout.make(ordered[j / perWord], j % perWord == 1,
                            shape.getFirstExpert(j));
    if (Value isExpert = exists(j))
      key = b.select(isExpert, key, noKey(b, true));
    keys.push_back(key);
  }
  return keys;
}

SmallVector<Value> RowSelection::makeWideKeys(ArrayRef<Value> choice) {
  SmallVector<Value> keys, dropped;
  if (op.getNGroup() > 1)
    dropped = findDropped(choice);
  for (int64_t j = 0; j < shape.keysPerLane; ++j) {
    Value key = WideKeys::make(b, choice[j], experts[j]);
    if (Value isExpert = exists(j))
      key = b.select(isExpert, key, noKey(b, false));
    // The groups that stay have k experts or more: no such key is chosen.
    if (!dropped.empty())
      key = b.select(dropped[j], noKey(b, false), key);
    keys.push_back(key);
  }
  return keys;
}

SmallVector<Value> RowSelection::keepHighestOfLane(ArrayRef<Value> keys) {
  size_t size = llvm::PowerOf2Ceil(numSelected);
  SmallVector<Value> kept;
  for (size_t first = 0; first < keys.size(); first += size) {
    SmallVector<Value> next(
        keys.slice(first, std::min(size, keys.size() - first)));
    next.resize(size, noKey(b, form.hasPackedKeys));
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
void RowSelection::addLane(MutableArrayRef<Value> kept) {
  if (shape.lanes == 1)
    return;
  int64_t certain = shape.keysPerLane;
  for (int64_t j = 0; j < shape.keysPerLane; ++j)
    if (exists(j))
      --certain;
  Value distance = b.mul(lane, b.i32(shape.width));
  for (auto [i, key] : llvm::enumerate(kept)) {
    if (static_cast<int64_t>(i) >= certain)
      key = b.op<arith::MaxUIOp>(key, distance);
    key = b.sub(key, distance);
  }
}

void RowSelection::select() {
  findNaN();
  SmallVector<Value> keys =
      form.hasPackedKeys ? makePackedKeys() : makeWideKeys(getChoiceScores());
  if (!form.hasPackedKeys &&
      static_cast<int64_t>(llvm::PowerOf2Ceil(numSelected)) > kMaxWideSort)
    return selectByRounds(std::move(keys));
  SmallVector<Value> kept = keepHighestOfLane(keys);
  if (form.hasPackedKeys)
    addLane(kept);
  for (int64_t distance = 1; distance < shape.lanes; distance *= 2) {
    SmallVector<Value> others = llvm::map_to_vector(
        kept, [&](Value key) { return b.shuffleXor(key, distance); });
    keepHighest(b, kept, others);
  }
  // The key of each slot, out of the list that every lane has.
  SmallVector<Value> slots;
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    Value key = kept[slot];
    for (int64_t other = 1; other < shape.lanes; ++other) {
      int64_t rank = other * shape.slotsPerLane + slot;
      if (rank >= numSelected)
        break;
      Value isOther = b.compare(CmpIPredicate::eq, lane, b.i32(other));
      key = b.select(isOther, kept[rank], key);
    }
    slots.push_back(key);
  }
  takeSlots(slots);
}

/// for rank in 0..k:
///   best = max of all keys of the group        (in registers, then shuffles)
///   the key equal to best becomes 0            (keys are distinct)
///   the lane that owns the slot of `rank` keeps best
///
/// For so many keys of 64 bits that a sorted list would not stay in registers.
void RowSelection::selectByRounds(SmallVector<Value> keys) {
  Value none = noKey(b, form.hasPackedKeys);
  int64_t numKeys = keys.size();
  SmallVector<Value> state = std::move(keys);
  state.append(shape.slotsPerLane, none);
  auto loop = scf::ForOp::create(
      b, b.i32(0), b.i32(numSelected), b.i32(1), state,
      [&](OpBuilder &builder, Location loc, Value rank, ValueRange carried) {
        ThreadBuilder body(loc, builder);
        auto higher = [&](Value l, Value r) {
          return body.op<arith::MaxUIOp>(l, r);
        };
        SmallVector<Value> next(carried);
        Value best = next.front();
        for (Value key : ArrayRef(next).slice(1, numKeys - 1))
          best = higher(best, key);
        best = body.reduceLanes(best, shape.lanes, higher);
        for (Value &key : MutableArrayRef(next).take_front(numKeys))
          key = body.select(body.compare(CmpIPredicate::eq, key, best), none,
                            key);
        Value firstRank = body.mul(lane, body.i32(shape.slotsPerLane));
        for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
          Value owned = body.add(firstRank, body.i32(slot));
          Value isOwner = body.compare(CmpIPredicate::eq, owned, rank);
          next[numKeys + slot] =
              body.select(isOwner, best, next[numKeys + slot]);
        }
        scf::YieldOp::create(body, next);
      });
  takeSlots(llvm::to_vector_of<Value>(loop.getResults().drop_front(numKeys)));
}

void RowSelection::takeSlots(ArrayRef<Value> keys) {
  PackedKeys packed(b, getElementTypeOrSelf(op.getScores().getType()));
  for (auto [slot, key] : llvm::enumerate(keys)) {
    Value expert =
        form.hasPackedKeys ? packed.expertOf(key) : WideKeys::expertOf(b, key);
    // A slot past k may have the key of no expert, whose index is out of range.
    if (isSlot[slot])
      expert = b.select(isSlot[slot], expert, b.i32(0));
    chosen.push_back(expert);
    hasGate.push_back(form.choosesByScores
                          ? Value()
                          : b.negate(WideKeys::isExcluded(b, key)));
    if (form.choosesByScores)
      chosenScores.push_back(form.hasPackedKeys ? packed.scoreOf(key)
                                                : WideKeys::scoreOf(b, key));
  }
}

void RowSelection::readForced() {
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    Value rank = rankOf(slot);
    if (isSlot[slot])
      rank = b.minSigned(rank, b.i32(numSelected - 1));
    Value expert =
        memref::LoadOp::create(b, op.getForced(), at(op.getForced(), 1, rank));
    Value limit = arith::ConstantOp::create(
        b, b.getIntegerAttr(expert.getType(), numExperts));
    hasGate.push_back(b.compare(CmpIPredicate::ult, expert, limit));
    forced.push_back(expert);
    chosen.push_back(b.castInt(expert, b.getI32Type()));
  }
}

//===----------------------------------------------------------------------===//
// Row
//===----------------------------------------------------------------------===//

void RowSelection::emit(Value rowToSelect, Value isRow) {
  row = rowToSelect;
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    int64_t highest = (shape.lanes - 1) * shape.slotsPerLane + slot;
    isSlot.push_back(
        highest < numSelected
            ? Value()
            : b.compare(CmpIPredicate::slt, rankOf(slot), b.i32(numSelected)));
  }
  loadScores();
  computeRowSoftmax();
  if (op.getForced()) {
    findNaN();
    readForced();
  } else {
    select();
  }
  storeSlots(computeGates(), isRow);
}
