//===- CPUModels.h - The numbers of kernels for a CPU -----------*- C++ -*-===//

#ifndef MOE_TARGET_CPUMODELS_H
#define MOE_TARGET_CPUMODELS_H

#include "mlir/Support/LLVM.h"
#include "llvm/Support/Error.h"

#include <string>

namespace mlir::moe {

/// What kernels for a CPU, as in HostCodeOptions, follow: its name, its vectors
/// and its second cache. Empty for an unknown name.
std::string describeCPU(StringRef cpu);

/// The pipeline "moe-to-cpu" with the options that suit `cpu`; without options
/// for an unknown name, of which the code generator complains.
///
/// `tuning` is the text of a table that `python -m moe_mlir.tune` wrote, or
/// empty:
///
///   {"moe_mlir_tuning": 1,
///    "cpus": {"znver4 vector-width=16 ..": {"product-panels": 8}}}
///
/// The numbers of the CPU that is described as `describeCPU` does take the
/// place of those that the model gives.
llvm::Expected<std::string> getCPUPipeline(StringRef cpu,
                                           StringRef tuning = "");

} // namespace mlir::moe

#endif // MOE_TARGET_CPUMODELS_H
