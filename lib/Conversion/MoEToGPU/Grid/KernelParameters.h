//===- KernelParameters.h - Kernels take what they read ---------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_GRID_KERNELPARAMETERS_H
#define MOE_LIB_CONVERSION_MOETOGPU_GRID_KERNELPARAMETERS_H

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"

namespace mlir::moe {

/// Where the kernels of `function` have more parameters than launches should
/// pass, takes those away that a kernel does not read, and makes kernels that
/// are then equal one, as those of equal layers are. `launches` are the entries
/// of the `moe.kernels` attribute, which say what is left.
void pruneKernels(func::FuncOp function, gpu::GPUModuleOp module,
                  MutableArrayRef<Attribute> launches);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_GRID_KERNELPARAMETERS_H
