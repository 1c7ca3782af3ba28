//===- MoEToLLVM.cpp - moe.assert on a CPU --------------------------------===//
//
// What convert-to-llvm asks the dialect for. A failed assertion calls the
// runtime's
//
//   void moe_fail(int32_t error, const char *message, const int64_t *values);
//
// which ends the call and does not return. cf.assert, with which the shapes of
// a call are verified, ends the call in the same way: upstream's lowering ends
// the process.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/MoEToLLVM.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/Conversion/ConvertToLLVM/ToLLVMInterface.h"
#include "mlir/Conversion/LLVMCommon/Pattern.h"
#include "mlir/Dialect/ControlFlow/IR/ControlFlowOps.h"
#include "mlir/Dialect/LLVMIR/FunctionCallUtils.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/xxhash.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr StringLiteral kRuntimeName = "moe_fail";

namespace {
/// Emits the block that a failed assertion jumps to.
class FailureEmitter {
public:
  FailureEmitter(OpBuilder &builder, Location loc, ModuleOp module)
      : builder(builder), loc(loc), module(module),
        pointer(LLVM::LLVMPointerType::get(builder.getContext())) {}

  LogicalResult emit(ErrorKind error, StringRef message, ValueRange values) {
    Type word = builder.getI32Type();
    FailureOr<LLVM::LLVMFuncOp> function = LLVM::lookupOrCreateFn(
        builder, module, kRuntimeName, {word, pointer, pointer},
        LLVM::LLVMVoidType::get(builder.getContext()));
    if (failed(function))
      return failure();
    Value kind = LLVM::ConstantOp::create(
        builder, loc, word, builder.getI32IntegerAttr(int32_t(error)));
    LLVM::CallOp::create(builder, loc, *function,
                         ValueRange{kind, getAddress(message), store(values)});
    LLVM::UnreachableOp::create(builder, loc);
    return success();
  }

private:
  /// Of a text with a zero behind it, shared by all assertions that have it.
  Value getAddress(StringRef message) {
    std::string text = (message + StringRef("\0", 1)).str();
    auto type = LLVM::LLVMArrayType::get(builder.getI8Type(), text.size());
    std::string name =
        "moe_message_" + llvm::utohexstr(llvm::xxh3_64bits(text));
    auto global = module.lookupSymbol<LLVM::GlobalOp>(name);
    if (!global) {
      OpBuilder::InsertionGuard guard(builder);
      builder.setInsertionPointToStart(module.getBody());
      global = LLVM::GlobalOp::create(builder, loc, type, /*isConstant=*/true,
                                      LLVM::Linkage::Internal, name,
                                      builder.getStringAttr(text));
    }
    return LLVM::AddressOfOp::create(builder, loc, global);
  }

  /// An array of the values, each in 64 bits.
  Value store(ValueRange values) {
    Type wide = builder.getI64Type();
    Value count = LLVM::ConstantOp::create(
        builder, loc, wide,
        builder.getI64IntegerAttr(std::max<int64_t>(values.size(), 1)));
    Value array = LLVM::AllocaOp::create(builder, loc, pointer, wide, count, 0);
    for (auto [i, value] : llvm::enumerate(values)) {
      if (value.getType() != wide)
        value = LLVM::SExtOp::create(builder, loc, wide, value);
      Value place = LLVM::GEPOp::create(builder, loc, pointer, wide, array,
                                        LLVM::GEPArg(int32_t(i)));
      LLVM::StoreOp::create(builder, loc, value, place);
    }
    return array;
  }

  OpBuilder &builder;
  Location loc;
  ModuleOp module;
  LLVM::LLVMPointerType pointer;
};
} // namespace

/// Splits the block at `op`: what is behind it runs where `condition` holds.
static LogicalResult lowerAssertion(Operation *op, Value condition,
                                    ErrorKind error, StringRef message,
                                    ValueRange values,
                                    ConversionPatternRewriter &rewriter) {
  Location loc = op->getLoc();
  Block *before = rewriter.getInsertionBlock();
  Block *after = rewriter.splitBlock(before, ++Block::iterator(op));
  Block *failed = rewriter.createBlock(before->getParent(),
                                       std::next(before->getIterator()));
  FailureEmitter emitter(rewriter, loc, op->getParentOfType<ModuleOp>());
  if (mlir::failed(emitter.emit(error, message, values)))
    return failure();
  rewriter.setInsertionPointToEnd(before);
  LLVM::CondBrOp::create(rewriter, loc, condition, after, failed);
  rewriter.eraseOp(op);
  return success();
}

namespace {
struct AssertToLLVM : ConvertOpToLLVMPattern<AssertOp> {
  using ConvertOpToLLVMPattern::ConvertOpToLLVMPattern;

  LogicalResult
  matchAndRewrite(AssertOp op, OpAdaptor adaptor,
                  ConversionPatternRewriter &rewriter) const override {
    return lowerAssertion(op, adaptor.getCondition(), op.getError(),
                          op.getMessage(), adaptor.getValues(), rewriter);
  }
};

struct ShapeAssertToLLVM : ConvertOpToLLVMPattern<cf::AssertOp> {
  using ConvertOpToLLVMPattern::ConvertOpToLLVMPattern;

  LogicalResult
  matchAndRewrite(cf::AssertOp op, OpAdaptor adaptor,
                  ConversionPatternRewriter &rewriter) const override {
    return lowerAssertion(op, adaptor.getArg(), ErrorKind::Value, op.getMsg(),
                          {}, rewriter);
  }
};

struct MoEToLLVMInterface : ConvertToLLVMPatternInterface {
  using ConvertToLLVMPatternInterface::ConvertToLLVMPatternInterface;

  void loadDependentDialects(MLIRContext *context) const final {
    context->loadDialect<LLVM::LLVMDialect>();
  }

  void populateConvertToLLVMConversionPatterns(
      ConversionTarget &target, LLVMTypeConverter &converter,
      RewritePatternSet &patterns) const final {
    patterns.add<AssertToLLVM>(converter);
    patterns.add<ShapeAssertToLLVM>(converter, /*benefit=*/2);
  }
};
} // namespace

void mlir::moe::registerMoEToLLVMInterface(DialectRegistry &registry) {
  registry.addExtension(+[](MLIRContext *, MoEDialect *dialect) {
    dialect->addInterfaces<MoEToLLVMInterface>();
  });
}
