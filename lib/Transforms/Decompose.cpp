//===- Decompose.cpp - Decompose moe ops into linalg ----------------------===//
//
// Replaces each op of the dialect by its meaning in smaller ops, which the op
// states itself through AggregatedOpInterface: nothing here knows an op. The
// results are the same up to the rounding of sums that a kernel orders
// differently. Costs what the meaning costs, which for the mixing ops is the
// whole token-by-token matrix.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/StringSet.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEDECOMPOSEPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

#define DEBUG_TYPE "moe-decompose"

using namespace mlir;
using namespace mlir::moe;

/// The ops of the dialect that state their meaning in smaller ones.
static SmallVector<StringRef> getDecomposableOps(MLIRContext *context) {
  SmallVector<StringRef> names;
  for (RegisteredOperationName name : context->getRegisteredOperations())
    if (name.getDialectNamespace() == MoEDialect::getDialectNamespace() &&
        name.hasInterface<linalg::AggregatedOpInterface>())
      names.push_back(name.stripDialect());
  llvm::sort(names);
  return names;
}

SmallVector<std::string>
mlir::moe::getOpsWithoutKernel(MLIRContext *context,
                               RewritePatternSet &kernels) {
  DenseSet<StringRef> roots;
  for (const std::unique_ptr<RewritePattern> &pattern :
       kernels.getNativePatterns())
    if (std::optional<OperationName> root = pattern->getRootKind())
      roots.insert(root->stripDialect());
  SmallVector<std::string> names;
  for (StringRef name : getDecomposableOps(context))
    if (!roots.contains(name))
      names.push_back(name.str());
  return names;
}

/// Why `op` refused, as far as it shows.
static StringRef explainRefusal(Operation *op) {
  bool hasBuffers = llvm::any_of(
      op->getOperandTypes(), [](Type type) { return isa<MemRefType>(type); });
  return hasBuffers ? "its meaning needs intermediate tensors and it works on "
                      "buffers; decompose before bufferization"
                    : "its decomposition refused";
}

namespace {
struct MoEDecomposePass
    : public mlir::moe::impl::MoEDecomposePassBase<MoEDecomposePass> {
  using Base::Base;

  LogicalResult initialize(MLIRContext *context) override {
    selected.clear();
    SmallVector<StringRef> known = getDecomposableOps(context);
    for (const std::string &name : ops) {
      StringRef mnemonic = StringRef(name);
      mnemonic.consume_front("moe.");
      if (!llvm::is_contained(known, mnemonic))
        return emitError(UnknownLoc::get(context))
               << "expected the names in option 'ops' of moe-decompose to be "
                  "among "
               << llvm::join(known, ", ") << "; found " << name;
      selected.insert(mnemonic);
    }
    return success();
  }

  void runOnOperation() override {
    refused.clear();
    // A meaning may consist of ops of the dialect, of which some are selected.
    while (true) {
      SmallVector<linalg::AggregatedOpInterface> worklist = findSelected();
      if (worklist.empty())
        return;
      for (linalg::AggregatedOpInterface op : worklist)
        decompose(op);
    }
  }

private:
  SmallVector<linalg::AggregatedOpInterface> findSelected() {
    SmallVector<linalg::AggregatedOpInterface> found;
    getOperation()->walk([&](linalg::AggregatedOpInterface op) {
      if (isa_and_nonnull<MoEDialect>(op->getDialect()) &&
          !refused.contains(op) &&
          (selected.empty() || selected.contains(op->getName().stripDialect())))
        found.push_back(op);
    });
    return found;
  }

  void decompose(linalg::AggregatedOpInterface op) {
    IRRewriter rewriter(op);
    FailureOr<SmallVector<Value>> results = op.decomposeOperation(rewriter);
    if (succeeded(results)) {
      ++numDecomposed;
      rewriter.replaceOp(op, *results);
      return;
    }
    ++numRefused;
    refused.insert(op);
    remark::missed(op->getLoc(),
                   remark::RemarkOpts::name("Decompose").category(DEBUG_TYPE))
        << op->getName().getStringRef() << ": "
        << remark::reason("{0}", explainRefusal(op));
  }

  /// Ops of this run that have no decomposition in their form.
  DenseSet<Operation *> refused;
  /// The mnemonics that `ops` names; empty for all.
  llvm::StringSet<> selected;
};
} // namespace
