//===- ScansToReductions.cpp - Running sums as reductions -----------------===//
//
// Matches a loop over the places of a dim that carries what its body has made
// of the elements so far, and keeps it at each place:
//
//   %r:2 = scf.for %i = 0 to n iter_args(%so_far = %start, %kept = %empty)
//     %x = tensor.extract_slice %source[.., %i, ..]
//     %next = linalg.generic ins(%x) outs(%so_far) { body }
//     tensor.insert_slice %next into %kept[.., %i, ..]
//
// It becomes a reduction for each place over the places up to it. That is more
// work, and it is parallel: as a loop, each iteration would be a launch.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Dialect/Utils/StaticValueUtils.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "mlir/Transforms/RegionUtils.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOESCANSTOREDUCTIONSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

namespace {
struct Scan {
  scf::ForOp loop;
  tensor::ExtractSliceOp slice;
  linalg::GenericOp step;
  /// The value of all places before the first one, a scalar.
  Value start;
  int64_t dim;
};
} // namespace

/// The dim along which a slice at `place` is one element wide, where it begins
/// with the tensor along all others.
static std::optional<int64_t> getPlaceDim(OffsetSizeAndStrideOpInterface slice,
                                          Value place) {
  std::optional<int64_t> found;
  if (!slice.hasUnitStride())
    return found;
  for (auto [dim, offset] : llvm::enumerate(slice.getMixedOffsets())) {
    if (offset == OpFoldResult(place)) {
      if (found || !isConstantIntValue(slice.getMixedSizes()[dim], 1))
        return std::nullopt;
      found = dim;
    } else if (!isConstantIntValue(offset, 0)) {
      return std::nullopt;
    }
  }
  return found;
}

/// Whether the sizes of `tensor` are known to be those.
static bool hasSizes(Value tensor, ArrayRef<OpFoldResult> sizes) {
  using Variable = ValueBoundsConstraintSet::Variable;
  return llvm::all_of(llvm::enumerate(sizes), [&](auto size) {
    FailureOr<bool> isEqual = ValueBoundsConstraintSet::areEqual(
        Variable(tensor, size.index()), Variable(size.value()));
    return succeeded(isEqual) && *isEqual;
  });
}

/// Whether `step` applies its body to each element of one tensor and of what
/// the loop carries.
static bool isStep(linalg::GenericOp step, Value carried) {
  // A body that reads the place, say, means something else at each.
  SetVector<Value> read;
  if (step)
    getUsedValuesDefinedAbove(step->getRegions(), read);
  return step &&
         llvm::none_of(read,
                       [&](Value value) {
                         return value.getParentBlock() == step->getBlock();
                       }) &&
         step.getNumDpsInputs() == 1 && step.getDpsInits().size() == 1 &&
         step.getDpsInits()[0] == carried && step.getNumReductionLoops() == 0 &&
         !step.hasIndexSemantics() &&
         llvm::all_of(step.getIndexingMapsArray(),
                      [](AffineMap map) { return map.isIdentity(); });
}

static std::optional<Scan> matchScan(scf::ForOp loop) {
  Block *body = loop.getBody();
  if (loop.getNumRegionIterArgs() != 2 ||
      !isConstantIntValue(loop.getLowerBound(), 0) ||
      !isConstantIntValue(loop.getStep(), 1) ||
      !loop.getResult(0).use_empty() || llvm::range_size(*body) != 4)
    return std::nullopt;
  auto step = loop.getYieldedValues()[0].getDefiningOp<linalg::GenericOp>();
  auto insert =
      loop.getYieldedValues()[1].getDefiningOp<tensor::InsertSliceOp>();
  if (!isStep(step, loop.getRegionIterArg(0)) || !insert ||
      insert.getSource() != step->getResult(0) ||
      insert.getDest() != loop.getRegionIterArg(1))
    return std::nullopt;
  auto slice = step.getInputs()[0].getDefiningOp<tensor::ExtractSliceOp>();
  auto start = loop.getInitArgs()[0].getDefiningOp<linalg::FillOp>();
  auto kept = loop.getInitArgs()[1].getDefiningOp<tensor::EmptyOp>();
  if (!slice || !start || !kept || slice->getBlock() != body ||
      slice.getSourceType().getRank() != slice.getType().getRank())
    return std::nullopt;
  std::optional<int64_t> dim = getPlaceDim(slice, loop.getInductionVar());
  if (!dim || dim != getPlaceDim(insert, loop.getInductionVar()))
    return std::nullopt;
  // All places of both tensors, and all that they have at one.
  SmallVector<OpFoldResult> sizes = insert.getMixedSizes();
  if (sizes != slice.getMixedSizes())
    return std::nullopt;
  sizes[*dim] = getAsOpFoldResult(loop.getUpperBound());
  if (!hasSizes(slice.getSource(), sizes) || !hasSizes(kept, sizes))
    return std::nullopt;
  return Scan{loop, slice, step, start.getInputs()[0], *dim};
}

/// out[.., i, ..] = the body over the elements j <= i.
static void replaceScan(Scan scan) {
  ImplicitLocOpBuilder b(scan.loop.getLoc(), scan.loop);
  Value source = scan.slice.getSource();
  auto type = cast<RankedTensorType>(scan.loop.getResult(1).getType());
  unsigned rank = type.getRank();
  Value empty = tensor::EmptyOp::create(
      b, tensor::getMixedSizes(b, b.getLoc(), source), type.getElementType());
  Value out = linalg::FillOp::create(b, scan.start, empty).getResult(0);
  // The last loop goes over the places of the source.
  SmallVector<AffineExpr> from, to;
  for (unsigned dim = 0; dim < rank; ++dim) {
    to.push_back(b.getAffineDimExpr(dim));
    from.push_back(b.getAffineDimExpr(dim == scan.dim ? rank : dim));
  }
  SmallVector<utils::IteratorType> iterators(rank,
                                             utils::IteratorType::parallel);
  iterators.push_back(utils::IteratorType::reduction);
  MLIRContext *context = b.getContext();
  auto op = linalg::GenericOp::create(
      b, type, source, out,
      ArrayRef{AffineMap::get(rank + 1, 0, from, context),
               AffineMap::get(rank + 1, 0, to, context)},
      iterators, [&](OpBuilder &builder, Location loc, ValueRange values) {
        ImplicitLocOpBuilder body(loc, builder);
        IRMapping mapping;
        mapping.map(scan.step.getBody()->getArguments(), values);
        for (Operation &nested : scan.step.getBody()->without_terminator())
          body.clone(nested, mapping);
        Value next = mapping.lookupOrDefault(
            scan.step.getBody()->getTerminator()->getOperand(0));
        Value isBefore =
            arith::CmpIOp::create(body, arith::CmpIPredicate::ule,
                                  linalg::IndexOp::create(body, rank),
                                  linalg::IndexOp::create(body, scan.dim));
        Value kept =
            arith::SelectOp::create(body, isBefore, next, values.back());
        linalg::YieldOp::create(body, kept);
      });
  scan.loop.getResult(1).replaceAllUsesWith(op->getResult(0));
  scan.loop.erase();
}

namespace {
struct MoEScansToReductionsPass
    : public mlir::moe::impl::MoEScansToReductionsPassBase<
          MoEScansToReductionsPass> {
  using Base::Base;

  void runOnOperation() override {
    for (auto loop : llvm::to_vector(getOperation().getOps<scf::ForOp>()))
      if (std::optional<Scan> scan = matchScan(loop)) {
        replaceScan(*scan);
        ++numReplaced;
      }
  }
};
} // namespace
