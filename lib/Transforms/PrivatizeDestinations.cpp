//===- PrivatizeDestinations.cpp - One destination a computation ----------===//
//
// Matches tensor.empty, and ops that only initialise one, with several uses:
//
//   %0 = linalg.fill ins(%zero) outs(%empty)
//   %1 = linalg.matmul ins(%a, %b) outs(%0)
//   %2 = linalg.matmul ins(%c, %d) outs(%0)
//
// becomes two fills of two empties. CSE makes them one because their values
// are equal, but they name memory that each computation writes. Sharing costs a
// copy at best. At worst it is wrong: empty-tensor elimination puts the shared
// value into the caller's memory for the first result, the second result is
// then computed there too, and storing the first overwrites it (seen on
// 22.1.8: @keeps_two_results_apart).
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Transforms/RegionUtils.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEPRIVATIZEDESTINATIONSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

/// Whether `op` only initialises a new tensor: it has one result and reads no
/// tensor but empty ones, in its regions neither.
static bool isInitialisation(Operation *op) {
  if (op->getNumResults() != 1 || op->getNumOperands() == 0 ||
      !isa<TensorType>(op->getResult(0).getType()) || !isMemoryEffectFree(op))
    return false;
  SetVector<Value> read(op->operand_begin(), op->operand_end());
  getUsedValuesDefinedAbove(op->getRegions(), read);
  bool readsEmpty = false;
  for (Value value : read) {
    if (!isa<TensorType>(value.getType()))
      continue;
    if (!value.getDefiningOp<tensor::EmptyOp>())
      return false;
    readsEmpty = true;
  }
  return readsEmpty;
}

/// Gives every use of the op's result but the last a copy of the op.
static void duplicatePerUse(Operation *op) {
  SmallVector<OpOperand *> uses;
  for (OpOperand &use : op->getResult(0).getUses())
    uses.push_back(&use);
  if (uses.empty())
    return;
  for (OpOperand *use : ArrayRef<OpOperand *>(uses).drop_back()) {
    OpBuilder builder(op);
    use->set(builder.clone(*op)->getResult(0));
  }
}

/// A slice of an empty tensor is an empty tensor.
static void foldSlice(tensor::ExtractSliceOp slice) {
  if (!slice.getSource().getDefiningOp<tensor::EmptyOp>() ||
      slice.getSourceType().getRank() != slice.getType().getRank())
    return;
  OpBuilder b(slice);
  slice->replaceAllUsesWith(tensor::EmptyOp::create(
      b, slice.getLoc(), slice.getMixedSizes(),
      slice.getType().getElementType(), slice.getType().getEncoding()));
  slice.erase();
}

namespace {
struct PrivatizeDestinationsPass
    : public mlir::moe::impl::MoEPrivatizeDestinationsPassBase<
          PrivatizeDestinationsPass> {
  using Base::Base;

  void runOnOperation() override {
    getOperation().walk(foldSlice);
    // Initialisations first: each copy uses the empty tensor once more.
    SmallVector<Operation *> initialisations, empties;
    getOperation().walk([&](Operation *op) {
      if (isInitialisation(op))
        initialisations.push_back(op);
      else if (isa<tensor::EmptyOp>(op))
        empties.push_back(op);
    });
    llvm::for_each(initialisations, duplicatePerUse);
    llvm::for_each(empties, duplicatePerUse);
  }
};
} // namespace
