//===- DispersionSums.h - The sums that a block adds up ---------*- C++ -*-===//
//
// What a block does in one loop over the rows has four parts: where the block
// stands (DispersionBlock), how many tokens the clusters have (TokenCounts),
// which tokens it adds (TokenList), and the tables that they are added to
// (SlabTables). BlockSums puts them together.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_DISPERSIONSUMS_H
#define MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_DISPERSIONSUMS_H

#include "DispersionPlan.h"
#include "Emit/Cluster.h"

namespace mlir::moe {

/// The slab, range and part of a block, and the place of a thread in them.
struct DispersionBlock {
  DispersionBlock(ThreadBuilder &b, MadDispersionOp op,
                  const DispersionPlan &plan, OpFoldResult numParts);

  Value alloc(int64_t size, Type type) {
    return memref::AllocOp::create(b, MemRefType::get({size}, type));
  }
  Value load(Value buffer, Value index) {
    return memref::LoadOp::create(b, buffer, index);
  }
  void store(Value value, Value buffer, ValueRange place) {
    memref::StoreOp::create(b, value, buffer, place);
  }
  Value minimum(Value lhs, Value rhs) { return b.op<arith::MinUIOp>(lhs, rhs); }
  Value less(Value lhs, Value rhs) {
    return b.compare(arith::CmpIPredicate::ult, lhs, rhs);
  }
  /// Calls `body` for the elements of the block's part of the result, shared by
  /// the threads of the cluster.
  void
  forEachOwn(function_ref<void(Value slot, Value cluster, Value column)> body);

  ThreadBuilder &b;
  MadDispersionOp op;
  const DispersionPlan &plan;
  int64_t numThreads;
  Cluster cluster;
  Value thread, subpart, columnInSlab, numColumns, numClusters;
  Value firstColumn, firstCluster, begin, end;
  /// The thread's column, or the last one if it has none.
  Value column;
};

/// Workgroup memory: how many tokens the clusters of the range have in this
/// block, and in all.
struct TokenCounts {
  explicit TokenCounts(DispersionBlock &block);

  Value own, total;
};

/// Workgroup memory: the tokens of the range, in order, as `token << 16 | place
/// of the cluster in a table`, and how many each warp found.
class TokenList {
public:
  explicit TokenList(DispersionBlock &block);

  /// Lists the tokens of the block, counts them, and fills up the last group
  /// with tokens of no cluster, whose mean is 0 in `means`.
  void listTokens(const TokenCounts &counts, Value means);

  Value getListed() const { return listed; }
  Value getLength() const { return length; }

private:
  void listSome(Value first, const TokenCounts &counts);
  void pad(Value means);
  Value getEntry(Value offset, Value place);

  DispersionBlock &block;
  ThreadBuilder &b;
  Value listed, found, length;
};

/// Workgroup memory: the tables, one a subpart, and the means.
class SlabTables {
public:
  explicit SlabTables(DispersionBlock &block);

  void clear();
  /// Adds the rows of the list, or their deviations from the means.
  void addRows(const TokenList &list, bool areDeviations);
  /// The tables of the block become one; all blocks may read it.
  void addSubparts();

  /// The one table, and the means.
  Value getTable() const { return table; }
  Value getMeans() const { return means; }

private:
  SmallVector<Value> loadGroup(const TokenList &list, Value first);
  SmallVector<Value> loadNextGroup(const TokenList &list, Value first,
                                   ValueRange group);
  void addGroup(ValueRange group, bool areDeviations);
  Value getDeviation(Value element, Value slot);
  /// The place in the thread's table of a cluster of the range, as an index.
  Value inTable(Value cluster);

  DispersionBlock &block;
  ThreadBuilder &b;
  Value table, means;
};

/// Emits what a block does for its slab, range and part.
class BlockSums {
public:
  BlockSums(ThreadBuilder &b, MadDispersionOp op, const DispersionPlan &plan,
            OpFoldResult numParts);

  /// The sums of the rows; with one part everything that follows from them,
  /// else sums[part, cluster, column] and counts[part, cluster].
  void emitSums(Value sums, Value counts);
  /// The sums of the deviations from the means of all parts.
  void emitDeviations(Value sums);

private:
  void finishAlone();
  void writePart(Value sums, Value counts);
  /// out[cluster, column] = total / count, 0 for an empty cluster (E14).
  Value getQuotient(Value slot, Value cluster);

  ThreadBuilder &b;
  MadDispersionOp op;
  const DispersionPlan &plan;
  DispersionBlock block;
  SlabTables tables;
  TokenCounts counts;
  TokenList list;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_DISPERSIONSUMS_H
