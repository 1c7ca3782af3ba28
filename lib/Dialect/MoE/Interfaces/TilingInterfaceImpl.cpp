//===- TilingInterfaceImpl.cpp - The one tiling model of the dialect ------===//
//
// A tile of an op is the op itself on slices: the slice of an operand is its
// map applied to the tile, and an origin operand moves by the tile's offset.
// Dims that the op keeps whole are refused, never computed wrongly.
//
// An op that folds its tokens into a table can be cut along them as well: into
// parts with a table each, from which the result is finished
// (SplitReductionOpInterface).
//
//===----------------------------------------------------------------------===//

#include "AttachToAllOps.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"
#include "MoE/Dialect/MoE/Interfaces/AllInterfaces.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
/// A tile of the iteration domain: offset and size of each dim.
struct Tile {
  ArrayRef<OpFoldResult> offsets;
  ArrayRef<OpFoldResult> sizes;
};

SmallVector<AffineMap> getMaps(Operation *op) {
  return cast<IndexingMapOpInterface>(op).getIndexingMapsArray();
}

OpFoldResult getSize(OpBuilder &builder, Location loc, Value value,
                     int64_t position) {
  return linalg::createFoldedDimOp(builder, loc, value, position);
}

/// The part of `operand` that `tile` touches. A dim that is not tileable, and
/// one that is broadcast, is taken whole.
Value sliceOperand(OpBuilder &builder, Location loc, Value operand,
                   AffineMap map, ArrayRef<Dim> dims, Tile tile,
                   SmallVectorImpl<Operation *> &slices) {
  SmallVector<OpFoldResult> offsets, sizes;
  for (auto [position, expr] : llvm::enumerate(map.getResults())) {
    auto dim = dyn_cast<AffineDimExpr>(expr);
    if (dim && dims[dim.getPosition()].isTileable()) {
      offsets.push_back(tile.offsets[dim.getPosition()]);
      sizes.push_back(tile.sizes[dim.getPosition()]);
    } else {
      offsets.push_back(builder.getIndexAttr(0));
      sizes.push_back(getSize(builder, loc, operand, position));
    }
  }
  SmallVector<OpFoldResult> strides(map.getNumResults(),
                                    builder.getIndexAttr(1));
  Operation *slice = isa<RankedTensorType>(operand.getType())
                         ? tensor::ExtractSliceOp::create(
                               builder, loc, operand, offsets, sizes, strides)
                               .getOperation()
                         : memref::SubViewOp::create(builder, loc, operand,
                                                     offsets, sizes, strides)
                               .getOperation();
  slices.push_back(slice);
  return slice->getResult(0);
}

/// A tile may start past 0 only along dims that can be cut.
LogicalResult verifyTile(MoEStructuredOpInterface op, Tile tile) {
  for (auto [dim, offset] : llvm::zip_equal(op.getDims(), tile.offsets))
    if (!dim.isTileable() && !isZeroInteger(offset))
      return op->emitOpError()
             << "expected dim " << dim.name << " to stay whole ("
             << (dim.whole ? "indices along it are absolute"
                           : "it is reduced inside the op")
             << "), found a tile of it; use tile size 0";
  return success();
}

template <typename OpTy>
struct StructuredOpTiling
    : TilingInterface::ExternalModel<StructuredOpTiling<OpTy>, OpTy> {
  SmallVector<utils::IteratorType> getLoopIteratorTypes(Operation *op) const {
    return llvm::map_to_vector(cast<OpTy>(op).getDims(), [](const Dim &dim) {
      return dim.isTileable() ? dim.iterator : utils::IteratorType::reduction;
    });
  }

  SmallVector<Range> getIterationDomain(Operation *op,
                                        OpBuilder &builder) const {
    OpBuilder::InsertionGuard guard(builder);
    builder.setInsertionPoint(op);
    auto structured = cast<MoEStructuredOpInterface>(op);
    SmallVector<Range> domain;
    for (unsigned dim = 0, e = structured.getDims().size(); dim < e; ++dim) {
      // A dim that no operand spans belongs to an implicit operand.
      OpFoldResult size = builder.getIndexAttr(1);
      if (auto place = findDim(structured, dim); succeeded(place))
        size =
            getSize(builder, op->getLoc(), place->first->get(), place->second);
      domain.push_back(
          {builder.getIndexAttr(0), size, builder.getIndexAttr(1)});
    }
    return domain;
  }

  FailureOr<TilingResult>
  getTiledImplementation(Operation *op, OpBuilder &builder,
                         ArrayRef<OpFoldResult> offsets,
                         ArrayRef<OpFoldResult> sizes) const {
    Tile tile{offsets, sizes};
    if (failed(verifyTile(cast<MoEStructuredOpInterface>(op), tile)))
      return failure();
    Operation *whole = cast<OpTy>(op).makeExplicit(builder);
    SmallVector<Dim> dims = cast<OpTy>(whole).getDims();
    SmallVector<AffineMap> maps = getMaps(whole);
    auto dps = cast<DestinationStyleOpInterface>(whole);

    SmallVector<Value> operands;
    SmallVector<Operation *> slices;
    SmallVector<Type> resultTypes;
    for (OpOperand &operand : whole->getOpOperands()) {
      Value value = operand.get();
      if (isa<ShapedType>(value.getType()))
        value =
            sliceOperand(builder, op->getLoc(), value,
                         maps[operand.getOperandNumber()], dims, tile, slices);
      operands.push_back(value);
      if (dps.isDpsInit(&operand) && isa<RankedTensorType>(value.getType()))
        resultTypes.push_back(value.getType());
    }
    for (auto [operand, dim] : cast<OpTy>(whole).getOrigins())
      operands[operand] =
          moveOrigin(builder, op->getLoc(), operands[operand], offsets[dim]);

    Operation *tiled = mlir::clone(builder, whole, resultTypes, operands);
    if (whole != op)
      whole->erase();
    return TilingResult{
        {tiled}, SmallVector<Value>(tiled->getResults()), slices};
  }

  LogicalResult
  getResultTilePosition(Operation *op, OpBuilder &builder,
                        unsigned resultNumber, ArrayRef<OpFoldResult> offsets,
                        ArrayRef<OpFoldResult> sizes,
                        SmallVector<OpFoldResult> &resultOffsets,
                        SmallVector<OpFoldResult> &resultSizes) const {
    OpOperand *init = getInit(op, resultNumber);
    SmallVector<Dim> dims = cast<OpTy>(op).getDims();
    for (auto [position, expr] :
         llvm::enumerate(getMaps(op)[init->getOperandNumber()].getResults())) {
      // A dim that is broadcast is there whole, as in sliceOperand.
      auto dim = dyn_cast<AffineDimExpr>(expr);
      bool cut = dim && dims[dim.getPosition()].isTileable();
      resultOffsets.push_back(cut ? offsets[dim.getPosition()]
                                  : builder.getIndexAttr(0));
      resultSizes.push_back(
          cut ? sizes[dim.getPosition()]
              : getSize(builder, op->getLoc(), init->get(), position));
    }
    return success();
  }

  LogicalResult getIterationDomainTileFromResultTile(
      Operation *op, OpBuilder &builder, unsigned resultNumber,
      ArrayRef<OpFoldResult> offsets, ArrayRef<OpFoldResult> sizes,
      SmallVectorImpl<OpFoldResult> &domainOffsets,
      SmallVectorImpl<OpFoldResult> &domainSizes) const {
    for (Range range : getIterationDomain(op, builder)) {
      domainOffsets.push_back(range.offset);
      domainSizes.push_back(range.size);
    }
    AffineMap map = getMaps(op)[getInit(op, resultNumber)->getOperandNumber()];
    for (auto [position, expr] : llvm::enumerate(map.getResults())) {
      auto dim = dyn_cast<AffineDimExpr>(expr);
      if (!dim)
        continue;
      domainOffsets[dim.getPosition()] = offsets[position];
      domainSizes[dim.getPosition()] = sizes[position];
    }
    return success();
  }

  FailureOr<TilingResult>
  generateResultTileValue(Operation *op, OpBuilder &builder,
                          unsigned resultNumber, ArrayRef<OpFoldResult> offsets,
                          ArrayRef<OpFoldResult> sizes) const {
    // A consumer that wants part of a whole dim cannot have it; that is not an
    // error, the producer just stays where it is.
    if (!isProducible(op, resultNumber, offsets, sizes))
      return failure();
    SmallVector<OpFoldResult> domainOffsets, domainSizes;
    if (failed(getIterationDomainTileFromResultTile(
            op, builder, resultNumber, offsets, sizes, domainOffsets,
            domainSizes)))
      return failure();
    FailureOr<TilingResult> tiled =
        getTiledImplementation(op, builder, domainOffsets, domainSizes);
    if (failed(tiled))
      return failure();
    return TilingResult{tiled->tiledOps,
                        {tiled->tiledValues[resultNumber]},
                        tiled->generatedSlices};
  }

private:
  /// Whether the wanted part of a result takes every whole dim from 0 to its
  /// end.
  static bool isProducible(Operation *op, unsigned resultNumber,
                           ArrayRef<OpFoldResult> offsets,
                           ArrayRef<OpFoldResult> sizes) {
    OpOperand *init = getInit(op, resultNumber);
    SmallVector<Dim> dims = cast<OpTy>(op).getDims();
    for (auto [position, expr] :
         llvm::enumerate(getMaps(op)[init->getOperandNumber()].getResults())) {
      auto dim = dyn_cast<AffineDimExpr>(expr);
      if (dim && dims[dim.getPosition()].isTileable())
        continue;
      FailureOr<bool> whole = ValueBoundsConstraintSet::areEqual(
          {sizes[position]}, {init->get(), static_cast<int64_t>(position)});
      if (!isZeroInteger(offsets[position]) || failed(whole) || !*whole)
        return false;
    }
    return true;
  }

  static OpOperand *getInit(Operation *op, unsigned resultNumber) {
    return cast<DestinationStyleOpInterface>(op).getDpsInitOperand(
        resultNumber);
  }

  static Value moveOrigin(OpBuilder &builder, Location loc, Value origin,
                          OpFoldResult offset) {
    AffineExpr a, b;
    bindSymbols(builder.getContext(), a, b);
    return getValueOrCreateConstantIndexOp(
        builder, loc,
        affine::makeComposedFoldedAffineApply(builder, loc, a + b,
                                              {origin, offset}));
  }
};
} // namespace

//===----------------------------------------------------------------------===//
// Parts of a reduction
//===----------------------------------------------------------------------===//

namespace {
/// The iterations `offset`, `size` of dim `split`, and the whole of all others.
Value sliceAlong(OpBuilder &builder, Location loc, Value operand, AffineMap map,
                 unsigned split, OpFoldResult offset, OpFoldResult size,
                 SmallVectorImpl<Operation *> &slices) {
  std::optional<unsigned> position =
      map.getResultPosition(getAffineDimExpr(split, map.getContext()));
  if (!position)
    return operand;
  SmallVector<OpFoldResult> offsets, sizes;
  for (unsigned dim = 0; dim < map.getNumResults(); ++dim) {
    bool isCut = dim == *position;
    offsets.push_back(isCut ? offset : builder.getIndexAttr(0));
    sizes.push_back(isCut ? size : getSize(builder, loc, operand, dim));
  }
  SmallVector<OpFoldResult> strides(offsets.size(), builder.getIndexAttr(1));
  slices.push_back(tensor::ExtractSliceOp::create(builder, loc, operand,
                                                  offsets, sizes, strides));
  return slices.back()->getResult(0);
}

/// Tables `[part, ...]`, one for each of the parts that run in parallel.
template <typename OpTy>
struct SplitOpPartialReduction
    : PartialReductionOpInterface::ExternalModel<SplitOpPartialReduction<OpTy>,
                                                 OpTy> {
  FailureOr<SmallVector<Value>> generateInitialTensorForPartialReduction(
      Operation *op, OpBuilder &builder, Location loc,
      ArrayRef<OpFoldResult> numParts,
      const SetVector<unsigned> &reductionDims) const {
    unsigned split = cast<SplitReductionOpInterface>(op).getSplitDim();
    if (!isCutAlong(split, reductionDims))
      return failure();
    return SmallVector<Value>{
        cast<SplitReductionOpInterface>(op).buildEmptyTables(builder,
                                                             numParts[split])};
  }

  FailureOr<TilingResult>
  tileToPartialReduction(Operation *op, OpBuilder &builder, Location loc,
                         ReductionTilingStrategy strategy, ValueRange init,
                         ArrayRef<OpFoldResult> offsets,
                         ArrayRef<OpFoldResult> sizes,
                         const SetVector<unsigned> &reductionDims,
                         ArrayRef<OpFoldResult> parts) const {
    unsigned split = cast<SplitReductionOpInterface>(op).getSplitDim();
    if (!isCutAlong(split, reductionDims) ||
        strategy != ReductionTilingStrategy::PartialReductionOuterParallel)
      return failure();
    SmallVector<Value> operands;
    SmallVector<Operation *> slices;
    for (auto [operand, map] : llvm::zip_equal(op->getOperands(), getMaps(op)))
      operands.push_back(sliceAlong(builder, loc, operand, map, split,
                                    offsets[split], sizes[split], slices));
    SmallVector<OpFoldResult> tableOffsets, tableSizes;
    if (failed(getPartialResultTilePosition(op, builder, 0, strategy, offsets,
                                            sizes, reductionDims, parts,
                                            tableOffsets, tableSizes)))
      return failure();
    auto tables = cast<RankedTensorType>(init[0].getType());
    auto table = tensor::ExtractSliceOp::create(
        builder, loc,
        RankedTensorType::get(tables.getShape().drop_front(),
                              tables.getElementType()),
        init[0], tableOffsets, tableSizes,
        SmallVector<OpFoldResult>(tables.getRank(), builder.getIndexAttr(1)));
    Operation *folded = cast<SplitReductionOpInterface>(op).foldIntoTable(
        builder, operands, table);
    return TilingResult{{folded}, {folded->getResult(0)}, slices};
  }

  FailureOr<MergeResult>
  mergeReductions(Operation *op, OpBuilder &builder, Location loc,
                  ValueRange tables,
                  const SetVector<unsigned> &reductionDims) const {
    if (!isCutAlong(cast<SplitReductionOpInterface>(op).getSplitDim(),
                    reductionDims))
      return failure();
    Value result =
        cast<SplitReductionOpInterface>(op).finishTables(builder, tables[0]);
    return MergeResult{{result.getDefiningOp()}, {result}};
  }

  LogicalResult getPartialResultTilePosition(
      Operation *op, OpBuilder &builder, unsigned,
      ReductionTilingStrategy strategy, ArrayRef<OpFoldResult>,
      ArrayRef<OpFoldResult>, const SetVector<unsigned> &reductionDims,
      ArrayRef<OpFoldResult> parts, SmallVector<OpFoldResult> &resultOffsets,
      SmallVector<OpFoldResult> &resultSizes) const {
    if (!isCutAlong(cast<SplitReductionOpInterface>(op).getSplitDim(),
                    reductionDims) ||
        strategy != ReductionTilingStrategy::PartialReductionOuterParallel)
      return failure();
    // A table has the sizes of the result.
    resultOffsets.assign(1, parts[0]);
    resultSizes.assign(1, builder.getIndexAttr(1));
    Value out = cast<DestinationStyleOpInterface>(op).getDpsInits()[0];
    for (OpFoldResult size :
         tensor::getMixedSizes(builder, op->getLoc(), out)) {
      resultOffsets.push_back(builder.getIndexAttr(0));
      resultSizes.push_back(size);
    }
    return success();
  }

private:
  static bool isCutAlong(unsigned split, const SetVector<unsigned> &dims) {
    return dims.size() == 1 && dims.front() == split;
  }
};
} // namespace

void mlir::moe::registerTilingInterfaceExternalModels(
    DialectRegistry &registry) {
  registry.addExtension(+[](MLIRContext *context, MoEDialect *) {
    // Tiles of ops on buffers are subviews.
    context->loadDialect<memref::MemRefDialect>();
  });
  attachToAllOps<StructuredOpTiling>(registry);
  registry.addExtension(+[](MLIRContext *context, MoEDialect *) {
    attachToOps<SplitOpPartialReduction, AdjacencyUpdateOp>(context);
  });
}
