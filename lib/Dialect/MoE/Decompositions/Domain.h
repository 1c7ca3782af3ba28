//===- Domain.h - Loop nests over the dims of an op -------------*- C++ -*-===//
//
// The decompositions and conversions of the moe ops are written as loop nests
// over the op's named dims: a `Domain` holds the dims and their sizes, an
// `Access` says by which of them a tensor is indexed, and `map` and `reduce`
// build one `linalg.generic` each. With the dims n, e, d of router logits
//
//   Access z = domain.reduce({domain.at(h, {n, d}), domain.at(weight, {e, d})},
//                            domain.filled({n, e}, 0.0f),
//                            [](Body &b, ValueRange in, Value acc) {
//                              return b.add(acc, b.mul(in[0], in[1]));
//                            });
//
// is `z_ne = sum_d h_nd weight_ed`. A dim that the output lacks is a reduction.
// Bodies compute in f32: elements of narrower float types are extended on
// entry.
//
//===----------------------------------------------------------------------===//

#ifndef LIB_DIALECT_MOE_DECOMPOSITIONS_DOMAIN_H
#define LIB_DIALECT_MOE_DECOMPOSITIONS_DOMAIN_H

#include "MoE/Dialect/MoE/IR/MoEDims.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"
#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

/// A tensor or buffer and, for each of its dims, the dim of the domain that
/// indexes it.
struct Access {
  /// Stands in `dims` for a dim of size 1 that is broadcast.
  static constexpr int64_t kBroadcast = MapsBuilder::kBroadcast;

  Value value;
  SmallVector<int64_t> dims;

  Type getElementType() const { return getElementTypeOrSelf(value.getType()); }
};

/// The body of a nest.
class Body : public ArithmeticBuilder {
public:
  Body(OpBuilder &builder, Location loc, ArrayRef<int64_t> loops = {})
      : ArithmeticBuilder(loc, builder), loops(loops) {}

  /// The iteration number along `dim` of the domain.
  Value iteration(int64_t dim);

  Value f64(double value) { return constant(getF64Type(), value); }
  /// An index, an integer or an f32 as an f64.
  Value toF64(Value value);

private:
  ArrayRef<int64_t> loops;
};

/// The dims of an op, to which a decomposition may add its own.
class Domain {
public:
  using MapFn = function_ref<Value(Body &, ValueRange in)>;
  using ReduceFn = function_ref<Value(Body &, ValueRange in, Value acc)>;

  /// Starts from the dims that `op` declares, by their numbers in its maps.
  Domain(OpBuilder &builder, MoEStructuredOpInterface op);

  /// Adds a dim of `size` iterations and returns its number.
  int64_t addDim(OpFoldResult size);
  /// Adds a dim that runs over the same iterations as `dim`.
  int64_t addTwin(int64_t dim) { return addDim(getSize(dim)); }

  int64_t getNumDims() const { return sizes.size(); }
  OpFoldResult getSize(int64_t dim);
  Value getSizeValue(int64_t dim);
  /// Code outside of any nest.
  Body &getBody() { return body; }

  Access at(Value value, ArrayRef<int64_t> dims);
  Access empty(ArrayRef<int64_t> dims, Type elementType);
  /// A new tensor of f32, of i1, or of another integer type.
  Access filled(ArrayRef<int64_t> dims, float value);
  Access filled(ArrayRef<int64_t> dims, bool value);
  Access filled(ArrayRef<int64_t> dims, Type type, int64_t value);
  /// `out` with every element `scalar`.
  Access fill(Access out, Value scalar);

  /// out = fn(ins), overwriting what `out` held.
  Access map(ArrayRef<Access> ins, Access out, MapFn fn);
  /// out = fn(ins, out), once for each iteration of the dims that `out` lacks.
  Access reduce(ArrayRef<Access> ins, Access out, ReduceFn fn);

  /// finish(sum of term(ins) over the dims that `dims` lacks) in f32. The sum
  /// and `finish` are in f64, where thousands of terms do not lose digits and
  /// squares of f32 do not overflow: for norms and means, not for products.
  Access sumWide(ArrayRef<Access> ins, ArrayRef<int64_t> dims, MapFn term,
                 MapFn finish);

  /// out += sum of products of the two inputs.
  Access contract(Access lhs, Access rhs, Access out);
  /// A new f32 tensor over `dims`: the sum of products of the two inputs.
  Access contract(Access lhs, Access rhs, ArrayRef<int64_t> dims);

private:
  Access build(ArrayRef<Access> ins, Access out, ReduceFn fn);

  OpBuilder &builder;
  MoEStructuredOpInterface op;
  Location loc;
  Body body;
  /// Null until asked for.
  SmallVector<OpFoldResult> sizes;
};

/// The parts of a softmax over the dims that `row` lacks.
struct Softmax {
  Access shift; ///< The maximum of the row, 0 where the row is all -inf.
  Access exps;  ///< exp(x - shift), 0 outside of the support.
  Access sum;   ///< The sum of `exps`; 0 iff the row has no support.
};

/// Builds the stable softmax of `logits`, rows being indexed by `row`. A row of
/// -inf has sum 0 instead of NaN.
Softmax buildSoftmax(Domain &domain, Access logits, ArrayRef<int64_t> row);

/// `lhs` followed by `rhs`.
SmallVector<int64_t> join(ArrayRef<int64_t> lhs, ArrayRef<int64_t> rhs);

/// numerator / denominator, and 0 where the denominator is 0.
Value divideOrZero(Body &b, Value numerator, Value denominator);

/// Whether candidate `lhs` comes before `rhs` in a selection: by value
/// descending with NaN after -inf, then by position ascending. The order is
/// total, so the number of candidates before one is its rank.
Value comesBefore(Body &b, Value lhs, Value lhsIndex, Value rhs,
                  Value rhsIndex);

//===----------------------------------------------------------------------===//
// Gradients
//===----------------------------------------------------------------------===//

/// A new f32 tensor over `dims`: the sum of gradients * values where the
/// gradient is not 0. What a masked token holds has gradient 0, and 0 times NaN
/// would be NaN (E11).
Access sumProducts(Domain &domain, Access gradients, Access values,
                   ArrayRef<int64_t> dims);

/// The sum of `values` over the dims that `dims` lack.
Access sumOver(Domain &domain, Access values, ArrayRef<int64_t> dims);

/// `values`, or `factor` times them, in the destination `out`.
Value copyInto(Domain &domain, Access values, Value out);
Value scaleInto(Domain &domain, Access values, Value factor, Value out);

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_DECOMPOSITIONS_DOMAIN_H
