//===- ResultsToDestinations.cpp - The boundary of a compiled module ------===//
//
// Matches public functions with a body. Legal because a destination is only
// written where the result would have been made, and nothing reads it before.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOERESULTSTODESTINATIONSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

/// The inputs belong to the caller, who may use them again.
static void markInputsReadOnly(func::FuncOp function) {
  Builder builder(function.getContext());
  for (BlockArgument argument : function.getArguments())
    if (isa<TensorType>(argument.getType()))
      function.setArgAttr(
          argument.getArgNumber(),
          bufferization::BufferizationDialect::kWritableAttrName,
          builder.getBoolAttr(false));
}

/// Appends an argument of each tensor result's type; null for other results.
static FailureOr<SmallVector<Value>> addDestinations(func::FuncOp function) {
  SmallVector<Value> destinations;
  for (Type type : function.getResultTypes()) {
    if (!isa<RankedTensorType>(type)) {
      destinations.push_back(nullptr);
      continue;
    }
    unsigned number = function.getNumArguments();
    if (failed(function.insertArgument(number, type, /*argAttrs=*/{},
                                       function.getLoc())))
      return failure();
    destinations.push_back(function.getArgument(number));
  }
  return destinations;
}

namespace {
struct ResultsToDestinationsPass
    : public mlir::moe::impl::MoEResultsToDestinationsPassBase<
          ResultsToDestinationsPass> {
  using Base::Base;

  void runOnOperation() override {
    for (auto function : getOperation().getOps<func::FuncOp>())
      if (function.isPublic() && !function.isDeclaration())
        if (failed(rewrite(function)))
          return signalPassFailure();
  }

private:
  LogicalResult rewrite(func::FuncOp function) {
    if (auto uses = function.getSymbolUses(getOperation());
        uses && !uses->empty()) {
      InFlightDiagnostic error = function.emitError()
                                 << "expected public function '@"
                                 << function.getSymName()
                                 << "' not to be called inside its module, "
                                    "found a call; make it private";
      error.attachNote(uses->begin()->getUser()->getLoc()) << "called here";
      return failure();
    }
    markInputsReadOnly(function);
    FailureOr<SmallVector<Value>> destinations = addDestinations(function);
    if (failed(destinations))
      return failure();
    function.walk([&](func::ReturnOp op) {
      OpBuilder builder(op);
      for (auto [operand, destination] :
           llvm::zip_equal(op->getOpOperands(), *destinations)) {
        if (!destination)
          continue;
        auto written = bufferization::MaterializeInDestinationOp::create(
            builder, op.getLoc(), operand.get(), destination);
        operand.set(written.getResult());
      }
    });
    function->setAttr(LLVM::LLVMDialect::getEmitCWrapperAttrName(),
                      UnitAttr::get(&getContext()));
    return success();
  }
};
} // namespace
