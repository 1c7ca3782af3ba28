//===- SizeRelations.cpp - Which sizes of a function agree ----------------===//
//
// Every size is traced to the arguments, one op at a time, and remembered: a
// model has thousands of ops and a handful of sizes. In an expression symbol i
// stands for leaf i of the tracer: a size or the value of an argument, or the
// larger or the smaller of two expressions, or the quotient of two.
//
//===----------------------------------------------------------------------===//

#include "MoE/Target/SizeRelations.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"
#include "MoE/Target/Signature.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/AffineExpr.h"
#include "mlir/IR/AffineMap.h"
#include "mlir/IR/Matchers.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "llvm/ADT/DenseMap.h"

#include <set>
#include <tuple>

using namespace mlir;
using namespace mlir::moe;

namespace json = llvm::json;

namespace {
/// `found` is, or is at most, `expected`.
struct Relation {
  AffineExpr found;
  bool isEquality;
  AffineExpr expected;

  auto key() const {
    return std::make_tuple(found.getAsOpaquePointer(), isEquality,
                           expected.getAsOpaquePointer());
  }
};
} // namespace

namespace {
/// What an affine expression has no more to say of.
struct Leaf {
  /// An argument, and its dim or `kNoDim`; null for an operation.
  Value argument;
  int64_t dim = 0;
  /// "max", "min" or "//" of two expressions.
  StringRef operation;
  AffineExpr a, b;

  static constexpr int64_t kNoDim = -1;
  bool operator==(const Leaf &) const = default;
};
} // namespace

class SizeTracer::Impl {
public:
  explicit Impl(func::FuncOp function, unsigned depth = 0)
      : function(function), entry(&function.getBody().front()),
        context(function.getContext()), depth(depth) {}

  /// Null where it depends on data.
  AffineExpr getSize(Value shaped, int64_t dim);
  AffineExpr getIndex(Value value);
  AffineExpr getIndex(OpFoldResult value) {
    if (auto constant = getConstantIntValue(value))
      return getConstant(*constant);
    return getIndex(cast<Value>(value));
  }

  json::Value describe(AffineExpr expr) const;
  ArrayRef<Relation> collectRelations();

private:
  using Place = std::pair<Value, int64_t>;
  static constexpr int64_t kNoDim = Leaf::kNoDim;

  AffineExpr getConstant(int64_t value) const {
    return getAffineConstantExpr(value, context);
  }
  bool isArgument(Value value) const {
    auto argument = dyn_cast<BlockArgument>(value);
    return argument && argument.getOwner() == entry;
  }
  AffineExpr getLeaf(const Leaf &leaf);
  AffineExpr getLeaf(Value argument, int64_t dim) {
    return getLeaf(Leaf{argument, dim, "", {}, {}});
  }
  AffineExpr getOperation(StringRef operation, AffineExpr a, AffineExpr b);
  AffineExpr remember(Place place, llvm::function_ref<AffineExpr()> trace);
  AffineExpr traceSize(OpResult shaped, int64_t dim);
  AffineExpr traceIndex(OpResult value);
  AffineExpr traceOneStep(Value value, std::optional<int64_t> dim);

  void require(AffineExpr found, bool isEquality, AffineExpr expected);
  void requireEqual(AffineExpr found, AffineExpr expected) {
    require(found, /*isEquality=*/true, expected);
  }
  void addRelations(Operation *op);
  void addIndexed(IndexingMapOpInterface op);
  void addOrder(MoEStructuredOpInterface op, ArrayRef<AffineExpr> sizes);
  void addCast(Value source, Value result);
  void addExpansion(Value source, Value result,
                    ArrayRef<ReassociationIndices> groups);
  void addSlice(OffsetSizeAndStrideOpInterface slice, Value whole);
  void addInserted(tensor::InsertSliceOp insert);
  void addConcatenation(tensor::ConcatOp concat);
  void addCall(func::CallOp call);

  func::FuncOp function;
  Block *entry;
  MLIRContext *context;
  /// Of calls, which may recurse.
  unsigned depth;
  static constexpr unsigned kMaxDepth = 16;
  SmallVector<Leaf> leaves;
  DenseMap<Place, AffineExpr> sizes;
  SmallVector<Relation> relations;
  std::set<decltype(std::declval<Relation>().key())> seen;
};

//===----------------------------------------------------------------------===//
// Sizes
//===----------------------------------------------------------------------===//

AffineExpr SizeTracer::Impl::getLeaf(const Leaf &leaf) {
  auto *found = llvm::find(leaves, leaf);
  unsigned position = found - leaves.begin();
  if (found == leaves.end())
    leaves.push_back(leaf);
  return getAffineSymbolExpr(position, context);
}

AffineExpr SizeTracer::Impl::getOperation(StringRef operation, AffineExpr a,
                                          AffineExpr b) {
  return a && b ? getLeaf(Leaf{{}, 0, operation, a, b}) : AffineExpr();
}

AffineExpr SizeTracer::Impl::remember(Place place,
                                      llvm::function_ref<AffineExpr()> trace) {
  // Of a value that depends on itself nothing is known.
  auto [found, isNew] = sizes.try_emplace(place);
  if (!isNew)
    return found->second;
  AffineExpr size = trace();
  sizes[place] = size;
  return size;
}

AffineExpr SizeTracer::Impl::getSize(Value shaped, int64_t dim) {
  auto type = cast<ShapedType>(shaped.getType());
  if (!type.hasRank())
    return nullptr;
  if (!type.isDynamicDim(dim))
    return getConstant(type.getDimSize(dim));
  if (isArgument(shaped))
    return getLeaf(shaped, dim);
  return remember({shaped, dim}, [&]() -> AffineExpr {
    auto result = dyn_cast<OpResult>(shaped);
    return result ? traceSize(result, dim) : traceOneStep(shaped, dim);
  });
}

/// The product of the sizes of the dims in `group`.
template <typename GetSize>
static AffineExpr multiply(ArrayRef<int64_t> group, AffineExpr one,
                           GetSize getSize) {
  AffineExpr product = one;
  for (int64_t dim : group) {
    AffineExpr size = getSize(dim);
    if (!size)
      return nullptr;
    product = product * size;
  }
  return product;
}

AffineExpr SizeTracer::Impl::traceSize(OpResult shaped, int64_t dim) {
  Operation *op = shaped.getOwner();
  if (auto destination = dyn_cast<DestinationStyleOpInterface>(op))
    if (OpOperand *init = destination.getTiedOpOperand(shaped))
      return getSize(init->get(), dim);
  if (auto collapse = dyn_cast<tensor::CollapseShapeOp>(op))
    return multiply(
        collapse.getReassociationIndices()[dim], getConstant(1),
        [&](int64_t joined) { return getSize(collapse.getSrc(), joined); });
  if (auto expand = dyn_cast<tensor::ExpandShapeOp>(op))
    return getIndex(expand.getMixedOutputShape()[dim]);
  return traceOneStep(shaped, dim);
}

AffineExpr SizeTracer::Impl::getIndex(Value value) {
  APInt constant;
  if (matchPattern(value, m_ConstantInt(&constant)))
    return getConstant(constant.getSExtValue());
  if (isArgument(value)) {
    bool isReadable = value.getType().isIndex() ||
                      value.getType().isSignlessInteger(32) ||
                      value.getType().isSignlessInteger(64);
    return isReadable ? getLeaf(value, kNoDim) : nullptr;
  }
  return remember({value, kNoDim}, [&]() -> AffineExpr {
    auto result = dyn_cast<OpResult>(value);
    return result ? traceIndex(result) : nullptr;
  });
}

AffineExpr SizeTracer::Impl::traceIndex(OpResult value) {
  Operation *op = value.getOwner();
  if (auto dim = dyn_cast<tensor::DimOp>(op))
    if (std::optional<int64_t> position = dim.getConstantIndex())
      return getSize(dim.getSource(), *position);
  if (auto cast = dyn_cast<arith::IndexCastOp>(op))
    return getIndex(cast.getIn());
  if (isa<arith::MaxSIOp, arith::MinSIOp>(op))
    return getOperation(isa<arith::MaxSIOp>(op) ? "max" : "min",
                        getIndex(op->getOperand(0)),
                        getIndex(op->getOperand(1)));
  // Of two sizes that are open, which bounds do not express.
  if (isa<arith::MulIOp, arith::DivUIOp, arith::DivSIOp, arith::CeilDivSIOp,
          arith::CeilDivUIOp, arith::FloorDivSIOp>(op)) {
    AffineExpr a = getIndex(op->getOperand(0)), b = getIndex(op->getOperand(1));
    if (!a || !b)
      return nullptr;
    if (isa<arith::MulIOp>(op))
      return a * b;
    // Of sizes, which are not negative: every division rounds to zero.
    auto divisor = dyn_cast<AffineConstantExpr>(b);
    bool isCeiling = isa<arith::CeilDivSIOp, arith::CeilDivUIOp>(op);
    if (!divisor && !isCeiling)
      return getOperation("//", a, b);
    if (!divisor || divisor.getValue() <= 0)
      return nullptr;
    return isCeiling ? a.ceilDiv(b) : a.floorDiv(b);
  }
  return value.getType().isIndex() ? traceOneStep(value, std::nullopt)
                                   : nullptr;
}

/// In terms of what the op that defines it reads.
AffineExpr SizeTracer::Impl::traceOneStep(Value value,
                                          std::optional<int64_t> dim) {
  AffineMap map;
  ValueDimList operands;
  ValueBoundsConstraintSet::Variable variable =
      dim ? ValueBoundsConstraintSet::Variable(value, *dim)
          : ValueBoundsConstraintSet::Variable(value);
  if (failed(ValueBoundsConstraintSet::computeBound(
          map, operands, presburger::BoundType::EQ, variable,
          [&](Value other, std::optional<int64_t>, ValueBoundsConstraintSet &) {
            return other != value;
          })))
    return nullptr;
  SmallVector<AffineExpr> replacements;
  for (auto [operand, operandDim] : operands) {
    AffineExpr size = operandDim         ? getSize(operand, *operandDim)
                      : operand == value ? AffineExpr()
                                         : getIndex(operand);
    if (!size)
      return nullptr;
    replacements.push_back(size);
  }
  ArrayRef<AffineExpr> all = replacements;
  return map.getResult(0).replaceDimsAndSymbols(
      all.take_front(map.getNumDims()), all.drop_front(map.getNumDims()));
}

json::Value SizeTracer::Impl::describe(AffineExpr expr) const {
  if (!expr)
    return nullptr;
  return describeExpr(expr, [&](AffineExpr symbol) -> json::Value {
    const Leaf &leaf = leaves[cast<AffineSymbolExpr>(symbol).getPosition()];
    if (!leaf.argument)
      return json::Array{leaf.operation, describe(leaf.a), describe(leaf.b)};
    json::Array place{"arg",
                      static_cast<int64_t>(
                          cast<BlockArgument>(leaf.argument).getArgNumber())};
    if (leaf.dim != kNoDim)
      place.push_back(leaf.dim);
    return place;
  });
}

//===----------------------------------------------------------------------===//
// Relations
//===----------------------------------------------------------------------===//

/// The last argument that an expression reads; -1 for none.
static int64_t findLast(AffineExpr expr, ArrayRef<Leaf> leaves) {
  int64_t last = -1;
  expr.walk([&](AffineExpr part) {
    auto symbol = dyn_cast<AffineSymbolExpr>(part);
    if (!symbol)
      return;
    const Leaf &leaf = leaves[symbol.getPosition()];
    int64_t found =
        leaf.argument
            ? cast<BlockArgument>(leaf.argument).getArgNumber()
            : std::max(findLast(leaf.a, leaves), findLast(leaf.b, leaves));
    last = std::max(last, found);
  });
  return last;
}

/// Whether that follows from sizes being so.
static bool isNonNegative(AffineExpr expr, ArrayRef<Leaf> leaves) {
  if (auto constant = dyn_cast<AffineConstantExpr>(expr))
    return constant.getValue() >= 0;
  if (auto symbol = dyn_cast<AffineSymbolExpr>(expr)) {
    const Leaf &leaf = leaves[symbol.getPosition()];
    if (leaf.argument)
      return leaf.dim >= 0;
    bool a = isNonNegative(leaf.a, leaves), b = isNonNegative(leaf.b, leaves);
    return leaf.operation == "max" ? a || b : a && b;
  }
  auto binary = dyn_cast<AffineBinaryOpExpr>(expr);
  return binary && isNonNegative(binary.getLHS(), leaves) &&
         isNonNegative(binary.getRHS(), leaves);
}

void SizeTracer::Impl::require(AffineExpr found, bool isEquality,
                               AffineExpr expected) {
  if (!found || !expected || found == expected)
    return;
  AffineExpr room =
      simplifyAffineExpr(expected - found, /*numDims=*/0, leaves.size());
  auto constant = dyn_cast<AffineConstantExpr>(room);
  if (isEquality ? constant && constant.getValue() == 0
                 : isNonNegative(room, leaves))
    return;
  // Messages are about the later argument.
  if (isEquality && findLast(found, leaves) < findLast(expected, leaves))
    std::swap(found, expected);
  Relation relation{found, isEquality, expected};
  if (seen.insert(relation.key()).second)
    relations.push_back(relation);
}

static bool isTensorOrBuffer(Value value) {
  auto type = dyn_cast<ShapedType>(value.getType());
  return type && type.hasRank() && isa<TensorType, MemRefType>(type);
}

/// The sizes of an op's iteration domain, as all operands that span a dim have
/// them; other maps stay within their operand.
void SizeTracer::Impl::addIndexed(IndexingMapOpInterface op) {
  SmallVector<AffineMap> maps = op.getIndexingMapsArray();
  if (maps.size() != op->getNumOperands() || maps.empty())
    return;
  SmallVector<AffineExpr> domain(maps[0].getNumDims());
  auto forEachExpr = [&](auto visit) {
    for (OpOperand &operand : op->getOpOperands()) {
      AffineMap map = maps[operand.getOperandNumber()];
      if (isTensorOrBuffer(operand.get()) &&
          map.getNumResults() ==
              cast<ShapedType>(operand.get().getType()).getRank())
        for (auto [position, expr] : llvm::enumerate(map.getResults()))
          visit(expr, getSize(operand.get(), position));
    }
  };
  forEachExpr([&](AffineExpr expr, AffineExpr size) {
    auto dim = dyn_cast<AffineDimExpr>(expr);
    if (!dim || !size)
      return;
    AffineExpr &known = domain[dim.getPosition()];
    if (known)
      requireEqual(size, known);
    else
      known = size;
  });
  // The last element that a map reads, where each dim is at its end.
  SmallVector<AffineExpr> last;
  for (AffineExpr size : domain)
    last.push_back(size ? size - 1 : getAffineDimExpr(0, context));
  forEachExpr([&](AffineExpr expr, AffineExpr size) {
    bool isKnown = !isa<AffineDimExpr>(expr) &&
                   !expr.walk([&](AffineExpr e) {
                          auto dim = dyn_cast<AffineDimExpr>(e);
                          return dim && !domain[dim.getPosition()]
                                     ? WalkResult::interrupt()
                                     : WalkResult::advance();
                        })
                        .wasInterrupted();
    if (isKnown && size)
      require(expr.replaceDims(last) + 1, /*isEquality=*/false, size);
  });
  if (auto structured = dyn_cast<MoEStructuredOpInterface>(op.getOperation()))
    addOrder(structured, domain);
}

void SizeTracer::Impl::addOrder(MoEStructuredOpInterface op,
                                ArrayRef<AffineExpr> domain) {
  for (auto [smaller, larger] : op.getDimOrder())
    require(domain[smaller], /*isEquality=*/false, domain[larger]);
}

/// A cast may claim a size that was open.
void SizeTracer::Impl::addCast(Value source, Value result) {
  if (!isTensorOrBuffer(source) || !isTensorOrBuffer(result))
    return;
  for (auto [dim, size] :
       llvm::enumerate(cast<ShapedType>(result.getType()).getShape()))
    if (!ShapedType::isDynamic(size))
      requireEqual(getSize(source, dim), getConstant(size));
}

void SizeTracer::Impl::addExpansion(Value source, Value result,
                                    ArrayRef<ReassociationIndices> groups) {
  for (auto [dim, group] : llvm::enumerate(groups))
    requireEqual(
        multiply(group, getConstant(1),
                 [&](int64_t split) { return getSize(result, split); }),
        getSize(source, dim));
}

/// From 0 on, and to the end at most.
void SizeTracer::Impl::addSlice(OffsetSizeAndStrideOpInterface slice,
                                Value whole) {
  SmallVector<OpFoldResult> offsets = slice.getMixedOffsets();
  SmallVector<OpFoldResult> lengths = slice.getMixedSizes();
  SmallVector<OpFoldResult> strides = slice.getMixedStrides();
  for (size_t dim = 0; dim < offsets.size(); ++dim) {
    AffineExpr offset = getIndex(offsets[dim]), size = getIndex(lengths[dim]);
    AffineExpr stride = getIndex(strides[dim]), end = getSize(whole, dim);
    if (!offset || !size || !stride || !end)
      continue;
    require(getConstant(0), /*isEquality=*/false, offset);
    require(offset + (size - 1) * stride + 1, /*isEquality=*/false, end);
  }
}

void SizeTracer::Impl::addInserted(tensor::InsertSliceOp insert) {
  llvm::SmallBitVector dropped = insert.getDroppedDims();
  int64_t position = 0;
  for (auto [dim, size] : llvm::enumerate(insert.getMixedSizes()))
    if (!dropped.test(dim))
      requireEqual(getSize(insert.getSource(), position++), getIndex(size));
}

void SizeTracer::Impl::addConcatenation(tensor::ConcatOp concat) {
  Value first = concat.getInputs().front();
  for (Value input : concat.getInputs().drop_front())
    for (int64_t dim = 0, rank = concat.getRank(); dim < rank; ++dim)
      if (dim != static_cast<int64_t>(concat.getDim()))
        requireEqual(getSize(input, dim), getSize(first, dim));
}

/// What a function of the module asks of its arguments, asked of those of the
/// call.
void SizeTracer::Impl::addCall(func::CallOp call) {
  auto callee = SymbolTable::lookupNearestSymbolFrom<func::FuncOp>(
      call, call.getCalleeAttr());
  if (!callee || callee.isExternal() || depth == kMaxDepth)
    return;
  Impl inner(callee, depth + 1);
  ArrayRef<Relation> asked = inner.collectRelations();
  // An operation comes after the leaves that it is of.
  SmallVector<AffineExpr> replacements;
  auto replace = [&](AffineExpr expr) -> AffineExpr {
    WalkResult known = expr.walk([&](AffineExpr part) {
      auto leaf = dyn_cast<AffineSymbolExpr>(part);
      return leaf && !replacements[leaf.getPosition()] ? WalkResult::interrupt()
                                                       : WalkResult::advance();
    });
    return known.wasInterrupted() ? AffineExpr()
                                  : expr.replaceSymbols(replacements);
  };
  for (const Leaf &leaf : inner.leaves) {
    if (!leaf.argument) {
      replacements.push_back(
          getOperation(leaf.operation, replace(leaf.a), replace(leaf.b)));
      continue;
    }
    Value operand =
        call.getOperand(cast<BlockArgument>(leaf.argument).getArgNumber());
    replacements.push_back(leaf.dim == kNoDim ? getIndex(operand)
                                              : getSize(operand, leaf.dim));
  }
  for (const Relation &relation : asked)
    require(replace(relation.found), relation.isEquality,
            replace(relation.expected));
}

void SizeTracer::Impl::addRelations(Operation *op) {
  if (auto indexed = dyn_cast<IndexingMapOpInterface>(op))
    addIndexed(indexed);
  else if (isa<tensor::CastOp, memref::CastOp>(op))
    addCast(op->getOperand(0), op->getResult(0));
  else if (auto expand = dyn_cast<tensor::ExpandShapeOp>(op))
    addExpansion(expand.getSrc(), expand.getResult(),
                 expand.getReassociationIndices());
  else if (auto collapse = dyn_cast<tensor::CollapseShapeOp>(op))
    addExpansion(collapse.getResult(), collapse.getSrc(),
                 collapse.getReassociationIndices());
  else if (auto extract = dyn_cast<tensor::ExtractSliceOp>(op))
    addSlice(extract, extract.getSource());
  else if (auto insert = dyn_cast<tensor::InsertSliceOp>(op)) {
    addSlice(insert, insert.getDest());
    addInserted(insert);
  } else if (auto concat = dyn_cast<tensor::ConcatOp>(op))
    addConcatenation(concat);
  else if (auto call = dyn_cast<func::CallOp>(op))
    addCall(call);
}

ArrayRef<Relation> SizeTracer::Impl::collectRelations() {
  function.walk([&](Operation *op) { addRelations(op); });
  return relations;
}

//===----------------------------------------------------------------------===//
// The tracer
//===----------------------------------------------------------------------===//

SizeTracer::SizeTracer(func::FuncOp function)
    : impl(std::make_unique<Impl>(function)) {}
SizeTracer::~SizeTracer() = default;

json::Value SizeTracer::describeSize(Value tensor, int64_t dim) {
  return impl->describe(impl->getSize(tensor, dim));
}

std::vector<json::Value> SizeTracer::describeRelations() {
  std::vector<json::Value> described;
  for (const Relation &relation : impl->collectRelations())
    described.push_back(json::Array{
        impl->describe(relation.found),
        relation.isEquality ? "==" : "<=", impl->describe(relation.expected)});
  return described;
}
