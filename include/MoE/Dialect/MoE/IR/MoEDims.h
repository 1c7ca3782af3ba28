//===- MoEDims.h - The dims of the ops, by name -----------------*- C++ -*-===//
//
// How the maps of an op with a fixed rank number its dims. Ops with free
// leading dims count their own from the leading ones on.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEDIMS_H
#define MOE_DIALECT_MOE_IR_MOEDIMS_H

#include <cstdint>

namespace mlir::moe {

namespace hyper {
enum : int64_t { e, d, g, h, c, numDims };
} // namespace hyper
namespace similarity {
enum : int64_t { b, i, e, j, d, f, numDims };
} // namespace similarity
namespace posterior {
enum : int64_t { b, h, i, j, f, d, c, e, l, numDims };
} // namespace posterior
namespace entropy {
// The dims that attention_posterior has too have the same numbers.
enum : int64_t { b, h, i, j, f, numDims };
} // namespace entropy
namespace mix {
enum : int64_t { b, h, i, e, j, f, numDims };
} // namespace mix
namespace selfmix {
enum : int64_t { b, h, i, e, f, numDims };
} // namespace selfmix
namespace dispersion {
enum : int64_t { e, d, n, numDims };
} // namespace dispersion
namespace adjacency {
enum : int64_t { e, l, n, k, numDims };
} // namespace adjacency
namespace dispatch {
enum : int64_t { n, k, e, b, l, numDims };
} // namespace dispatch
namespace token_rows {
enum : int64_t { r, n, k, numDims };
} // namespace token_rows
namespace grouped_linear {
// g features behind the gate; of a weight in panels, p panels of q features,
// and t times s features of x; of a quantized one, c bytes a row, u scales.
enum : int64_t { r, f, g, e, b, n, d, p, q, t, s, c, u, numDims };
} // namespace grouped_linear
namespace grouped_outer {
enum : int64_t { e, f, d, r, b, n, numDims };
} // namespace grouped_outer
namespace balance {
enum : int64_t { n, e, k, numDims };
} // namespace balance

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_MOEDIMS_H
