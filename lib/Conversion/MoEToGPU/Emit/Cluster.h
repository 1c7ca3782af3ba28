//===- Cluster.h - Blocks that share workgroup memory -----------*- C++ -*-===//
//
// The blocks of a cluster run at the same time and reach each other's
// workgroup memory, so that they combine what each has found without a table
// in global memory. Where a chip has no clusters, one of a single block means
// the same.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_CLUSTER_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_CLUSTER_H

#include "ThreadLowerings.h"

namespace mlir::moe {

/// The attribute of a loop over blocks that says of how many threads they are,
/// where it is not as many as the pass has been told.
inline constexpr llvm::StringLiteral kBlockThreadsAttrName =
    "moe.block_threads";
/// Gives the blocks of the loop whose body `b` is at the start of so many.
void setBlockThreads(ThreadBuilder &b, int64_t numThreads);

class Cluster {
public:
  /// Opens a loop over the blocks of clusters, in up to two dims; `b` continues
  /// in its body.
  Cluster(ThreadBuilder &b, BlockShape block,
          ArrayRef<OpFoldResult> numClusters);

  /// The number of the cluster along dim `dim`.
  Value getId(unsigned dim) const { return ids[dim]; }
  /// The number of the block in its cluster, and how many it has.
  Value getRank() const { return ids.back(); }
  int64_t getSize() const { return size; }
  /// All threads of the cluster.
  Workers getWorkers();
  /// Part `number` of the cluster and of the block, of as many parts as there
  /// are clusters along `dim`, of 0 .. count: parts in the order of the
  /// numbers and of about one size.
  std::pair<Value, Value> getPart(Value count, unsigned dim, Value numParts);

  /// The threads of all blocks meet and see each other's writes. A block must
  /// not end while another one reads its memory.
  void barrier();
  /// Element `position` (i32) of a workgroup buffer of block `rank`.
  Value load(Value buffer, Value position, int64_t rank);
  /// Its sum over the blocks, in their order.
  Value sum(Value buffer, Value position);
  /// Writes an element of a workgroup buffer of every block.
  void storeToAll(Value value, Value buffer, Value position);

private:
  Value getPointer(Value buffer, Value position, int64_t rank);

  ThreadBuilder &b;
  BlockShape block;
  int64_t size;
  SmallVector<Value> ids;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EMIT_CLUSTER_H
