//===- MoEToGPU.cpp - Block-level ops to GPU kernels ----------------------===//
//
// Each loop over blocks becomes a kernel (KernelOutlining.cpp), and each
// block-level op in it the code of its threads (one pattern an op, one file a
// pattern). A kernel of several ops is their composition: they meet in
// workgroup memory, with a barrier wherever one op touches what another wrote.
//
//===----------------------------------------------------------------------===//

#include "Emit/Cluster.h"
#include "Emit/ThreadBuilder.h"
#include "Grid/KernelOutlining.h"
#include "Grid/KernelParameters.h"
#include "Grid/ScalarReads.h"
#include "Grid/Workspace.h"
#include "Product/ChunkProducts.h"
#include "Schedules.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/GPUSchedules.h"
#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/Transforms.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/MemRef/Utils/MemRefUtils.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Interfaces/ViewLikeInterface.h"
#include "mlir/Rewrite/FrozenRewritePatternSet.h"
#include "mlir/Rewrite/PatternApplicator.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::moe {
#define GEN_PASS_DEF_CONVERTMOETOGPUPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Barriers
//===----------------------------------------------------------------------===//

namespace {
/// Finds where the threads of a block must wait for each other.
class BarrierPlacement {
public:
  /// Puts a barrier before `op` if it touches what an op since the last barrier
  /// wrote, or writes what one read.
  void visit(Operation *op) {
    SmallVector<Value> reads = getBuffers<MemoryEffects::Read>(op);
    SmallVector<Value> writes = getBuffers<MemoryEffects::Write>(op);
    auto isWritten = [&](Value v) { return written.contains(v); };
    auto isRead = [&](Value v) { return read.contains(v); };
    if (llvm::any_of(reads, isWritten) || llvm::any_of(writes, isWritten) ||
        llvm::any_of(writes, isRead)) {
      OpBuilder b(op);
      gpu::BarrierOp::create(b, op->getLoc());
      written.clear();
      read.clear();
    }
    written.insert_range(writes);
    read.insert_range(reads);
  }

private:
  /// The buffers, looked at through views, on which `op` has the effect.
  template <typename EffectTy>
  SmallVector<Value> getBuffers(Operation *op) {
    SmallVector<MemoryEffects::EffectInstance> effects;
    cast<MemoryEffectOpInterface>(op).getEffects(effects);
    SmallVector<Value> buffers;
    for (const MemoryEffects::EffectInstance &effect : effects) {
      Value buffer = effect.getValue();
      if (!buffer || !isa<EffectTy>(effect.getEffect()))
        continue;
      if (auto memref = dyn_cast<MemrefValue>(buffer))
        buffer = memref::skipViewLikeOps(memref);
      buffers.push_back(buffer);
    }
    return buffers;
  }

  llvm::DenseSet<Value> written, read;
};

/// Keeps why a pattern did not match, to tell the user.
class ReasonListener : public RewriterBase::Listener {
public:
  void notifyMatchFailure(Location loc,
                          function_ref<void(Diagnostic &)> callback) override {
    Diagnostic diagnostic(loc, DiagnosticSeverity::Remark);
    callback(diagnostic);
    reason = diagnostic.str();
  }

  std::string reason;
};

} // namespace

//===----------------------------------------------------------------------===//
// What the kernels say
//===----------------------------------------------------------------------===//

KernelFacts mlir::moe::getGPUKernelFacts(Operation *op) {
  KernelFacts facts;
  BlockShape block = getBlockShape(op);
  RewritePatternSet kernels(op->getContext());
  populateToThreadsPatterns(kernels, block);
  populateToGridPatterns(kernels, block);
  facts.addKernels(kernels);
  addAdjacencyFacts(facts);
  addCombineFacts(facts, block);
  addDispatchFacts(facts, block);
  addDispersionFacts(facts);
  addGroupedLinearGridFacts(facts, block);
  addRouterLogitsFacts(facts, block);
  addSoftmaxMixBackwardFacts(facts, block);
  addSoftmaxMixFacts(facts, block);
  addTopKRenormFacts(facts, block);
  return facts;
}

void mlir::moe::populateToThreadsPatterns(RewritePatternSet &patterns,
                                          BlockShape block) {
  populateCopyToThreadsPatterns(patterns, block);
  populateChunkProductToThreadsPatterns(patterns, block);
  populateLinalgToThreadsPatterns(patterns, block);
  populateLinalgProductToThreadsPatterns(patterns, block);
  populateRouterLogitsToThreadsPatterns(patterns, block);
  populateSoftmaxMixBackwardToThreadsPatterns(patterns, block);
  populateSoftmaxMixToThreadsPatterns(patterns, block);
  populateTopKRenormToThreadsPatterns(patterns, block);
}

//===----------------------------------------------------------------------===//
// Pass
//===----------------------------------------------------------------------===//

/// Whether `buffer` or a view of it is written by an op.
static bool isWritten(Value buffer) {
  return llvm::any_of(buffer.getUsers(), [&](Operation *user) {
    if (isa<ViewLikeOpInterface, UnrealizedConversionCastOp>(user))
      return llvm::any_of(user->getResults(), isWritten);
    auto effects = dyn_cast<MemoryEffectOpInterface>(user);
    if (!effects)
      return !isMemoryEffectFree(user);
    SmallVector<MemoryEffects::EffectInstance> writes;
    effects.getEffectsOnValue(buffer, writes);
    return llvm::any_of(writes, [](MemoryEffects::EffectInstance &effect) {
      return isa<MemoryEffects::Write>(effect.getEffect());
    });
  });
}

/// The arguments that the function only reads.
static DenseSet<Value> getConstantArguments(func::FuncOp function) {
  DenseSet<Value> constants;
  for (BlockArgument argument : function.getArguments())
    if (isa<MemRefType>(argument.getType()) && !isWritten(argument))
      constants.insert(argument);
  return constants;
}

/// What remarks are filtered by.
static constexpr StringLiteral kPassName = "convert-moe-to-gpu";

/// What the kernels compute again for themselves has lost its users.
static void eraseDeadOps(func::FuncOp function) {
  for (Operation &op :
       llvm::make_early_inc_range(llvm::reverse(function.getBody().front())))
    if (isOpTriviallyDead(&op))
      op.erase();
}

/// Whether `op` works on buffers as a whole: it reads or writes them.
static bool isBlockLevel(Operation &op) {
  auto effects = dyn_cast<MemoryEffectOpInterface>(op);
  return effects && (effects.hasEffect<MemoryEffects::Read>() ||
                     effects.hasEffect<MemoryEffects::Write>());
}

namespace {
struct ConvertMoEToGPUPass
    : public mlir::moe::impl::ConvertMoEToGPUPassBase<ConvertMoEToGPUPass> {
  using Base::Base;

  void getDependentDialects(DialectRegistry &registry) const override {
    Base::getDependentDialects(registry);
    registerThreadDialects(registry);
  }

  void runOnOperation() override {
    if (failed(verifyBlockSize(getOperation(), blockSize)))
      return signalPassFailure();
    KernelFacts facts = getGPUKernelFacts(getOperation());
    for (auto function : llvm::to_vector(getOperation().getOps<func::FuncOp>()))
      if (!function.isExternal() && failed(convert(function, facts)))
        return signalPassFailure();
  }

private:
  /// The blocks of the kernel of `forall`: of as many threads as its ops want,
  /// where they agree; else as their kernels of the fewest demands, the last
  /// ones, want, and the ops take the best kernels for such blocks, with a
  /// remark.
  BlockShape getBlock(scf::ForallOp forall, const KernelFacts &facts) {
    BlockShape block = getBlockShape(forall, blockSize);
    if (auto given =
            forall->getAttrOfType<IntegerAttr>(kBlockThreadsAttrName)) {
      block.numThreads = given.getInt();
      return block;
    }
    SmallVector<std::pair<Operation *, SmallVector<KernelConfigAttr>>> choices;
    SetVector<int64_t> wanted, needed;
    forall.walk([&](MoEStructuredOpInterface op) {
      choices.emplace_back(op, facts.getConfigs(op));
      keepPossibleConfig(op, choices.back().second, kPassName);
      KernelConfigAttr config = getKernelConfig(op);
      wanted.insert(config && config.getThreads() ? config.getThreads()
                                                  : blockSize);
      if (config && !choices.back().second.empty() &&
          choices.back().second.back().getThreads())
        needed.insert(choices.back().second.back().getThreads());
    });
    if (wanted.size() == 1) {
      block.numThreads = wanted.front();
      return block;
    }
    if (needed.size() == 1)
      block.numThreads = needed.front();
    for (auto &[op, configs] : choices) {
      auto isFor = [&](KernelConfigAttr config) {
        return config.getThreads() == 0 ||
               config.getThreads() == block.numThreads;
      };
      KernelConfigAttr config = getKernelConfig(op);
      auto *other = llvm::find_if(configs, isFor);
      if (config && !isFor(config) && other != configs.end())
        takeConfigInstead(op, *other,
                          llvm::formatv("its loop is shared with kernels for "
                                        "blocks of {0} threads",
                                        block.numThreads)
                              .str(),
                          kPassName);
    }
    return block;
  }

  LogicalResult convert(func::FuncOp function, const KernelFacts &facts) {
    readScalarsInLoops(function);
    castReshapes(function);
    if (failed(moveBuffersToWorkspace(function)))
      return failure();
    DenseSet<Value> constants = getConstantArguments(function);
    SmallVector<scf::ForallOp> loops;
    function.walk<WalkOrder::PreOrder>([&](scf::ForallOp forall) {
      loops.push_back(forall);
      return WalkResult::skip();
    });
    if (!loops.empty()) {
      OpBuilder b = OpBuilder::atBlockEnd(getOperation().getBody());
      auto module = gpu::GPUModuleOp::create(
          b, function.getLoc(), (function.getName() + "_gpu").str());
      if (Attribute target = getOperation()->getAttr(kTargetAttrName))
        module.setTargetsAttr(b.getArrayAttr(target));
      getOperation()->setAttr(gpu::GPUDialect::getContainerModuleAttrName(),
                              b.getUnitAttr());
      SmallVector<Attribute> launches;
      for (scf::ForallOp forall : loops) {
        std::string name = (function.getName() + "_kernel").str();
        if (!launches.empty())
          name = (name + Twine("_") + Twine(launches.size())).str();
        DictionaryAttr launch;
        BlockShape block = getBlock(forall, facts);
        FailureOr<OutlinedKernel> kernel =
            outlineKernel(forall, module, name, block, constants, launch);
        if (failed(kernel) || failed(lowerToThreads(*kernel, block, facts)))
          return failure();
        launches.push_back(
            addDynamicMemory(launch, function, kernel->function));
        ++numKernels;
      }
      pruneKernels(function, module, launches);
      function->setAttr(kKernelsAttrName, b.getArrayAttr(launches));
    }
    eraseDeadOps(function);
    return verifyNothingLeft(function);
  }

  /// A kernel whose ops took dynamic memory says so wherever it is launched.
  static DictionaryAttr addDynamicMemory(DictionaryAttr launch,
                                         func::FuncOp function,
                                         gpu::GPUFuncOp kernel) {
    auto bytes = kernel->getAttrOfType<IntegerAttr>(kDynamicSmemAttrName);
    if (!bytes)
      return launch;
    function.walk([&](gpu::LaunchFuncOp op) {
      if (op.getKernelName() != kernel.getNameAttr())
        return;
      OpBuilder b(op);
      op.getDynamicSharedMemorySizeMutable().assign(
          arith::ConstantIntOp::create(b, op.getLoc(), bytes.getInt(), 32));
    });
    NamedAttrList entries(launch);
    entries.set("dynamic_smem", bytes);
    return entries.getDictionary(launch.getContext());
  }

  /// Lowers the block-level ops of a kernel one after the other.
  LogicalResult lowerToThreads(OutlinedKernel kernel, BlockShape block,
                               const KernelFacts &facts) {
    SmallVector<Operation *> ops;
    for (Operation &op : *kernel.body)
      if (isBlockLevel(op))
        ops.push_back(&op);
    // Only now is it known which buffers lie in workgroup memory.
    for (Operation *op : ops)
      if (isa<MoEStructuredOpInterface>(op))
        keepPossibleConfig(op, facts.getConfigs(op), kPassName);
    BarrierPlacement barriers;
    for (Operation *op : ops)
      barriers.visit(op);

    RewritePatternSet patterns(&getContext());
    populateToThreadsPatterns(patterns, block);
    FrozenRewritePatternSet frozen(std::move(patterns));
    PatternApplicator applicator(frozen);
    applicator.applyDefaultCostModel();
    ReasonListener listener;
    PatternRewriter rewriter(&getContext());
    rewriter.setListener(&listener);
    for (Operation *op : ops) {
      // A scalar: every thread reads it for itself.
      if (isa<memref::LoadOp>(op))
        continue;
      listener.reason = "no lowering of this op to GPU threads exists yet";
      rewriter.setInsertionPoint(op);
      Location loc = op->getLoc();
      StringRef name = op->getName().getStringRef();
      if (failed(applicator.matchAndRewrite(op, rewriter)))
        return emitError(loc)
               << "cannot run '" << name
               << "' on the threads of a block: " << listener.reason;
    }
    if (failed(expandMathForThreads(kernel.function)))
      return failure();
    return rewriteBoolBuffers(kernel.function);
  }

  /// Work outside of the loops would be lost: whoever launches the kernels of
  /// `moe.kernels` does not run the function.
  static LogicalResult verifyNothingLeft(func::FuncOp function) {
    if (function.getNumResults() != 0)
      return function.emitError()
             << "expected a function whose results are destinations among its "
                "arguments, found "
             << function.getNumResults() << " results";
    WalkResult result = function.walk([](Operation *op) {
      bool isMoE = isa_and_nonnull<MoEDialect>(op->getDialect());
      if (isa<gpu::LaunchFuncOp>(op) ||
          !(isMoE || isBlockLevel(*op) || isa<memref::AllocOp>(op)))
        return WalkResult::advance();
      op->emitError() << "expected '" << op->getName()
                      << "' to be part of a loop over blocks; its form has no "
                         "GPU lowering yet";
      return WalkResult::interrupt();
    });
    return failure(result.wasInterrupted());
  }
};
} // namespace
