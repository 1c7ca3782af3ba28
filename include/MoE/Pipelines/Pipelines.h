//===- Pipelines.h - Orders of passes ---------------------------*- C++ -*-===//

#ifndef MOE_PIPELINES_PIPELINES_H
#define MOE_PIPELINES_PIPELINES_H

#include "mlir/Pass/PassOptions.h"

namespace mlir {
class OpPassManager;

namespace moe {

/// Options of `--moe-to-cpu`.
struct MoEToCPUPipelineOptions
    : PassPipelineOptions<MoEToCPUPipelineOptions> {
  PassOptions::Option<bool> threads{
      *this, "threads",
      llvm::cl::desc("run tiles in parallel through the runtime's "
                     "moe_parallel_for; otherwise in loops"),
      llvm::cl::init(true)};
  /// The default is a multiple of both the 16 tokens of a selection's vector
  /// and the 6 queries of a mixing tile, so that neither has a partial block.
  PassOptions::Option<int64_t> tileSize{
      *this, "tile-size", llvm::cl::desc("rows of a parallel tile"),
      llvm::cl::init(96)};
  PassOptions::Option<int64_t> vectorWidth{
      *this, "vector-width",
      llvm::cl::desc("lanes of an f32 vector, a power of two of at least 4"),
      llvm::cl::init(16)};
};

/// From public functions on tensors to the LLVM dialect. A function's results
/// become trailing buffers that the caller owns; see docs for the convention.
void buildMoEToCPUPipeline(OpPassManager &manager,
                           const MoEToCPUPipelineOptions &options);

void registerMoEToCPUPipeline();

} // namespace moe
} // namespace mlir

#endif // MOE_PIPELINES_PIPELINES_H
