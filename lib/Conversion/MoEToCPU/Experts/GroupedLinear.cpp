//===- GroupedLinear.cpp - moe.grouped_linear on register tiles -----------===//
//
// Matches moe.grouped_linear on contiguous buffers. Work is cut along experts
// and the columns of their weights, which ProductCore makes panels of, or reads
// as such. What follows the sums (a gate, an activation, a rounding) is done
// while those of a block of rows and a panel are in cache; without any of it
// they are formed in y itself.
//
//===----------------------------------------------------------------------===//

#include "ExpertRuns.h"
#include "Patterns.h"
#include "Product/ProductCore.h"

#include "MoE/Dialect/MoE/IR/ExpertActivations.h"
#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
/// A part of one expert's work: some rows, the columns of a group of panels.
struct Part {
  Value expert, firstRow, endRow;
  PanelGroup group;
};

/// The sums of a part: where they are, what they begin with, and what becomes
/// of them.
class LayerSums {
public:
  /// `numColumns` are the columns of z, or of one of its halves.
  LayerSums(Emitter &e, GroupedLinearOp op, Value numSources, Value numColumns)
      : e(e), op(op), y(op.getOuts()[0]), numSources(numSources),
        numColumns(numColumns) {}

  /// Makes a buffer for the parts of a group, unless sums are formed in y.
  void allocate(const PanelGroup &group);
  ProductSums get(const Part &part);
  /// Begins with the bias.
  void start(const Part &part);
  /// Writes y. Of sums that are formed in it only those without a row of x are
  /// left to do.
  void finish(const Part &part);
  /// Rows of no run are zero.
  void clearRows(Value begin, Value end);

private:
  bool hasHalves() { return op.getGate() == GateLayout::Concatenated; }
  /// Whether sums are formed in y.
  bool isDirect() { return !op.hasEpilogue() && getElementType(y).isF32(); }

  /// A vector of columns of z: where they are, and where its sums are.
  struct Vector {
    Value column, mask, sums;
  };
  void forEachVector(const Part &part, bool isSecond,
                     function_ref<void(const Vector &vector)> body);
  Value loadBias(const Part &part, const Vector &vector);
  Value loadSums(const Part &part, Value row, const Vector &vector);
  void finishRow(const Part &part, Value row);
  void storeY(Value values, Value row, Value column, Value mask);

  Emitter &e;
  GroupedLinearOp op;
  Value y, numSources, numColumns, buffer;
  /// Where sums of the second half of columns begin in a row of the buffer.
  int64_t secondHalf = 0;
};

class GroupedLinearKernel {
public:
  GroupedLinearKernel(Emitter &e, GroupedLinearOp op);
  void emit();

private:
  PanelShape getShape();
  ProductLhs getLhs();
  Values getPanelAt(Value expert, Value k, Value column);
  ProductRhs getRhs(Value expert);
  void emitPart(const Part &part);

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
  numColumns = e.dim(y, 1);
  if (op.getGate() == GateLayout::Interleaved) {
    std::optional<int64_t> constant = getConstantIntValue(numColumns);
    numColumns =
        constant ? e.index(2 * *constant) : e.mul(numColumns, e.index(2));
  }
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
/// any. Vectors wholly behind the last column, which nobody uses, are read
/// from the last panel.
Values GroupedLinearKernel::getPanelAt(Value expert, Value k, Value column) {
  int64_t columns = *op.getPacked();
  Value behind;
  if (op.hasPanelsOfHalves()) {
    columns /= 2;
    Value isFactor = e.compare(arith::CmpIPredicate::sge, column, numColumns);
    Value zero = e.index(0);
    column = e.sub(column, e.select(isFactor, numColumns, zero));
    behind = e.select(isFactor, e.index(columns), zero);
  }
  Value size = e.index(columns);
  Value last = e.sub(e.dim(op.getW(), 1), e.index(1));
  Value panel = arith::DivUIOp::create(e, column, size);
  Value lane = arith::RemUIOp::create(e, column, size);
  Values at{expert, e.minSigned(panel, last), k,
            behind ? e.add(lane, behind) : lane};
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
// What comes before and after the sums
//===----------------------------------------------------------------------===//

void LayerSums::allocate(const PanelGroup &group) {
  secondHalf = group.mostPanels * group.numVectors * e.width / 2;
  if (!isDirect())
    buffer = makeBlockSums(e, group);
}

ProductSums LayerSums::get(const Part &part) {
  if (isDirect())
    return {y,
            [](Value row, Value column, bool) { return Values{row, column}; }};
  return {buffer, [=, this](Value row, Value column, bool isSecond) {
            Value place = e.sub(column, part.group.column);
            return Values{e.sub(row, part.firstRow),
                          e.add(place, e.index(isSecond ? secondHalf : 0))};
          }};
}

/// Calls `body` for the vectors of a group, or of a half of its columns.
void LayerSums::forEachVector(const Part &part, bool isSecond,
                              function_ref<void(const Vector &vector)> body) {
  forEachVectorOfGroup(
      e, part.group, part.group.numVectors / (hasHalves() ? 2 : 1), numColumns,
      [&](const GroupVector &vector) {
        Value column = vector.column;
        if (isSecond)
          column = e.add(column, numColumns);
        body({column, vector.mask,
              e.add(vector.place, e.index(isSecond ? secondHalf : 0))});
      });
}

Value LayerSums::loadBias(const Part &part, const Vector &vector) {
  if (!op.getBias())
    return e.f32(0.0);
  return e.loadFloats(op.getBias(), {part.expert, vector.column}, vector.mask);
}

void LayerSums::start(const Part &part) {
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    for (bool isSecond : {false, true})
      if (!isSecond || hasHalves())
        forEachVector(part, isSecond, [&](const Vector &vector) {
          Value bias = loadBias(part, vector);
          if (isDirect())
            storeY(bias, row, vector.column, vector.mask);
          else
            e.storeVector(bias, buffer,
                          {e.sub(row, part.firstRow), vector.sums});
        });
  });
}

void LayerSums::storeY(Value values, Value row, Value column, Value mask) {
  Type element = getElementType(y);
  if (!element.isF32())
    values = arith::TruncFOp::create(e, e.vectorOf(element), values);
  e.storeVector(values, y, {row, column}, mask);
}

/// The sums of a row; without a row of x they are the bias.
Value LayerSums::loadSums(const Part &part, Value row, const Vector &vector) {
  Value sum = e.loadVector(buffer, {e.sub(row, part.firstRow), vector.sums});
  if (Value missing = isMissing(e, op.getRows(), row, numSources))
    sum = e.select(missing, loadBias(part, vector), sum);
  return sum;
}

/// Gates and factors that alternate, apart.
static std::pair<Value, Value> deinterleave(Emitter &e, Value a, Value b) {
  SmallVector<int64_t> even, odd;
  for (int64_t lane = 0; lane < e.width; ++lane) {
    even.push_back(2 * lane);
    odd.push_back(2 * lane + 1);
  }
  return {vector::ShuffleOp::create(e, a, b, even),
          vector::ShuffleOp::create(e, a, b, odd)};
}

void LayerSums::finishRow(const Part &part, Value row) {
  switch (op.getGate()) {
  case GateLayout::None:
    return forEachVector(part, false, [&](const Vector &vector) {
      storeY(buildActivation(e, op, loadSums(part, row, vector)), row,
             vector.column, vector.mask);
    });
  case GateLayout::Concatenated:
    return forEachVector(part, false, [&](const Vector &gate) {
      Vector up{e.add(gate.column, numColumns), gate.mask,
                e.add(gate.sums, e.index(secondHalf))};
      storeY(buildGatedActivation(e, op, loadSums(part, row, gate),
                                  loadSums(part, row, up)),
             row, gate.column, gate.mask);
    });
  case GateLayout::Interleaved:
    break;
  }
  Value two = e.index(2), width = e.index(e.width);
  Value end =
      e.mul(part.group.numPanels, e.index(part.group.numVectors * e.width));
  e.loop(e.index(0), end, 2 * e.width, [&](Value offset) {
    Values halves;
    for (Value place : {offset, e.add(offset, width)}) {
      Value column = e.add(part.group.column, place);
      Value mask = part.group.hasTail ? e.firstLanes(e.sub(numColumns, column))
                                      : Value();
      halves.push_back(loadSums(part, row, {column, mask, place}));
    }
    auto [gate, up] = deinterleave(e, halves[0], halves[1]);
    Value column =
        arith::DivSIOp::create(e, e.add(part.group.column, offset), two);
    Value mask =
        part.group.hasTail ? e.firstLanes(e.sub(e.dim(y, 1), column)) : Value();
    storeY(buildGatedActivation(e, op, gate, up), row, column, mask);
  });
}

void LayerSums::finish(const Part &part) {
  if (isDirect() && !op.getRows())
    return;
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    if (!isDirect())
      return finishRow(part, row);
    e.ifThen(isMissing(e, op.getRows(), row, numSources), [&] {
      forEachVector(part, false, [&](const Vector &vector) {
        storeY(loadBias(part, vector), row, vector.column, vector.mask);
      });
    });
  });
}

void LayerSums::clearRows(Value begin, Value end) {
  Value width = e.dim(y, 1);
  e.loop(begin, end, 1, [&](Value row) {
    e.loop(e.index(0), width, e.width, [&](Value column) {
      storeY(e.f32(0.0), row, column, e.firstLanes(e.sub(width, column)));
    });
  });
}

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

void GroupedLinearKernel::emitPart(const Part &part) {
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
                                         "expected panels of whole vectors");
    return KernelPattern::matchAndRewrite(op, rewriter);
  }
};
} // namespace

void mlir::moe::addGroupedLinearFacts(KernelFacts &facts, int64_t vectorWidth) {
  facts.addForms<GroupedLinearOp>(
      [=](GroupedLinearOp op) { return hasKernel(op, vectorWidth); },
      "a packed weight in panels, or halves of panels, of whole vectors");
}

void mlir::moe::populateGroupedLinearToCPUPatterns(RewritePatternSet &patterns,
                                                   const CPUTarget &options) {
  patterns.add<GroupedLinearPattern>(patterns.getContext(), options);
}
