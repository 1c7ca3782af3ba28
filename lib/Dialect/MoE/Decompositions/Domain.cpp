//===- Domain.cpp - Loop nests over the dims of an op ---------------------===//

#include "Domain.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/STLExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Body
//===----------------------------------------------------------------------===//

Value Body::iteration(int64_t dim) {
  const int64_t *loop = llvm::find(loops, dim);
  assert(loop != loops.end() && "the nest does not iterate over this dim");
  return linalg::IndexOp::create(*this, loop - loops.begin());
}

Value Body::toF64(Value value) {
  if (isFloat(value))
    return arith::ExtFOp::create(*this, getF64Type(), value);
  return arith::SIToFPOp::create(*this, getF64Type(),
                                 castInt(value, getI64Type()));
}

//===----------------------------------------------------------------------===//
// Domain
//===----------------------------------------------------------------------===//

Domain::Domain(OpBuilder &builder, MoEStructuredOpInterface op)
    : builder(builder), op(op), loc(op->getLoc()), body(builder, loc),
      sizes(op.getDims().size()) {}

int64_t Domain::addDim(OpFoldResult size) {
  sizes.push_back(size);
  return sizes.size() - 1;
}

OpFoldResult Domain::getSize(int64_t dim) {
  if (sizes[dim])
    return sizes[dim];
  int64_t size = getStaticDimSize(op, dim);
  if (!ShapedType::isDynamic(size))
    return sizes[dim] = builder.getIndexAttr(size);
  auto place = findDim(op, dim);
  assert(succeeded(place) && "no operand spans this dim");
  return sizes[dim] = linalg::createFoldedDimOp(
             builder, loc, place->first->get(), place->second);
}

Value Domain::getSizeValue(int64_t dim) {
  return getValueOrCreateConstantIndexOp(builder, loc, getSize(dim));
}

Access Domain::at(Value value, ArrayRef<int64_t> dims) {
  assert(cast<ShapedType>(value.getType()).getRank() ==
             static_cast<int64_t>(dims.size()) &&
         "one dim of the domain for each dim of the value");
  return {value, llvm::to_vector(dims)};
}

Access Domain::empty(ArrayRef<int64_t> dims, Type elementType) {
  SmallVector<OpFoldResult> shape;
  for (int64_t dim : dims)
    shape.push_back(dim == Access::kBroadcast
                        ? OpFoldResult(builder.getIndexAttr(1))
                        : getSize(dim));
  return at(tensor::EmptyOp::create(builder, loc, shape, elementType), dims);
}

Access Domain::fill(Access out, Value scalar) {
  auto op = linalg::FillOp::create(builder, loc, scalar, out.value);
  if (op->getNumResults() == 1)
    out.value = op.getResult(0);
  return out;
}
Access Domain::filled(ArrayRef<int64_t> dims, float value) {
  return fill(empty(dims, builder.getF32Type()), body.f32(value));
}
Access Domain::filled(ArrayRef<int64_t> dims, bool value) {
  return filled(dims, builder.getI1Type(), value);
}
Access Domain::filled(ArrayRef<int64_t> dims, Type type, int64_t value) {
  return fill(empty(dims, type), body.constantInt(type, value));
}

/// The dims that any of `accesses` is indexed by, in ascending order: the loops
/// of a nest over them.
static SmallVector<int64_t> collectLoops(ArrayRef<Access> accesses) {
  SmallVector<int64_t> loops;
  for (const Access &access : accesses)
    for (int64_t dim : access.dims)
      if (dim != Access::kBroadcast && !llvm::is_contained(loops, dim))
        loops.push_back(dim);
  llvm::sort(loops);
  return loops;
}

static AffineMap getMap(const Access &access, ArrayRef<int64_t> loops,
                        MLIRContext *context) {
  SmallVector<AffineExpr> exprs;
  for (int64_t dim : access.dims)
    exprs.push_back(dim == Access::kBroadcast
                        ? getAffineConstantExpr(0, context)
                        : getAffineDimExpr(
                              llvm::find(loops, dim) - loops.begin(), context));
  return AffineMap::get(loops.size(), 0, exprs, context);
}

Access Domain::build(ArrayRef<Access> ins, Access out, ReduceFn fn) {
  SmallVector<Access> accesses(ins);
  accesses.push_back(out);
  SmallVector<int64_t> loops = collectLoops(accesses);

  SmallVector<AffineMap> maps;
  for (const Access &access : accesses)
    maps.push_back(getMap(access, loops, builder.getContext()));
  SmallVector<utils::IteratorType> iterators;
  for (int64_t loop : loops)
    iterators.push_back(llvm::is_contained(out.dims, loop)
                            ? utils::IteratorType::parallel
                            : utils::IteratorType::reduction);
  SmallVector<Value> inputs = llvm::map_to_vector(
      ins, [](const Access &access) { return access.value; });
  SmallVector<Type> resultTypes;
  if (isa<TensorType>(out.value.getType()))
    resultTypes.push_back(out.value.getType());

  auto generic = linalg::GenericOp::create(
      builder, loc, resultTypes, inputs, ValueRange{out.value}, maps, iterators,
      [&](OpBuilder &nested, Location nestedLoc, ValueRange args) {
        Body b(nested, nestedLoc, loops);
        SmallVector<Value> in;
        for (Value arg : args.drop_back()) {
          bool narrow =
              isFloat(arg) && arg.getType().getIntOrFloatBitWidth() < 32;
          in.push_back(narrow ? arith::ExtFOp::create(b, b.getF32Type(), arg)
                              : arg);
        }
        linalg::YieldOp::create(b, fn(b, in, args.back()));
      });
  if (!resultTypes.empty())
    out.value = generic.getResult(0);
  return out;
}

Access Domain::map(ArrayRef<Access> ins, Access out, MapFn fn) {
  return build(ins, out,
               [&](Body &b, ValueRange in, Value) { return fn(b, in); });
}

Access Domain::reduce(ArrayRef<Access> ins, Access out, ReduceFn fn) {
  return build(ins, out, fn);
}

Access Domain::sumWide(ArrayRef<Access> ins, ArrayRef<int64_t> dims, MapFn term,
                       MapFn finish) {
  Access sums = reduce(ins, fill(empty(dims, body.getF64Type()), body.f64(0.0)),
                       [&](Body &b, ValueRange in, Value acc) {
                         return b.add(acc, b.toF64(term(b, in)));
                       });
  return map({sums}, empty(dims, body.getF32Type()),
             [&](Body &b, ValueRange in) -> Value {
               return arith::TruncFOp::create(b, b.getF32Type(), finish(b, in));
             });
}

Access Domain::contract(Access lhs, Access rhs, Access out) {
  return reduce({lhs, rhs}, out, [](Body &b, ValueRange in, Value acc) {
    return b.add(acc, b.mul(in[0], in[1]));
  });
}

Access Domain::contract(Access lhs, Access rhs, ArrayRef<int64_t> dims) {
  return contract(lhs, rhs, filled(dims, 0.0f));
}

//===----------------------------------------------------------------------===//
// What several ops need
//===----------------------------------------------------------------------===//

SmallVector<int64_t> mlir::moe::join(ArrayRef<int64_t> lhs,
                                     ArrayRef<int64_t> rhs) {
  SmallVector<int64_t> joined(lhs);
  llvm::append_range(joined, rhs);
  return joined;
}

Value mlir::moe::divideOrZero(Body &b, Value numerator, Value denominator) {
  Value zero = b.f32(0.0);
  return b.select(b.equal(denominator, zero), zero,
                  b.div(numerator, denominator));
}

Value mlir::moe::comesBefore(Body &b, Value lhs, Value lhsIndex, Value rhs,
                             Value rhsIndex) {
  Value lhsNan = b.isNaN(lhs), rhsNan = b.isNaN(rhs);
  Value better = b.either(b.less(rhs, lhs), b.both(b.negate(lhsNan), rhsNan));
  Value tie = b.either(b.equal(lhs, rhs), b.both(lhsNan, rhsNan));
  return b.either(better, b.both(tie, b.less(lhsIndex, rhsIndex)));
}

Softmax mlir::moe::buildSoftmax(Domain &domain, Access logits,
                                ArrayRef<int64_t> row) {
  Type f32 = domain.getBody().getF32Type();
  Access lowest =
      domain.fill(domain.empty(row, f32), domain.getBody().negInfinity());
  Access max =
      domain.reduce({logits}, lowest, [](Body &b, ValueRange in, Value acc) {
        return b.maximum(acc, in[0]);
      });
  // -inf - -inf would be NaN where the row has no support.
  Access shift =
      domain.map({max}, domain.empty(row, f32), [](Body &b, ValueRange in) {
        return b.select(b.isNegInfinity(in[0]), b.f32(0.0), in[0]);
      });
  Access exps = domain.map(
      {logits, shift}, domain.empty(logits.dims, f32),
      [](Body &b, ValueRange in) { return b.exp(b.sub(in[0], in[1])); });
  Access sum = domain.reduce(
      {exps}, domain.filled(row, 0.0f),
      [](Body &b, ValueRange in, Value acc) { return b.add(acc, in[0]); });
  return {shift, exps, sum};
}

Access mlir::moe::sumProducts(Domain &domain, Access gradients, Access values,
                              ArrayRef<int64_t> dims) {
  return domain.reduce({gradients, values}, domain.filled(dims, 0.0f),
                       [](Body &b, ValueRange in, Value acc) {
                         Value isZero = b.equal(in[0], b.f32(0.0));
                         Value sum = b.add(acc, b.mul(in[0], in[1]));
                         return b.select(isZero, acc, sum);
                       });
}

Access mlir::moe::sumOver(Domain &domain, Access values,
                          ArrayRef<int64_t> dims) {
  return domain.reduce(
      {values}, domain.filled(dims, 0.0f),
      [](Body &b, ValueRange in, Value acc) { return b.add(acc, in[0]); });
}

Value mlir::moe::copyInto(Domain &domain, Access values, Value out) {
  return domain
      .map({values}, domain.at(out, values.dims),
           [](Body &b, ValueRange in) { return in[0]; })
      .value;
}

Value mlir::moe::scaleInto(Domain &domain, Access values, Value factor,
                           Value out) {
  return domain
      .map({values}, domain.at(out, values.dims),
           [&](Body &b, ValueRange in) { return b.mul(in[0], factor); })
      .value;
}
