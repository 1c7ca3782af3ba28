//===- MoEToNVVM.h - From routers to PTX ------------------------*- C++ -*-===//

#ifndef MOE_PIPELINES_MOETONVVM_H
#define MOE_PIPELINES_MOETONVVM_H

#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassOptions.h"

namespace mlir::moe {

struct MoEToNVVMPipelineOptions
    : public PassPipelineOptions<MoEToNVVMPipelineOptions> {
  PassOptions::Option<std::string> chip{
      *this, "chip",
      llvm::cl::desc("chip to compile for: sm_80, sm_86, sm_89, sm_90, "
                     "sm_90a, sm_100 or sm_120"),
      llvm::cl::init("sm_90")};
  PassOptions::Option<int64_t> blockSize{
      *this, "block-size", llvm::cl::desc("threads of a block"),
      llvm::cl::init(128)};
  PassOptions::Option<int64_t> maxRows{
      *this, "max-rows", llvm::cl::desc("tokens that a block takes at most"),
      llvm::cl::init(16)};
};

/// Adds the passes that turn public functions on tensors into kernels in PTX:
/// one `gpu.binary` a function, whose attribute `moe.kernels` says how to
/// launch them (MoE/Conversion/MoEToGPU.h).
void buildMoEToNVVMPipeline(OpPassManager &pm,
                            const MoEToNVVMPipelineOptions &options);

void registerMoEToNVVMPipeline();

} // namespace mlir::moe

#endif // MOE_PIPELINES_MOETONVVM_H
