//===- CastReshapes.cpp - Reshapes without a buffer of sizes --------------===//
//
// Where two sizes of one group are unknown, a shape can be expanded by
// memref.reshape alone, which reads the sizes from a buffer. Kernels compute
// what they capture again, and that buffer is written by nobody else: the
// sizes are the values that the function stores there.
//
//===----------------------------------------------------------------------===//

#include "ThreadLowerings.h"

#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

using namespace mlir;
using namespace mlir::moe;

/// The values that the function stores in each element of `buffer`; nothing if
/// it does anything else with it but reshaping and reading sizes again.
static FailureOr<SmallVector<Value>> getStoredSizes(Value buffer) {
  auto alloc = buffer.getDefiningOp<memref::AllocOp>();
  if (!alloc || !alloc.getType().hasStaticShape() ||
      alloc.getType().getRank() != 1)
    return failure();
  SmallVector<Value> sizes(alloc.getType().getDimSize(0));
  for (Operation *user : alloc->getUsers()) {
    if (isa<memref::ReshapeOp, memref::DeallocOp>(user))
      continue;
    if (auto load = dyn_cast<memref::LoadOp>(user);
        load && getConstantIntValue(load.getIndices()[0]))
      continue;
    auto store = dyn_cast<memref::StoreOp>(user);
    std::optional<int64_t> place =
        store ? getConstantIntValue(store.getIndices()[0]) : std::nullopt;
    if (!place || store->getBlock() != alloc->getBlock() || sizes[*place])
      return failure();
    sizes[*place] = store.getValueToStore();
  }
  if (llvm::is_contained(sizes, Value()))
    return failure();
  return sizes;
}

/// `reshape` as a view of its source with the sizes and the strides that
/// follow from them.
static void castReshape(memref::ReshapeOp reshape, ArrayRef<Value> values) {
  ImplicitLocOpBuilder b(reshape.getLoc(), reshape);
  auto type = cast<MemRefType>(reshape.getType());
  SmallVector<OpFoldResult> sizes;
  for (auto [size, value] : llvm::zip_equal(type.getShape(), values))
    sizes.push_back(ShapedType::isDynamic(size)
                        ? OpFoldResult(value)
                        : OpFoldResult(b.getIndexAttr(size)));
  Value cast = memref::ReinterpretCastOp::create(
      b, type, reshape.getSource(), b.getIndexAttr(0), sizes,
      getContiguousStrides(b, sizes));
  reshape.replaceAllUsesWith(cast);
  reshape.erase();
}

void mlir::moe::castReshapes(func::FuncOp function) {
  SmallVector<memref::ReshapeOp> reshapes;
  function.walk([&](memref::ReshapeOp op) { reshapes.push_back(op); });
  llvm::MapVector<Operation *, SmallVector<Value>> shapes;
  for (memref::ReshapeOp reshape : reshapes) {
    auto source = cast<MemRefType>(reshape.getSource().getType());
    auto result = dyn_cast<MemRefType>(reshape.getType());
    if (result && result.hasStaticShape() && source.getLayout().isIdentity() &&
        result.getLayout().isIdentity()) {
      castReshape(reshape, SmallVector<Value>(result.getRank()));
      continue;
    }
    FailureOr<SmallVector<Value>> sizes = getStoredSizes(reshape.getShape());
    if (failed(sizes) || !result || !source.getLayout().isIdentity() ||
        !result.getLayout().isIdentity() ||
        !llvm::all_of(
            *sizes, [](Value size) { return isa<IndexType>(size.getType()); }))
      continue;
    shapes.insert({reshape.getShape().getDefiningOp(), *sizes});
    castReshape(reshape, *sizes);
  }
  for (auto &[shape, sizes] : shapes) {
    if (llvm::any_of(shape->getUsers(), llvm::IsaPred<memref::ReshapeOp>))
      continue;
    for (Operation *user : llvm::make_early_inc_range(shape->getUsers())) {
      if (auto load = dyn_cast<memref::LoadOp>(user))
        load.replaceAllUsesWith(
            sizes[*getConstantIntValue(load.getIndices()[0])]);
      user->erase();
    }
    shape->erase();
  }
}
