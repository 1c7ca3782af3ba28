//===- Rows.cpp - Loop nests along contiguous rows on vectors -------------===//
//
// Matches linalg.generic on buffers whose last loop walks contiguous rows,
// where the compiler behind us would keep a scalar loop:
//
//   out[row] += f(in[row, v], ..)      a sum or maximum of floats, whose order
//                                      only we may change
//   out[row, v] = f(.., table[g(row), v])   a row of a table that is chosen by
//                                      a value in memory, which is no gather
//
// What does not depend on v is computed once a row; the rest of the body is
// written again on vectors. Lanes behind the end of a row are masked. Each sum
// has an order that the length of the row alone decides: not its position, not
// the number of rows.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/IR/IRMapping.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Recognising rows
//===----------------------------------------------------------------------===//

namespace {
enum class Combine { None, Add, Max };

/// A nest along rows. `v` is its last loop.
struct RowNest {
  linalg::GenericOp op;
  unsigned v;
  /// How a row is reduced; None where it is written.
  Combine combine = Combine::None;
  /// What the reduction combines the old value with.
  Value term;
  /// The values of the body that differ between the lanes of a row.
  DenseSet<Value> lanes;

  bool isReduction() const { return combine != Combine::None; }
};
} // namespace

static bool walks(AffineMap map, unsigned dim) {
  return map.isFunctionOfDim(dim);
}

/// Whether `operand` is read or written at consecutive elements along `v`, as
/// floats, or does not depend on `v`.
static bool isRowOrUniform(linalg::GenericOp op, OpOperand *operand,
                           unsigned v) {
  AffineMap map = op.getMatchingIndexingMap(operand);
  if (!walks(map, v))
    return true;
  Type type = operand->get().getType();
  Type element = getElementTypeOrSelf(type);
  return isa<MemRefType>(type) && isInnermostContiguous(type) &&
         (element.isF32() || element.isBF16() || element.isF16()) &&
         map.getResults().back() == getAffineDimExpr(v, op.getContext()) &&
         llvm::none_of(map.getResults().drop_back(), [&](AffineExpr expr) {
           return expr.isFunctionOfDim(v);
         });
}

/// Whether `op` loads consecutive elements along `v` of a row that no lane
/// chooses.
static bool isRowOfTable(memref::LoadOp op, const RowNest &nest) {
  if (op.getIndices().empty() || !op.getType().isF32() ||
      !isInnermostContiguous(op.getMemRef().getType()))
    return false;
  auto last = op.getIndices().back().getDefiningOp<linalg::IndexOp>();
  return last && last.getDim() == nest.v &&
         llvm::none_of(op.getIndices().drop_back(),
                       [&](Value index) { return nest.lanes.contains(index); });
}

/// Finds the values that differ between lanes; fails where the body has an
/// operation that cannot be written on vectors.
static bool classifyBody(RowNest &nest) {
  Block *body = nest.op.getBody();
  for (OpOperand &operand : nest.op->getOpOperands())
    if (walks(nest.op.getMatchingIndexingMap(&operand), nest.v))
      nest.lanes.insert(body->getArgument(operand.getOperandNumber()));
  for (Operation &op : body->without_terminator()) {
    if (auto index = dyn_cast<linalg::IndexOp>(op)) {
      if (index.getDim() == nest.v)
        nest.lanes.insert(index.getResult());
      continue;
    }
    bool differs = llvm::any_of(
        op.getOperands(), [&](Value v) { return nest.lanes.contains(v); });
    auto load = dyn_cast<memref::LoadOp>(op);
    if (!differs) {
      if (!load && !isPure(&op))
        return false;
      continue;
    }
    if (load ? !isRowOfTable(load, nest)
             : !OpTrait::hasElementwiseMappableTraits(&op))
      return false;
    nest.lanes.insert(op.getResult(0));
  }
  // The position in the row is only an index of tables.
  for (auto index : body->getOps<linalg::IndexOp>())
    if (index.getDim() == nest.v &&
        !llvm::all_of(index->getUsers(), llvm::IsaPred<memref::LoadOp>))
      return false;
  // 16-bit elements are extended before anything else.
  return llvm::all_of(body->getArguments(), [&](BlockArgument argument) {
    return !nest.lanes.contains(argument) || argument.getType().isF32() ||
           llvm::all_of(argument.getUsers(), [](Operation *user) {
             return isa<arith::ExtFOp>(user) &&
                    user->getResult(0).getType().isF32();
           });
  });
}

/// Recognises `out + term` and `max(out, term)`.
static void matchCombine(RowNest &nest) {
  Block *body = nest.op.getBody();
  Value out = body->getArguments().back();
  Operation *yielded = body->getTerminator()->getOperand(0).getDefiningOp();
  if (!yielded || yielded->getNumOperands() != 2 || !out.hasOneUse())
    return;
  Combine combine = isa<arith::AddFOp>(yielded)       ? Combine::Add
                    : isa<arith::MaximumFOp>(yielded) ? Combine::Max
                                                      : Combine::None;
  for (unsigned side : {0u, 1u})
    if (yielded->getOperand(side) == out) {
      nest.combine = combine;
      nest.term = yielded->getOperand(1 - side);
    }
}

static FailureOr<RowNest> matchRowNest(linalg::GenericOp op,
                                       PatternRewriter &rewriter) {
  auto fail = [&](const char *reason) {
    return rewriter.notifyMatchFailure(op, reason);
  };
  if (!op.hasPureBufferSemantics() || op.getNumDpsInits() != 1 ||
      op.getNumLoops() == 0)
    return fail("expected one destination on buffers");
  RowNest nest;
  nest.op = op;
  nest.v = op.getNumLoops() - 1;
  for (OpOperand &operand : op->getOpOperands())
    if (!op.getMatchingIndexingMap(&operand).isProjectedPermutation(
            /*allowZeroInResults=*/true) ||
        !isRowOrUniform(op, &operand, nest.v))
      return fail("expected operands along contiguous rows");
  if (!classifyBody(nest))
    return fail("expected a body that can be written on vectors");

  bool hasTable = llvm::any_of(
      op.getBody()->getOps<memref::LoadOp>(),
      [&](memref::LoadOp load) { return nest.lanes.contains(load); });
  bool writesRows = walks(op.getIndexingMapsArray().back(), nest.v);
  if (!writesRows)
    matchCombine(nest);
  if (writesRows ? !hasTable
                 : !nest.isReduction() || !nest.lanes.contains(nest.term))
    return fail("scalar loops do as well");
  return nest;
}

//===----------------------------------------------------------------------===//
// The loops
//===----------------------------------------------------------------------===//

namespace {
class RowKernel {
public:
  RowKernel(Emitter &e, RowNest nest) : e(e), nest(std::move(nest)) {}
  void emit() { emitOuter(0); }

private:
  void emitOuter(unsigned dim);
  void emitRow();
  void emitWrites(Value size);
  void emitReduction(Value size);

  bool differs(Value value) { return nest.lanes.contains(value); }
  Value getLoopSize(unsigned dim);
  Values indicesOf(OpOperand &operand, Value v);
  void emitUniformPart();
  Value emitLanes(Value result, Value v, Value mask, IRMapping &values);
  Value asVector(Value value, IRMapping &values);
  Value cloneOnVectors(Operation &op, IRMapping &values);
  Value combine(Value a, Value b);
  Value reduceLanes(Value vector);
  void forEachVector(Value size, function_ref<void(Value v, Value mask)> body);

  Emitter &e;
  RowNest nest;
  Values ivs;
  IRMapping uniform;
};
} // namespace

Value RowKernel::getLoopSize(unsigned dim) {
  AffineExpr wanted = getAffineDimExpr(dim, nest.op.getContext());
  for (OpOperand &operand : nest.op->getOpOperands())
    for (auto [position, expr] :
         llvm::enumerate(nest.op.getMatchingIndexingMap(&operand).getResults()))
      if (expr == wanted)
        return e.dim(operand.get(), position);
  llvm_unreachable("every loop is a dim of an operand");
}

/// Where `operand` is accessed in the current row, at `v` of it.
Values RowKernel::indicesOf(OpOperand &operand, Value v) {
  Values indices;
  for (AffineExpr expr :
       nest.op.getMatchingIndexingMap(&operand).getResults()) {
    auto dim = dyn_cast<AffineDimExpr>(expr);
    indices.push_back(!dim                          ? e.index(0)
                      : dim.getPosition() == nest.v ? v
                                                    : ivs[dim.getPosition()]);
  }
  return indices;
}

void RowKernel::emitOuter(unsigned dim) {
  if (dim == nest.v)
    return emitRow();
  e.loop(e.index(0), getLoopSize(dim), 1, [&](Value iv) {
    ivs.push_back(iv);
    emitOuter(dim + 1);
    ivs.pop_back();
  });
}

void RowKernel::emitRow() {
  emitUniformPart();
  Value size = getLoopSize(nest.v);
  if (nest.isReduction())
    emitReduction(size);
  else
    emitWrites(size);
}

/// What all lanes of a row share: loads of one element a row and what follows
/// from them. The old value of a reduction is added at its end.
void RowKernel::emitUniformPart() {
  uniform = IRMapping();
  Block *body = nest.op.getBody();
  for (OpOperand &operand : nest.op->getOpOperands()) {
    BlockArgument argument = body->getArgument(operand.getOperandNumber());
    if (!differs(argument) && !argument.use_empty())
      uniform.map(argument,
                  isa<MemRefType>(operand.get().getType())
                      ? e.load(operand.get(), indicesOf(operand, Value()))
                      : operand.get());
  }
  for (Operation &op : body->without_terminator()) {
    if (llvm::any_of(op.getResults(), [&](Value v) { return differs(v); }) ||
        (nest.isReduction() &&
         op.getResult(0) == body->getTerminator()->getOperand(0)))
      continue;
    if (auto index = dyn_cast<linalg::IndexOp>(op))
      uniform.map(index.getResult(), ivs[index.getDim()]);
    else
      e.clone(op, uniform);
  }
}

/// Whole vectors, then the lanes that are left.
void RowKernel::forEachVector(Value size,
                              function_ref<void(Value, Value)> body) {
  Value rest = e.rest(size, e.width);
  Value end = e.sub(size, rest);
  e.loop(e.index(0), end, e.width, [&](Value v) { body(v, Value()); });
  e.ifThen(e.compare(arith::CmpIPredicate::ne, rest, e.index(0)),
           [&] { body(end, e.firstLanes(rest)); });
}

void RowKernel::emitWrites(Value size) {
  OpOperand &out = *nest.op.getDpsInitOperand(0);
  forEachVector(size, [&](Value v, Value mask) {
    IRMapping values = uniform;
    Value result = nest.op.getBody()->getTerminator()->getOperand(0);
    Value vector = emitLanes(result, v, mask, values);
    Type element = getElementTypeOrSelf(out.get().getType());
    assert(getElementTypeOrSelf(vector.getType()) == element &&
           "the body yields elements of its destination");
    e.storeVector(vector, out.get(), indicesOf(out, v), mask);
  });
}

void RowKernel::emitReduction(Value size) {
  OpOperand &out = *nest.op.getDpsInitOperand(0);
  Type element = getElementTypeOrSelf(out.get().getType());
  double neutral = nest.combine == Combine::Add
                       ? 0.0
                       : -std::numeric_limits<double>::infinity();
  Value start = e.constant(e.vectorOf(element), neutral);
  auto step = [&](Value v, Value mask, Value carried) {
    IRMapping values = uniform;
    Value term = emitLanes(nest.term, v, mask, values);
    return combine(carried, mask ? e.select(mask, term, start) : term);
  };
  Value rest = e.rest(size, e.width);
  Value end = e.sub(size, rest);
  Value sum = e.loop(e.index(0), end, e.width, start,
                     [&](Value v, ValueRange carried) -> Values {
                       return {step(v, Value(), carried[0])};
                     })[0];
  sum = e.ifElse(
      e.compare(arith::CmpIPredicate::ne, rest, e.index(0)), sum.getType(),
      [&] { return Values{step(end, e.firstLanes(rest), sum)}; },
      [&] { return Values{sum}; })[0];
  Values place = indicesOf(out, Value());
  e.store(combine(e.load(out.get(), place), reduceLanes(sum)), out.get(),
          place);
}

Value RowKernel::combine(Value a, Value b) {
  if (nest.combine == Combine::Add)
    return e.add(a, b);
  return e.maximum(a, b);
}

Value RowKernel::reduceLanes(Value vector) {
  if (nest.combine == Combine::Add)
    return e.reduceAdd(vector);
  return vector::ReductionOp::create(e, vector::CombiningKind::MAXIMUMF,
                                     vector);
}

/// The lanes of `result` at `v`: loads of the rows, then the part of the body
/// that differs between lanes.
Value RowKernel::emitLanes(Value result, Value v, Value mask,
                           IRMapping &values) {
  Block *body = nest.op.getBody();
  for (OpOperand &operand : nest.op->getOpOperands()) {
    BlockArgument argument = body->getArgument(operand.getOperandNumber());
    if (differs(argument) && !argument.use_empty())
      values.map(argument,
                 e.loadFloats(operand.get(), indicesOf(operand, v), mask));
  }
  for (Operation &op : body->without_terminator()) {
    if (!llvm::any_of(op.getResults(), [&](Value v) { return differs(v); }) ||
        isa<linalg::IndexOp>(op))
      continue;
    if (nest.isReduction() &&
        op.getResult(0) == body->getTerminator()->getOperand(0))
      continue;
    if (auto load = dyn_cast<memref::LoadOp>(op)) {
      Values indices;
      for (Value index : load.getIndices().drop_back())
        indices.push_back(values.lookupOrDefault(index));
      indices.push_back(v);
      values.map(load.getResult(),
                 e.loadFloats(load.getMemRef(), indices, mask));
      continue;
    }
    values.map(op.getResult(0), cloneOnVectors(op, values));
  }
  return asVector(result, values);
}

Value RowKernel::asVector(Value value, IRMapping &values) {
  Value mapped = values.lookupOrDefault(value);
  return isa<VectorType>(mapped.getType()) ? mapped : e.splat(mapped);
}

Value RowKernel::cloneOnVectors(Operation &op, IRMapping &values) {
  Values operands;
  for (Value operand : op.getOperands())
    operands.push_back(asVector(operand, values));
  VectorType type = e.vectorOf(op.getResult(0).getType());
  // Elements of 16 bits are f32 from their load on.
  if (isa<arith::ExtFOp>(op) && operands[0].getType() == type)
    return operands[0];
  OperationState state(op.getLoc(), op.getName().getIdentifier(), operands,
                       type, op.getDiscardableAttrDictionary().getValue());
  state.propertiesAttr = op.getPropertiesAsAttribute();
  return e.create(state)->getResult(0);
}

namespace {
/// A nest along contiguous rows -> loops over vectors.
struct RowsToVector : OpRewritePattern<linalg::GenericOp> {
  RowsToVector(MLIRContext *context, const CPUTarget &options)
      // Products have a lowering that keeps more of them in registers.
      : OpRewritePattern(context, /*benefit=*/0), options(options) {}

  LogicalResult matchAndRewrite(linalg::GenericOp op,
                                PatternRewriter &rewriter) const override {
    FailureOr<RowNest> nest = matchRowNest(op, rewriter);
    if (failed(nest))
      return failure();
    Emitter emitter(op.getLoc(), rewriter, options);
    RowKernel(emitter, *nest).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUTarget options;
};
} // namespace

void mlir::moe::populateRowsToCPUPatterns(RewritePatternSet &patterns,
                                          const CPUTarget &options) {
  patterns.add<RowsToVector>(patterns.getContext(), options);
}
