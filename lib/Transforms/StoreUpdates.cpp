//===- StoreUpdates.cpp - Updated arguments hold their new content --------===//
//
// Matches the return of a function on buffers whose results update arguments:
//
//   func @f(%a: memref<4xf32>) -> (memref<4xf32> {moe.updates = 0 : i64}) {
//     return %r }
//   becomes
//   func @f(%a: memref<4xf32>) { memref.copy %r, %a; return }
//
// Bufferization computes most updates in the argument itself, and nothing is
// copied. Where it cannot (the old content is still read), the new content is
// copied when everything else is done.
//
//===----------------------------------------------------------------------===//

#include "MoE/Support/Updates.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/MemRef/Utils/MemRefUtils.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOESTOREUPDATESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

static Value withoutCasts(Value buffer) {
  while (auto cast = buffer.getDefiningOp<memref::CastOp>())
    buffer = cast.getSource();
  return buffer;
}

/// Whether nothing else can write the buffer: it is a new allocation.
static bool isNew(Value buffer) {
  Value root = memref::skipViewLikeOps(cast<MemrefValue>(buffer));
  return root.getDefiningOp<memref::AllocOp>() != nullptr;
}

/// A copy of `buffer` in memory of its own.
static Value saved(OpBuilder &b, Location loc, Value buffer) {
  auto type = cast<MemRefType>(buffer.getType());
  SmallVector<Value> sizes;
  for (int64_t dim = 0, rank = type.getRank(); dim < rank; ++dim)
    if (type.isDynamicDim(dim))
      sizes.push_back(memref::DimOp::create(b, loc, buffer, dim));
  Value copy = memref::AllocOp::create(
      b, loc, MemRefType::get(type.getShape(), type.getElementType()), sizes);
  memref::CopyOp::create(b, loc, buffer, copy);
  return copy;
}

static LogicalResult storeUpdates(func::FuncOp function) {
  auto terminator =
      cast<func::ReturnOp>(function.getBody().front().getTerminator());
  OpBuilder builder(terminator);
  BitVector updates(function.getNumResults());
  SmallVector<std::pair<Value, Value>> copies;
  for (auto [position, result] : llvm::enumerate(terminator.getOperands())) {
    std::optional<unsigned> argument = getUpdatedArgument(function, position);
    if (!argument)
      continue;
    if (!isa<MemRefType>(result.getType()))
      return terminator.emitOpError()
             << "expected a buffer for result " << position
             << ", which updates an argument, found " << result.getType()
             << "; bufferize first";
    updates.set(position);
    Value target = function.getArgument(*argument);
    if (withoutCasts(result) != target)
      copies.emplace_back(result, target);
  }
  // Of several, one may overwrite what another still has to read.
  if (copies.size() > 1)
    for (auto &[source, target] : copies)
      if (!isNew(source))
        source = saved(builder, terminator.getLoc(), source);
  for (auto [source, target] : copies)
    memref::CopyOp::create(builder, terminator.getLoc(), source, target);
  for (int position = updates.find_last(); position >= 0;
       position = updates.find_prev(position)) {
    terminator.getOperandsMutable().erase(position);
    (void)function.eraseResult(position);
  }
  return success();
}

namespace {
struct StoreUpdatesPass
    : mlir::moe::impl::MoEStoreUpdatesPassBase<StoreUpdatesPass> {
  using Base::Base;

  void runOnOperation() override {
    if (!getOperation().isExternal() &&
        getOperation().getBody().hasOneBlock() &&
        failed(storeUpdates(getOperation())))
      signalPassFailure();
  }
};
} // namespace
