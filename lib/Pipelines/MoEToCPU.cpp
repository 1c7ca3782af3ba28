//===- MoEToCPU.cpp - Tensors to the LLVM dialect for a CPU ---------------===//
//
// The order of passes behind --moe-to-cpu. Every stage leaves valid IR that
// moe-opt can print: --moe-to-cpu --mlir-print-ir-after-all shows the way.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/Passes.h"
#include "MoE/Pipelines/Pipelines.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Conversion/AffineToStandard/AffineToStandard.h"
#include "mlir/Conversion/BufferizationToMemRef/BufferizationToMemRef.h"
#include "mlir/Conversion/ConvertToLLVM/ToLLVMPass.h"
#include "mlir/Conversion/MathToLLVM/MathToLLVM.h"
#include "mlir/Conversion/MathToLibm/MathToLibm.h"
#include "mlir/Conversion/MemRefToLLVM/MemRefToLLVM.h"
#include "mlir/Conversion/ReconcileUnrealizedCasts/ReconcileUnrealizedCasts.h"
#include "mlir/Conversion/SCFToControlFlow/SCFToControlFlow.h"
#include "mlir/Conversion/VectorToLLVM/ConvertVectorToLLVMPass.h"
#include "mlir/Conversion/VectorToSCF/VectorToSCF.h"
#include "mlir/Dialect/Arith/Transforms/Passes.h"
#include "mlir/Dialect/Bufferization/Pipelines/Passes.h"
#include "mlir/Dialect/Bufferization/Transforms/Passes.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/Passes.h"
#include "mlir/Dialect/Math/Transforms/Passes.h"
#include "mlir/Dialect/MemRef/Transforms/Passes.h"
#include "mlir/Dialect/SCF/Transforms/Passes.h"
#include "mlir/Dialect/Tensor/Transforms/Passes.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Transforms/Passes.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// moe -> moe
//===----------------------------------------------------------------------===//

/// One parallel loop a kernel, with everything that its rows need inside; then
/// the ops that have no kernel of their own become loop nests of linalg.
static void buildTilingStage(OpPassManager &manager,
                             const MoEToCPUPipelineOptions &options) {
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  // Of the ops as they are, and of those that they become.
  manager.addPass(createMoESelectKernelConfigPass({options.tileSize}));
  manager.addPass(createMoEConvertToSoftmaxMixPass());
  manager.addPass(createMoESelectKernelConfigPass({options.tileSize}));
  manager.addNestedPass<func::FuncOp>(createMoEConcatenateInPlacePass());
  manager.addNestedPass<func::FuncOp>(createMoEKeepReducedDimsPass());
  manager.addPass(createMoEPropagateReshapesPass());
  manager.addPass(createMoEJoinRowsPass());
  // Initial values with one user are made inside its tile.
  manager.addNestedPass<func::FuncOp>(createMoEPrivatizeDestinationsPass());
  MoETileAndFusePassOptions tiling;
  tiling.tileSize = options.tileSize;
  if (options.threads)
    manager.addPass(createMoEDeclareThreadCountPass());
  manager.addNestedPass<func::FuncOp>(createMoETileAndFusePass(tiling));
  manager.addNestedPass<func::FuncOp>(createMoEFuseReductionsPass());
  manager.addPass(createMoEDecomposeForCPUPass({options.vectorWidth}));
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  manager.addNestedPass<func::FuncOp>(createMoEFuseElementwisePass());
}

//===----------------------------------------------------------------------===//
// Tensors -> buffers
//===----------------------------------------------------------------------===//

/// The caller's memory for results, the stack or one allocation for the rest.
static void buildBufferizationStage(OpPassManager &manager) {
  manager.addPass(createMoEResultsToDestinationsPass());
  manager.addNestedPass<func::FuncOp>(createMoEPrivatizeDestinationsPass());
  manager.addPass(bufferization::createEmptyTensorEliminationPass());
  manager.addPass(bufferization::createEmptyTensorToAllocTensorPass());
  bufferization::OneShotBufferizePassOptions bufferization;
  bufferization.bufferizeFunctionBoundaries = true;
  bufferization.functionBoundaryTypeConversion =
      bufferization::LayoutMapOption::IdentityLayoutMap;
  manager.addPass(bufferization::createOneShotBufferizePass(bufferization));
  manager.addPass(memref::createFoldMemRefAliasOpsPass());
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  // What a function returns in an argument is not cloned for its caller.
  manager.addPass(bufferization::createDropEquivalentBufferResultsPass());
  manager.addNestedPass<func::FuncOp>(createMoEStoreUpdatesPass());
  manager.addNestedPass<func::FuncOp>(createMoEPromoteTileBuffersPass());
  manager.addNestedPass<func::FuncOp>(
      bufferization::createPromoteBuffersToStackPass());
  bufferization::buildBufferDeallocationPipeline(manager);
  manager.addPass(createConvertBufferizationToMemRefPass());
}

//===----------------------------------------------------------------------===//
// Leaf ops -> loops over vectors
//===----------------------------------------------------------------------===//

static void buildVectorStage(OpPassManager &manager,
                             const MoEToCPUPipelineOptions &options) {
  ConvertMoEToCPUPassOptions conversion;
  conversion.vectorWidth = options.vectorWidth;
  conversion.vectorRegisters = options.vectorRegisters;
  conversion.bf16Dot = options.bf16Dot;
  conversion.bf16Tiles = options.bf16Tiles;
  conversion.int8Dot = options.int8Dot;
  conversion.bytePairs = options.bytePairs;
  conversion.byteTable = options.byteTable;
  conversion.streamPrefetcher = options.streamPrefetcher;
  conversion.l2Bytes = options.l2Bytes;
  conversion.productVectors = options.productVectors;
  conversion.productRows = options.productRows;
  conversion.productPanels = options.productPanels;
  conversion.expertRows = options.expertRows;
  conversion.mixQueries = options.mixQueries;
  conversion.fetchBytes = options.fetchBytes;
  manager.addNestedPass<func::FuncOp>(createConvertMoEToCPUPass(conversion));
  manager.addNestedPass<func::FuncOp>(createMoEExpandCopiesPass());
  manager.addNestedPass<func::FuncOp>(createConvertLinalgToLoopsPass());
  MoEApproximateMathPassOptions math;
  math.scalef = options.scalef;
  manager.addNestedPass<func::FuncOp>(createMoEApproximateMathPass(math));
  // First, as kernels write each constant where they need it: the canonicalizer
  // looks at all users of a constant each time that it meets another one.
  manager.addPass(createCSEPass());
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  MoEOutlineParallelPassOptions outlining;
  outlining.threads = options.threads;
  manager.addPass(createMoEOutlineParallelPass(outlining));
  manager.addPass(createMoEOutlineLoopsPass());
  manager.addNestedPass<func::FuncOp>(createMoELimitStackPass());
}

//===----------------------------------------------------------------------===//
// Loops -> the LLVM dialect
//===----------------------------------------------------------------------===//

static void buildLLVMStage(OpPassManager &manager) {
  manager.addPass(createMoECastExpandedShapesPass());
  manager.addPass(memref::createExpandStridedMetadataPass());
  manager.addPass(createLowerAffinePass());
  manager.addPass(createLoopInvariantCodeMotionPass());
  manager.addPass(createCanonicalizerPass());
  manager.addPass(createCSEPass());
  manager.addNestedPass<func::FuncOp>(createConvertVectorToSCFPass());
  manager.addPass(createSCFToControlFlowPass());
  manager.addPass(arith::createArithExpandOpsPass());
  manager.addNestedPass<func::FuncOp>(createMoEExpandBooleanAccessesPass());
  manager.addPass(createConvertVectorToLLVMPass());
  manager.addPass(createConvertMathToLLVMPass());
  manager.addPass(createConvertMathToLibmPass());
  // The runtime's functions for memory: they do not return without it.
  FinalizeMemRefToLLVMConversionPassOptions memory;
  memory.useGenericFunctions = true;
  manager.addPass(createFinalizeMemRefToLLVMConversionPass(memory));
  // All other dialects in one conversion: each costs a walk and its casts.
  manager.addPass(createConvertToLLVMPass());
  manager.addPass(createReconcileUnrealizedCastsPass());
  // What is left to simplify LLVM does as well, and in less time.
  manager.addPass(createCSEPass());
}

void mlir::moe::buildMoEToCPUPipeline(OpPassManager &manager,
                                      const MoEToCPUPipelineOptions &options) {
  buildTilingStage(manager, options);
  buildBufferizationStage(manager);
  buildVectorStage(manager, options);
  buildLLVMStage(manager);
}

void mlir::moe::registerMoEToCPUPipeline() {
  PassPipelineRegistration<MoEToCPUPipelineOptions>(
      "moe-to-cpu",
      "From functions on tensors to the LLVM dialect for a CPU; results become "
      "trailing buffers that the caller owns",
      buildMoEToCPUPipeline);
}
