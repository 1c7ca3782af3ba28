//===- OutlineParallel.cpp - Parallel loops to calls of the runtime -------===//
//
// Matches each scf.forall on buffers that is not inside another one:
//
//   scf.forall (%i, %j) = (0, 0) to (%a, %b) step (1, 64) { use(%x) }
//
// becomes a store of %a, %b, %x to a struct, a call
//
//   moe_parallel_for(ceildiv(%a, 1) * ceildiv(%b, 64), @f_parallel_0, struct)
//
// and a function that runs the iterations begin..end of the flattened loop.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Conversion/LLVMCommon/TypeConverter.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Affine/Utils.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/SCF/Transforms/Transforms.h"
#include "mlir/Transforms/RegionUtils.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEOUTLINEPARALLELPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

static constexpr StringLiteral kRuntimeFunction = "moe_parallel_for";

//===----------------------------------------------------------------------===//
// Values from outside
//===----------------------------------------------------------------------===//

/// The values that `loop` uses from outside, apart from constants, which are
/// rebuilt inside.
static SetVector<Value> getCaptures(scf::ForallOp loop) {
  SetVector<Value> used, captures;
  getUsedValuesDefinedAbove(loop.getRegion(), used);
  for (OpFoldResult bound : llvm::concat<OpFoldResult>(
           loop.getMixedLowerBound(), loop.getMixedUpperBound(),
           loop.getMixedStep()))
    if (auto value = dyn_cast<Value>(bound))
      used.insert(value);
  for (Value value : used)
    if (!value.getDefiningOp() ||
        !value.getDefiningOp()->hasTrait<OpTrait::ConstantLike>())
      captures.insert(value);
  return captures;
}

/// Casts between a value and its LLVM type; the lowerings to LLVM fold it.
static Value castTo(OpBuilder &builder, Location loc, Value value, Type type) {
  if (value.getType() == type)
    return value;
  return UnrealizedConversionCastOp::create(builder, loc, type, value)
      .getResult(0);
}

namespace {
/// Outlines one loop.
class LoopOutliner {
public:
  LoopOutliner(scf::ForallOp loop, SymbolTable &symbols,
               const LLVMTypeConverter &types)
      : loop(loop), parent(loop->getParentOfType<func::FuncOp>()),
        symbols(symbols), types(types), loc(loop.getLoc()),
        captures(getCaptures(loop)) {}

  LogicalResult outline() {
    if (failed(chooseContextType()))
      return failure();
    func::FuncOp body = buildBody();
    buildCall(body);
    loop.erase();
    return success();
  }

private:
  /// The context is a struct of the captures' LLVM types.
  LogicalResult chooseContextType() {
    SmallVector<Type> fields;
    for (Value capture : captures) {
      Type field = types.convertType(capture.getType());
      if (!field)
        return loop->emitError()
               << "expected values used in a parallel loop to have an LLVM "
                  "type, found "
               << capture.getType() << "; bufferize first";
      fields.push_back(field);
    }
    contextType = LLVM::LLVMStructType::getLiteral(loop->getContext(), fields);
    return success();
  }

  /// One count a dim: ceildiv(upper - lower, step).
  SmallVector<Value> buildTripCounts(OpBuilder &builder, IRMapping &mapping) {
    AffineExpr lower, upper, step;
    bindSymbols(loop->getContext(), lower, upper, step);
    auto map = [&](OpFoldResult value) -> OpFoldResult {
      if (auto inside = dyn_cast<Value>(value))
        return mapping.lookupOrDefault(inside);
      return value;
    };
    SmallVector<Value> counts;
    for (auto [lb, ub, by] :
         llvm::zip_equal(loop.getMixedLowerBound(), loop.getMixedUpperBound(),
                         loop.getMixedStep()))
      counts.push_back(getValueOrCreateConstantIndexOp(
          builder, loc,
          affine::makeComposedFoldedAffineApply(builder, loc,
                                                (upper - lower).ceilDiv(step),
                                                {map(lb), map(ub), map(by)})));
    return counts;
  }

  /// func @<parent>_parallel(begin, end, context): the loop over its range.
  func::FuncOp buildBody() {
    MLIRContext *context = loop->getContext();
    OpBuilder builder(context);
    Type i64 = builder.getI64Type();
    Type pointer = LLVM::LLVMPointerType::get(context);
    auto body =
        func::FuncOp::create(loc, (parent.getSymName() + "_parallel").str(),
                             builder.getFunctionType({i64, i64, pointer}, {}));
    body.setPrivate();
    symbols.insert(body, std::next(Block::iterator(parent)));

    builder.setInsertionPointToStart(body.addEntryBlock());
    IRMapping mapping;
    loadContext(builder, body.getArgument(2), mapping);
    Value begin = arith::IndexCastOp::create(
        builder, loc, builder.getIndexType(), body.getArgument(0));
    Value end = arith::IndexCastOp::create(builder, loc, builder.getIndexType(),
                                           body.getArgument(1));
    SmallVector<Value> counts = buildTripCounts(builder, mapping);
    Value one = arith::ConstantIndexOp::create(builder, loc, 1);
    auto range = scf::ForOp::create(builder, loc, begin, end, one);
    func::ReturnOp::create(builder, loc);

    builder.setInsertionPointToStart(range.getBody());
    buildIteration(builder, range.getInductionVar(), counts, mapping);
    return body;
  }

  /// Splits the flat iteration into the loop's indices and clones its body.
  void buildIteration(OpBuilder &builder, Value flat, ValueRange counts,
                      IRMapping &mapping) {
    SmallVector<Value> positions{flat};
    if (counts.size() > 1) {
      auto split = affine::AffineDelinearizeIndexOp::create(
          builder, loc, flat, counts, /*hasOuterBound=*/true);
      positions.assign(split->result_begin(), split->result_end());
    }
    AffineExpr lower, position, step;
    bindSymbols(loop->getContext(), lower, position, step);
    for (auto [iv, pos, lb, by] :
         llvm::zip_equal(loop.getInductionVars(), positions,
                         loop.getMixedLowerBound(), loop.getMixedStep())) {
      auto map = [&](OpFoldResult value) -> OpFoldResult {
        if (auto inside = dyn_cast<Value>(value))
          return mapping.lookupOrDefault(inside);
        return value;
      };
      mapping.map(iv, getValueOrCreateConstantIndexOp(
                          builder, loc,
                          affine::makeComposedFoldedAffineApply(
                              builder, loc, lower + position * step,
                              {map(lb), OpFoldResult(pos), map(by)})));
    }
    for (Operation &op : loop.getBody()->without_terminator())
      builder.clone(op, mapping);
    sequenceNestedLoops(builder.getInsertionBlock());
  }

  /// Parallel loops inside an outlined one run in sequence.
  static void sequenceNestedLoops(Block *block) {
    SmallVector<scf::ForallOp> nested;
    block->walk([&](scf::ForallOp inner) { nested.push_back(inner); });
    for (scf::ForallOp inner : nested) {
      IRRewriter rewriter(inner);
      // Cannot fail: a loop on buffers has no results to thread through.
      if (failed(scf::forallToForLoop(rewriter, inner)))
        llvm_unreachable("expected a nested parallel loop on buffers");
    }
  }

  /// Constants are cloned, captures are loaded.
  void loadContext(OpBuilder &builder, Value context, IRMapping &mapping) {
    SetVector<Value> used;
    getUsedValuesDefinedAbove(loop.getRegion(), used);
    for (Value operand : loop->getOperands())
      used.insert(operand);
    for (Value value : used)
      if (!captures.contains(value))
        mapping.map(value, builder.clone(*value.getDefiningOp())->getResult(0));
    if (captures.empty())
      return;
    Value fields = LLVM::LoadOp::create(builder, loc, contextType, context);
    for (auto [index, capture] : llvm::enumerate(captures)) {
      Value field = LLVM::ExtractValueOp::create(builder, loc, fields,
                                                 ArrayRef<int64_t>(index));
      mapping.map(capture, castTo(builder, loc, field, capture.getType()));
    }
  }

  /// Stores the captures and calls the runtime in the place of the loop.
  void buildCall(func::FuncOp body) {
    MLIRContext *context = loop->getContext();
    Type pointer = LLVM::LLVMPointerType::get(context);
    // At the entry, so that a loop around the call does not grow the stack.
    OpBuilder entry = OpBuilder::atBlockBegin(&parent.getBody().front());
    Value one = LLVM::ConstantOp::create(entry, loc, entry.getI64Type(), 1);
    Value storage =
        LLVM::AllocaOp::create(entry, loc, pointer, contextType, one);

    OpBuilder builder(loop);
    Value fields = LLVM::UndefOp::create(builder, loc, contextType);
    for (auto [index, capture] : llvm::enumerate(captures))
      fields = LLVM::InsertValueOp::create(
          builder, loc, fields,
          castTo(builder, loc, capture, contextType.getBody()[index]),
          ArrayRef<int64_t>(index));
    LLVM::StoreOp::create(builder, loc, fields, storage);

    IRMapping identity;
    Value count;
    for (Value trips : buildTripCounts(builder, identity))
      count = count ? arith::MulIOp::create(builder, loc, count, trips) : trips;
    Value count64 =
        arith::IndexCastOp::create(builder, loc, builder.getI64Type(), count);
    Value function = func::ConstantOp::create(
        builder, loc, body.getFunctionType(), body.getSymName());
    LLVM::CallOp::create(
        builder, loc, TypeRange(), kRuntimeFunction,
        ValueRange{count64, castTo(builder, loc, function, pointer), storage});
  }

  scf::ForallOp loop;
  func::FuncOp parent;
  SymbolTable &symbols;
  const LLVMTypeConverter &types;
  Location loc;
  SetVector<Value> captures;
  LLVM::LLVMStructType contextType;
};

struct OutlineParallelPass
    : public mlir::moe::impl::MoEOutlineParallelPassBase<OutlineParallelPass> {
  using Base::Base;

  void runOnOperation() override {
    ModuleOp module = getOperation();
    SmallVector<scf::ForallOp> loops;
    module.walk([&](scf::ForallOp loop) {
      if (!loop->getParentOfType<scf::ForallOp>() &&
          loop->getParentOfType<func::FuncOp>())
        loops.push_back(loop);
    });
    if (loops.empty())
      return;
    SymbolTable symbols(module);
    LLVMTypeConverter types(&getContext());
    declareRuntime(module);
    for (scf::ForallOp loop : loops) {
      if (loop.getNumResults() != 0) {
        loop->emitError("expected a parallel loop on buffers, found one with "
                        "results; bufferize first");
        return signalPassFailure();
      }
      if (failed(LoopOutliner(loop, symbols, types).outline()))
        return signalPassFailure();
      ++numOutlined;
    }
  }

private:
  void declareRuntime(ModuleOp module) {
    if (module.lookupSymbol(kRuntimeFunction))
      return;
    OpBuilder builder = OpBuilder::atBlockBegin(module.getBody());
    Type pointer = LLVM::LLVMPointerType::get(&getContext());
    LLVM::LLVMFuncOp::create(
        builder, module.getLoc(), kRuntimeFunction,
        LLVM::LLVMFunctionType::get(LLVM::LLVMVoidType::get(&getContext()),
                                    {builder.getI64Type(), pointer, pointer}));
  }
};
} // namespace
