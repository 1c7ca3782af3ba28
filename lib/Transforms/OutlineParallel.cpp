//===- OutlineParallel.cpp - Parallel loops to calls of the runtime -------===//
//
// Turns each outermost scf.forall into a private function over a range of
// iterations and a call of the runtime's
//
//   void moe_parallel_for(int64_t count,
//                         void (*body)(int64_t begin, int64_t end, void *ctx),
//                         void *ctx);
//
// which may run disjoint ranges in any order and on any thread. What the body
// uses of the surrounding function travels in a struct on the caller's stack.
// Iterations of a forall write disjoint memory, so bits do not change with the
// number of threads. Foralls inside a body, and all of them where a caller
// wants no threads, become loops.
//
// Loops that do the same to other values, as those of a model's layers do,
// share one function: what it reads is in the struct. Most of a model's code is
// in these functions, so that all that follows has half as much to do for two
// equal layers.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Conversion/LLVMCommon/TypeConverter.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/SCF/Transforms/Transforms.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/Matchers.h"
#include "mlir/Transforms/RegionUtils.h"

#include <unordered_map>

namespace mlir::moe {
#define GEN_PASS_DEF_MOEOUTLINEPARALLELPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

static constexpr StringLiteral kRuntimeName = "moe_parallel_for";

//===----------------------------------------------------------------------===//
// Iterations
//===----------------------------------------------------------------------===//

namespace {
/// The iterations of a forall as one range: lower bound, step and number of
/// iterations of each dim, outermost first.
struct IterationSpace {
  SmallVector<Value> lower, step, count;
  Value total;
};
} // namespace

static IterationSpace getIterationSpace(ImplicitLocOpBuilder &builder,
                                        scf::ForallOp forall) {
  IterationSpace space;
  space.total = arith::ConstantIndexOp::create(builder, 1);
  for (auto [lower, upper, step] :
       llvm::zip_equal(forall.getMixedLowerBound(), forall.getMixedUpperBound(),
                       forall.getMixedStep())) {
    auto get = [&](OpFoldResult value) {
      return getValueOrCreateConstantIndexOp(builder, builder.getLoc(), value);
    };
    space.lower.push_back(get(lower));
    space.step.push_back(get(step));
    Value extent =
        arith::SubIOp::create(builder, get(upper), space.lower.back());
    space.count.push_back(
        arith::CeilDivSIOp::create(builder, extent, space.step.back()));
    space.total =
        arith::MulIOp::create(builder, space.total, space.count.back());
  }
  return space;
}

/// The induction variables of iteration `linear`.
static SmallVector<Value> getInductionVars(ImplicitLocOpBuilder &builder,
                                           const IterationSpace &space,
                                           Value linear) {
  SmallVector<Value> variables(space.count.size());
  for (size_t dim = space.count.size(); dim-- > 0;) {
    Value position = linear;
    if (dim > 0) {
      position = arith::RemSIOp::create(builder, linear, space.count[dim]);
      linear = arith::DivSIOp::create(builder, linear, space.count[dim]);
    }
    variables[dim] = arith::AddIOp::create(
        builder, space.lower[dim],
        arith::MulIOp::create(builder, position, space.step[dim]));
  }
  return variables;
}

//===----------------------------------------------------------------------===//
// Captured values
//===----------------------------------------------------------------------===//

/// The values that `region` uses from outside, constants cloned into it so that
/// they need not travel.
static SmallVector<Value> captureValues(OpBuilder &builder, Region &region) {
  SetVector<Value> used;
  getUsedValuesDefinedAbove(region, used);
  SmallVector<Value> captured;
  for (Value value : used) {
    Operation *definition = value.getDefiningOp();
    if (!definition || !definition->hasTrait<OpTrait::ConstantLike>()) {
      captured.push_back(value);
      continue;
    }
    builder.setInsertionPointToStart(&region.front());
    replaceAllUsesInRegionWith(value, builder.clone(*definition)->getResult(0),
                               region);
  }
  return captured;
}

/// The value in the type that it has in the LLVM dialect, and back. The casts
/// vanish when the function is lowered.
static Value castTo(ImplicitLocOpBuilder &builder, Type type, Value value) {
  if (value.getType() == type)
    return value;
  return UnrealizedConversionCastOp::create(builder, type, value).getResult(0);
}

//===----------------------------------------------------------------------===//
// Equal functions
//===----------------------------------------------------------------------===//

/// Equal for functions whose bodies are equal.
static llvm::hash_code hashBody(func::FuncOp function) {
  llvm::hash_code hash(0);
  function.getBody().walk([&](Operation *op) {
    hash =
        llvm::hash_combine(hash, OperationEquivalence::computeHash(
                                     op, OperationEquivalence::ignoreHashValue,
                                     OperationEquivalence::ignoreHashValue,
                                     OperationEquivalence::IgnoreLocations));
  });
  return hash;
}

static bool haveEqualBodies(func::FuncOp a, func::FuncOp b) {
  return OperationEquivalence::isRegionEquivalentTo(
      &a.getBody(), &b.getBody(), OperationEquivalence::IgnoreLocations);
}

//===----------------------------------------------------------------------===//
// Outlining
//===----------------------------------------------------------------------===//

namespace {
class Outliner {
public:
  explicit Outliner(ModuleOp module)
      : module(module), symbols(module), converter(module.getContext()) {}

  LogicalResult outline(scf::ForallOp forall);

  /// How many loops got a function that another loop had already.
  unsigned numShared = 0;

private:
  /// An earlier function that is equal to `body`, which is erased then; else
  /// `body` itself.
  func::FuncOp shareEqual(func::FuncOp body);
  func::FuncOp makeBody(scf::ForallOp forall, ArrayRef<Value> captured,
                        LLVM::LLVMStructType contextType);
  func::FuncOp getRuntimeFunction();

  ModuleOp module;
  SymbolTable symbols;
  LLVMTypeConverter converter;
  std::unordered_map<size_t, SmallVector<func::FuncOp, 1>> bodies;
};
} // namespace

func::FuncOp Outliner::getRuntimeFunction() {
  if (auto function = symbols.lookup<func::FuncOp>(kRuntimeName))
    return function;
  OpBuilder builder = OpBuilder::atBlockEnd(module.getBody());
  auto pointer = LLVM::LLVMPointerType::get(module.getContext());
  auto function = func::FuncOp::create(
      builder, module.getLoc(), kRuntimeName,
      builder.getFunctionType({builder.getI64Type(), pointer, pointer}, {}));
  function.setPrivate();
  symbols.insert(function);
  return function;
}

/// func private @f_parallel(%begin: i64, %end: i64, %ctx: !llvm.ptr) {
///   captured = load %ctx
///   for %i = %begin to %end { body(delinearize %i) } }
func::FuncOp Outliner::makeBody(scf::ForallOp forall, ArrayRef<Value> captured,
                                LLVM::LLVMStructType contextType) {
  auto parent = forall->getParentOfType<func::FuncOp>();
  OpBuilder moduleBuilder(parent);
  Type i64 = moduleBuilder.getI64Type();
  auto pointer = LLVM::LLVMPointerType::get(module.getContext());
  auto function = func::FuncOp::create(
      moduleBuilder, forall.getLoc(), (parent.getName() + "_parallel").str(),
      moduleBuilder.getFunctionType({i64, i64, pointer}, {}));
  function.setPrivate();
  symbols.insert(function);

  Block *entry = function.addEntryBlock();
  auto builder = ImplicitLocOpBuilder::atBlockEnd(forall.getLoc(), entry);
  IRMapping mapping;
  for (auto [position, value] : llvm::enumerate(captured)) {
    Value field = LLVM::GEPOp::create(
        builder, pointer, contextType, entry->getArgument(2),
        ArrayRef<LLVM::GEPArg>{0, static_cast<int32_t>(position)});
    Value loaded =
        LLVM::LoadOp::create(builder, contextType.getBody()[position], field);
    mapping.map(value, castTo(builder, value.getType(), loaded));
  }
  // The bounds are computed again from the captured values.
  auto isolated = cast<scf::ForallOp>(builder.clone(*forall, mapping));
  builder.setInsertionPoint(isolated);
  IterationSpace space = getIterationSpace(builder, isolated);
  Type index = builder.getIndexType();
  Value begin =
      arith::IndexCastOp::create(builder, index, entry->getArgument(0));
  Value end = arith::IndexCastOp::create(builder, index, entry->getArgument(1));
  Value one = arith::ConstantIndexOp::create(builder, 1);
  auto loop = scf::ForOp::create(builder, begin, end, one);
  builder.setInsertionPointToStart(loop.getBody());
  SmallVector<Value> variables =
      getInductionVars(builder, space, loop.getInductionVar());
  IRRewriter rewriter(builder);
  rewriter.eraseOp(isolated.getTerminator());
  rewriter.inlineBlockBefore(isolated.getBody(),
                             loop.getBody()->getTerminator(), variables);
  rewriter.eraseOp(isolated);
  builder.setInsertionPointToEnd(entry);
  func::ReturnOp::create(builder);
  return function;
}

func::FuncOp Outliner::shareEqual(func::FuncOp body) {
  SmallVector<func::FuncOp, 1> &candidates = bodies[hashBody(body)];
  for (func::FuncOp other : candidates)
    if (haveEqualBodies(other, body)) {
      symbols.erase(body);
      ++numShared;
      return other;
    }
  candidates.push_back(body);
  return body;
}

LogicalResult Outliner::outline(scf::ForallOp forall) {
  auto parent = forall->getParentOfType<func::FuncOp>();
  ImplicitLocOpBuilder builder(forall.getLoc(), forall);
  SmallVector<Value> captured = captureValues(builder, forall.getRegion());
  // The body computes the bounds too.
  for (Value bound : forall->getOperands())
    if (!llvm::is_contained(captured, bound))
      captured.push_back(bound);

  SmallVector<Type> fields;
  for (Value value : captured) {
    Type type = converter.convertType(value.getType());
    if (!type)
      return forall.emitOpError()
             << "expected values that can be stored, found a use of "
             << value.getType();
    fields.push_back(type);
  }
  auto contextType =
      LLVM::LLVMStructType::getLiteral(module.getContext(), fields);
  func::FuncOp body = shareEqual(makeBody(forall, captured, contextType));

  // The struct lives in the caller's frame: one a call site, not one a call.
  auto pointer = LLVM::LLVMPointerType::get(module.getContext());
  builder.setInsertionPointToStart(&parent.getBody().front());
  Value one = LLVM::ConstantOp::create(builder, builder.getI64Type(),
                                       builder.getI64IntegerAttr(1));
  Value context = LLVM::AllocaOp::create(builder, pointer, contextType, one);
  builder.setInsertionPoint(forall);
  for (auto [position, value] : llvm::enumerate(captured)) {
    Value field = LLVM::GEPOp::create(
        builder, pointer, contextType, context,
        ArrayRef<LLVM::GEPArg>{0, static_cast<int32_t>(position)});
    LLVM::StoreOp::create(builder, castTo(builder, fields[position], value),
                          field);
  }
  IterationSpace space = getIterationSpace(builder, forall);
  Value count =
      arith::IndexCastOp::create(builder, builder.getI64Type(), space.total);
  Value address = func::ConstantOp::create(
      builder, body.getFunctionType(),
      FlatSymbolRefAttr::get(module.getContext(), body.getName()));
  func::CallOp::create(
      builder, getRuntimeFunction(),
      ValueRange{count, castTo(builder, pointer, address), context});
  forall.erase();
  return success();
}

/// Moves static allocas of `block` to the entry of `function`: in a loop they
/// would grow the stack with each iteration.
static void hoistAllocas(func::FuncOp function) {
  Block &entry = function.getBody().front();
  SmallVector<memref::AllocaOp> allocas;
  function.walk([&](memref::AllocaOp alloca) {
    if (alloca->getNumOperands() == 0 &&
        !alloca->getParentOfType<memref::AllocaScopeOp>())
      allocas.push_back(alloca);
  });
  for (memref::AllocaOp alloca : allocas)
    alloca->moveBefore(&entry, entry.begin());
}

namespace {
struct OutlineParallelPass
    : mlir::moe::impl::MoEOutlineParallelPassBase<OutlineParallelPass> {
  using Base::Base;

  void runOnOperation() override {
    if (failed(verifyBuffers()))
      return signalPassFailure();
    if (threads && failed(outlineOutermost()))
      return signalPassFailure();
    eraseUnusedThreadCount();
    SmallVector<scf::ForallOp> rest;
    getOperation().walk([&](scf::ForallOp forall) { rest.push_back(forall); });
    IRRewriter rewriter(&getContext());
    for (scf::ForallOp forall : rest) {
      rewriter.setInsertionPoint(forall);
      if (failed(scf::forallToForLoop(rewriter, forall)))
        return signalPassFailure();
    }
    for (auto function : getOperation().getOps<func::FuncOp>())
      if (!function.isExternal())
        hoistAllocas(function);
  }

private:
  LogicalResult verifyBuffers() {
    WalkResult result = getOperation()->walk([](scf::ForallOp forall) {
      if (forall.getNumResults() == 0)
        return WalkResult::advance();
      emitError(forall.getLoc(), "expected a parallel loop on buffers, found "
                                 "one with results; bufferize first");
      return WalkResult::interrupt();
    });
    return failure(result.wasInterrupted());
  }

  void eraseUnusedThreadCount() {
    auto function = getOperation().lookupSymbol<func::FuncOp>(kThreadCountName);
    if (function && SymbolTable::symbolKnownUseEmpty(function, getOperation()))
      function.erase();
  }

  LogicalResult outlineOutermost() {
    Outliner outliner(getOperation());
    SmallVector<scf::ForallOp> outermost;
    getOperation().walk<WalkOrder::PreOrder>([&](scf::ForallOp forall) {
      outermost.push_back(forall);
      return WalkResult::skip();
    });
    for (scf::ForallOp forall : outermost) {
      if (failed(outliner.outline(forall)))
        return failure();
      ++numOutlined;
    }
    numShared += outliner.numShared;
    return success();
  }
};
} // namespace
