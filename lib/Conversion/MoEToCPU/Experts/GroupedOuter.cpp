//===- GroupedOuter.cpp - moe.grouped_outer on register tiles -------------===//
//
// Matches moe.grouped_outer on contiguous buffers. Of each expert it is the
// product of its rows of dy, transposed, with its rows of x, which ProductCore
// makes panels of. Work is cut along experts and the features of x. Sums that
// are no f32 are formed in a buffer, a block of rows of the weight at a time.
//
//===----------------------------------------------------------------------===//

#include "ExpertRuns.h"
#include "Patterns.h"
#include "Product/ProductCore.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
class GroupedOuterKernel {
public:
  GroupedOuterKernel(Emitter &e, GroupedOuterOp op)
      : e(e), op(op), dw(op.getOuts()[0]) {}
  void emit();

private:
  /// Rows of a weight, columns of a group of panels.
  struct Part {
    Value expert, firstRow, endRow;
    PanelGroup group;
  };

  bool isDirect() { return getElementType(dw).isF32(); }
  void forEachVector(
      const Part &part,
      function_ref<void(Value row, Value column, Value place, Value mask)>
          body);
  void emitPart(const ExpertRun &run, const Part &part);

  Emitter &e;
  GroupedOuterOp op;
  Value dw, sums;
};
} // namespace

void GroupedOuterKernel::forEachVector(
    const Part &part, function_ref<void(Value, Value, Value, Value)> body) {
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    forEachVectorOfGroup(e, part.group, part.group.numVectors, e.dim(dw, 2),
                         [&](const GroupVector &vector) {
                           body(row, vector.column, vector.place, vector.mask);
                         });
  });
}

void GroupedOuterKernel::emitPart(const ExpertRun &run, const Part &part) {
  forEachVector(part, [&](Value row, Value column, Value place, Value mask) {
    if (isDirect())
      e.storeVector(e.f32(0.0), dw, {part.expert, row, column}, mask);
    else
      e.storeVector(e.f32(0.0), sums, {e.sub(row, part.firstRow), place});
  });
  Value numSources = e.dim(op.getX(), 0), rows = op.getRows();
  ProductLhs lhs{
      op.getDy(),
      [&](Value row, Value k) { return Values{e.add(run.begin, k), row}; },
      /*isContiguous=*/false};
  ProductRhs rhs{op.getX(),
                 [&](Value k, Value column) {
                   Value row =
                       readRow(e, rows, e.add(run.begin, k), numSources);
                   return Values{row, column};
                 },
                 RhsLayout::NContiguous};
  if (rows)
    rhs.isMissing = [&](Value k) {
      return isMissing(e, rows, e.add(run.begin, k), numSources);
    };
  ProductSums target{
      isDirect() ? dw : sums, [&](Value row, Value column, bool) {
        return isDirect() ? Values{part.expert, row, column}
                          : Values{e.sub(row, part.firstRow),
                                   e.sub(column, part.group.column)};
      }};
  // Without rows of x there is nothing to read.
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, e.index(0)), [&] {
    ProductProblem problem(e, lhs, rhs, target, PanelShape(e, e.dim(dw, 2)),
                           e.sub(run.end, run.begin));
    multiplyGroup(problem, {part.firstRow, part.endRow}, part.group);
  });
  if (isDirect())
    return;
  forEachVector(part, [&](Value row, Value column, Value place, Value mask) {
    Value sum = e.loadVector(sums, {e.sub(row, part.firstRow), place});
    Value rounded =
        arith::TruncFOp::create(e, e.vectorOf(getElementType(dw)), sum);
    e.storeVector(rounded, dw, {part.expert, row, column}, mask);
  });
}

void GroupedOuterKernel::emit() {
  PanelShape shape(e, e.dim(dw, 2));
  Value numRows = e.dim(dw, 1);
  forEachPartOfPanels(
      e, e.dim(dw, 0), shape.getNumPanels(),
      [&](Value expert, Value first, Value end) {
        ExpertRun run =
            readRun(e, op.getOffsets(), expert, e.dim(op.getDy(), 0));
        shape.forEachGroup(first, end, [&](const PanelGroup &group) {
          if (!isDirect())
            sums = makeBlockSums(e, group);
          forEachBlockOfRows(e, e.index(0), numRows,
                             [&](Value firstRow, Value endRow) {
                               emitPart(run, {expert, firstRow, endRow, group});
                             });
        });
      });
}

void mlir::moe::populateGroupedOuterToCPUPatterns(RewritePatternSet &patterns,
                                                  const CPUTarget &options) {
  patterns.add<KernelPattern<GroupedOuterOp, GroupedOuterKernel>>(
      patterns.getContext(), options);
}
