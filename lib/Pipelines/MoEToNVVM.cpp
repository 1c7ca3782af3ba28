//===- MoEToNVVM.cpp - From routers to PTX --------------------------------===//
//
// Upstream's gpu-lower-to-nvvm-pipeline is not used: it lowers the host too,
// passes buffers as descriptors, and defaults to a PTX version that aborts the
// process for newer chips.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/Passes.h"
#include "MoE/Pipelines/Pipelines.h"
#include "MoE/Transforms/Passes.h"
#include "mlir/Conversion/AffineToStandard/AffineToStandard.h"
#include "mlir/Conversion/GPUToNVVM/GPUToNVVMPass.h"
#include "mlir/Conversion/ReconcileUnrealizedCasts/ReconcileUnrealizedCasts.h"
#include "mlir/Conversion/SCFToControlFlow/SCFToControlFlow.h"
#include "mlir/Dialect/Arith/Transforms/Passes.h"
#include "mlir/Dialect/Bufferization/Transforms/Passes.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/GPU/Transforms/Passes.h"
#include "mlir/Dialect/MemRef/Transforms/Passes.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Transforms/Passes.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Tensors: one loop over blocks a kernel
//===----------------------------------------------------------------------===//

/// Tiles rows to blocks, with as many rows a tile as their kernels want or
/// workgroup memory holds.
static void buildTileToBlocks(OpPassManager &manager, int64_t maxRows) {
  manager.addNestedPass<func::FuncOp>(createMoELinearToGroupedLinearPass());
  // Layers of experts without a kernel are loops over them, which become grids.
  manager.addNestedPass<func::FuncOp>(createMoEDecomposeExpertsForGPUPass());
  manager.addNestedPass<func::FuncOp>(createMoEMapLoopsToBlocksPass());
  manager.addNestedPass<func::FuncOp>(createMoEDecomposeForGridsPass());
  manager.addPass(createMoESelectKernelConfigPass());
  manager.addNestedPass<func::FuncOp>(createMoEKeepReducedDimsPass());
  manager.addPass(createMoEPropagateReshapesPass());
  manager.addNestedPass<func::FuncOp>(
      createMoEConcatenationsToSelectionsPass());
  manager.addNestedPass<func::FuncOp>(createMoEFuseElementwisePass());
  // Initial values with one user are made inside its tile.
  manager.addNestedPass<func::FuncOp>(createMoEPrivatizeDestinationsPass());
  manager.addNestedPass<func::FuncOp>(createMoETileAndFusePass({maxRows}));
  manager.addNestedPass<func::FuncOp>(createMoEDecomposeForGPUPass());
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
}

static void buildTiling(OpPassManager &manager,
                        const MoEToNVVMPipelineOptions &options) {
  // Layers that a program has as functions: kernels are those of one function,
  // and equal ones become one.
  manager.addPass(createInlinerPass());
  manager.addPass(createMoEAttachNVVMTargetPass({options.chip}));
  manager.addNestedPass<func::FuncOp>(createMoEEraseHostAssertsPass());
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  manager.addNestedPass<func::FuncOp>(createMoEScansToReductionsPass());
  manager.addPass(createMoEConvertToSoftmaxMixPass());
  buildTileToBlocks(manager, options.maxRows);
}

//===----------------------------------------------------------------------===//
// Buffers
//===----------------------------------------------------------------------===//

/// The caller's memory for results; buffers inside a loop become workgroup
/// memory and have no deallocation.
static void buildBufferization(OpPassManager &manager) {
  manager.addPass(createMoEResultsToDestinationsPass());
  manager.addNestedPass<func::FuncOp>(createMoEPrivatizeDestinationsPass());
  manager.addPass(bufferization::createEmptyTensorEliminationPass());
  // Once more: the place of a part may be known only after that of the whole.
  manager.addNestedPass<func::FuncOp>(createMoEPrivatizeDestinationsPass());
  manager.addPass(bufferization::createEmptyTensorEliminationPass());
  bufferization::OneShotBufferizePassOptions options;
  options.bufferizeFunctionBoundaries = true;
  options.functionBoundaryTypeConversion =
      bufferization::LayoutMapOption::IdentityLayoutMap;
  manager.addPass(bufferization::createOneShotBufferizePass(options));
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  manager.addPass(bufferization::createDropEquivalentBufferResultsPass());
  manager.addNestedPass<func::FuncOp>(createMoEStoreUpdatesPass());
  // Sizes of what lies between kernels follow from those of the arguments.
  manager.addPass(memref::createResolveShapedTypeResultDimsPass());
  // Copies whose two sides have become one value are folded.
  manager.addPass(createCanonicalizerPass());
}

//===----------------------------------------------------------------------===//
// Kernels
//===----------------------------------------------------------------------===//

static void buildKernels(OpPassManager &manager,
                         const MoEToNVVMPipelineOptions &options) {
  manager.addNestedPass<func::FuncOp>(
      createMoEDistributeToGridPass({options.blockSize}));
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createConvertMoEToGPUPass({options.blockSize}));
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());

  OpPassManager &kernels = manager.nest<gpu::GPUModuleOp>();
  kernels.addPass(createConvertMoEAssertToCFPass());
  kernels.addPass(memref::createExpandStridedMetadataPass());
  kernels.addPass(createLowerAffinePass());
  kernels.addPass(arith::createArithExpandOpsPass());
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

static void buildPTX(OpPassManager &manager) {
  GpuModuleToBinaryPassOptions binary;
  // PTX needs no CUDA toolkit, and any driver can compile it.
  binary.compilationTarget = "isa";
  manager.addPass(createGpuModuleToBinaryPass(binary));
}

//===----------------------------------------------------------------------===//
// Registration
//===----------------------------------------------------------------------===//

void mlir::moe::buildMoEToNVVMPipeline(
    OpPassManager &manager, const MoEToNVVMPipelineOptions &options) {
  buildTiling(manager, options);
  buildBufferization(manager);
  buildKernels(manager, options);
  buildPTX(manager);
}

void mlir::moe::registerMoEToNVVMPipeline() {
  PassPipelineRegistration<MoEToNVVMPipelineOptions>(
      "moe-to-nvvm", "Compile routers on tensors to PTX for an NVIDIA chip",
      buildMoEToNVVMPipeline);
  PassPipelineRegistration<MoETileToBlocksPipelineOptions>(
      "moe-tile-to-blocks",
      "Choose kernel configurations and tile rows to the blocks of a GPU grid",
      [](OpPassManager &manager,
         const MoETileToBlocksPipelineOptions &options) {
        buildTileToBlocks(manager, options.maxRows);
      });
}
