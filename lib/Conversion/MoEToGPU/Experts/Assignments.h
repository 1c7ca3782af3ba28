//===- Assignments.h - The assignments that dispatch places -----*- C++ -*-===//
//
// The kernels of moe.dispatch go over assignments in the order in which they
// ask for a row, of which each block has a part.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_ASSIGNMENTS_H
#define MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_ASSIGNMENTS_H

#include "Emit/ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

namespace mlir::moe {

/// Assignments that a thread has at a time, so that as many loads are in
/// flight.
inline constexpr int64_t kAssignmentsAtATime = 4;

/// The experts that have rows, kDynamic where their number is not known.
int64_t getNumExperts(DispatchOp op);

/// How the assignments are cut into parts, one a block: loop 1 counts them,
/// loop 2 places them.
struct AssignmentParts {
  AssignmentParts(ThreadBuilder &b, DispatchOp op, BlockShape block);

  /// Whether there may be more assignments than one block's.
  bool mayBeMany() const { return getConstantIntValue(numBlocks) != 0; }
  /// Where part `number` begins and ends.
  std::pair<Value, Value> get(ThreadBuilder &b, Value number) const;

  int64_t clusterSize;
  /// The blocks of loop 1, 0 where one block is enough, and its clusters.
  OpFoldResult numBlocks, numClusters;
  /// The same numbers; blocks from `used` on have no part.
  Value blocks, used;
  /// The number of assignments.
  Value count;
};

/// Choice `place` of a token.
struct Assignment {
  Value token, place;
  /// Whether it exists, and has an expert, too.
  Value exists, isAsking;
  /// The physical expert, or the number of experts where it has none.
  Value expert;
};

/// What the threads of a block do with assignments.
class BlockOfAssignments {
public:
  BlockOfAssignments(ThreadBuilder &b, DispatchOp op, BlockShape block);

  /// counts[e] = the assignments among begin .. end to expert e, once the
  /// threads have met again.
  void countExperts(Value begin, Value end, Value counts);

protected:
  using Body = function_ref<void(Value)>;
  void forEachExpert(Body body) {
    b.loop(thread, b.index(experts), block.numThreads, body);
  }
  /// `kAssignmentsAtATime` assignments from `first` on, `stride` apart, of
  /// those below `end`.
  SmallVector<Assignment> read(Value first, int64_t stride, Value end);

  Value alloc(int64_t size) {
    return memref::AllocOp::create(b, MemRefType::get({size}, b.getI32Type()));
  }
  Value load(Value buffer, Value place) {
    return memref::LoadOp::create(b, buffer, b.toIndex(place));
  }
  void store(Value value, Value buffer, Value place) {
    memref::StoreOp::create(b, value, buffer, b.toIndex(place));
  }
  /// As an integer of the elements of `buffer`.
  void storeNumber(Value number, Value buffer, Value place) {
    Type element = cast<MemRefType>(buffer.getType()).getElementType();
    store(b.castInt(number, element), buffer, place);
  }
  void barrier() { gpu::BarrierOp::create(b); }
  Value less(Value lhs, Value rhs) {
    return b.compare(arith::CmpIPredicate::ult, lhs, rhs);
  }

  ThreadBuilder &b;
  DispatchOp op;
  BlockShape block;
  int64_t experts, tile;
  Value thread, numTokens;

private:
  Assignment readOne(Value number, Value end);
  Value readPhysical(Value logical);
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_ASSIGNMENTS_H
