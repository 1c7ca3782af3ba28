//===- ScatterLoops.cpp - Loops that write slices to places ---------------===//
//
// Matches loops around one write, whose place is read from buffers, such as
// that of new keys into a cache:
//
//   scf.for %i = 0 to n
//     %place = memref.load %places[%i]
//     memref.copy %rows[%i, 0] [1, d], %target[%place, 0] [1, d]
//
// As loops of the host, each iteration would be a launch. All iterations run
// at once instead, each on a block of its own. Two that write the same place
// write it in the order of the loop: one that a later one overwrites does not
// write at all. To know, the lanes of a warp compute the places of the later
// ones.
//
//===----------------------------------------------------------------------===//

#include "ScatterLoops.h"
#include "Emit/ThreadBuilder.h"

#include "mlir/Dialect/MemRef/Utils/MemRefUtils.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Utils/StaticValueUtils.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// What is matched
//===----------------------------------------------------------------------===//

namespace {
/// Loops, each the only one in the one before, and the write in the last.
struct ScatterLoops {
  static std::optional<ScatterLoops> match(scf::ForOp outermost);

  SmallVector<scf::ForOp> loops;
  /// What the loops compute for each iteration, in order: loads, and ops
  /// without effects.
  SmallVector<Operation *> computed;
  /// A memref.copy into a view, or a memref.store.
  Operation *write = nullptr;
  /// Where in its target it writes.
  SmallVector<OpFoldResult> place;

  Value getTarget() const;
  bool isCopy() const { return isa<memref::CopyOp>(write); }
  Operation *outermost() const { return loops.front(); }

private:
  bool visit(Block *body);
  /// Whether all iterations have the same `value`.
  bool isOutside(Value value) const;
  bool hasPlace();
  bool readsNoTarget() const;
};
} // namespace

static Value getRoot(Value buffer) {
  return memref::skipViewLikeOps(cast<MemrefValue>(buffer));
}

Value ScatterLoops::getTarget() const {
  if (auto copy = dyn_cast<memref::CopyOp>(write))
    return copy.getTarget();
  return cast<memref::StoreOp>(write).getMemRef();
}

/// Takes the loop's body apart; false where it has other ops.
bool ScatterLoops::visit(Block *body) {
  for (Operation &op : body->without_terminator()) {
    if (write)
      return false;
    if (auto inner = dyn_cast<scf::ForOp>(op)) {
      if (loops.back().getBody() != body)
        return false;
      loops.push_back(inner);
      if (!visit(inner.getBody()) || !write)
        return false;
    } else if (isa<memref::CopyOp, memref::StoreOp>(op)) {
      write = &op;
    } else if (op.getNumRegions() == 0 &&
               (isa<memref::LoadOp>(op) || isMemoryEffectFree(&op))) {
      computed.push_back(&op);
    } else {
      return false;
    }
  }
  return true;
}

bool ScatterLoops::isOutside(Value value) const {
  return !outermost()->isAncestor(value.getParentRegion()->getParentOp());
}

/// Finds where it writes; false where two iterations could meet in a part of
/// what they write.
bool ScatterLoops::hasPlace() {
  if (auto store = dyn_cast<memref::StoreOp>(write)) {
    place = getAsOpFoldResult(store.getIndices());
    return isOutside(store.getMemRef());
  }
  auto view = getTarget().getDefiningOp<memref::SubViewOp>();
  if (!view || !view.hasUnitStride() || !isOutside(view.getSource()) ||
      isOutside(view))
    return false;
  place = view.getMixedOffsets();
  for (auto [offset, size] :
       llvm::zip_equal(view.getMixedOffsets(), view.getMixedSizes())) {
    auto dynamic = dyn_cast<Value>(offset);
    bool isFixed = !dynamic || isOutside(dynamic);
    auto dynamicSize = dyn_cast<Value>(size);
    if ((!isFixed && !isConstantIntValue(size, 1)) ||
        (dynamicSize && !isOutside(dynamicSize)))
      return false;
  }
  return true;
}

/// Whether what iterations read is not what others write.
bool ScatterLoops::readsNoTarget() const {
  Value target = getRoot(getTarget());
  if (auto copy = dyn_cast<memref::CopyOp>(write);
      copy && getRoot(copy.getSource()) == target)
    return false;
  return llvm::none_of(computed, [&](Operation *op) {
    auto load = dyn_cast<memref::LoadOp>(op);
    return load && getRoot(load.getMemRef()) == target;
  });
}

std::optional<ScatterLoops> ScatterLoops::match(scf::ForOp outermost) {
  ScatterLoops scatter;
  scatter.loops.push_back(outermost);
  if (!scatter.visit(outermost.getBody()) || !scatter.write)
    return std::nullopt;
  for (scf::ForOp loop : scatter.loops)
    if (loop.getNumResults() != 0 ||
        !isConstantIntValue(loop.getLowerBound(), 0) ||
        !isConstantIntValue(loop.getStep(), 1) ||
        !scatter.isOutside(loop.getUpperBound()))
      return std::nullopt;
  if (!scatter.hasPlace() || !scatter.readsNoTarget())
    return std::nullopt;
  return scatter;
}

//===----------------------------------------------------------------------===//
// What it becomes
//===----------------------------------------------------------------------===//

namespace {
class ScatterEmitter {
public:
  ScatterEmitter(ThreadBuilder &b, const ScatterLoops &scatter,
                 BlockShape block)
      : b(b), scatter(scatter), block(block) {}

  void emit();

private:
  /// The positions of `loops` in iteration `number` of all of theirs.
  SmallVector<Value> getPositions(ArrayRef<scf::ForOp> loops, Value number);
  /// The number of the iteration that has these positions, and of all.
  Value getNumber(ArrayRef<scf::ForOp> loops, ValueRange positions);
  Value getCount(ArrayRef<scf::ForOp> loops);
  /// What the loops compute where they are at `positions`.
  IRMapping compute(ValueRange positions);
  Value isSamePlace(const IRMapping &one, const IRMapping &other);
  Value isOverwritten(ValueRange positions, const IRMapping &mapping);
  void emitIteration(Value number);

  ThreadBuilder &b;
  const ScatterLoops &scatter;
  BlockShape block;
};
} // namespace

/// All loops go from 0 to a bound in steps of 1.
static Value getBound(scf::ForOp loop) { return loop.getUpperBound(); }

SmallVector<Value> ScatterEmitter::getPositions(ArrayRef<scf::ForOp> loops,
                                                Value number) {
  SmallVector<Value> positions(loops.size());
  for (size_t i = loops.size(); i-- > 1;) {
    Value bound = getBound(loops[i]);
    positions[i] = b.op<arith::RemUIOp>(number, bound);
    number = b.op<arith::DivUIOp>(number, bound);
  }
  if (!loops.empty())
    positions[0] = number;
  return positions;
}

Value ScatterEmitter::getNumber(ArrayRef<scf::ForOp> loops,
                                ValueRange positions) {
  Value number = positions[0];
  for (auto [loop, position] :
       llvm::zip_equal(loops.drop_front(), positions.drop_front()))
    number = b.add(b.mul(number, getBound(loop)), position);
  return number;
}

Value ScatterEmitter::getCount(ArrayRef<scf::ForOp> loops) {
  Value count = getBound(loops[0]);
  for (scf::ForOp loop : loops.drop_front())
    count = b.mul(count, getBound(loop));
  return count;
}

IRMapping ScatterEmitter::compute(ValueRange positions) {
  IRMapping mapping;
  for (auto [loop, position] : llvm::zip_equal(scatter.loops, positions))
    mapping.map(scf::ForOp(loop).getInductionVar(), position);
  for (Operation *op : scatter.computed)
    b.clone(*op, mapping);
  return mapping;
}

Value ScatterEmitter::isSamePlace(const IRMapping &one,
                                  const IRMapping &other) {
  Value same = b.boolean(true);
  for (OpFoldResult offset : scatter.place)
    if (auto value = dyn_cast<Value>(offset))
      same = b.op<arith::AndIOp>(same, b.compare(arith::CmpIPredicate::eq,
                                                 one.lookupOrDefault(value),
                                                 other.lookupOrDefault(value)));
  return same;
}

/// Whether a later iteration writes the place of this one. Those for which a
/// loop is elsewhere that is an offset of the place do not. Of copies all lanes
/// of a warp have the same iteration and look at others in turns.
Value ScatterEmitter::isOverwritten(ValueRange positions,
                                    const IRMapping &mapping) {
  SmallVector<scf::ForOp> repeating;
  SmallVector<Value> own;
  SmallVector<unsigned> which;
  for (auto [i, loop] : llvm::enumerate(scatter.loops))
    if (!llvm::is_contained(scatter.place,
                            OpFoldResult(scf::ForOp(loop).getInductionVar()))) {
      repeating.push_back(loop);
      own.push_back(positions[i]);
      which.push_back(i);
    }
  if (repeating.empty())
    return b.boolean(false);
  Value next = b.add(getNumber(repeating, own), b.index(1));
  if (scatter.isCopy()) {
    Value thread = Workers::ofBlock(b, block).thread;
    next = b.add(next, b.op<arith::RemUIOp>(thread, b.index(kWarpSize)));
  }
  Value found =
      b.loop(next, getCount(repeating), scatter.isCopy() ? kWarpSize : 1,
             b.boolean(false),
             [&](Value number, ValueRange found) -> SmallVector<Value> {
               SmallVector<Value> later(positions);
               for (auto [i, position] :
                    llvm::zip_equal(which, getPositions(repeating, number)))
                 later[i] = position;
               Value same = isSamePlace(mapping, compute(later));
               return {b.op<arith::OrIOp>(found[0], same)};
             })[0];
  if (!scatter.isCopy())
    return found;
  return b.compare(arith::CmpIPredicate::ne, b.ballot(found), b.i32(0));
}

void ScatterEmitter::emitIteration(Value number) {
  SmallVector<Value> positions = getPositions(scatter.loops, number);
  IRMapping mapping = compute(positions);
  b.ifThen(b.negate(isOverwritten(positions, mapping)), [&] {
    Operation *write = b.clone(*scatter.write, mapping);
    if (auto copy = dyn_cast<memref::CopyOp>(write)) {
      emitCopyForThreads(b, copy, Workers::ofBlock(b, block));
      copy.erase();
    }
  });
}

/// A block has an iteration of a copy, and a thread one of a store.
void ScatterEmitter::emit() {
  Value count = getCount(scatter.loops);
  if (scatter.isCopy() && scatter.loops.size() == 1)
    return emitIteration(createGrid(b, OpFoldResult(count)));
  Value id = createGrid(b, b.getIndexAttr(kGridBlocks));
  if (scatter.isCopy())
    return b.loop(id, count, kGridBlocks, [&](Value i) { emitIteration(i); });
  Workers workers = Workers::ofGrid(b, block, id, kGridBlocks);
  b.loop(workers.thread, count, workers.count,
         [&](Value i) { emitIteration(i); });
}

void mlir::moe::distributeScatterLoops(func::FuncOp function,
                                       BlockShape block) {
  SmallVector<scf::ForOp> loops;
  function.walk<WalkOrder::PreOrder>([&](Operation *op) {
    if (auto loop = dyn_cast<scf::ForOp>(op))
      loops.push_back(loop);
    return isa<scf::ForOp, scf::ForallOp>(op) ? WalkResult::skip()
                                              : WalkResult::advance();
  });
  for (scf::ForOp loop : loops) {
    std::optional<ScatterLoops> scatter = ScatterLoops::match(loop);
    if (!scatter)
      continue;
    OpBuilder builder(loop);
    ThreadBuilder b(scatter->write->getLoc(), builder);
    ScatterEmitter(b, *scatter, block).emit();
    loop.erase();
  }
}
