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
#include "ProductCore.h"

#include "MoE/Dialect/MoE/IR/ExpertActivations.h"
#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

/// Rows whose sums lie in cache together, and share what is packed of weights.
static constexpr int64_t kBlockRows = 128;

namespace {
class GroupedLinearKernel {
public:
  GroupedLinearKernel(Emitter &e, GroupedLinearOp op);
  void emit();

private:
  /// A part of one expert's work: some rows, the columns of a group of panels.
  struct Part {
    Value expert, firstRow, endRow;
    PanelGroup group;
  };

  bool hasHalves() { return op.getGate() == GateLayout::Concatenated; }
  /// Whether sums are formed in y.
  bool isDirect() { return !op.hasEpilogue() && getElementType(y).isF32(); }

  PanelShape getShape();
  ProductLeft getLeft();
  ProductRight getRight(Value expert);
  ProductSums getSums(const Part &part);
  void emitPart(const Part &part);

  /// A vector of columns of z: where they are, and where its sums are.
  struct Vector {
    Value column, mask, sums;
  };
  void forEachVector(const Part &part, bool isSecond,
                     function_ref<void(const Vector &vector)> body);
  Value loadBias(const Part &part, const Vector &vector);
  Value loadSums(const Part &part, Value row, const Vector &vector);
  void startSums(const Part &part);
  void finishSums(const Part &part);
  void finishRow(const Part &part, Value row);
  void clearRows(Value begin, Value end);
  void storeY(Value values, Value row, Value column, Value mask);

  Emitter &e;
  GroupedLinearOp op;
  Value y, sums;
  /// Where sums of the second half of columns begin in a row of `sums`.
  int64_t secondHalf = 0;
  Value numRows, numSources, numSteps;
  /// Columns of z, or of one of its halves.
  Value numColumns;
};
} // namespace

GroupedLinearKernel::GroupedLinearKernel(Emitter &e, GroupedLinearOp op)
    : e(e), op(op), y(op.getOuts()[0]) {
  numRows = e.dim(y, 0);
  numSources = e.dim(op.getX(), 0);
  numSteps = e.dim(op.getX(), 1);
  numColumns = e.dim(y, 1);
  if (op.getGate() != GateLayout::Interleaved)
    return;
  std::optional<int64_t> constant = getConstantIntValue(numColumns);
  numColumns =
      constant ? e.index(2 * *constant) : e.mul(numColumns, e.index(2));
}

//===----------------------------------------------------------------------===//
// Operands
//===----------------------------------------------------------------------===//

PanelShape GroupedLinearKernel::getShape() {
  return PanelShape(e, numColumns, hasHalves() ? numColumns : Value(),
                    /*areEven=*/op.isGated());
}

ProductLeft GroupedLinearKernel::getLeft() {
  ProductLeft left{op.getX(),
                   [](Value row, Value step) { return Values{row, step}; },
                   /*isContiguous=*/true};
  if (op.getRows())
    left.getRow = [this](Value row) {
      return readRow(e, op.getRows(), row, numSources);
    };
  return left;
}

ProductRight GroupedLinearKernel::getRight(Value expert) {
  if (std::optional<int64_t> columns = op.getPacked())
    return {op.getW(),
            [=, this](Value step, Value column) {
              Value size = e.index(*columns);
              Values at{expert, arith::DivSIOp::create(e, column, size), step,
                        arith::RemSIOp::create(e, column, size)};
              if (op.isPackedInPairs())
                at.push_back(e.index(0));
              return at;
            },
            ProductLayout::Panels};
  if (op.getTransposed())
    return {
        op.getW(),
        [=](Value step, Value column) { return Values{expert, step, column}; },
        ProductLayout::AlongColumns};
  return {
      op.getW(),
      [=](Value step, Value column) { return Values{expert, column, step}; },
      ProductLayout::AlongSteps};
}

ProductSums GroupedLinearKernel::getSums(const Part &part) {
  if (isDirect())
    return {y,
            [](Value row, Value column, bool) { return Values{row, column}; }};
  return {sums, [=, this](Value row, Value column, bool isSecond) {
            Value place = e.sub(column, part.group.column);
            return Values{e.sub(row, part.firstRow),
                          e.add(place, e.index(isSecond ? secondHalf : 0))};
          }};
}

//===----------------------------------------------------------------------===//
// What comes before and after the sums
//===----------------------------------------------------------------------===//

/// Calls `body` for the vectors of a group, or of a half of its columns.
void GroupedLinearKernel::forEachVector(
    const Part &part, bool isSecond,
    function_ref<void(const Vector &vector)> body) {
  int64_t vectors = part.group.numVectors / (hasHalves() ? 2 : 1);
  Value end = e.mul(part.group.numPanels, e.index(vectors * e.width));
  e.loop(e.index(0), end, e.width, [&](Value offset) {
    Value column = e.add(part.group.column, offset), mask;
    if (part.group.mayEnd)
      mask = e.firstLanes(e.sub(numColumns, column));
    if (isSecond)
      column = e.add(column, numColumns);
    body({column, mask, e.add(offset, e.index(isSecond ? secondHalf : 0))});
  });
}

Value GroupedLinearKernel::loadBias(const Part &part, const Vector &vector) {
  if (!op.getBias())
    return e.f32(0.0);
  return e.loadFloats(op.getBias(), {part.expert, vector.column}, vector.mask);
}

/// Sums begin with the bias.
void GroupedLinearKernel::startSums(const Part &part) {
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    for (bool isSecond : {false, true})
      if (!isSecond || hasHalves())
        forEachVector(part, isSecond, [&](const Vector &vector) {
          Value bias = loadBias(part, vector);
          if (isDirect())
            storeY(bias, row, vector.column, vector.mask);
          else
            e.storeVector(bias, sums, {e.sub(row, part.firstRow), vector.sums});
        });
  });
}

void GroupedLinearKernel::storeY(Value values, Value row, Value column,
                                 Value mask) {
  Type element = getElementType(y);
  if (!element.isF32())
    values = arith::TruncFOp::create(e, e.vectorOf(element), values);
  e.storeVector(values, y, {row, column}, mask);
}

/// The sums of a row; without a row of x they are the bias.
Value GroupedLinearKernel::loadSums(const Part &part, Value row,
                                    const Vector &vector) {
  Value sum = e.loadVector(sums, {e.sub(row, part.firstRow), vector.sums});
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

void GroupedLinearKernel::finishRow(const Part &part, Value row) {
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
      Value mask =
          part.group.mayEnd ? e.firstLanes(e.sub(numColumns, column)) : Value();
      halves.push_back(loadSums(part, row, {column, mask, place}));
    }
    auto [gate, up] = deinterleave(e, halves[0], halves[1]);
    Value column =
        arith::DivSIOp::create(e, e.add(part.group.column, offset), two);
    Value mask =
        part.group.mayEnd ? e.firstLanes(e.sub(e.dim(y, 1), column)) : Value();
    storeY(buildGatedActivation(e, op, gate, up), row, column, mask);
  });
}

/// Of sums that are formed in y only those without a row of x are left to do.
void GroupedLinearKernel::finishSums(const Part &part) {
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

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

void GroupedLinearKernel::emitPart(const Part &part) {
  startSums(part);
  // Without rows of x there is nothing to read.
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, e.index(0)), [&] {
    ProductCore core(e, getLeft(), getRight(part.expert), getSums(part),
                     getShape(), numSteps);
    core.multiply(part.firstRow, part.endRow, part.group);
  });
  finishSums(part);
}

/// Rows of no run are zero.
void GroupedLinearKernel::clearRows(Value begin, Value end) {
  Value width = e.dim(y, 1);
  e.loop(begin, end, 1, [&](Value row) {
    e.loop(e.index(0), width, e.width, [&](Value column) {
      storeY(e.f32(0.0), row, column, e.firstLanes(e.sub(width, column)));
    });
  });
}

void GroupedLinearKernel::emit() {
  Value numExperts = e.dim(op.getW(), 0);
  Value zero = e.index(0), last = e.sub(numExperts, e.index(1));
  Value offsets = op.getOffsets();
  clearRows(zero, readRun(e, offsets, zero, numRows).begin);
  clearRows(readRun(e, offsets, last, numRows).end, numRows);
  PanelShape shape = getShape();
  forEachPartOfPanels(
      e, numExperts, shape.getNumPanels(),
      [&](Value expert, Value first, Value end) {
        ExpertRun run = readRun(e, offsets, expert, numRows);
        shape.forEachGroup(first, end, [&](const PanelGroup &group) {
          int64_t columns = group.mostPanels * group.numVectors * e.width;
          secondHalf = columns / 2;
          if (!isDirect())
            sums =
                e.scratch({e.getIndexAttr(kBlockRows), e.getIndexAttr(columns)},
                          e.getF32Type());
          e.loop(run.begin, run.end, kBlockRows, [&](Value row) {
            Value endRow =
                e.minSigned(e.add(row, e.index(kBlockRows)), run.end);
            emitPart({expert, row, endRow, group});
          });
        });
      });
}

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

/// Vectors of a packed weight lie in one panel, those of both of its halves.
static bool hasKernel(GroupedLinearOp op) {
  std::optional<int64_t> packed = op.getPacked();
  if (!packed)
    return true;
  // The widest vectors that there are.
  constexpr int64_t kMostLanes = 16;
  int64_t width = cast<ShapedType>(op.getOuts()[0].getType()).getDimSize(1);
  return *packed % kMostLanes == 0 &&
         (op.getGate() != GateLayout::Concatenated ||
          (!ShapedType::isDynamic(width) && width % kMostLanes == 0));
}

static LogicalResult matchGroupedLinear(GroupedLinearOp op,
                                        PatternRewriter &rewriter) {
  if (!hasKernel(op))
    return rewriter.notifyMatchFailure(op, "expected panels of whole vectors");
  return matchContiguousBuffers(op, rewriter);
}

void mlir::moe::addGroupedLinearFacts(KernelFacts &facts) {
  facts.addForms<GroupedLinearOp>(
      hasKernel, "a packed weight in panels of whole vectors of 16 columns");
}

void mlir::moe::populateGroupedLinearToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<
      KernelPattern<GroupedLinearOp, GroupedLinearKernel, matchGroupedLinear>>(
      patterns.getContext(), options);
}
