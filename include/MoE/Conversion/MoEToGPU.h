//===- MoEToGPU.h - From block-level ops to GPU kernels ---------*- C++ -*-===//
//
// The kernels that `convert-moe-to-gpu` makes, and how to launch them.
//
// A function `f` on buffers gives a `gpu.module @f_gpu`. Its first scf.forall
// over blocks becomes the kernel `f_kernel`, the next ones `f_kernel_1`, ...
// Every kernel of a function has the same parameters:
//
//   1. the arguments of `f`, in order (inputs, then the destinations of the
//      results): a buffer is one pointer to its first element, contiguous and
//      row-major; a scalar is passed by value, `index` as 64 bits;
//   2. the dynamic sizes of the buffers, as 64-bit integers, in the order of
//      the arguments and of their dims. Sizes that are equal are repeated.
//
// A launch has `block_size` threads a block along x. The number of blocks is a
// function of the dynamic sizes; where it is 0 (no tokens) nothing is to be
// launched. Both stand in the attribute `moe.kernels` of `f`, an array with one
// dictionary a kernel:
//
//   {name = "f_kernel", module = "f_gpu", block_size = 128 : i64,
//    grid = affine_map<()[s0, s1] -> (s0 ceildiv 16, 1, 1)>}
//
// where s0, s1, ... are the dynamic sizes in the order of the parameters. All
// workgroup memory is static. The body of `f` keeps one gpu.launch_func a
// kernel, for a host that is compiled too.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_CONVERSION_MOETOGPU_H
#define MOE_CONVERSION_MOETOGPU_H

#include "llvm/ADT/StringRef.h"

namespace mlir::moe {

/// The attribute of a function that says how to launch its kernels.
inline constexpr llvm::StringLiteral kKernelsAttrName = "moe.kernels";

/// The most workgroup memory that a kernel may declare statically.
inline constexpr int64_t kMaxStaticWorkgroupBytes = 48 * 1024;

} // namespace mlir::moe

#endif // MOE_CONVERSION_MOETOGPU_H
