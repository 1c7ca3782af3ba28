//===- Adjacency.cpp - moe.co_selections ----------------------------------===//
//
// Matches moe.co_selections on buffers: token by token, one is added to the
// count of every pair of distinct experts that the token selected. Counts are
// integers, so that no order of the tokens changes a bit.
//
//===----------------------------------------------------------------------===//

#include "Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
class CoSelectionsKernel {
public:
  CoSelectionsKernel(Emitter &e, CoSelectionsOp op) : e(e), op(op) {}
  void emit();

private:
  void countToken(Value token);
  void readSelection(Value token);
  void increment(Value memref, ValueRange position) {
    Value one = e.constantInt(e.getI32Type(), 1);
    e.store(e.add(e.load(memref, position), one), memref, position);
  }

  Emitter &e;
  CoSelectionsOp op;
  Value numSelected, numExperts, counts;
  /// The experts of the token at hand as indices, -1 for none.
  Value selection;
};
} // namespace

/// The distinct experts of a token. One that is out of range or repeated is no
/// element of the set.
void CoSelectionsKernel::readSelection(Value token) {
  e.loop(e.index(0), numSelected, 1, [&](Value place) {
    Value expert = e.toIndex(e.load(op.getIndices(), {token, place}));
    Value isExpert = e.compare(arith::CmpIPredicate::ult, expert, numExperts);
    Value isNew = e.loop(
        e.index(0), place, 1, {isExpert},
        [&](Value earlier, ValueRange valid) -> Values {
          return {e.both(valid[0],
                         e.compare(arith::CmpIPredicate::ne,
                                   e.load(selection, {earlier}), expert))};
        })[0];
    e.store(e.select(isNew, expert, e.index(-1)), selection, {place});
  });
}

void CoSelectionsKernel::countToken(Value token) {
  readSelection(token);
  Value none = e.index(0);
  auto isExpert = [&](Value expert) {
    return e.compare(arith::CmpIPredicate::sge, expert, none);
  };
  e.loop(none, numSelected, 1, [&](Value first) {
    Value row = e.load(selection, {first});
    e.ifThen(isExpert(row), [&] {
      e.loop(none, numSelected, 1, [&](Value second) {
        Value column = e.load(selection, {second});
        e.ifThen(isExpert(column), [&] { increment(counts, {row, column}); });
      });
    });
  });
}

void CoSelectionsKernel::emit() {
  counts = op.getOuts()[0];
  numSelected = e.dim(op.getIndices(), 1);
  numExperts = e.dim(counts, 0);
  Value numTokens = e.dim(op.getIndices(), 0);
  OpFoldResult places = getSize(e, op.getIndices(), 1);
  e.withScratch(isa<Value>(places), [&] {
    selection = e.scratch({places}, e.getIndexType());
    e.loop(e.index(0), numTokens, 1, [&](Value token) {
      if (Value mask = op.getMask())
        e.ifThen(e.load(mask, {token}), [&] { countToken(token); });
      else
        countToken(token);
    });
  });
}

namespace {
/// moe.co_selections on buffers -> a loop over tokens.
struct CoSelectionsToLoops : OpRewritePattern<CoSelectionsOp> {
  CoSelectionsToLoops(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(CoSelectionsOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    Emitter emitter(op.getLoc(), rewriter, options);
    CoSelectionsKernel(emitter, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateAdjacencyToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<CoSelectionsToLoops>(patterns.getContext(), options);
}
