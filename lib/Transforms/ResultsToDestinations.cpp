//===- ResultsToDestinations.cpp - Results into caller-owned buffers ------===//
//
// Gives every result of a public function a trailing buffer argument that the
// result is materialised in, so that bufferization finds the caller's memory
// as the destination and needs no allocation and no copy for it. Bits do not
// change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Support/Updates.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Dialect/Tensor/Transforms/Transforms.h"
#include "mlir/IR/SymbolTable.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOERESULTSTODESTINATIONSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// The tensor that a result is stored as; a scalar is a tensor of rank 0. Null
/// for what cannot be stored.
static RankedTensorType getStoredType(Type result) {
  if (auto tensor = dyn_cast<RankedTensorType>(result))
    return tensor;
  if (result.isIntOrIndexOrFloat())
    return RankedTensorType::get({}, result);
  return nullptr;
}

/// The lowering of memref.expand_shape derives one size a group from the
/// others.
static bool canExpand(RankedTensorType type,
                      ArrayRef<ReassociationIndices> groups) {
  return llvm::all_of(groups, [&](const ReassociationIndices &group) {
    return llvm::count_if(
               group, [&](int64_t dim) { return type.isDynamicDim(dim); }) <= 1;
  });
}

/// `destination` as a buffer of the shape of `type`, whose dims were joined as
/// `groups` say.
static Value expand(OpBuilder &b, Location loc, Value destination,
                    RankedTensorType type,
                    ArrayRef<ReassociationIndices> groups) {
  SmallVector<OpFoldResult> shape;
  for (auto [position, group] : llvm::enumerate(groups)) {
    int64_t known = 1;
    for (int64_t dim : group)
      if (!type.isDynamicDim(dim))
        known *= type.getDimSize(dim);
    for (int64_t dim : group) {
      if (!type.isDynamicDim(dim)) {
        shape.push_back(b.getIndexAttr(type.getDimSize(dim)));
        continue;
      }
      Value size = memref::DimOp::create(b, loc, destination, position);
      if (known != 1)
        size = arith::DivUIOp::create(
            b, loc, size, arith::ConstantIndexOp::create(b, loc, known));
      shape.push_back(size);
    }
  }
  return memref::ExpandShapeOp::create(
      b, loc, MemRefType::get(type.getShape(), type.getElementType()),
      destination, groups, shape);
}

/// Goes from a reshaped result to what was reshaped, and gives the destination
/// that shape instead: views of contiguous memory cost nothing, and
/// empty-tensor elimination does not look through reshapes. The views, which
/// `b` makes, must be there before the result is computed.
static void moveReshapesToDestination(OpBuilder &b, Value &result,
                                      Value &destination) {
  for (;;) {
    Operation *reshape = result.getDefiningOp();
    if (!isa_and_nonnull<tensor::CollapseShapeOp, tensor::ExpandShapeOp>(
            reshape))
      return;
    Location loc = reshape->getLoc();
    Value source = reshape->getOperand(0);
    auto type = cast<RankedTensorType>(source.getType());
    if (auto collapse = dyn_cast<tensor::CollapseShapeOp>(reshape)) {
      if (!canExpand(type, collapse.getReassociationIndices()))
        return;
      destination =
          expand(b, loc, destination, type, collapse.getReassociationIndices());
    } else {
      destination = memref::CollapseShapeOp::create(
          b, loc, destination,
          cast<tensor::ExpandShapeOp>(reshape).getReassociationIndices());
    }
    result = source;
  }
}

/// What updates an argument stays a result until bufferization has run: the
/// argument may be written, and moe-store-updates erases the result.
static LogicalResult allowUpdate(func::FuncOp function, unsigned result,
                                 unsigned argument) {
  Type type = function.getResultTypes()[result];
  if (argument >= function.getNumArguments() || !isa<TensorType>(type) ||
      function.getArgumentTypes()[argument] != type)
    return function.emitOpError()
           << "expected result " << result
           << " to update an argument of its type, found '" << kUpdatesAttrName
           << "' " << argument;
  function.setArgAttr(argument,
                      bufferization::BufferizationDialect::kWritableAttrName,
                      BoolAttr::get(function.getContext(), true));
  return success();
}

/// func @f(%a) -> tensor<?xf32> { return %r }
/// becomes
/// func @f(%a {bufferization.writable = false}, %d: memref<?xf32>) {
///   bufferization.materialize_in_destination %r in restrict writable %d
///   return }
static LogicalResult addDestinations(func::FuncOp function) {
  OpBuilder builder(function.getContext());
  function->setAttr(LLVM::LLVMDialect::getEmitCWrapperAttrName(),
                    builder.getUnitAttr());
  for (auto [position, type] : llvm::enumerate(function.getArgumentTypes()))
    if (isa<TensorType>(type))
      function.setArgAttr(
          position, bufferization::BufferizationDialect::kWritableAttrName,
          builder.getBoolAttr(false));

  if (!function.getBody().hasOneBlock())
    return function.emitOpError(
        "expected one block, found several: structure control flow first");
  auto terminator =
      cast<func::ReturnOp>(function.getBody().front().getTerminator());
  OpBuilder entry = OpBuilder::atBlockBegin(&function.getBody().front());
  builder.setInsertionPoint(terminator);
  SmallVector<Value> updates;
  BitVector stored(function.getNumResults());
  for (auto [position, result] : llvm::enumerate(terminator.getOperands())) {
    if (auto argument = getUpdatedArgument(function, position)) {
      if (failed(allowUpdate(function, position, *argument)))
        return failure();
      updates.push_back(result);
      continue;
    }
    stored.set(position);
    RankedTensorType type = getStoredType(result.getType());
    if (!type)
      return function.emitOpError()
             << "expected result " << position
             << " to be a ranked tensor or a scalar, found "
             << result.getType();
    Location loc = result.getLoc();
    auto bufferType = MemRefType::get(type.getShape(), type.getElementType());
    if (failed(function.insertArgument(function.getNumArguments(), bufferType,
                                       DictionaryAttr(), loc)))
      return failure();
    Value value = result;
    if (!isa<TensorType>(value.getType()))
      value = tensor::FromElementsOp::create(builder, loc, type, value);
    Value destination = function.getArguments().back();
    moveReshapesToDestination(entry, value, destination);
    bufferization::MaterializeInDestinationOp::create(
        builder, loc, /*result=*/Type(), value, destination, /*restrict=*/true,
        /*writable=*/true);
  }
  terminator.getOperandsMutable().assign(updates);
  return function.eraseResults(stored);
}

namespace {
struct ResultsToDestinationsPass
    : mlir::moe::impl::MoEResultsToDestinationsPassBase<
          ResultsToDestinationsPass> {
  using Base::Base;

  void runOnOperation() override {
    SymbolTableCollection symbols;
    SymbolUserMap users(symbols, getOperation());
    for (auto function : getOperation().getOps<func::FuncOp>()) {
      if (!function.isPublic() || function.isExternal())
        continue;
      if (function.getNumResults() > 0)
        for (Operation *user : users.getUsers(function)) {
          (emitError(function.getLoc())
           << "expected public function '@" << function.getName()
           << "' not to be called inside its module, found a call; make it "
              "private")
                  .attachNote(user->getLoc())
              << "called here";
          return signalPassFailure();
        }
      if (failed(addDestinations(function)))
        return signalPassFailure();
    }
    // An empty tensor that is reshaped is an empty tensor of that shape.
    RewritePatternSet patterns(&getContext());
    tensor::populateFoldTensorEmptyPatterns(patterns);
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
