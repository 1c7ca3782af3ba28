//===- DeclareThreadCount.cpp - Declare what counts threads ---------------===//
//
// Declares the runtime's moe_get_num_threads, which passes on functions cannot
// do themselves; they call it.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEDECLARETHREADCOUNTPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

Value mlir::moe::buildThreadCount(ImplicitLocOpBuilder &builder) {
  auto function = SymbolTable::lookupNearestSymbolFrom<func::FuncOp>(
      builder.getInsertionBlock()->getParentOp(),
      builder.getStringAttr(kThreadCountName));
  if (!function)
    return {};
  Value threads = func::CallOp::create(builder, function).getResult(0);
  return arith::IndexCastOp::create(builder, builder.getIndexType(), threads);
}

namespace {
struct DeclareThreadCountPass
    : mlir::moe::impl::MoEDeclareThreadCountPassBase<DeclareThreadCountPass> {
  using Base::Base;

  void runOnOperation() override {
    ModuleOp module = getOperation();
    if (module.lookupSymbol(kThreadCountName))
      return;
    OpBuilder builder = OpBuilder::atBlockEnd(module.getBody());
    auto function =
        func::FuncOp::create(builder, module.getLoc(), kThreadCountName,
                             builder.getFunctionType({}, builder.getI32Type()));
    function.setPrivate();
  }
};
} // namespace
