//===- MoEToNVVM.cpp - From routers to PTX --------------------------------===//
//
// Upstream's gpu-lower-to-nvvm-pipeline is not used: it lowers the host too,
// passes buffers as descriptors, and defaults to a PTX version that aborts the
// process for newer chips.
//
//===----------------------------------------------------------------------===//

#include "MoE/Pipelines/MoEToNVVM.h"

#include "MoE/Conversion/Passes.h"
#include "MoE/Transforms/Passes.h"
#include "mlir/Conversion/AffineToStandard/AffineToStandard.h"
#include "mlir/Conversion/GPUToNVVM/GPUToNVVMPass.h"
#include "mlir/Conversion/ReconcileUnrealizedCasts/ReconcileUnrealizedCasts.h"
#include "mlir/Conversion/SCFToControlFlow/SCFToControlFlow.h"
#include "mlir/Dialect/Bufferization/Transforms/Passes.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/GPU/Transforms/Passes.h"
#include "mlir/Dialect/MemRef/Transforms/Passes.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Transforms/Passes.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Tensors: one loop over blocks a kernel
//===----------------------------------------------------------------------===//

static void buildTiling(OpPassManager &pm,
                        const MoEToNVVMPipelineOptions &options) {
  pm.addPass(createCanonicalizerPass());
  pm.addPass(createCSEPass());
  pm.addNestedPass<func::FuncOp>(
      createMoETileToBlocksPass({options.maxRows}));
  pm.addPass(createCanonicalizerPass());
  pm.addPass(createCSEPass());
}

//===----------------------------------------------------------------------===//
// Buffers
//===----------------------------------------------------------------------===//

static void buildBufferization(OpPassManager &pm) {
  pm.addPass(bufferization::createEmptyTensorEliminationPass());
  bufferization::OneShotBufferizePassOptions options;
  options.bufferizeFunctionBoundaries = true;
  options.functionBoundaryTypeConversion =
      bufferization::LayoutMapOption::IdentityLayoutMap;
  pm.addPass(bufferization::createOneShotBufferizePass(options));
  pm.addPass(bufferization::createDropEquivalentBufferResultsPass());
  pm.addPass(createCanonicalizerPass());
  pm.addPass(createCSEPass());
  // Copies whose two sides have become one value are folded.
  pm.addPass(createCanonicalizerPass());
}

//===----------------------------------------------------------------------===//
// Kernels
//===----------------------------------------------------------------------===//

static void buildKernels(OpPassManager &pm,
                         const MoEToNVVMPipelineOptions &options) {
  pm.addPass(createConvertMoEToGPUPass({options.blockSize}));
  pm.addPass(createCanonicalizerPass());
  pm.addPass(createCSEPass());

  OpPassManager &kernels = pm.nest<gpu::GPUModuleOp>();
  kernels.addPass(memref::createExpandStridedMetadataPass());
  kernels.addPass(createLowerAffinePass());
  kernels.addPass(createCanonicalizerPass());
  kernels.addPass(createCSEPass());
  kernels.addPass(createSCFToControlFlowPass());
  ConvertGpuOpsToNVVMOpsOptions nvvm;
  nvvm.useBarePtrCallConv = true;
  kernels.addPass(createConvertGpuOpsToNVVMOps(nvvm));
  kernels.addPass(createReconcileUnrealizedCastsPass());
  kernels.addPass(createCanonicalizerPass());
  kernels.addPass(createCSEPass());
}

static void buildPTX(OpPassManager &pm,
                     const MoEToNVVMPipelineOptions &options) {
  pm.addPass(createMoEAttachNVVMTargetPass({options.chip}));
  GpuModuleToBinaryPassOptions binary;
  // PTX needs no CUDA toolkit, and any driver can compile it.
  binary.compilationTarget = "isa";
  pm.addPass(createGpuModuleToBinaryPass(binary));
}

//===----------------------------------------------------------------------===//
// Registration
//===----------------------------------------------------------------------===//

void mlir::moe::buildMoEToNVVMPipeline(
    OpPassManager &pm, const MoEToNVVMPipelineOptions &options) {
  buildTiling(pm, options);
  buildBufferization(pm);
  buildKernels(pm, options);
  buildPTX(pm, options);
}

void mlir::moe::registerMoEToNVVMPipeline() {
  PassPipelineRegistration<MoEToNVVMPipelineOptions>(
      "moe-to-nvvm", "Compile routers on tensors to PTX for an NVIDIA chip",
      buildMoEToNVVMPipeline);
}
