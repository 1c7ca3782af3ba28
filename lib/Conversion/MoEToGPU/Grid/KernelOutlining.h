//===- KernelOutlining.h - Blocks of a grid become a kernel -----*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_GRID_KERNELOUTLINING_H
#define MOE_LIB_CONVERSION_MOETOGPU_GRID_KERNELOUTLINING_H

#include "ThreadLowerings.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

namespace mlir::moe {

/// A kernel, and the block of code that every block of its grid runs that has
/// something to do.
struct OutlinedKernel {
  gpu::GPUFuncOp function;
  Block *body;
};

/// Moves the body of `forall`, whose iterations are blocks, into a kernel
/// `name` of `module`, and puts its launch in the loop's place. Buffers that
/// the body allocates become workgroup memory. `launch` gets the entry of the
/// `moe.kernels` attribute. `constants` are buffers that no kernel of the
/// function writes. Emits an error and fails on a loop that no kernel
/// can stand for.
FailureOr<OutlinedKernel> outlineKernel(scf::ForallOp forall,
                                        gpu::GPUModuleOp module, StringRef name,
                                        BlockShape block,
                                        const DenseSet<Value> &constants,
                                        DictionaryAttr &launch);

/// Lets the threads of `kernel` read buffers of i1 as the bytes that they are.
/// To be called when all ops on whole buffers are lowered.
LogicalResult rewriteBoolBuffers(gpu::GPUFuncOp kernel);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_GRID_KERNELOUTLINING_H
