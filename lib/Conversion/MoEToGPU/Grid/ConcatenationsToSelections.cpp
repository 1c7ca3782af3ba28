//===- ConcatenationsToSelections.cpp - Parts by index --------------------===//
//
// Matches parts that lie next to each other along a dim and that elementwise
// ops read:
//
//   %0 = tensor.insert_slice %minus_y into %empty[0, 0] [%n, 32] [1, 1]
//   %1 = tensor.insert_slice %x into %0[0, 32] [%n, 32] [1, 1]
//
// becomes
//
//   %1 = linalg.generic outs(%empty)
//     %i, %j = linalg.index 0, 1
//     arith.select (%j < 32), %minus_y[%i, %j], %x[%i, %j - 32]
//
// which one kernel computes together with what reads it. Slices and short
// elementwise ops that parts come from are read through. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Dialect/Utils/StaticValueUtils.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOECONCATENATIONSTOSELECTIONSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

//===----------------------------------------------------------------------===//
// What is matched
//===----------------------------------------------------------------------===//

namespace {
struct Part {
  Value source;
  int64_t begin, size;
};

/// Parts along `dim`, in order, that are the whole of `result`.
struct Concatenation {
  static std::optional<Concatenation> match(tensor::InsertSliceOp last);

  tensor::InsertSliceOp result;
  /// What the parts are inserted into: a tensor without values.
  Value empty;
  int64_t dim = -1;
  SmallVector<Part> parts;

private:
  bool add(tensor::InsertSliceOp slice);
  bool isWhole();
};
} // namespace

static bool isParallel(linalg::GenericOp op) {
  return op.getNumResults() == 1 && op.getNumLoops() > 0 &&
         op.getNumLoops() == op.getNumParallelLoops() &&
         op.hasPureTensorSemantics();
}

/// Adds what `slice` inserts; false where it is no part along one dim, or the
/// whole.
bool Concatenation::add(tensor::InsertSliceOp slice) {
  RankedTensorType type = slice.getSourceType(), whole = slice.getDestType();
  if (!slice.hasUnitStride() || type.getRank() != whole.getRank())
    return false;
  size_t before = parts.size();
  for (int64_t i = 0; i < type.getRank(); ++i) {
    std::optional<int64_t> offset =
        getConstantIntValue(slice.getMixedOffsets()[i]);
    bool isCut = type.getDimSize(i) != whole.getDimSize(i);
    if (!offset || (*offset != 0 && !isCut) ||
        (isCut && (dim >= 0 && dim != i)))
      return false;
    if (!isCut)
      continue;
    if (type.isDynamicDim(i) || whole.isDynamicDim(i))
      return false;
    dim = i;
    parts.push_back({slice.getSource(), *offset, type.getDimSize(i)});
  }
  return parts.size() > before;
}

/// Puts the parts in order; false where they overlap or leave a gap.
bool Concatenation::isWhole() {
  constexpr size_t kMostParts = 4;
  llvm::sort(parts,
             [](const Part &a, const Part &b) { return a.begin < b.begin; });
  int64_t end = 0;
  for (const Part &part : parts) {
    if (part.begin != end || part.size == 0)
      return false;
    end += part.size;
  }
  return parts.size() > 1 && parts.size() <= kMostParts &&
         end == result.getType().getDimSize(dim);
}

std::optional<Concatenation> Concatenation::match(tensor::InsertSliceOp last) {
  Concatenation found;
  found.result = last;
  Value into = last;
  while (auto slice = into.getDefiningOp<tensor::InsertSliceOp>()) {
    if ((slice != last && !slice->hasOneUse()) || !found.add(slice))
      return std::nullopt;
    into = slice.getDest();
  }
  // What copies it whole would make the copies that are to be saved.
  bool isFused = llvm::all_of(last->getUsers(), [&](Operation *user) {
    auto reader = dyn_cast<linalg::GenericOp>(user);
    return reader && isParallel(reader) && user->getBlock() == last->getBlock();
  });
  if (!into.getDefiningOp<tensor::EmptyOp>() || last->use_empty() || !isFused ||
      !found.isWhole())
    return std::nullopt;
  found.empty = into;
  return found;
}

//===----------------------------------------------------------------------===//
// What it becomes
//===----------------------------------------------------------------------===//

/// Whether an element of `op` is computed in a few steps from one of each
/// input.
static bool isShort(linalg::GenericOp op) {
  constexpr size_t kMostOps = 4;
  AffineMap written = op.getMatchingIndexingMap(op.getDpsInitOperand(0));
  return isParallel(op) && written.isIdentity() &&
         op.getBody()->getOperations().size() <= kMostOps &&
         !op.payloadUsesValueFromOperand(op.getDpsInitOperand(0)) &&
         llvm::all_of(op.getIndexingMapsArray(),
                      [](AffineMap map) {
                        return map.isProjectedPermutation(
                            /*allowZeroInResults=*/true);
                      }) &&
         llvm::all_of(op.getBody()->without_terminator(),
                      [](Operation &nested) {
                        return nested.getDialect()->getNamespace() == "arith" &&
                               isMemoryEffectFree(&nested) &&
                               nested.getNumRegions() == 0;
                      });
}

/// Element `place` of `source`, or of what it was made from.
static Value readElement(ImplicitLocOpBuilder &b, Value source,
                         ValueRange place) {
  if (auto slice = source.getDefiningOp<tensor::ExtractSliceOp>();
      slice && slice.hasUnitStride() &&
      slice.getType().getRank() == slice.getSourceType().getRank()) {
    SmallVector<Value> from;
    for (auto [index, offset] : llvm::zip_equal(place, slice.getMixedOffsets()))
      from.push_back(b.createOrFold<arith::AddIOp>(
          index, getValueOrCreateConstantIndexOp(b, b.getLoc(), offset)));
    return readElement(b, slice.getSource(), from);
  }
  auto op = source.getDefiningOp<linalg::GenericOp>();
  if (!op || !isShort(op))
    return tensor::ExtractOp::create(b, source, place);
  IRMapping mapping;
  for (OpOperand *input : op.getDpsInputOperands()) {
    Value element = input->get();
    if (isa<RankedTensorType>(element.getType())) {
      SmallVector<Value> from;
      for (AffineExpr expr : op.getMatchingIndexingMap(input).getResults()) {
        auto dim = dyn_cast<AffineDimExpr>(expr);
        from.push_back(dim ? place[dim.getPosition()]
                           : arith::ConstantIndexOp::create(b, 0));
      }
      element = readElement(b, element, from);
    }
    mapping.map(op.getMatchingBlockArgument(input), element);
  }
  for (Operation &nested : op.getBody()->without_terminator())
    b.clone(nested, mapping);
  return mapping.lookup(op.getBody()->getTerminator()->getOperand(0));
}

/// The element at `place` of the whole. Parts that do not have it are read at
/// their nearest place.
static Value selectPart(ImplicitLocOpBuilder &b,
                        const Concatenation &concatenation,
                        ArrayRef<Value> place) {
  Value selected;
  Value position = place[concatenation.dim];
  auto index = [&](int64_t value) {
    return arith::ConstantIndexOp::create(b, value);
  };
  for (const Part &part : concatenation.parts) {
    SmallVector<Value> from(place);
    Value own = position;
    if (part.begin > 0) {
      own = arith::MaxSIOp::create(b, own, index(part.begin));
      own = arith::SubIOp::create(b, own, index(part.begin));
    }
    from[concatenation.dim] =
        arith::MinSIOp::create(b, own, index(part.size - 1));
    Value element = readElement(b, part.source, from);
    if (!selected) {
      selected = element;
      continue;
    }
    Value isBehind = arith::CmpIOp::create(b, arith::CmpIPredicate::sge,
                                           position, index(part.begin));
    selected = arith::SelectOp::create(b, isBehind, element, selected);
  }
  return selected;
}

static void replace(const Concatenation &concatenation) {
  tensor::InsertSliceOp last = concatenation.result;
  ImplicitLocOpBuilder b(last.getLoc(), last);
  RankedTensorType type = last.getType();
  int64_t rank = type.getRank();
  auto op = linalg::GenericOp::create(
      b, type, ValueRange(), concatenation.empty,
      b.getMultiDimIdentityMap(rank),
      SmallVector<utils::IteratorType>(rank, utils::IteratorType::parallel),
      [&](OpBuilder &builder, Location loc, ValueRange) {
        ImplicitLocOpBuilder body(loc, builder);
        SmallVector<Value> place;
        for (int64_t i = 0; i < rank; ++i)
          place.push_back(linalg::IndexOp::create(body, i));
        linalg::YieldOp::create(body, selectPart(body, concatenation, place));
      });
  last.replaceAllUsesWith(op.getResult(0));
}

namespace {
struct MoEConcatenationsToSelectionsPass
    : public mlir::moe::impl::MoEConcatenationsToSelectionsPassBase<
          MoEConcatenationsToSelectionsPass> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<tensor::InsertSliceOp> slices;
    getOperation().walk(
        [&](tensor::InsertSliceOp op) { slices.push_back(op); });
    for (tensor::InsertSliceOp slice : slices)
      if (std::optional<Concatenation> found = Concatenation::match(slice)) {
        replace(*found);
        ++numReplaced;
      }
    if (numReplaced == 0)
      return;
    // Parts that have no other readers.
    for (Operation &op : llvm::make_early_inc_range(
             llvm::reverse(getOperation().getBody().front())))
      if (isOpTriviallyDead(&op))
        op.erase();
  }
};
} // namespace
