//===- BufferizableOpInterfaceImpl.cpp - Bufferization of moe ops ---------===//
//
// A structured op on tensors becomes the same op on buffers: each result's
// buffer is the buffer of the destination it is tied to.
//
//===----------------------------------------------------------------------===//

#include "AttachToAllOps.h"
#include "MoE/Dialect/MoE/Interfaces/AllInterfaces.h"

#include "mlir/Dialect/Bufferization/IR/BufferizableOpInterface.h"
#include "mlir/Dialect/Bufferization/IR/DstBufferizableOpInterfaceImpl.h"

using namespace mlir;
using namespace mlir::bufferization;
using namespace mlir::moe;

namespace {
template <typename OpTy>
struct StructuredOpBufferization
    : DstBufferizableOpInterfaceExternalModel<StructuredOpBufferization<OpTy>,
                                              OpTy> {
  bool bufferizesToMemoryRead(Operation *op, OpOperand &operand,
                              const AnalysisState &) const {
    return cast<DestinationStyleOpInterface>(op).isDpsInput(&operand) ||
           cast<OpTy>(op).accumulates();
  }

  LogicalResult bufferize(Operation *op, RewriterBase &rewriter,
                          const BufferizationOptions &options,
                          BufferizationState &state) const {
    auto dps = cast<DestinationStyleOpInterface>(op);
    if (dps.hasPureBufferSemantics())
      return success();
    SmallVector<Value> operands, destinations;
    for (OpOperand &operand : op->getOpOperands()) {
      if (!isa<TensorType>(operand.get().getType())) {
        operands.push_back(operand.get());
        continue;
      }
      FailureOr<Value> buffer =
          getBuffer(rewriter, operand.get(), options, state);
      if (failed(buffer))
        return failure();
      operands.push_back(*buffer);
      if (dps.isDpsInit(&operand))
        destinations.push_back(*buffer);
    }
    mlir::clone(rewriter, op, /*newResultTypes=*/TypeRange(), operands);
    replaceOpWithBufferizedValues(rewriter, op, destinations);
    return success();
  }
};
} // namespace

void mlir::moe::registerBufferizableOpInterfaceExternalModels(
    DialectRegistry &registry) {
  attachToAllOps<StructuredOpBufferization>(registry);
}
