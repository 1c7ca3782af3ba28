//===- MergeLoops.cpp - One loop for the ops of a group -------------------===//

#include "MergeLoops.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/Transforms.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/SCF/Utils/Utils.h"
#include "mlir/IR/Dominance.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Transforms/CSE.h"

using namespace mlir;
using namespace mlir::moe;

/// Makes `loop` run to the bounds of `leader`, which are the sizes of the same
/// rows. Failure where only one of them is static.
static LogicalResult shareBounds(RewriterBase &rewriter, scf::ForallOp leader,
                                 scf::ForallOp loop) {
  SmallVector<OpFoldResult> bounds = leader.getMixedUpperBound();
  SmallVector<OpFoldResult> own = loop.getMixedUpperBound();
  for (auto [bound, ownBound] : llvm::zip_equal(bounds, own))
    if (isa<Attribute>(bound) ? bound != ownBound : isa<Attribute>(ownBound))
      return failure();
  for (auto [bound, ownBound] : llvm::zip_equal(bounds, own))
    if (auto value = dyn_cast<Value>(ownBound))
      rewriter.replaceUsesWithIf(
          value, cast<Value>(bound),
          [&](OpOperand &use) { return loop->isAncestor(use.getOwner()); });
  return success();
}

/// Moves what is computed from `loop` behind `last`. Failure, with nothing
/// moved, where `last` needs it or an op with side effects would have to move.
static LogicalResult moveUsersBehind(RewriterBase &rewriter, scf::ForallOp loop,
                                     scf::ForallOp last) {
  DenseSet<Operation *> moving{loop};
  SmallVector<Operation *> users;
  auto dependsOnMoving = [&](Operation *op) {
    return op
        ->walk([&](Operation *nested) {
          bool depends = llvm::any_of(nested->getOperands(), [&](Value value) {
            return moving.contains(value.getDefiningOp());
          });
          return depends ? WalkResult::interrupt() : WalkResult::advance();
        })
        .wasInterrupted();
  };
  for (Operation *op = loop->getNextNode(); op != last;
       op = op->getNextNode()) {
    if (!dependsOnMoving(op))
      continue;
    if (!isMemoryEffectFree(op))
      return failure();
    moving.insert(op);
    users.push_back(op);
  }
  if (dependsOnMoving(last))
    return failure();
  Operation *behind = last;
  for (Operation *user : users) {
    rewriter.moveOpAfter(user, behind);
    behind = user;
  }
  return success();
}

bool mlir::moe::mergeEqualChecks(RewriterBase &rewriter, Block &block) {
  SmallVector<linalg::GenericOp> checks;
  bool merged = false;
  for (auto op :
       llvm::make_early_inc_range(block.getOps<linalg::GenericOp>())) {
    if (!hasEffectsInBody(op))
      continue;
    auto *earlier = llvm::find_if(checks, [&](linalg::GenericOp other) {
      return OperationEquivalence::isEquivalentTo(
          other, op, OperationEquivalence::IgnoreLocations);
    });
    if (earlier == checks.end()) {
      checks.push_back(op);
      continue;
    }
    rewriter.replaceOp(op, (*earlier)->getResults());
    merged = true;
  }
  return merged;
}

/// Replaces tiles of one op that differ in nothing but their destinations,
/// which no op of the dialect reads, by the first of them.
static bool mergeEqualTiles(RewriterBase &rewriter, scf::ForallOp loop) {
  SmallVector<MoEStructuredOpInterface> tiles;
  bool merged = false;
  for (Operation &op : llvm::make_early_inc_range(*loop.getBody())) {
    auto tile = dyn_cast<MoEStructuredOpInterface>(&op);
    if (!tile)
      continue;
    auto dps = cast<DestinationStyleOpInterface>(&op);
    auto isEqual = [&](MoEStructuredOpInterface other) {
      if (other->getName() != op.getName() ||
          other->getResultTypes() != op.getResultTypes() ||
          other->getAttrDictionary() != op.getAttrDictionary() ||
          other->getPropertiesAsAttribute() != op.getPropertiesAsAttribute())
        return false;
      return llvm::all_of(
          llvm::zip_equal(op.getOpOperands(), other->getOpOperands()),
          [&](auto pair) {
            auto [mine, its] = pair;
            return dps.isDpsInit(&mine) || mine.get() == its.get();
          });
    };
    auto *earlier = llvm::find_if(tiles, isEqual);
    if (earlier == tiles.end()) {
      tiles.push_back(tile);
      continue;
    }
    rewriter.replaceOp(&op, (*earlier)->getResults());
    merged = true;
  }
  return merged;
}

void mlir::moe::mergeLoops(RewriterBase &rewriter,
                           ArrayRef<scf::ForallOp> loops) {
  scf::ForallOp merged = loops.back();
  for (scf::ForallOp loop : llvm::reverse(loops.drop_back())) {
    if (failed(shareBounds(rewriter, loop, merged)) ||
        failed(moveUsersBehind(rewriter, loop, merged)))
      continue;
    merged = fuseIndependentSiblingForallLoops(loop, merged, rewriter);
  }
  DominanceInfo dominance;
  do
    eliminateCommonSubExpressions(rewriter, dominance, merged);
  while (mergeEqualTiles(rewriter, merged) ||
         mergeEqualChecks(rewriter, *merged.getBody()));
}
