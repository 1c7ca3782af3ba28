//===- RowGroup.h - Ops that one loop over rows computes --------*- C++ -*-===//
//
// A loop over tiles of rows computes an op together with others when a row of
// one needs just the same row of the others. Which ops that are follows from
// their indexing maps:
//
//   z -> p -> g -> selection        p and z join through "all users are in"
//        p -> base selection        joins because p would be computed twice
//
// The group is grown from one op, a consumer of all others or of none:
//
//   1. A producer joins when all its users are in the group and read it row by
//      row, so that nothing is computed twice.
//   2. In a group with an op of the moe dialect, where rows are short, a
//      producer with other users joins as well if those whose results end in
//      ops of the dialect over the same rows join too, and the rest can read
//      what the loop stores.
//   3. Users of a member that are ops of the dialect over the same rows join.
//
// The group stays convex: no path leaves it and comes back.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_TRANSFORMS_ROWGROUP_H
#define MOE_LIB_TRANSFORMS_ROWGROUP_H

#include "MoE/Transforms/Transforms.h"

#include "mlir/Interfaces/TilingInterface.h"
#include "llvm/ADT/MapVector.h"

namespace mlir::moe {

using Rows = SmallVector<unsigned>;

/// Whether an operand has a static size of 0. Tiles of such an op have the size
/// 0 there, which asks MLIR's tiling for no tiles: it stays whole.
bool hasEmptyOperand(Operation *op);

/// Whether tiles of single `rows` have results of static size, which the memory
/// of a GPU block needs.
bool hasBoundedTile(Operation *op, ArrayRef<unsigned> rows);

/// What a tile takes of the rows of a group: `rows` of them along one of its
/// loops, one along the others.
struct RowTile {
  unsigned loop;
  OpFoldResult rows;
};

struct WantedTile {
  unsigned loop;
  int64_t rows;
};

/// The tile that the kernel of `op` wants whose loops run over `rows`; nothing
/// if it takes what it gets. A kernel asks for rows of its innermost dim, since
/// along another one each would come with a matrix of its own; consumers that
/// transpose them have it as another loop.
std::optional<WantedTile> getWantedTile(TilingInterface op,
                                        ArrayRef<unsigned> rows);

class RowGroup {
public:
  /// Grows the group of `seed`. Ops for which `isTaken` holds stay outside.
  RowGroup(TilingInterface seed, function_ref<bool(Operation *)> isTaken);

  bool contains(Operation *op) const { return rows.contains(op); }
  /// The dims of a member that the loops run over, outermost first.
  ArrayRef<unsigned> getRows(Operation *op) const {
    return rows.find(op)->second;
  }
  unsigned getNumLoops() const { return rows.front().second.size(); }
  /// The loop of which a tile takes several rows where no kernel asks for some:
  /// the last one along which rows of a product share an operand, which a tile
  /// then reads once. Consumers that transpose the rows have it as another loop
  /// than the last.
  unsigned getSharingLoop() const;
  /// The members whose results are used outside of the group or nowhere, in
  /// program order.
  SmallVector<TilingInterface> getRoots() const;
  /// All members in program order.
  SmallVector<Operation *> getMembers() const;
  /// Whether an op of the dialect is among the members.
  bool isOfRouting() const;
  /// The bytes that a row takes of what its members hand to each other, as far
  /// as that is not stored.
  int64_t getBytesARow() const;
  /// The elements of the widest row of a member.
  int64_t getMostElementsARow() const;
  /// Producers that could have joined by their kind, and why they did not.
  const llvm::MapVector<Operation *, std::string> &getMissed() const {
    return missed;
  }

private:
  using Members = llvm::MapVector<Operation *, Rows>;

  bool isCandidate(Operation *op) const;
  bool addProducers(Operation *member);
  bool addProducer(Operation *producer);
  bool addConsumers(Operation *member);
  FailureOr<Rows> getConsumerRows(Operation *user,
                                  const Members &joining) const;
  bool absorb(Operation *user, Members &joining) const;
  void join(const Members &joining);
  bool staysConvexWith(const Members &joining) const;
  bool miss(Operation *producer, StringRef reason);

  bool needsBoundedTiles;
  function_ref<bool(Operation *)> isTaken;
  Members rows;
  llvm::MapVector<Operation *, std::string> missed;
};

} // namespace mlir::moe

#endif // MOE_LIB_TRANSFORMS_ROWGROUP_H
