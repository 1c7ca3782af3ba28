//===- RuntimeOpVerification.cpp - Checks of sizes at run time ------------===//
//
// What the verifier says about static sizes, said about dynamic ones:
//
//   %0 = memref.dim %weight, %c1
//   %1 = memref.dim %h, %c1
//   %2 = arith.cmpi eq, %0, %1
//   cf.assert %2, "... expected dim 1 of 'weight' to match dim 1 of 'h'"
//
//===----------------------------------------------------------------------===//

#include "AttachToAllOps.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"
#include "MoE/Dialect/MoE/Interfaces/AllInterfaces.h"

#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/ControlFlow/IR/ControlFlowOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Interfaces/RuntimeVerifiableOpInterface.h"

using namespace mlir;
using namespace mlir::moe;

using GenerateMessage = function_ref<std::string(Operation *, StringRef)>;

namespace {
/// Emits the checks of one op.
class ShapeChecks {
public:
  ShapeChecks(MoEStructuredOpInterface op, OpBuilder &builder, Location loc,
              GenerateMessage generateMessage)
      : op(op), builder(builder), loc(loc), generateMessage(generateMessage) {}

  /// Every operand that spans a dim has the size of the first one.
  void checkDimsAgree() {
    SmallVector<AffineMap> maps =
        cast<IndexingMapOpInterface>(op.getOperation()).getIndexingMapsArray();
    for (OpOperand &operand : op->getOpOperands())
      for (auto [position, expr] :
           llvm::enumerate(maps[operand.getOperandNumber()].getResults()))
        if (auto dim = dyn_cast<AffineDimExpr>(expr))
          checkDimAgrees(operand, position, dim.getPosition());
  }

  /// The smaller dim of each ordered pair is not the larger one.
  void checkDimOrder() {
    SmallVector<Dim> dims = op.getDims();
    for (auto [smaller, larger] : op.getDimOrder()) {
      auto small = findDim(op, smaller), large = findDim(op, larger);
      if (failed(small) || failed(large))
        continue;
      check(arith::CmpIPredicate::ule, getSize(*small->first, small->second),
            getSize(*large->first, large->second),
            (Twine("expected ") + dims[smaller].name + " to be at most " +
             dims[larger].name)
                .str());
    }
  }

private:
  void checkDimAgrees(OpOperand &operand, unsigned position, unsigned dim) {
    auto first = findDim(op, dim);
    if (failed(first) || first->first == &operand)
      return;
    check(arith::CmpIPredicate::eq, getSize(operand, position),
          getSize(*first->first, first->second),
          (Twine("expected dim ") + Twine(position) + " of '" +
           op.getOperandName(operand.getOperandNumber()) + "' to match dim " +
           Twine(first->second) + " of '" +
           op.getOperandName(first->first->getOperandNumber()) + "'")
              .str());
  }

  Value getSize(OpOperand &operand, unsigned position) {
    return getValueOrCreateConstantIndexOp(
        builder, loc,
        linalg::createFoldedDimOp(builder, loc, operand.get(), position));
  }

  void check(arith::CmpIPredicate predicate, Value lhs, Value rhs,
             StringRef message) {
    // Static sizes are the verifier's.
    std::optional<int64_t> left = getConstantIntValue(lhs);
    std::optional<int64_t> right = getConstantIntValue(rhs);
    if (left && right)
      return;
    Value holds = arith::CmpIOp::create(builder, loc, predicate, lhs, rhs);
    cf::AssertOp::create(builder, loc, holds, generateMessage(op, message));
  }

  MoEStructuredOpInterface op;
  OpBuilder &builder;
  Location loc;
  GenerateMessage generateMessage;
};

template <typename OpTy>
struct StructuredOpRuntimeVerification
    : RuntimeVerifiableOpInterface::ExternalModel<
          StructuredOpRuntimeVerification<OpTy>, OpTy> {
  void generateRuntimeVerification(Operation *op, OpBuilder &builder,
                                   Location loc,
                                   GenerateMessage generateMessage) const {
    ShapeChecks checks(cast<MoEStructuredOpInterface>(op), builder, loc,
                       generateMessage);
    checks.checkDimsAgree();
    checks.checkDimOrder();
  }
};
} // namespace

void mlir::moe::registerRuntimeVerifiableOpInterfaceExternalModels(
    DialectRegistry &registry) {
  registry.addExtension(+[](MLIRContext *context, MoEDialect *) {
    // The checks use these dialects, which the checked IR need not contain.
    context->loadDialect<cf::ControlFlowDialect>();
  });
  attachToAllOps<StructuredOpRuntimeVerification>(registry);
}
