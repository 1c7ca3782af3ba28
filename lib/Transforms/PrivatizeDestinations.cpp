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
// 22.1.8: @keeps_two_results_apart). Bufferization does not see that
// bufferization.materialize_in_destination writes a buffer, nor that one
// tensor.parallel_insert_slice writes before another one reads.
//
// So would any other value that several results start from. Where a value is
// read behind an op that may be computed in its memory, what is stored starts
// from a copy, bufferization.alloc_tensor() copy(%value).
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/LoopLikeInterface.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Transforms/RegionUtils.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEPRIVATIZEDESTINATIONSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

/// Whether `op` repeats a tensor of fewer dims: a bias for each row.
static bool isBroadcast(Operation *op) {
  auto generic = dyn_cast<linalg::GenericOp>(op);
  return isa<linalg::BroadcastOp>(op) ||
         (generic && linalg::isaBroadcastOpInterface(generic));
}

/// Whether `op` only initialises a new tensor: it has one result and reads no
/// tensor but empty ones, in its regions neither, or is a broadcast.
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
    if (value.getDefiningOp<tensor::EmptyOp>())
      readsEmpty = true;
    else if (!isBroadcast(op))
      return false;
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

//===----------------------------------------------------------------------===//
// Results that start from what others read
//===----------------------------------------------------------------------===//

/// The operands whose memory `result` may be computed in.
static SmallVector<OpOperand *> getDestinations(OpResult result) {
  Operation *op = result.getOwner();
  if (isa<bufferization::AllocTensorOp>(op))
    return {};
  if (auto destinationStyle = dyn_cast<DestinationStyleOpInterface>(op))
    return {destinationStyle.getTiedOpOperand(result)};
  if (auto loop = dyn_cast<LoopLikeOpInterface>(op)) {
    OpOperand *init = loop.getTiedLoopInit(result);
    return init ? SmallVector<OpOperand *>{init} : SmallVector<OpOperand *>();
  }
  if (auto branches = dyn_cast<scf::IfOp>(op))
    return {&branches.thenYield()->getOpOperand(result.getResultNumber()),
            &branches.elseYield()->getOpOperand(result.getResultNumber())};
  // Views.
  SmallVector<OpOperand *> operands;
  for (OpOperand &operand : op->getOpOperands())
    if (isa<TensorType>(operand.get().getType()))
      operands.push_back(&operand);
  return operands;
}

/// Whether `value`, or what may lie in its memory, is read behind `op`, which
/// may overwrite it.
static bool isReadBehind(Value value, Operation *op) {
  SmallVector<Value> worklist{value};
  DenseSet<Value> seen{value};
  while (!worklist.empty()) {
    Value read = worklist.pop_back_val();
    for (OpOperand &use : read.getUses()) {
      Operation *user = use.getOwner();
      if (user == op)
        continue;
      Operation *place = op->getBlock()->findAncestorOpInBlock(*user);
      // Of another block: it is not known which comes first.
      if (!place || op->isBeforeInBlock(place))
        return true;
      for (OpResult result : user->getResults())
        if (isa<TensorType>(result.getType()) &&
            llvm::is_contained(getDestinations(result), &use) &&
            seen.insert(result).second)
          worklist.push_back(result);
    }
  }
  return false;
}

/// A copy of the operand's value, as its new value.
static void copyBefore(OpOperand &operand) {
  OpBuilder b(operand.getOwner());
  Location loc = operand.getOwner()->getLoc();
  auto type = cast<RankedTensorType>(operand.get().getType());
  operand.set(bufferization::AllocTensorOp::create(b, loc, type, ValueRange(),
                                                   operand.get()));
}

/// The argument of a loop's body that `value` is, or is a slice of; null for
/// what was computed.
static BlockArgument getSlicedArgument(Value value) {
  while (auto slice = value.getDefiningOp<tensor::ExtractSliceOp>())
    value = slice.getSource();
  return dyn_cast<BlockArgument>(value);
}

/// Visits the operands that `stored` starts from, the last op's first; `visit`
/// says whether to go on to what such an operand starts from.
static void walkStarts(Value stored, function_ref<bool(OpOperand &)> visit) {
  SmallVector<Value> worklist{stored};
  DenseSet<Value> seen{stored};
  while (!worklist.empty()) {
    auto value = dyn_cast<OpResult>(worklist.pop_back_val());
    if (!value)
      continue;
    for (OpOperand *start : getDestinations(value))
      if (visit(*start) && seen.insert(start->get()).second)
        worklist.push_back(start->get());
  }
}

/// Gives what is stored memory of its own as soon as it starts from a value
/// that is read after something was computed in its memory.
static void startFromCopies(Value stored) {
  walkStarts(stored, [](OpOperand &start) {
    // What lies in memory of the caller, or of a loop, may stay there.
    if (start.get().getDefiningOp<tensor::EmptyOp>() ||
        getSlicedArgument(start.get()))
      return false;
    if (!isReadBehind(start.get(), start.getOwner()))
      return true;
    copyBefore(start);
    return false;
  });
}

/// Memory of its own for an operand whose value is a slice of what `loop`
/// shares, which is empty if the loop starts from an empty tensor.
static void leaveSharedMemory(scf::ForallOp loop, BlockArgument shared,
                              OpOperand &operand) {
  if (!loop.getTiedOpOperand(shared)->get().getDefiningOp<tensor::EmptyOp>())
    return copyBefore(operand);
  OpBuilder b(operand.getOwner());
  Location loc = operand.getOwner()->getLoc();
  auto type = cast<RankedTensorType>(operand.get().getType());
  operand.set(tensor::EmptyOp::create(
      b, loc, tensor::getMixedSizes(b, loc, operand.get()),
      type.getElementType(), type.getEncoding()));
}

/// Whether `loop` stores only `value` in `shared`.
static bool storesOnly(scf::ForallOp loop, BlockArgument shared, Value value) {
  return llvm::all_of(loop.getCombiningOps(shared), [&](Operation *op) {
    auto insert = dyn_cast<tensor::ParallelInsertSliceOp>(op);
    return insert && insert.getSource() == value;
  });
}

/// What is stored in one destination of a loop is not computed in another one.
static void keepToDestination(scf::ForallOp loop,
                              tensor::ParallelInsertSliceOp insert) {
  walkStarts(insert.getSource(), [&](OpOperand &start) {
    BlockArgument shared = getSlicedArgument(start.get());
    bool isOther = shared && shared != insert.getDest() &&
                   llvm::is_contained(loop.getRegionIterArgs(), shared);
    if (isOther && !storesOnly(loop, shared, insert.getSource()))
      leaveSharedMemory(loop, shared, start);
    return !shared;
  });
}

static void separateStores(Operation *root) {
  root->walk([](bufferization::MaterializeInDestinationOp op) {
    if (isa<BaseMemRefType>(op.getDest().getType()))
      startFromCopies(op.getSource());
  });
  root->walk([](scf::ForallOp loop) {
    // Only another destination could be overwritten too early.
    if (loop.getNumResults() < 2)
      return;
    auto inserts = loop.getTerminator().getOps<tensor::ParallelInsertSliceOp>();
    for (tensor::ParallelInsertSliceOp insert : inserts)
      startFromCopies(insert.getSource());
    for (tensor::ParallelInsertSliceOp insert : inserts)
      keepToDestination(loop, insert);
  });
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
    separateStores(getOperation());
  }
};
} // namespace
