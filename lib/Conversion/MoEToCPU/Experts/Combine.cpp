//===- Combine.cpp - moe.combine on vectors -------------------------------===//
//
// Matches moe.combine on buffers with contiguous rows. Each token's row is
// formed in registers, a few vectors of features at a time, from the rows of
// its experts in the order of k, and written once. No row is read for a slot
// that is none.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

/// Vectors of a row that are formed together: one look at a slot serves all.
static constexpr int64_t kVectors = 4;

namespace {
class CombineKernel {
public:
  CombineKernel(Emitter &e, CombineOp op) : e(e), op(op) {}
  void emit();

private:
  void emitToken(ValueRange token);
  void emitColumns(ValueRange token, Value column, int64_t numVectors,
                   Value mask);
  Values addExpert(ValueRange token, Value place, Value column, Value mask,
                   ValueRange sums);

  Value columnOf(Value first, int64_t vector) {
    return vector == 0 ? first : e.add(first, e.index(vector * e.width));
  }
  static Values join(ValueRange token, Value last) {
    Values position(token);
    position.push_back(last);
    return position;
  }

  Emitter &e;
  CombineOp op;
  int64_t numLeading;
  Value numPlaces, numRows, numColumns;
};
} // namespace

/// sums + gate * expert_out[slot], or `sums` for a slot that is none.
Values CombineKernel::addExpert(ValueRange token, Value place, Value column,
                                Value mask, ValueRange sums) {
  Values position = join(token, place);
  Value slot = e.toIndex(e.load(op.getSlots(), position));
  // As an unsigned number a negative one is large.
  Value isRow = e.compare(arith::CmpIPredicate::ult, slot, numRows);
  return e.ifElse(
      isRow, sums.getTypes(),
      [&]() -> Values {
        Value gate = e.splat(e.load(op.getGates(), position));
        Values next;
        for (auto [i, sum] : llvm::enumerate(sums)) {
          Value row = e.loadFloats(op.getExpertOut(),
                                   {slot, columnOf(column, i)}, mask);
          next.push_back(e.fma(gate, row, sum));
        }
        return next;
      },
      [&]() -> Values { return Values(sums); });
}

/// y of one token from `column` on, `numVectors` vectors of it.
void CombineKernel::emitColumns(ValueRange token, Value column,
                                int64_t numVectors, Value mask) {
  Values sums;
  for (int64_t i = 0; i < numVectors; ++i)
    sums.push_back(op.getShared()
                       ? e.loadFloats(op.getShared(),
                                      join(token, columnOf(column, i)), mask)
                       : e.f32(0.0));
  sums = e.loop(e.index(0), numPlaces, 1, sums,
                [&](Value place, ValueRange carried) {
                  return addExpert(token, place, column, mask, carried);
                });
  Value y = op.getOuts()[0];
  Type element = cast<MemRefType>(y.getType()).getElementType();
  for (auto [i, sum] : llvm::enumerate(sums)) {
    Value rounded = sum;
    if (!element.isF32())
      rounded = arith::TruncFOp::create(e, e.vectorOf(element), sum);
    e.storeVector(rounded, y, join(token, columnOf(column, i)), mask);
  }
}

void CombineKernel::emitToken(ValueRange token) {
  int64_t step = kVectors * e.width;
  auto roundDown = [&](int64_t multiple) {
    return e.sub(numColumns, e.rest(numColumns, multiple));
  };
  Value blocksEnd = roundDown(step), vectorsEnd = roundDown(e.width);
  e.loop(e.index(0), blocksEnd, step,
         [&](Value column) { emitColumns(token, column, kVectors, Value()); });
  e.loop(blocksEnd, vectorsEnd, e.width,
         [&](Value column) { emitColumns(token, column, 1, Value()); });
  e.ifThen(e.compare(arith::CmpIPredicate::slt, vectorsEnd, numColumns), [&] {
    emitColumns(token, vectorsEnd, 1,
                e.firstLanes(e.sub(numColumns, vectorsEnd)));
  });
}

void CombineKernel::emit() {
  numLeading = cast<MemRefType>(op.getGates().getType()).getRank() - 1;
  numPlaces = e.dim(op.getGates(), numLeading);
  numRows = e.dim(op.getExpertOut(), 0);
  numColumns = e.dim(op.getExpertOut(), 1);
  e.loopOverLeading(op.getGates(), numLeading,
                    [&](ValueRange token) { emitToken(token); });
}

static LogicalResult matchCombine(CombineOp op, PatternRewriter &rewriter) {
  if (failed(matchBuffers(op, rewriter)))
    return failure();
  const Value rows[] = {op.getExpertOut(), op.getShared(), op.getOuts()[0]};
  for (Value operand : rows)
    if (operand && !isInnermostContiguous(operand.getType()))
      return rewriter.notifyMatchFailure(
          op, "expected operands with contiguous rows");
  return success();
}

void mlir::moe::populateCombineToCPUPatterns(RewritePatternSet &patterns,
                                             const CPUTarget &options) {
  patterns.add<KernelPattern<CombineOp, CombineKernel, matchCombine>>(
      patterns.getContext(), options);
}
