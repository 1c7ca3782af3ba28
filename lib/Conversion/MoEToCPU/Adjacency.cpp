//===- Adjacency.cpp - moe.adjacency_update -------------------------------===//
//
// Matches moe.adjacency_update on buffers with contiguous rows. Co-selections
// are counted as integers, so that no order of the tokens changes a bit; then
// one pass over the E x E entries normalises and blends:
//
//   a_new[r, c] = beta a[r, c] + (1 - beta) C[r, c] / D
//
// with D the sum of row r (`row`), of column c (`col`) or C[c, c] (`eq7`), and
// 0 where D is 0 (E16). C is symmetric, so sums of rows are sums of columns.
//
//===----------------------------------------------------------------------===//

#include "Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
class AdjacencyKernel {
public:
  AdjacencyKernel(Emitter &e, AdjacencyUpdateOp op) : e(e), op(op) {}
  void emit();

private:
  void clearCounts();
  void countToken(Value token);
  void readSelection(Value token);
  void computeDivisors();
  void blend();

  Value i32(int64_t value) { return e.constantInt(e.getI32Type(), value); }
  void increment(Value memref, ValueRange position) {
    e.store(e.add(e.load(memref, position), i32(1)), memref, position);
  }

  Emitter &e;
  AdjacencyUpdateOp op;
  Value numTokens, numSelected, numExperts, newA;
  /// C, the divisors D as f32, the experts of the token at hand as indices
  /// (-1 for none), and whether any token was valid.
  Value counts, divisors, selection, anyValid;
};
} // namespace

void AdjacencyKernel::clearCounts() {
  e.loop(e.index(0), numExperts, 1, [&](Value row) {
    e.loop(e.index(0), numExperts, 1,
           [&](Value column) { e.store(i32(0), counts, {row, column}); });
  });
}

/// The distinct experts of a token. One that is out of range or repeated is no
/// element of the set.
void AdjacencyKernel::readSelection(Value token) {
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

void AdjacencyKernel::countToken(Value token) {
  readSelection(token);
  Value none = e.index(0);
  e.loop(none, numSelected, 1, [&](Value first) {
    Value row = e.load(selection, {first});
    e.ifThen(e.compare(arith::CmpIPredicate::sge, row, none), [&] {
      e.store(i32(1), anyValid, {});
      e.loop(none, numSelected, 1, [&](Value second) {
        Value column = e.load(selection, {second});
        Value counted = e.compare(arith::CmpIPredicate::sge, column, none);
        if (!op.getDiagonal())
          counted =
              e.both(counted, e.compare(arith::CmpIPredicate::ne, row, column));
        e.ifThen(counted, [&] { increment(counts, {row, column}); });
      });
    });
  });
}

/// D of every row (`row`) or column (`col`, `eq7`).
void AdjacencyKernel::computeDivisors() {
  e.loop(e.index(0), numExperts, 1, [&](Value expert) {
    Value total;
    if (op.getNorm() == AdjacencyNorm::Eq7)
      total = e.load(counts, {expert, expert});
    else
      total = e.loop(e.index(0), numExperts, 1, {i32(0)},
                     [&](Value other, ValueRange sum) -> Values {
                       return {e.add(sum[0], e.load(counts, {expert, other}))};
                     })[0];
    e.store(arith::SIToFPOp::create(e, e.getF32Type(), total), divisors,
            {expert});
  });
}

void AdjacencyKernel::blend() {
  Type f32 = e.getF32Type();
  double beta = op.getBeta().convertToDouble();
  Value zero = e.constant(f32, 0.0);
  Value keep = e.constant(f32, beta), take = e.constant(f32, 1.0 - beta);
  // E18: without a valid token the graph stays as it is.
  Value isFrozen =
      e.compare(arith::CmpIPredicate::eq, e.load(anyValid, {}), i32(0));
  e.loop(e.index(0), numExperts, 1, [&](Value row) {
    e.loop(e.index(0), numExperts, 1, [&](Value column) {
      Value old = e.load(op.getA(), {row, column});
      Value count =
          arith::SIToFPOp::create(e, f32, e.load(counts, {row, column}));
      Value divisor =
          e.load(divisors, {op.getNorm() == AdjacencyNorm::Row ? row : column});
      Value isUnused = e.compare(arith::CmpFPredicate::OEQ, divisor, zero);
      Value weight = e.select(isUnused, zero, e.div(count, divisor));
      Value blended = e.fma(keep, old, e.mul(take, weight));
      e.store(e.select(isFrozen, old, blended), newA, {row, column});
    });
  });
}

void AdjacencyKernel::emit() {
  newA = op.getOuts()[0];
  numTokens = e.dim(op.getIndices(), 0);
  numSelected = e.dim(op.getIndices(), 1);
  numExperts = e.dim(op.getA(), 0);
  OpFoldResult size = getSize(e, op.getA(), 0);
  OpFoldResult places = getSize(e, op.getIndices(), 1);
  auto isDynamic = [](OpFoldResult value) { return isa<Value>(value); };
  e.withScratch(isDynamic(size) || isDynamic(places), [&] {
    counts = e.scratch({size, size}, e.getI32Type());
    divisors = e.scratch({size}, e.getF32Type());
    selection = e.scratch({places}, e.getIndexType());
    anyValid = e.scratch({}, e.getI32Type());
    e.store(i32(0), anyValid, {});
    clearCounts();
    e.loop(e.index(0), numTokens, 1, [&](Value token) {
      if (Value mask = op.getMask())
        e.ifThen(e.load(mask, {token}), [&] { countToken(token); });
      else
        countToken(token);
    });
    computeDivisors();
    blend();
  });
}

namespace {
/// moe.adjacency_update on buffers -> integer counts and one blending pass.
struct AdjacencyUpdateToLoops : OpRewritePattern<AdjacencyUpdateOp> {
  AdjacencyUpdateToLoops(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(AdjacencyUpdateOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    Emitter emitter(op.getLoc(), rewriter, options);
    AdjacencyKernel(emitter, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateAdjacencyToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<AdjacencyUpdateToLoops>(patterns.getContext(), options);
}
