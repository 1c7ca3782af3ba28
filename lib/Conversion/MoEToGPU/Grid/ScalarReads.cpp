//===- ScalarReads.cpp - Scalars that kernels read ------------------------===//
//
// A function that runs as kernels computes nothing between them. A scalar that
// it reads from a buffer, such as the place of a token in a cache, is read in
// each loop over blocks that uses it instead:
//
//   %i = memref.load %places[%c0]           scf.forall (%b) in (n)
//   %row = memref.subview %cache[%i, 0]  ->   %i = memref.load %places[%c0]
//   scf.forall (%b) in (n)                    %row = memref.subview ..
//     memref.copy %new, %row                  memref.copy %new, %row
//
// That is the same value if nothing writes the buffer from the load on up to
// the end of the loop.
//
//===----------------------------------------------------------------------===//

#include "ScalarReads.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/MemRef/Utils/MemRefUtils.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Transforms/RegionUtils.h"

using namespace mlir;
using namespace mlir::moe;

/// The buffer of which `value` is, or shows a part; null if it is no buffer.
static Value getRoot(Value value) {
  auto buffer = dyn_cast<MemrefValue>(value);
  return buffer ? Value(memref::skipViewLikeOps(buffer)) : Value();
}

/// Whether `op`, or one in it, has `buffer` or a part of it at hand.
static bool uses(Operation *op, Value buffer) {
  return op
      ->walk([&](Operation *inner) {
        return llvm::any_of(
                   inner->getOperands(),
                   [&](Value operand) { return getRoot(operand) == buffer; })
                   ? WalkResult::interrupt()
                   : WalkResult::advance();
      })
      .wasInterrupted();
}

/// Whether `op`, or one in it, may write `buffer`. Where addresses are computed
/// from buffers, all that are at hand may be meant.
static bool mayWrite(Operation *op, Value buffer) {
  if (!uses(op, buffer))
    return false;
  auto isWrite = [&](const MemoryEffects::EffectInstance &effect) {
    if (!isa<MemoryEffects::Write>(effect.getEffect()))
      return false;
    Value root = effect.getValue() ? getRoot(effect.getValue()) : Value();
    return !root || root == buffer;
  };
  return op
      ->walk([&](Operation *inner) {
        auto effects = dyn_cast<MemoryEffectOpInterface>(inner);
        SmallVector<MemoryEffects::EffectInstance> all;
        if (effects)
          effects.getEffects(all);
        bool isKnown = effects || isMemoryEffectFree(inner) ||
                       inner->hasTrait<OpTrait::HasRecursiveMemoryEffects>();
        return !isKnown || llvm::any_of(all, isWrite) ? WalkResult::interrupt()
                                                      : WalkResult::advance();
      })
      .wasInterrupted();
}

static bool canReadIn(scf::ForallOp forall, memref::LoadOp load) {
  if (load->getBlock() != forall->getBlock())
    return false;
  Value buffer = getRoot(load.getMemRef());
  for (Operation *op = load;; op = op->getNextNode()) {
    if (mayWrite(op, buffer))
      return false;
    if (op == forall)
      return true;
  }
}

/// Adds the ops that `value` follows from, loads or without effects, in order.
/// Returns whether a load is among them; fails where `forall` cannot have them.
static FailureOr<bool> collect(Value value, scf::ForallOp forall,
                               SetVector<Operation *> &ops) {
  Operation *op = value.getDefiningOp();
  auto load = dyn_cast_or_null<memref::LoadOp>(op);
  // Buffers and arguments are what all kernels have.
  if (!op || (!load && !isMemoryEffectFree(op)))
    return false;
  if (op->getNumRegions() != 0 || (load && !canReadIn(forall, load)))
    return failure();
  bool reads = load != nullptr;
  for (Value operand : op->getOperands()) {
    FailureOr<bool> follows = collect(operand, forall, ops);
    if (failed(follows))
      return failure();
    reads |= *follows;
  }
  if (reads)
    ops.insert(op);
  return reads;
}

static void readScalarsIn(scf::ForallOp forall) {
  SetVector<Value> captured;
  getUsedValuesDefinedAbove(forall.getRegion(), captured);
  auto b = OpBuilder::atBlockBegin(forall.getBody());
  IRMapping mapping;
  for (Value value : captured) {
    SetVector<Operation *> ops;
    FailureOr<bool> reads = collect(value, forall, ops);
    if (failed(reads) || !*reads)
      continue;
    for (Operation *op : ops)
      if (!mapping.contains(op->getResult(0)))
        b.clone(*op, mapping);
    replaceAllUsesInRegionWith(value, mapping.lookup(value),
                               forall.getRegion());
  }
}

void mlir::moe::readScalarsInLoops(func::FuncOp function) {
  SmallVector<scf::ForallOp> loops;
  function.walk<WalkOrder::PreOrder>([&](scf::ForallOp forall) {
    loops.push_back(forall);
    return WalkResult::skip();
  });
  for (scf::ForallOp forall : loops)
    readScalarsIn(forall);
}
