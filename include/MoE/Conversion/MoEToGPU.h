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
// Buffers between kernels, or between ops of a function that a kernel cannot
// hold in workgroup memory, are parts of one more buffer of bytes, the
// workspace: it is the last of the arguments, and so of the pointers, and its
// size is the last of the sizes. The attribute `moe.workspace` of `f`, an
// affine map of the other sizes, says how many bytes it must have; without it
// there is no workspace. Nothing need be in it before the first kernel or after
// the last. A host launches the kernels in order on one stream and allocates
// the workspace once, for the largest sizes that it will see.
//
// Every buffer starts at a multiple of 16 bytes, the workspace of 256.
//
// A launch has `block_size` threads a block along x. The number of blocks is a
// function of the dynamic sizes; where it is 0 (no tokens) nothing is to be
// launched. Both stand in the attribute `moe.kernels` of `f`, an array with one
// dictionary a kernel:
//
//   {name = "f_kernel", module = "f_gpu", block_size = 128 : i64,
//    grid = affine_map<()[s0, s1] -> (s0 ceildiv 16, 1, 1)>}
//
// where s0, s1, ... are the dynamic sizes in the order of the parameters. An
// entry with `dynamic_smem = N : i64` needs N bytes of dynamic workgroup
// memory, which a host must first allow for the kernel
// (MAX_DYNAMIC_SHARED_SIZE_BYTES); other workgroup memory is static. The body
// of `f` keeps one gpu.launch_func a kernel, for a host that is compiled too.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_CONVERSION_MOETOGPU_H
#define MOE_CONVERSION_MOETOGPU_H

#include "llvm/ADT/StringRef.h"

namespace mlir {
class Operation;
} // namespace mlir

namespace mlir::moe {
class KernelFacts;

/// What the kernels of the chip that the module of `op` is compiled for say.
KernelFacts getGPUKernelFacts(Operation *op);

/// The attribute of a function that says how to launch its kernels.
inline constexpr llvm::StringLiteral kKernelsAttrName = "moe.kernels";

/// The attribute of a function that says how large its workspace must be.
inline constexpr llvm::StringLiteral kWorkspaceAttrName = "moe.workspace";

/// Buffers in the workspace start at multiples of this many bytes.
inline constexpr int64_t kWorkspaceAlignment = 256;

/// The attribute of a kernel with the bytes of workgroup memory that its launch
/// must give it.
inline constexpr llvm::StringLiteral kDynamicSmemAttrName = "moe.dynamic_smem";

/// The attribute of a loop over blocks whose neighbours along x, as many as it
/// says, form a cluster. The kernel carries it as `nvvm.cluster_dim`, and a
/// host launches it like any other.
inline constexpr llvm::StringLiteral kClusterBlocksAttrName =
    "moe.cluster_blocks";

} // namespace mlir::moe

#endif // MOE_CONVERSION_MOETOGPU_H
