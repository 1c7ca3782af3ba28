//===- MoEStructured.cpp - What all structured ops share ------------------===//

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/TypeUtilities.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Maps
//===----------------------------------------------------------------------===//

MapsBuilder &MapsBuilder::add(Value operand, ArrayRef<int64_t> dims) {
  return addWithLeading(operand, 0, dims);
}

MapsBuilder &MapsBuilder::addWithLeading(Value operand, int64_t numLeading,
                                         ArrayRef<int64_t> dims) {
  if (!operand)
    return *this;
  SmallVector<AffineExpr> results;
  for (int64_t dim = 0; dim < numLeading; ++dim)
    results.push_back(getAffineDimExpr(dim, context));
  for (int64_t dim : dims)
    results.push_back(dim == kBroadcast ? getAffineConstantExpr(0, context)
                                        : getAffineDimExpr(dim, context));
  maps.push_back(AffineMap::get(numDims, 0, results, context));
  return *this;
}

SmallVector<int64_t> mlir::moe::getBiasDims(Value bias, int64_t b, int64_t h,
                                            int64_t i, int64_t j) {
  auto type = bias ? cast<ShapedType>(bias.getType()) : ShapedType();
  // Another rank is the verifier's to refuse.
  if (!type || type.getRank() != 4)
    return {b, h, i, j};
  return {type.getDimSize(0) == 1 ? MapsBuilder::kBroadcast : b,
          type.getDimSize(1) == 1 ? MapsBuilder::kBroadcast : h, i, j};
}

bool mlir::moe::areValuesPerHead(Value values) {
  return values && cast<ShapedType>(values.getType()).getRank() == 4;
}

SmallVector<int64_t> mlir::moe::getValueDims(Value values, int64_t b, int64_t h,
                                             int64_t j, int64_t e) {
  if (areValuesPerHead(values))
    return {b, h, j, e};
  return {b, j, e};
}

static SmallVector<AffineMap> getMaps(MoEStructuredOpInterface op) {
  return cast<IndexingMapOpInterface>(op.getOperation()).getIndexingMapsArray();
}

FailureOr<std::pair<OpOperand *, unsigned>>
mlir::moe::findDim(MoEStructuredOpInterface op, unsigned dim) {
  SmallVector<AffineMap> maps = getMaps(op);
  for (OpOperand &operand : op->getOpOperands())
    for (auto [position, expr] :
         llvm::enumerate(maps[operand.getOperandNumber()].getResults()))
      if (auto dimExpr = dyn_cast<AffineDimExpr>(expr))
        if (dimExpr.getPosition() == dim)
          return std::make_pair(&operand, static_cast<unsigned>(position));
  return failure();
}

int64_t mlir::moe::getStaticDimSize(MoEStructuredOpInterface op, unsigned dim) {
  SmallVector<AffineMap> maps = getMaps(op);
  for (OpOperand &operand : op->getOpOperands()) {
    auto type = dyn_cast<ShapedType>(operand.get().getType());
    if (!type)
      continue;
    for (auto [size, expr] : llvm::zip_equal(
             type.getShape(), maps[operand.getOperandNumber()].getResults())) {
      auto dimExpr = dyn_cast<AffineDimExpr>(expr);
      if (dimExpr && dimExpr.getPosition() == dim &&
          !ShapedType::isDynamic(size))
        return size;
    }
  }
  return ShapedType::kDynamic;
}

//===----------------------------------------------------------------------===//
// Effects and sizes
//===----------------------------------------------------------------------===//

void mlir::moe::getStructuredEffects(
    DestinationStyleOpInterface op,
    SmallVectorImpl<SideEffects::EffectInstance<MemoryEffects::Effect>>
        &effects) {
  bool accumulates =
      cast<MoEStructuredOpInterface>(op.getOperation()).accumulates();
  for (OpOperand &operand : op->getOpOperands()) {
    if (!isa<MemRefType>(operand.get().getType()))
      continue;
    bool isOut = op.isDpsInit(&operand);
    if (!isOut || accumulates)
      effects.emplace_back(MemoryEffects::Read::get(), &operand);
    if (isOut)
      effects.emplace_back(MemoryEffects::Write::get(), &operand);
  }
}

LogicalResult mlir::moe::reifyFromInits(DestinationStyleOpInterface op,
                                        OpBuilder &builder,
                                        ReifiedRankedShapedTypeDims &shapes) {
  for (OpOperand &init : op.getDpsInitsMutable())
    if (isa<RankedTensorType>(init.get().getType()))
      shapes.push_back(
          tensor::getMixedSizes(builder, op->getLoc(), init.get()));
  return success();
}

//===----------------------------------------------------------------------===//
// Verification
//===----------------------------------------------------------------------===//

static bool hasElement(Type elementType, OutElement element) {
  switch (element) {
  case OutElement::F32:
    return elementType.isF32();
  case OutElement::I32:
    return elementType.isInteger(32);
  case OutElement::ExpertIndex:
    return elementType.isInteger(32) || elementType.isInteger(64);
  case OutElement::Activation:
    return elementType.isF32() || elementType.isBF16() || elementType.isF16();
  }
  llvm_unreachable("unknown element kind");
}

static StringRef spell(OutElement element) {
  switch (element) {
  case OutElement::F32:
    return "f32";
  case OutElement::I32:
    return "i32";
  case OutElement::ExpertIndex:
    return "i32 or i64";
  case OutElement::Activation:
    return "f32, bf16 or f16";
  }
  llvm_unreachable("unknown element kind");
}

/// One destination a result, each with its element type.
static LogicalResult verifyOuts(MoEStructuredOpInterface op,
                                ArrayRef<OutElement> outs) {
  auto dps = cast<DestinationStyleOpInterface>(op.getOperation());
  if (dps.getNumDpsInits() != static_cast<int64_t>(outs.size()))
    return op->emitOpError()
           << "expected " << outs.size() << " destinations in 'outs', found "
           << dps.getNumDpsInits();
  for (auto [init, element] : llvm::zip_equal(dps.getDpsInitsMutable(), outs)) {
    Type found = getElementTypeOrSelf(init.get().getType());
    if (!hasElement(found, element))
      return op->emitOpError()
             << "expected elements of '"
             << op.getOperandName(init.getOperandNumber()) << "' to be "
             << spell(element) << ", found " << found;
  }
  return success();
}

/// Tensors and buffers are not mixed, and no static size overflows the byte
/// arithmetic of the lowerings (sizes are multiplied in i64).
static LogicalResult verifyContainers(MoEStructuredOpInterface op) {
  bool tensors = false, buffers = false;
  for (OpOperand &operand : op->getOpOperands()) {
    auto type = dyn_cast<ShapedType>(operand.get().getType());
    if (!type)
      continue;
    (isa<TensorType>(type) ? tensors : buffers) = true;
    int64_t bytes = 8;
    for (int64_t size : type.getShape())
      if (!ShapedType::isDynamic(size) && llvm::MulOverflow(bytes, size, bytes))
        return op->emitOpError()
               << "expected the size of '"
               << op.getOperandName(operand.getOperandNumber())
               << "' in bytes to fit a signed 64-bit number";
  }
  if (tensors && buffers)
    return op->emitOpError(
        "expected all shaped operands to be tensors or all to be memrefs");
  return success();
}

static std::string spellDims(ArrayRef<Dim> dims, AffineMap map) {
  std::string text;
  llvm::raw_string_ostream os(text);
  llvm::interleaveComma(map.getResults(), os, [&](AffineExpr expr) {
    if (auto dim = dyn_cast<AffineDimExpr>(expr))
      os << dims[dim.getPosition()].name;
    else
      os << 1;
  });
  return text;
}

/// Each operand has its map's rank, and the sizes of a dim agree.
static LogicalResult verifyShapes(MoEStructuredOpInterface op) {
  SmallVector<Dim> dims = op.getDims();
  SmallVector<AffineMap> maps = getMaps(op);
  struct Seen {
    int64_t size = ShapedType::kDynamic;
    unsigned operand = 0, position = 0;
  };
  SmallVector<Seen> seen(dims.size());
  for (OpOperand &operand : op->getOpOperands()) {
    auto type = dyn_cast<ShapedType>(operand.get().getType());
    if (!type)
      continue;
    unsigned number = operand.getOperandNumber();
    AffineMap map = maps[number];
    if (type.getRank() != map.getNumResults())
      return op->emitOpError()
             << "expected '" << op.getOperandName(number) << "' to have rank "
             << map.getNumResults() << " (" << spellDims(dims, map)
             << "), found rank " << type.getRank();
    for (auto [position, expr] : llvm::enumerate(map.getResults())) {
      int64_t size = type.getDimSize(position);
      auto dimExpr = dyn_cast<AffineDimExpr>(expr);
      if (!dimExpr || ShapedType::isDynamic(size))
        continue;
      Seen &first = seen[dimExpr.getPosition()];
      if (ShapedType::isDynamic(first.size))
        first = {size, number, static_cast<unsigned>(position)};
      else if (first.size != size)
        return op->emitOpError() << "expected dim " << position << " of '"
                                 << op.getOperandName(number) << "' (" << size
                                 << ") to match dim " << first.position
                                 << " of '" << op.getOperandName(first.operand)
                                 << "' (" << first.size << ")";
    }
  }
  for (auto [smaller, larger] : op.getDimOrder())
    if (!ShapedType::isDynamic(seen[smaller].size) &&
        !ShapedType::isDynamic(seen[larger].size) &&
        seen[smaller].size > seen[larger].size)
      return op->emitOpError()
             << "expected " << dims[smaller].name << " (" << seen[smaller].size
             << ") to be at most " << dims[larger].name << " ("
             << seen[larger].size << ")";
  return success();
}

LogicalResult mlir::moe::verifyStructured(Operation *operation,
                                          ArrayRef<OutElement> outs) {
  auto op = cast<MoEStructuredOpInterface>(operation);
  if (failed(verifyOuts(op, outs)) || failed(verifyContainers(op)))
    return failure();
  return verifyShapes(op);
}
