//===- GroupedLinear.cpp - moe.grouped_linear on register tiles -----------===//
//
// Matches moe.grouped_linear on contiguous buffers. Work is cut along experts
// and the columns of their weights, which ProductCore makes panels of, or reads
// as such. What follows the sums (a gate, an activation, a rounding) is done
// while those of a block of rows and a panel are in cache; without any of it
// they are formed in y itself.
//
//===----------------------------------------------------------------------===//

#include "LayerSums.h"
#include "Patterns.h"
#include "Product/ProductCore.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
class GroupedLinearKernel {
public:
  GroupedLinearKernel(Emitter &e, GroupedLinearOp op);
  void emit();

private:
  PanelShape getShape();
  ProductLhs getLhs();
  Values getPanelAt(Value expert, Value k, Value column);
  ProductRhs getRhs(Value expert);
  void emitPart(const LayerPart &part);

  Emitter &e;
  GroupedLinearOp op;
  Value numRows, numSources, numK;
  /// Columns of z, or of one of its halves.
  Value numColumns;
  std::optional<LayerSums> sums;
};
} // namespace

GroupedLinearKernel::GroupedLinearKernel(Emitter &e, GroupedLinearOp op)
    : e(e), op(op) {
  Value y = op.getOuts()[0];
  numRows = e.dim(y, 0);
  numSources = e.dim(op.getX(), 0);
  numK = e.dim(op.getX(), 1);
  numColumns = getNumColumns(e, op);
  sums.emplace(e, op, numSources, numColumns);
}

//===----------------------------------------------------------------------===//
// Operands
//===----------------------------------------------------------------------===//

PanelShape GroupedLinearKernel::getShape() {
  bool hasHalves = op.getGate() == GateLayout::Concatenated;
  return PanelShape(e, numColumns, hasHalves ? numColumns : Value(),
                    /*areEven=*/op.isGated());
}

ProductLhs GroupedLinearKernel::getLhs() {
  ProductLhs lhs{op.getX(), [](Value row, Value k) { return Values{row, k}; },
                 /*isContiguous=*/true};
  if (op.getRows())
    lhs.getRow = [this](Value row) {
      return readRow(e, op.getRows(), row, numSources);
    };
  return lhs;
}

/// Where a vector of columns begins in panels: `k` counts pairs where there are
/// any.
Values GroupedLinearKernel::getPanelAt(Value expert, Value k, Value column) {
  PanelPlace place = findInPanels(e, op, numColumns, column);
  Values at{expert, place.panel, k, place.lane};
  if (op.isPackedInPairs())
    at.push_back(e.index(0));
  return at;
}

ProductRhs GroupedLinearKernel::getRhs(Value expert) {
  if (op.getPacked())
    return {op.getW(),
            [=, this](Value k, Value column) {
              return getPanelAt(expert, k, column);
            },
            RhsLayout::Panels};
  if (op.getTransposed())
    return {op.getW(),
            [=](Value k, Value column) { return Values{expert, k, column}; },
            RhsLayout::NContiguous};
  return {op.getW(),
          [=](Value k, Value column) { return Values{expert, column, k}; },
          RhsLayout::KContiguous};
}

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

void GroupedLinearKernel::emitPart(const LayerPart &part) {
  sums->start(part);
  // Without rows of x there is nothing to read.
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, e.index(0)), [&] {
    ProductProblem problem(e, getLhs(), getRhs(part.expert), sums->get(part),
                           getShape(), numK);
    multiplyGroup(problem, {part.firstRow, part.endRow}, part.group);
  });
  sums->finish(part);
}

void GroupedLinearKernel::emit() {
  Value numExperts = e.dim(op.getW(), 0);
  Value zero = e.index(0), last = e.sub(numExperts, e.index(1));
  Value offsets = op.getOffsets();
  sums->clearRows(zero, readRun(e, offsets, zero, numRows).begin);
  sums->clearRows(readRun(e, offsets, last, numRows).end, numRows);
  PanelShape shape = getShape();
  forEachPartOfPanels(
      e, numExperts, shape.getNumPanels(),
      [&](Value expert, Value first, Value end) {
        ExpertRun run = readRun(e, offsets, expert, numRows);
        shape.forEachGroup(first, end, [&](const PanelGroup &group) {
          sums->allocate(group);
          forEachBlockOfRows(e, run.begin, run.end,
                             [&](Value firstRow, Value endRow) {
                               emitPart({expert, firstRow, endRow, group});
                             });
        });
      });
}

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

/// A vector of columns of a packed weight lies in one panel, or one half of it.
static bool hasKernel(GroupedLinearOp op, int64_t vectorWidth) {
  if (op.isQuantized())
    return false;
  std::optional<int64_t> packed = op.getPacked();
  int64_t parts = op.hasPanelsOfHalves() ? 2 : 1;
  return !packed || *packed % (parts * vectorWidth) == 0;
}

namespace {
struct GroupedLinearPattern
    : KernelPattern<GroupedLinearOp, GroupedLinearKernel> {
  using KernelPattern::KernelPattern;

  LogicalResult matchAndRewrite(GroupedLinearOp op,
                                PatternRewriter &rewriter) const override {
    if (!hasKernel(op, options.vectorWidth))
      return rewriter.notifyMatchFailure(op,
                                         "expected floats, in panels of whole "
                                         "vectors if they are packed");
    return KernelPattern::matchAndRewrite(op, rewriter);
  }
};
} // namespace

void mlir::moe::addGroupedLinearFacts(KernelFacts &facts, int64_t vectorWidth) {
  facts.addForms<GroupedLinearOp>(
      [=](GroupedLinearOp op) {
        return op.isQuantized() ? hasQuantizedKernel(op, vectorWidth)
                                : hasKernel(op, vectorWidth);
      },
      "a packed weight in panels, or halves of panels, of whole vectors; a "
      "quantized one is packed, in groups of whole vectors");
}

void mlir::moe::populateGroupedLinearToCPUPatterns(RewritePatternSet &patterns,
                                                   const CPUTarget &options) {
  patterns.add<GroupedLinearPattern>(patterns.getContext(), options);
}
