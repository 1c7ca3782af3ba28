//===- KernelOutlining.cpp - Blocks of a grid become a kernel -------------===//
//
// Upstream's gpu-kernel-outlining passes whatever the body captures, in the
// order in which it is captured. A kernel that is launched from a manifest
// needs parameters that follow from the function's signature alone, so this
// outlining passes all arguments and computes every other captured value again
// inside of the kernel: sizes, constants and scalars that lie in buffers, which
// cost next to nothing.
//
//===----------------------------------------------------------------------===//

#include "KernelOutlining.h"
#include "Workspace.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Support/Chips.h"
#include "MoE/Support/ElementBytes.h"
#include "MoE/Transforms/Transforms.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "mlir/Interfaces/ViewLikeInterface.h"
#include "mlir/Transforms/RegionUtils.h"

using namespace mlir;
using namespace mlir::moe;

/// Workgroup buffers start at multiples of this, the widest access of a thread.
/// Without it a buffer would have the alignment of its elements.
static constexpr int64_t kWorkgroupAlignment = 16;

//===----------------------------------------------------------------------===//
// Signature
//===----------------------------------------------------------------------===//

/// Every argument can be passed to a kernel.
static LogicalResult verifyArguments(func::FuncOp function) {
  for (BlockArgument argument : function.getArguments()) {
    Type type = argument.getType();
    if (auto memref = dyn_cast<MemRefType>(type);
        memref ? memref.getLayout().isIdentity() : type.isIntOrIndexOrFloat())
      continue;
    return function.emitError()
           << "expected argument " << argument.getArgNumber()
           << " to be a contiguous buffer or a scalar, found " << type;
  }
  return success();
}

/// The type of a buffer in a kernel. An i1 takes a byte in memory, which the
/// memref type does not say and the conversion to LLVM refuses to assume.
static MemRefType getStorageType(MemRefType type) {
  if (type.getElementType().isInteger(1))
    return cast<MemRefType>(type.clone(IntegerType::get(type.getContext(), 8)));
  return type;
}

static SmallVector<Type> getParameterTypes(func::FuncOp function) {
  Builder b(function.getContext());
  SmallVector<Type> types;
  int64_t numSizes = 0;
  for (Type type : function.getArgumentTypes()) {
    if (auto memref = dyn_cast<MemRefType>(type)) {
      // A buffer without dims stands for the pointer to its first element.
      types.push_back(
          MemRefType::get({}, getStorageType(memref).getElementType()));
      numSizes += memref.getNumDynamicDims();
    } else {
      types.push_back(type.isIndex() ? b.getI64Type() : type);
    }
  }
  types.append(numSizes, b.getI64Type());
  return types;
}

/// Rebuilds the function's arguments from the kernel's parameters.
static void mapArguments(ImplicitLocOpBuilder &b, func::FuncOp function,
                         gpu::GPUFuncOp kernel, IRMapping &mapping) {
  unsigned nextSize = function.getNumArguments();
  for (auto [argument, parameter] :
       llvm::zip(function.getArguments(), kernel.getArguments())) {
    auto type = dyn_cast<MemRefType>(argument.getType());
    if (!type) {
      Value value = parameter;
      if (argument.getType().isIndex())
        value = arith::IndexCastOp::create(b, b.getIndexType(), value);
      mapping.map(argument, value);
      continue;
    }
    SmallVector<OpFoldResult> sizes;
    for (int64_t size : type.getShape()) {
      if (!ShapedType::isDynamic(size)) {
        sizes.push_back(b.getIndexAttr(size));
        continue;
      }
      Value parameter = kernel.getArgument(nextSize++);
      sizes.push_back(arith::IndexCastOp::create(b, b.getIndexType(), parameter)
                          .getResult());
    }
    Value buffer = memref::ReinterpretCastOp::create(
        b, getStorageType(type), parameter, b.getIndexAttr(0), sizes,
        getContiguousStrides(b, sizes));
    if (buffer.getType() != type)
      buffer = UnrealizedConversionCastOp::create(b, type, buffer).getResult(0);
    mapping.map(argument, buffer);
  }
}

/// What the launch passes: the pointers, the scalars, the dynamic sizes.
static SmallVector<Value> getLaunchOperands(ImplicitLocOpBuilder &b,
                                            func::FuncOp function) {
  SmallVector<Value> operands, sizes;
  for (Value argument : function.getArguments()) {
    auto type = dyn_cast<MemRefType>(argument.getType());
    if (!type) {
      if (argument.getType().isIndex())
        argument = arith::IndexCastOp::create(b, b.getI64Type(), argument);
      operands.push_back(argument);
      continue;
    }
    Value buffer = argument;
    if (getStorageType(type) != type)
      buffer =
          UnrealizedConversionCastOp::create(b, getStorageType(type), buffer)
              .getResult(0);
    auto pointer = MemRefType::get({}, getStorageType(type).getElementType());
    operands.push_back(memref::ReinterpretCastOp::create(
        b, pointer, buffer, b.getIndexAttr(0), ArrayRef<OpFoldResult>(),
        ArrayRef<OpFoldResult>()));
    for (int64_t dim = 0; dim < type.getRank(); ++dim)
      if (type.isDynamicDim(dim)) {
        Value size = memref::DimOp::create(b, argument, dim);
        sizes.push_back(arith::IndexCastOp::create(b, b.getI64Type(), size));
      }
  }
  operands.append(sizes);
  return operands;
}

//===----------------------------------------------------------------------===//
// Grid
//===----------------------------------------------------------------------===//

/// Blocks along y and along z, of all chips; x may have 2^31 - 1.
static constexpr int64_t kMaxBlocks = 65535;

namespace {
/// The dims of a loop over blocks, by the grid dim that each is mapped to.
struct Grid {
  /// Puts counts that y and z may not hold, such as those of tokens, on x, as
  /// far as ids are divided by constants only.
  void fold();
  /// The number of a block along `dim` as the loop has it.
  Value createId(ImplicitLocOpBuilder &b, gpu::Dimension dim) const;

  /// The number of blocks along x, y and z as expressions of the sizes.
  SmallVector<AffineExpr> counts;
  /// For each dim of the loop, the grid dim it is mapped to.
  SmallVector<gpu::Dimension> dims;
  /// For each dim of the loop, whether its count is one that is large enough.
  SmallVector<bool> areBounds;
  /// The counts of the first dims if these and the next one share x.
  SmallVector<int64_t> folded;
};
} // namespace

void Grid::fold() {
  size_t last = 0;
  for (size_t dim = 1; dim < counts.size(); ++dim) {
    if (!isa<AffineConstantExpr>(counts[dim - 1]))
      break;
    auto count = dyn_cast<AffineConstantExpr>(counts[dim]);
    if (!count || count.getValue() > kMaxBlocks)
      last = dim;
  }
  for (AffineExpr count : ArrayRef(counts).take_front(last))
    folded.push_back(cast<AffineConstantExpr>(count).getValue());
  for (AffineExpr &count : MutableArrayRef(counts).slice(1, last)) {
    counts[0] = counts[0] * count;
    count = getAffineConstantExpr(1, count.getContext());
  }
}

Value Grid::createId(ImplicitLocOpBuilder &b, gpu::Dimension dim) const {
  auto number = static_cast<size_t>(dim);
  if (folded.empty() || number > folded.size())
    return gpu::BlockIdOp::create(b, dim);
  auto constant = [&](int64_t value) {
    return arith::ConstantIndexOp::create(b, value);
  };
  if (number < folded.size() && folded[number] == 1)
    return constant(0);
  Value id = gpu::BlockIdOp::create(b, gpu::Dimension::x);
  int64_t before = llvm::product_of(ArrayRef(folded).take_front(number));
  if (before > 1)
    id = arith::DivUIOp::create(b, id, constant(before));
  if (number < folded.size())
    id = arith::RemUIOp::create(b, id, constant(folded[number]));
  return id;
}

static FailureOr<Grid> getGrid(scf::ForallOp forall, func::FuncOp function) {
  MLIRContext *context = forall.getContext();
  Grid grid;
  grid.counts.assign(3, getAffineConstantExpr(1, context));
  auto mapping = forall.getMapping().value_or(ArrayAttr::get(context, {}));
  if (mapping.empty())
    return forall.emitError("expected a loop that is mapped to the blocks of a "
                            "grid; run moe-tile-and-fuse with gpu-blocks");
  for (auto [attribute, lower, upper, step] :
       llvm::zip_equal(mapping, forall.getMixedLowerBound(),
                       forall.getMixedUpperBound(), forall.getMixedStep())) {
    auto block = dyn_cast<gpu::GPUBlockMappingAttr>(attribute);
    if (!block || block.isLinearMapping())
      return forall.emitError()
             << "expected a mapping to #gpu.block<x>, <y> or <z>, found "
             << attribute;
    int64_t dim = static_cast<int64_t>(block.getBlock());
    AffineExpr first = getSizeExpr(lower, function);
    AffineExpr end = getSizeExpr(upper, function);
    AffineExpr stride = getSizeExpr(step, function);
    // More blocks than it takes do nothing; those of a cluster need each other.
    bool isBound = !end && !forall->hasAttr(kClusterBlocksAttrName);
    if (isBound)
      end = getSizeBound(upper, function);
    grid.areBounds.push_back(isBound);
    if (!first || !end || !stride)
      return forall.emitError("expected bounds that follow from the sizes of "
                              "the function's buffers");
    grid.counts[dim] = (end - first).ceilDiv(stride);
    grid.dims.push_back(static_cast<gpu::Dimension>(dim));
  }
  grid.fold();
  return grid;
}

static AffineMap getGridMap(const Grid &grid, func::FuncOp function) {
  return simplifyAffineMap(AffineMap::get(0, getNumDynamicSizes(function),
                                          grid.counts, function.getContext()));
}

//===----------------------------------------------------------------------===//
// Body
//===----------------------------------------------------------------------===//

/// Maps `value`, which the loop captures, to the same value in the kernel. It
/// may be read from the buffers in `constants`.
static LogicalResult rematerialise(OpBuilder &b, Value value,
                                   IRMapping &mapping,
                                   const DenseSet<Value> &constants) {
  if (mapping.contains(value))
    return success();
  Operation *op = value.getDefiningOp();
  if (op && hasEffect<MemoryEffects::Allocate>(op, value))
    return op->emitError("expected the buffers that a kernel uses to be "
                         "arguments of the function or local to a block, "
                         "found one that kernels would share");
  auto load = dyn_cast_or_null<memref::LoadOp>(op);
  bool readsConstant = load && constants.contains(load.getMemRef());
  if (!op || op->getNumRegions() != 0 ||
      !(readsConstant || isMemoryEffectFree(op)))
    return emitError(value.getLoc(),
                     "expected what a kernel uses to follow from the "
                     "function's arguments without reading what a kernel "
                     "writes");
  for (Value operand : op->getOperands())
    if (failed(rematerialise(b, operand, mapping, constants)))
      return failure();
  b.clone(*op, mapping);
  return success();
}

/// Has blocks at or behind the end of the loop do nothing, of a grid that is
/// larger than it takes: what `b` builds next is for the others.
static void skipBlocksBehindEnd(ImplicitLocOpBuilder &b, scf::ForallOp forall,
                                const Grid &grid, const IRMapping &mapping) {
  Value isInside;
  for (auto [isBound, variable, upper] :
       llvm::zip_equal(grid.areBounds, forall.getInductionVars(),
                       forall.getMixedUpperBound())) {
    if (!isBound)
      continue;
    Value is = arith::CmpIOp::create(b, arith::CmpIPredicate::slt,
                                     mapping.lookup(variable),
                                     mapping.lookup(cast<Value>(upper)));
    isInside =
        isInside ? arith::AndIOp::create(b, isInside, is).getResult() : is;
  }
  if (isInside)
    b.setInsertionPointToStart(scf::IfOp::create(b, isInside).thenBlock());
}

static LogicalResult cloneBody(ImplicitLocOpBuilder &b, scf::ForallOp forall,
                               const Grid &grid, IRMapping &mapping,
                               const DenseSet<Value> &constants) {
  llvm::SetVector<Value> captured;
  getUsedValuesDefinedAbove(forall.getRegion(), captured);
  captured.insert_range(forall.getOperands());
  for (Value value : captured)
    if (failed(rematerialise(b, value, mapping, constants)))
      return failure();
  // iv = lower + block * step
  auto remap = [&](OpFoldResult value) -> OpFoldResult {
    if (auto dynamic = dyn_cast<Value>(value))
      return mapping.lookup(dynamic);
    return value;
  };
  AffineExpr lower, block, step;
  bindSymbols(b.getContext(), lower, block, step);
  for (auto [variable, dim, first, stride] :
       llvm::zip_equal(forall.getInductionVars(), grid.dims,
                       forall.getMixedLowerBound(), forall.getMixedStep())) {
    Value id = grid.createId(b, dim);
    OpFoldResult value = affine::makeComposedFoldedAffineApply(
        b, b.getLoc(), lower + block * step, {remap(first), id, remap(stride)});
    mapping.map(variable,
                getValueOrCreateConstantIndexOp(b, b.getLoc(), value));
  }
  skipBlocksBehindEnd(b, forall, grid, mapping);
  for (Operation &op : forall.getBody()->without_terminator())
    b.clone(op, mapping);
  return success();
}

/// The number of elements that `alloc` has at most.
static FailureOr<int64_t> getMaxElements(memref::AllocOp alloc) {
  int64_t elements = 1;
  for (OpFoldResult size : alloc.getMixedSizes()) {
    FailureOr<int64_t> bound = ValueBoundsConstraintSet::computeConstantBound(
        presburger::BoundType::UB, size, /*stopCondition=*/nullptr,
        /*closedUB=*/true);
    if (failed(bound))
      return alloc.emitError("expected a buffer of a block to have a size with "
                             "a constant bound");
    elements *= *bound;
  }
  return elements;
}

/// The workgroup memory of a kernel: static, or dynamic if it is too much.
static Value createArena(gpu::GPUFuncOp kernel, int64_t bytes,
                         gpu::AddressSpaceAttr space) {
  auto b = OpBuilder::atBlockBegin(&kernel.front());
  auto getType = [&](int64_t size) {
    return MemRefType::get({size}, b.getI8Type(), MemRefLayoutAttrInterface(),
                           space);
  };
  if (bytes > ::moe::kMaxStaticSharedBytes) {
    kernel->setAttr(kDynamicSmemAttrName, b.getI64IntegerAttr(bytes));
    return gpu::DynamicSharedMemoryOp::create(b, kernel.getLoc(),
                                              getType(ShapedType::kDynamic));
  }
  Value arena = kernel.addWorkgroupAttribution(getType(bytes), kernel.getLoc());
  kernel.setWorkgroupAttributionAttr(0, LLVM::LLVMDialect::getAlignAttrName(),
                                     b.getI64IntegerAttr(kWorkgroupAlignment));
  return arena;
}

/// Buffers that a block allocates become parts of one workgroup buffer. They
/// keep the default memory space for their users; LLVM sees through the cast.
static LogicalResult placeWorkgroupBuffers(gpu::GPUFuncOp kernel,
                                           int64_t sharedBytes) {
  SmallVector<memref::AllocOp> allocs;
  kernel.walk([&](memref::AllocOp alloc) { allocs.push_back(alloc); });
  SmallVector<int64_t> offsets;
  int64_t bytes = 0;
  for (memref::AllocOp alloc : allocs) {
    FailureOr<int64_t> elements = getMaxElements(alloc);
    if (failed(elements))
      return failure();
    offsets.push_back(bytes);
    int64_t width = getElementBytes(alloc.getType().getElementType());
    bytes += llvm::alignTo(*elements * width, kWorkgroupAlignment);
  }
  if (bytes > sharedBytes)
    return kernel.emitError()
           << "expected a block to need at most " << sharedBytes
           << " bytes of workgroup memory, found " << bytes
           << "; use smaller tiles";
  if (bytes == 0)
    return success();

  MLIRContext *context = kernel.getContext();
  auto space =
      gpu::AddressSpaceAttr::get(context, gpu::AddressSpace::Workgroup);
  Value arena = createArena(kernel, bytes, space);
  OpBuilder b(context);
  for (auto [alloc, offset] : llvm::zip_equal(allocs, offsets)) {
    for (Operation *user : llvm::make_early_inc_range(alloc->getUsers()))
      if (isa<memref::DeallocOp>(user))
        user->erase();
    b.setInsertionPoint(alloc);
    Location loc = alloc.getLoc();
    MemRefType type = alloc.getType(), stored = getStorageType(type);
    auto placed = MemRefType::get(type.getShape(), stored.getElementType(),
                                  type.getLayout(), space);
    Value start = arith::ConstantIndexOp::create(b, loc, offset);
    Value view = memref::ViewOp::create(b, loc, placed, arena, start,
                                        alloc.getDynamicSizes());
    view = memref::MemorySpaceCastOp::create(b, loc, stored, view);
    if (stored != type)
      view =
          UnrealizedConversionCastOp::create(b, loc, type, view).getResult(0);
    alloc.replaceAllUsesWith(view);
    alloc.erase();
  }
  return success();
}

//===----------------------------------------------------------------------===//
// Buffers of i1
//===----------------------------------------------------------------------===//

/// The bytes behind a buffer of i1, or null.
static Value getBytes(Value buffer) {
  auto type = dyn_cast<MemRefType>(buffer.getType());
  auto cast = buffer.getDefiningOp<UnrealizedConversionCastOp>();
  if (!type || !type.getElementType().isInteger(1) || !cast)
    return {};
  return cast.getOperand(0);
}

/// A load of i1 becomes the load of a byte and a comparison with 0.
static void rewriteBoolLoad(memref::LoadOp load, Value bytes) {
  ImplicitLocOpBuilder b(load.getLoc(), load);
  Value byte = memref::LoadOp::create(b, bytes, load.getIndices());
  Value zero = arith::ConstantIntOp::create(b, 0, 8);
  load.replaceAllUsesWith(
      arith::CmpIOp::create(b, arith::CmpIPredicate::ne, byte, zero)
          .getResult());
  load.erase();
}

/// A store of i1 stores a byte.
static void rewriteBoolStore(memref::StoreOp store, Value bytes) {
  ImplicitLocOpBuilder b(store.getLoc(), store);
  Value byte = arith::ExtUIOp::create(b, b.getI8Type(), store.getValue());
  memref::StoreOp::create(b, byte, bytes, store.getIndices());
  store.erase();
}

/// A view of a buffer of i1 becomes the same view of its bytes.
static void rewriteBoolView(Operation *view, Value buffer, Value bytes) {
  ImplicitLocOpBuilder b(view->getLoc(), view);
  IRMapping mapping;
  mapping.map(buffer, bytes);
  Operation *byteView = b.clone(*view, mapping);
  for (auto [result, byteResult] :
       llvm::zip_equal(view->getResults(), byteView->getResults())) {
    Value replacement = byteResult;
    if (auto type = dyn_cast<MemRefType>(result.getType())) {
      byteResult.setType(getStorageType(type));
      replacement =
          UnrealizedConversionCastOp::create(b, type, byteResult).getResult(0);
    }
    result.replaceAllUsesWith(replacement);
  }
  view->erase();
}

LogicalResult mlir::moe::rewriteBoolBuffers(gpu::GPUFuncOp kernel) {
  SmallVector<Operation *> ops;
  // A view comes before its users.
  kernel.walk<WalkOrder::PreOrder>([&](Operation *op) { ops.push_back(op); });
  for (Operation *op : ops) {
    Value buffer, bytes;
    for (Value operand : op->getOperands())
      if (Value found = getBytes(operand)) {
        buffer = operand;
        bytes = found;
      }
    if (!bytes)
      continue;
    if (auto load = dyn_cast<memref::LoadOp>(op))
      rewriteBoolLoad(load, bytes);
    else if (auto store = dyn_cast<memref::StoreOp>(op))
      rewriteBoolStore(store, bytes);
    else if (isa<ViewLikeOpInterface, memref::DimOp>(op))
      rewriteBoolView(op, buffer, bytes);
    else
      return op->emitError("expected buffers of i1 to be loaded, stored and "
                           "viewed only");
  }
  return success();
}

//===----------------------------------------------------------------------===//
// Kernel and launch
//===----------------------------------------------------------------------===//

static void createLaunch(scf::ForallOp forall, gpu::GPUFuncOp kernel,
                         AffineMap gridMap, int64_t blockSize) {
  auto function = forall->getParentOfType<func::FuncOp>();
  ImplicitLocOpBuilder b(forall.getLoc(), forall);
  SmallVector<Value> operands = getLaunchOperands(b, function);
  SmallVector<OpFoldResult> sizes;
  for (Value size : ArrayRef(operands).take_back(gridMap.getNumSymbols()))
    sizes.push_back(
        arith::IndexCastOp::create(b, b.getIndexType(), size).getResult());
  SmallVector<Value> blocks;
  for (AffineExpr count : gridMap.getResults())
    blocks.push_back(getValueOrCreateConstantIndexOp(
        b, b.getLoc(),
        affine::makeComposedFoldedAffineApply(
            b, b.getLoc(), AffineMap::get(0, gridMap.getNumSymbols(), count),
            sizes)));
  Value one = arith::ConstantIndexOp::create(b, 1);
  Value threads = arith::ConstantIndexOp::create(b, blockSize);
  gpu::LaunchFuncOp::create(b, kernel,
                            gpu::KernelDim3{blocks[0], blocks[1], blocks[2]},
                            gpu::KernelDim3{threads, one, one},
                            /*dynamicSharedMemorySize=*/Value(), operands);
}

FailureOr<OutlinedKernel>
mlir::moe::outlineKernel(scf::ForallOp forall, gpu::GPUModuleOp module,
                         StringRef name, BlockShape block,
                         const DenseSet<Value> &constants,
                         DictionaryAttr &launch) {
  auto function = forall->getParentOfType<func::FuncOp>();
  FailureOr<Grid> grid = getGrid(forall, function);
  if (failed(grid) || failed(verifyArguments(function)))
    return failure();

  ImplicitLocOpBuilder b(forall.getLoc(), module.getContext());
  b.setInsertionPointToEnd(module.getBody());
  auto kernel = gpu::GPUFuncOp::create(
      b, name, b.getFunctionType(getParameterTypes(function), {}));
  kernel->setAttr(gpu::GPUDialect::getKernelFuncAttrName(), b.getUnitAttr());
  kernel.setKnownBlockSizeAttr(
      b.getDenseI32ArrayAttr({static_cast<int32_t>(block.numThreads), 1, 1}));
  // Without it ptxas aims at several blocks an SM and caps the registers.
  kernel->setAttr(NVVM::NVVMDialect::getMinctasmAttrName(),
                  b.getI32IntegerAttr(1));
  if (auto blocks = forall->getAttrOfType<IntegerAttr>(kClusterBlocksAttrName))
    kernel->setAttr(
        NVVM::NVVMDialect::getClusterDimAttrName(),
        b.getDenseI32ArrayAttr({static_cast<int32_t>(blocks.getInt()), 1, 1}));
  b.setInsertionPointToStart(&kernel.front());
  IRMapping mapping;
  mapArguments(b, function, kernel, mapping);
  if (failed(cloneBody(b, forall, *grid, mapping, constants)))
    return failure();
  Block *body = b.getInsertionBlock();
  b.setInsertionPointToEnd(&kernel.front());
  gpu::ReturnOp::create(b);
  if (failed(placeWorkgroupBuffers(kernel, block.sharedBytes)))
    return failure();

  AffineMap gridMap = getGridMap(*grid, function);
  createLaunch(forall, kernel, gridMap, block.numThreads);
  forall.erase();
  launch = b.getDictionaryAttr({
      b.getNamedAttr("block_size", b.getI64IntegerAttr(block.numThreads)),
      b.getNamedAttr("grid", AffineMapAttr::get(gridMap)),
      b.getNamedAttr("module", b.getStringAttr(module.getName())),
      b.getNamedAttr("name", b.getStringAttr(name)),
  });
  return OutlinedKernel{kernel, body};
}
