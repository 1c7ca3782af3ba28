//===- Workspace.cpp - Global memory between kernels ----------------------===//
//
// What one kernel hands to the next lies in global memory. Nothing allocates
// it at run time: the buffers become parts of a workspace that the caller
// passes, and its size is a function of the dynamic sizes, like the grids.
//
//===----------------------------------------------------------------------===//

#include "Workspace.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Sizes
//===----------------------------------------------------------------------===//

/// Dim `position` of an argument as a symbol.
static AffineExpr getArgumentSize(BlockArgument buffer, int64_t position,
                                  func::FuncOp function) {
  unsigned symbol = 0;
  for (BlockArgument argument : function.getArguments()) {
    auto type = dyn_cast<MemRefType>(argument.getType());
    if (argument == buffer)
      return getAffineSymbolExpr(symbol + type.getDynamicDimIndex(position),
                                 function.getContext());
    symbol += type ? type.getNumDynamicDims() : 0;
  }
  return {};
}

/// Dim `position` of a buffer: of an argument, of one that the function
/// allocates, or of a view of one of them.
static AffineExpr getDimExpr(Value buffer, int64_t position,
                             func::FuncOp function) {
  auto type = cast<MemRefType>(buffer.getType());
  if (!type.isDynamicDim(position))
    return getAffineConstantExpr(type.getDimSize(position),
                                 function.getContext());
  if (auto argument = dyn_cast<BlockArgument>(buffer))
    return getArgumentSize(argument, position, function);
  unsigned number = type.getDynamicDimIndex(position);
  if (auto alloc = buffer.getDefiningOp<memref::AllocOp>())
    return getSizeExpr(alloc.getDynamicSizes()[number], function);
  if (auto view = buffer.getDefiningOp<memref::ViewOp>())
    return getSizeExpr(view.getSizes()[number], function);
  if (auto view = buffer.getDefiningOp<memref::ReinterpretCastOp>())
    return getSizeExpr(view.getMixedSizes()[position], function);
  if (auto view = buffer.getDefiningOp<memref::SubViewOp>();
      view && view.getSourceType().getRank() == type.getRank())
    return getSizeExpr(view.getMixedSizes()[position], function);
  if (auto expand = buffer.getDefiningOp<memref::ExpandShapeOp>())
    return getSizeExpr(expand.getMixedOutputShape()[position], function);
  auto collapse = buffer.getDefiningOp<memref::CollapseShapeOp>();
  if (!collapse)
    return {};
  AffineExpr size = getAffineConstantExpr(1, function.getContext());
  // The loop needs a copy: the getter makes its groups anew.
  ReassociationIndices group = collapse.getReassociationIndices()[position];
  for (int64_t dim : group) {
    AffineExpr expr = getDimExpr(collapse.getSrc(), dim, function);
    if (!expr)
      return {};
    size = size * expr;
  }
  return size;
}

AffineExpr mlir::moe::getSizeExpr(OpFoldResult value, func::FuncOp function) {
  if (std::optional<int64_t> constant = getConstantIntValue(value))
    return getAffineConstantExpr(*constant, function.getContext());
  auto producer = cast<Value>(value).getDefiningOp();
  if (auto dim = dyn_cast_or_null<memref::DimOp>(producer)) {
    std::optional<int64_t> position = dim.getConstantIndex();
    return position ? getDimExpr(dim.getSource(), *position, function)
                    : AffineExpr();
  }
  if (isa_and_nonnull<arith::MulIOp, arith::AddIOp>(producer)) {
    AffineExpr lhs = getSizeExpr(producer->getOperand(0), function);
    AffineExpr rhs = getSizeExpr(producer->getOperand(1), function);
    if (!lhs || !rhs)
      return {};
    return isa<arith::MulIOp>(producer) ? lhs * rhs : lhs + rhs;
  }
  auto apply = dyn_cast_or_null<affine::AffineApplyOp>(producer);
  if (!apply)
    return {};
  SmallVector<AffineExpr> dims, symbols;
  AffineMap map = apply.getAffineMap();
  for (auto [number, operand] : llvm::enumerate(apply.getMapOperands())) {
    AffineExpr expr = getSizeExpr(operand, function);
    if (!expr)
      return {};
    (number < map.getNumDims() ? dims : symbols).push_back(expr);
  }
  return map.getResult(0).replaceDimsAndSymbols(dims, symbols);
}

//===----------------------------------------------------------------------===//
// Bounds of sizes
//===----------------------------------------------------------------------===//

/// Whether `value` is at least 0, as sizes are and what is made of them without
/// differences.
static bool isNonNegative(OpFoldResult value) {
  if (std::optional<int64_t> constant = getConstantIntValue(value))
    return *constant >= 0;
  Operation *producer = cast<Value>(value).getDefiningOp();
  auto areOperands = [&] {
    return llvm::all_of(producer->getOperands(),
                        [](Value operand) { return isNonNegative(operand); });
  };
  if (isa_and_nonnull<memref::DimOp>(producer))
    return true;
  if (isa_and_nonnull<arith::MaxSIOp>(producer))
    return isNonNegative(producer->getOperand(0)) ||
           isNonNegative(producer->getOperand(1));
  return isa_and_nonnull<arith::MinSIOp, arith::MulIOp, arith::AddIOp>(
             producer) &&
         areOperands();
}

/// A bound of dim `position` of `buffer`, as getSizeBound.
static AffineExpr getDimBound(Value buffer, int64_t position,
                              func::FuncOp function) {
  auto type = cast<MemRefType>(buffer.getType());
  unsigned number = type.getDynamicDimIndex(position);
  if (auto alloc = buffer.getDefiningOp<memref::AllocOp>())
    return getSizeBound(alloc.getDynamicSizes()[number], function);
  if (auto view = buffer.getDefiningOp<memref::SubViewOp>();
      view && view.getSourceType().getRank() == type.getRank())
    return getSizeBound(view.getMixedSizes()[position], function);
  return {};
}

AffineExpr mlir::moe::getSizeBound(OpFoldResult value, func::FuncOp function) {
  MLIRContext *context = function.getContext();
  if (isNonNegative(value))
    if (AffineExpr size = getSizeExpr(value, function))
      return size;
  if (std::optional<int64_t> constant = getConstantIntValue(value))
    return getAffineConstantExpr(std::max<int64_t>(*constant, 0), context);
  Operation *producer = cast<Value>(value).getDefiningOp();
  if (auto dim = dyn_cast_or_null<memref::DimOp>(producer)) {
    std::optional<int64_t> position = dim.getConstantIndex();
    return position ? getDimBound(dim.getSource(), *position, function)
                    : AffineExpr();
  }
  if (!isa_and_nonnull<arith::MulIOp, arith::AddIOp, arith::SubIOp,
                       arith::MinSIOp, arith::MaxSIOp>(producer))
    return {};
  Value left = producer->getOperand(0), right = producer->getOperand(1);
  AffineExpr lhs = getSizeBound(left, function),
             rhs = getSizeBound(right, function);
  if (isa<arith::SubIOp>(producer))
    return isNonNegative(right) ? lhs : AffineExpr();
  if (isa<arith::MinSIOp>(producer)) {
    // Of two bounds a constant is the better one for a buffer of a few rows.
    if (!lhs || !rhs)
      return lhs ? lhs : rhs;
    return isa<AffineConstantExpr>(rhs) ? rhs : lhs;
  }
  if (!lhs || !rhs)
    return {};
  // Both are at least 0, so that the sum is no less than either.
  if (!isa<arith::MulIOp>(producer))
    return lhs + rhs;
  if (isNonNegative(left) && isNonNegative(right))
    return lhs * rhs;
  // A size that is taken off: at most nothing.
  bool isNegated = (getConstantIntValue(left) && isNonNegative(right)) ||
                   (getConstantIntValue(right) && isNonNegative(left));
  return isNegated ? getAffineConstantExpr(0, context) : AffineExpr();
}

unsigned mlir::moe::getNumDynamicSizes(func::FuncOp function) {
  unsigned count = 0;
  for (Type type : function.getArgumentTypes())
    if (auto memref = dyn_cast<MemRefType>(type))
      count += memref.getNumDynamicDims();
  return count;
}

//===----------------------------------------------------------------------===//
// Buffers
//===----------------------------------------------------------------------===//

/// The bytes that `alloc` takes at most as an expression of the sizes, a
/// multiple of the alignment; null if its sizes do not follow from the
/// function's buffers.
static AffineExpr getBytes(memref::AllocOp alloc, func::FuncOp function) {
  MemRefType type = alloc.getType();
  int64_t width = getElementBytes(type.getElementType());
  AffineExpr bytes = getAffineConstantExpr(width, function.getContext());
  for (OpFoldResult size : alloc.getMixedSizes()) {
    AffineExpr expr = getSizeExpr(size, function);
    if (!expr)
      expr = getSizeBound(size, function);
    if (!expr)
      return {};
    bytes = bytes * expr;
  }
  return bytes.ceilDiv(kWorkspaceAlignment) * kWorkspaceAlignment;
}

//===----------------------------------------------------------------------===//
// Places
//===----------------------------------------------------------------------===//

namespace {
/// A buffer, and from which kernel to which one it holds something: numbers of
/// ops in the function.
struct Lifetime {
  memref::AllocOp alloc;
  AffineExpr bytes;
  unsigned first = 0, last = 0;
};
} // namespace

/// Widens `lifetime` by the ops that access `buffer` or a view of it.
static void addUses(Lifetime &lifetime, Value buffer,
                    const DenseMap<Operation *, unsigned> &numbers) {
  Block *block = lifetime.alloc->getBlock();
  for (Operation *user : buffer.getUsers()) {
    if (isa<memref::DeallocOp, memref::DimOp>(user))
      continue;
    if (isa<ViewLikeOpInterface, UnrealizedConversionCastOp>(user)) {
      for (Value view : user->getResults())
        addUses(lifetime, view, numbers);
      continue;
    }
    unsigned number = numbers.lookup(block->findAncestorOpInBlock(*user));
    lifetime.first = std::min(lifetime.first, number);
    lifetime.last = std::max(lifetime.last, number);
  }
}

/// Where each buffer starts; `end` gets the size of all. Kernels run one after
/// the other, so that a buffer takes the place of one of the same size that no
/// later kernel accesses: what lies between the layers of a model is there once
/// or twice, and equal layers find theirs at equal places.
static SmallVector<AffineExpr> findPlaces(MutableArrayRef<Lifetime> lifetimes,
                                          func::FuncOp function,
                                          AffineExpr &end) {
  DenseMap<Operation *, unsigned> numbers;
  for (Operation &op : function.front())
    numbers[&op] = numbers.size();
  for (Lifetime &lifetime : lifetimes) {
    lifetime.first = numbers.size();
    addUses(lifetime, lifetime.alloc.getMemref(), numbers);
  }
  auto order = llvm::to_vector(llvm::seq<unsigned>(lifetimes.size()));
  llvm::stable_sort(order, [&](unsigned lhs, unsigned rhs) {
    return lifetimes[lhs].first < lifetimes[rhs].first;
  });
  struct Slot {
    AffineExpr begin, bytes;
    unsigned last;
  };
  SmallVector<Slot> slots;
  SmallVector<AffineExpr> places(lifetimes.size());
  for (unsigned i : order) {
    const Lifetime &lifetime = lifetimes[i];
    auto *free = llvm::find_if(slots, [&](const Slot &slot) {
      return slot.bytes == lifetime.bytes && slot.last < lifetime.first;
    });
    if (free == slots.end()) {
      slots.push_back({end, lifetime.bytes, 0});
      free = std::prev(slots.end());
      end = end + lifetime.bytes;
    }
    free->last = lifetime.last;
    places[i] = free->begin;
  }
  return places;
}

/// `alloc` becomes a view of the workspace that starts at `offset`.
static void placeInWorkspace(memref::AllocOp alloc, Value workspace,
                             AffineExpr offset, ValueRange sizes) {
  ImplicitLocOpBuilder b(alloc.getLoc(), alloc);
  Value start = getValueOrCreateConstantIndexOp(
      b, b.getLoc(),
      affine::makeComposedFoldedAffineApply(
          b, b.getLoc(), AffineMap::get(0, sizes.size(), offset),
          getAsOpFoldResult(sizes)));
  MemRefType type = alloc.getType(), storage = type;
  // An i1 takes a byte in memory.
  if (type.getElementType().isInteger(1))
    storage = cast<MemRefType>(type.clone(b.getI8Type()));
  Value view = memref::ViewOp::create(b, storage, workspace, start,
                                      alloc.getDynamicSizes());
  if (storage != type)
    view = UnrealizedConversionCastOp::create(b, type, view).getResult(0);
  for (Operation *user : llvm::make_early_inc_range(alloc->getUsers()))
    if (isa<memref::DeallocOp>(user))
      user->erase();
  alloc.replaceAllUsesWith(view);
  alloc.erase();
}

LogicalResult mlir::moe::moveBuffersToWorkspace(func::FuncOp function) {
  SmallVector<memref::AllocOp> allocs(function.getOps<memref::AllocOp>());
  if (allocs.empty())
    return success();
  SmallVector<Lifetime> lifetimes;
  for (memref::AllocOp alloc : allocs) {
    AffineExpr bytes = getBytes(alloc, function);
    if (!bytes || !alloc.getType().getLayout().isIdentity())
      return alloc.emitError("expected a buffer between kernels to be "
                             "contiguous and to have sizes that follow from "
                             "those of the function's buffers");
    lifetimes.push_back({alloc, bytes});
  }
  AffineExpr end = getAffineConstantExpr(0, function.getContext());
  SmallVector<AffineExpr> offsets = findPlaces(lifetimes, function, end);

  unsigned numSizes = getNumDynamicSizes(function);
  auto b = ImplicitLocOpBuilder::atBlockBegin(function.getLoc(),
                                              &function.getBody().front());
  SmallVector<Value> sizes;
  for (BlockArgument argument : function.getArguments())
    if (auto type = dyn_cast<MemRefType>(argument.getType()))
      for (int64_t dim = 0; dim < type.getRank(); ++dim)
        if (type.isDynamicDim(dim))
          sizes.push_back(memref::DimOp::create(b, argument, dim));
  unsigned position = function.getNumArguments();
  auto type = MemRefType::get({ShapedType::kDynamic}, b.getI8Type());
  if (failed(function.insertArgument(position, type, {}, function.getLoc())))
    return failure();
  Value workspace = function.getArgument(position);
  for (auto [alloc, offset] : llvm::zip_equal(allocs, offsets))
    placeInWorkspace(alloc, workspace, offset, sizes);
  function->setAttr(kWorkspaceAttrName, AffineMapAttr::get(simplifyAffineMap(
                                            AffineMap::get(0, numSizes, end))));
  return success();
}
