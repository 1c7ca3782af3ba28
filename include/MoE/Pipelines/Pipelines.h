//===- Pipelines.h - Orders of passes ---------------------------*- C++ -*-===//

#ifndef MOE_PIPELINES_PIPELINES_H
#define MOE_PIPELINES_PIPELINES_H

#include "MoE/Conversion/CPUTarget.h"
#include "MoE/Conversion/Chips.h"
#include "mlir/Pass/PassOptions.h"

namespace mlir {
class OpPassManager;

namespace moe {

/// Options of `--moe-to-cpu`.
struct MoEToCPUPipelineOptions : PassPipelineOptions<MoEToCPUPipelineOptions> {
  PassOptions::Option<bool> threads{
      *this, "threads",
      llvm::cl::desc("run tiles in parallel through the runtime's "
                     "moe_parallel_for; otherwise in loops"),
      llvm::cl::init(true)};
  PassOptions::Option<int64_t> tileSize{
      *this, "tile-size", llvm::cl::desc("rows of a parallel tile"),
      llvm::cl::init(CPUTarget::kTileSize)};
  PassOptions::Option<int64_t> vectorWidth{
      *this, "vector-width",
      llvm::cl::desc("lanes of an f32 vector, a power of two of at least 4"),
      llvm::cl::init(16)};
  PassOptions::Option<int64_t> vectorRegisters{
      *this, "vector-registers",
      llvm::cl::desc("vector registers that tiles may fill: 32 or 16"),
      llvm::cl::init(32)};
  PassOptions::Option<bool> bf16Dot{
      *this, "bf16-dot",
      llvm::cl::desc("multiply bf16 tokens in pairs (AVX512_BF16)"),
      llvm::cl::init(false)};
  PassOptions::Option<bool> bf16Tiles{
      *this, "bf16-tiles",
      llvm::cl::desc("multiply pairs of bf16 in tiles (AMX_BF16)"),
      llvm::cl::init(false)};
  PassOptions::Option<bool> int8Dot{
      *this, "int8-dot",
      llvm::cl::desc("multiply bytes in fours (AVX512_VNNI, AVX_VNNI)"),
      llvm::cl::init(false)};
  PassOptions::Option<bool> bytePairs{
      *this, "byte-pairs",
      llvm::cl::desc("multiply bytes in pairs (AVX2, AVX512BW)"),
      llvm::cl::init(false)};
  PassOptions::Option<bool> byteTable{
      *this, "byte-table",
      llvm::cl::desc("look up codes of 8 bits in a table (AVX512_VBMI)"),
      llvm::cl::init(false)};
  PassOptions::Option<bool> streamPrefetcher{
      *this, "stream-prefetcher",
      llvm::cl::desc("the CPU asks for memory that is read in order by itself"),
      llvm::cl::init(false)};
  PassOptions::Option<int64_t> l2Bytes{
      *this, "l2-bytes", llvm::cl::desc("bytes of the second cache of a core"),
      llvm::cl::init(1 << 20)};
  // As of `convert-moe-to-cpu`: 0 is what follows from vectors and cache.
  PassOptions::Option<int64_t> productVectors{
      *this, "product-vectors",
      llvm::cl::desc("vectors of columns of a product's register tile"),
      llvm::cl::init(0)};
  PassOptions::Option<int64_t> productRows{
      *this, "product-rows",
      llvm::cl::desc("rows of a product's register tile"), llvm::cl::init(0)};
  PassOptions::Option<int64_t> productPanels{
      *this, "product-panels",
      llvm::cl::desc("panels of columns that a product packs at a time"),
      llvm::cl::init(0)};
  PassOptions::Option<int64_t> expertRows{
      *this, "expert-rows",
      llvm::cl::desc(
          "rows of a layer of experts whose sums lie in cache together"),
      llvm::cl::init(0)};
  PassOptions::Option<int64_t> mixQueries{
      *this, "mix-queries",
      llvm::cl::desc("queries that share one packing of keys"),
      llvm::cl::init(0)};
  PassOptions::Option<int64_t> fetchBytes{
      *this, "fetch-bytes",
      llvm::cl::desc("how far ahead the scores of a selection are fetched"),
      llvm::cl::init(0)};
  PassOptions::Option<bool> scalef{
      *this, "scalef",
      llvm::cl::desc("scale exponentials by one instruction (AVX-512)"),
      llvm::cl::init(false)};
};

/// From public functions on tensors to the LLVM dialect. A function's results
/// become trailing buffers that the caller owns; see docs for the convention.
void buildMoEToCPUPipeline(OpPassManager &manager,
                           const MoEToCPUPipelineOptions &options);

/// Registers `--moe-to-cpu` in the process-wide registry.
void registerMoEToCPUPipeline();

/// Options of `--moe-to-nvvm`.
struct MoEToNVVMPipelineOptions
    : PassPipelineOptions<MoEToNVVMPipelineOptions> {
  std::string chipHelp = "chip to compile for, out of " + listChips();
  PassOptions::Option<std::string> chip{*this, "chip", llvm::cl::desc(chipHelp),
                                        llvm::cl::init("sm_90")};
  PassOptions::Option<int64_t> blockSize{
      *this, "block-size",
      llvm::cl::desc("threads of a block, a multiple of 32"),
      llvm::cl::init(128)};
  PassOptions::Option<int64_t> maxRows{
      *this, "max-rows", llvm::cl::desc("tokens that a block takes at most"),
      llvm::cl::init(16)};
};

/// Options of `--moe-tile-to-blocks`, a stage of `--moe-to-nvvm`.
struct MoETileToBlocksPipelineOptions
    : PassPipelineOptions<MoETileToBlocksPipelineOptions> {
  PassOptions::Option<int64_t> maxRows{
      *this, "max-rows", llvm::cl::desc("tokens that a block takes at most"),
      llvm::cl::init(16)};
};

/// From public functions on tensors to kernels in PTX: one `gpu.binary` a
/// function, whose attribute `moe.kernels` says how to launch them (see
/// MoE/Conversion/MoEToGPU.h).
void buildMoEToNVVMPipeline(OpPassManager &manager,
                            const MoEToNVVMPipelineOptions &options);

/// Registers `--moe-to-nvvm` and its stage `--moe-tile-to-blocks`.
void registerMoEToNVVMPipeline();

} // namespace moe
} // namespace mlir

#endif // MOE_PIPELINES_PIPELINES_H
