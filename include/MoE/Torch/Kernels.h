//===- Kernels.h - The routing ops in C++ programs with torch ---*- C++ -*-===//
//
// libmoe_torch registers ops of torch.ops.moe with torch's dispatcher, for
// programs without Python: AOTInductor packages and exported graphs then find
// them. Their code are artifacts that `moe_mlir.frontends.aot.package` wrote
// beside the package:
//
//   moe::torch_ops::loadKernels("model.kernels");
//   torch::inductor::AOTIModelPackageLoader model("model.pt2");
//
// In Python `import moe_mlir` registers the same ops: load one of the two.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TORCH_KERNELS_H
#define MOE_TORCH_KERNELS_H

#include <string>

namespace moe::torch_ops {

/// Loads the kernels of an artifact for all ops; may be called for several.
/// Their code runs in this process: trust its source. Throws
/// std::runtime_error where the folder is damaged or for another CPU.
__attribute__((visibility("default"))) void
loadKernels(const std::string &artifact);

} // namespace moe::torch_ops

#endif // MOE_TORCH_KERNELS_H
