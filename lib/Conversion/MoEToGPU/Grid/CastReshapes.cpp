//===- CastReshapes.cpp - Reshapes without a buffer of sizes --------------===//
//
// Where two sizes of one group are unknown, a program expands a shape by
// memref.reshape, which reads the sizes from a buffer. Kernels compute what
// they capture again, and that buffer is written by nobody else: the sizes are
// the values that the function stores there. What passes expand themselves is
// memref.expand_shape, which memref-expand-strided-metadata does not take with
// two such sizes.
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

/// The result of `reshape` as a view of its source with the sizes and the
/// strides that follow from them.
static void castTo(ArrayRef<OpFoldResult> sizes, ViewLikeOpInterface reshape) {
  ImplicitLocOpBuilder b(reshape.getLoc(), reshape);
  Value view = memref::ReinterpretCastOp::create(
      b, cast<MemRefType>(reshape->getResult(0).getType()),
      reshape.getViewSource(), b.getIndexAttr(0), sizes,
      getContiguousStrides(b, sizes));
  reshape->replaceAllUsesWith(ValueRange(view));
  reshape->erase();
}

static void castReshape(memref::ReshapeOp reshape, ArrayRef<Value> values) {
  OpBuilder b(reshape);
  auto type = cast<MemRefType>(reshape.getType());
  SmallVector<OpFoldResult> sizes;
  for (auto [size, value] : llvm::zip_equal(type.getShape(), values))
    sizes.push_back(ShapedType::isDynamic(size)
                        ? OpFoldResult(value)
                        : OpFoldResult(b.getIndexAttr(size)));
  castTo(sizes, reshape);
}

/// Those of which two sizes of a group are unknown.
static void castExpandShape(memref::ExpandShapeOp expand) {
  MemRefType result = expand.getResultType();
  bool hasTwo = llvm::any_of(expand.getReassociationIndices(),
                             [&](const ReassociationIndices &dims) {
                               return llvm::count_if(dims, [&](int64_t dim) {
                                        return result.isDynamicDim(dim);
                                      }) > 1;
                             });
  if (hasTwo && expand.getSrcType().getLayout().isIdentity() &&
      result.getLayout().isIdentity())
    castTo(expand.getMixedOutputShape(), expand);
}

void mlir::moe::castReshapes(func::FuncOp function) {
  function.walk(castExpandShape);
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
