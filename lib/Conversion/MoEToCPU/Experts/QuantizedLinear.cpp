//===- QuantizedLinear.cpp - moe.grouped_linear on packed codes -----------===//
//
// Matches moe.grouped_linear on contiguous buffers with a packed weight of
// codes. What few rows wait for is memory, so that codes are read once, in the
// order of addresses, and become numbers in registers: a tile of rows and two
// vectors of columns takes a block of codes, 32 of each column, and adds
// scale (sum of x code - zero sum of x) to its sums. These stay in registers
// for all blocks. A sum is that of its blocks in their order, whatever the tile
// is; products with integers are exact, so that a result does not depend on how
// they are formed either.
//
//===----------------------------------------------------------------------===//

#include "LayerSums.h"
#include "Patterns.h"
#include "Product/RegisterTile.h"
#include "QuantizedRows.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"

#include <cmath>

using namespace mlir;
using namespace mlir::moe;

/// The vectors of columns of a tile.
static constexpr int64_t kTileVectors = 2;

//===----------------------------------------------------------------------===//
// Codes
//===----------------------------------------------------------------------===//

namespace {
/// The codes of a weight as unsigned bytes, four of each column in a lane.
class WeightCodes {
public:
  WeightCodes(Emitter &e, GroupedLinearOp op, CodeProduct product)
      : e(e), op(op), product(product) {}

  /// The lines of a block of features, and quads of features of a line.
  int64_t getLines(int64_t blockSize) { return blockSize / 4 / getQuads(); }
  int64_t getQuads() { return op.getCodesPerByte(); }
  /// The quads of a vector of columns at `at`.
  Values load(ValueRange at);
  /// What is multiplied with a quad of a row: as many vectors as
  /// `QuantizedRows::splat` gives.
  Values expand(Value quad);
  /// sum + products of a quad of codes and one of a row.
  Value multiplyAdd(Value codes, Value features, Value sum);
  /// The code that stands for 0, without zeros, in what `expand` gives.
  double getZero();
  /// What codes are a multiple of.
  double getUnit() {
    switch (*op.getFormat()) {
    case WeightFormat::Int4:
    case WeightFormat::Int8:
      return 1.0;
    case WeightFormat::Fp4E2M1:
      return 0.5;
    case WeightFormat::Fp8E4M3:
      return 256.0;
    }
    llvm_unreachable("unknown format");
  }

private:
  Value widenFloat8(Value bytes);
  Values expandFloat8(Value quad);
  Values lookUpFloat8(Value quad);
  Value shift(Value vector, int64_t bits) {
    return bits == 0 ? vector
                     : Value(arith::ShRUIOp::create(e, vector, e.i32(bits)));
  }
  Value mask(Value vector, uint32_t bits) {
    return arith::AndIOp::create(e, vector, e.i32(bits));
  }

  Emitter &e;
  GroupedLinearOp op;
  const CodeProduct product;
  /// With it in the upper bits a code is a bf16, as 128 is 0x4300 and its
  /// mantissa has 7 bits.
  static constexpr uint32_t kPairOf128 = 0x43004300;
};
} // namespace

/// 12 plus twice the values of codes of a sign, 2 of exponent, 1 of mantissa.
static constexpr int8_t kFloat4Codes[] = {12, 13, 14, 15, 16, 18, 20, 24,
                                          12, 11, 10, 9,  8,  6,  4,  0};

Values WeightCodes::load(ValueRange at) {
  auto type = VectorType::get({4 * e.width}, e.getI8Type());
  Value bytes = vector::BitCastOp::create(
      e, e.ints(), vector::LoadOp::create(e, type, op.getW(), at));
  if (op.getCodesPerByte() == 1)
    return {bytes};
  Values quads{mask(bytes, 0x0f0f0f0f), mask(shift(bytes, 4), 0x0f0f0f0f)};
  if (*op.getFormat() == WeightFormat::Fp4E2M1)
    for (Value &quad : quads)
      quad = e.lookUpBytes(quad, kFloat4Codes);
  return quads;
}

/// The bytes of even number, floats of 8 bits, as f32 that are 2^-8 of them: an
/// f16 has the same bits of mantissa at other places, and 8 more of exponent.
Value WeightCodes::widenFloat8(Value bytes) {
  auto shiftUp = [&](Value vector, int64_t bits) -> Value {
    return arith::ShLIOp::create(e, vector, e.i32(bits));
  };
  Value halves = arith::OrIOp::create(e, shiftUp(mask(bytes, 0x00800080), 8),
                                      shiftUp(mask(bytes, 0x007f007f), 7));
  halves = vector::BitCastOp::create(
      e, VectorType::get({2 * e.width}, e.getF16Type()), halves);
  return arith::ExtFOp::create(
      e, VectorType::get({2 * e.width}, e.getF32Type()), halves);
}

/// Pairs of bf16 that are 2^-8 of floats of 8 bits, byte by byte by a table.
Values WeightCodes::lookUpFloat8(Value quad) {
  SmallVector<int8_t> lowBytes, highBytes;
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7;
    float value = std::ldexp(exponent == 0 ? mantissa : mantissa + 8,
                             std::max(exponent, 1) - 18);
    uint32_t bits = llvm::bit_cast<uint32_t>(value) >> 16;
    lowBytes.push_back(static_cast<int8_t>(bits));
    highBytes.push_back(static_cast<int8_t>(bits >> 8));
  }
  auto either = [&](Value a, Value b) -> Value {
    return arith::OrIOp::create(e, a, b);
  };
  Value low = e.lookUpBytes(quad, lowBytes);
  Value high = either(e.lookUpBytes(quad, highBytes), mask(quad, 0x80808080));
  Value evenHigh = arith::ShLIOp::create(e, mask(high, 0x00ff00ff), e.i32(8));
  return {either(mask(low, 0x00ff00ff), evenHigh),
          either(mask(shift(low, 8), 0x00ff00ff), mask(high, 0xff00ff00))};
}

/// Of each column two numbers lie side by side, as pairs do.
Values WeightCodes::expandFloat8(Value quad) {
  if (product == CodeProduct::Pairs && e.target.byteTable)
    return lookUpFloat8(quad);
  Values sides{widenFloat8(quad), widenFloat8(shift(quad, 8))};
  if (product == CodeProduct::Pairs) {
    auto pairs = VectorType::get({2 * e.width}, e.getBF16Type());
    return llvm::map_to_vector(sides, [&](Value side) -> Value {
      return vector::BitCastOp::create(e, e.ints(),
                                       arith::TruncFOp::create(e, pairs, side));
    });
  }
  Values numbers;
  for (int64_t feature = 0; feature < 4; ++feature) {
    auto order = llvm::map_to_vector(llvm::seq(e.width), [&](int64_t lane) {
      return 2 * lane + feature / 2;
    });
    Value side = sides[feature % 2];
    numbers.push_back(vector::ShuffleOp::create(e, side, side, order));
  }
  return numbers;
}

Values WeightCodes::expand(Value quad) {
  if (*op.getFormat() == WeightFormat::Fp8E4M3)
    return expandFloat8(quad);
  switch (product) {
  case CodeProduct::Bytes:
    return {quad};
  case CodeProduct::Pairs: {
    Values pairs;
    for (int64_t bits : {0, 8})
      pairs.push_back(arith::OrIOp::create(
          e, mask(shift(quad, bits), 0x00ff00ff), e.i32(kPairOf128)));
    return pairs;
  }
  case CodeProduct::Floats:
    break;
  }
  Values numbers;
  for (int64_t byte = 0; byte < 4; ++byte) {
    Value code = shift(quad, 8 * byte);
    if (byte < 3)
      code = mask(code, 0xff);
    numbers.push_back(arith::SIToFPOp::create(e, e.floats(), code));
  }
  return numbers;
}

Value WeightCodes::multiplyAdd(Value codes, Value features, Value sum) {
  switch (product) {
  case CodeProduct::Bytes:
    return e.dotBytes(codes, features, sum);
  case CodeProduct::Pairs:
    return e.dotPairs(features, codes, sum);
  case CodeProduct::Floats:
    return e.fma(features, codes, sum);
  }
  llvm_unreachable("unknown product");
}

double WeightCodes::getZero() {
  double behind = product == CodeProduct::Pairs ? 128.0 : 0.0;
  if (op.getZeros())
    return behind;
  switch (*op.getFormat()) {
  case WeightFormat::Fp8E4M3:
    return 0.0;
  case WeightFormat::Int4:
    return behind + 8.0;
  case WeightFormat::Int8:
    return behind + 128.0;
  case WeightFormat::Fp4E2M1:
    return behind + 12.0;
  }
  llvm_unreachable("unknown format");
}

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

namespace {
class QuantizedLinearKernel {
public:
  QuantizedLinearKernel(Emitter &e, GroupedLinearOp op);
  void emit();

private:
  /// Where a vector of columns lies in panels, and its sums.
  struct Column {
    PanelPlace place;
    Value number;
    bool isSecond;
  };
  PanelShape getShape();
  int64_t getTileRows() const;
  SmallVector<Column> getColumns(const PanelGroup &group, Value slot);
  void packRows(Value first, Value end);
  void emitPart(const LayerPart &part);
  void multiplyTile(const LayerPart &part, ArrayRef<Column> columns,
                    Value first, int64_t numRows);
  Values multiplyBlock(Value expert, ArrayRef<Column> columns, ValueRange rows,
                       Value block);
  Values addBlock(Value expert, ArrayRef<Column> columns, ValueRange rows,
                  Value block, ValueRange products, ValueRange totals);
  void prefetchAhead(Value expert, const Column &column, Value block);

  Emitter &e;
  GroupedLinearOp op;
  Value numRows, numSources, numColumns;
  QuantizedRows lhs;
  WeightCodes codes;
  LayerSums sums;
};
} // namespace

QuantizedLinearKernel::QuantizedLinearKernel(Emitter &e, GroupedLinearOp op)
    : e(e), op(op), numRows(e.dim(op.getOuts()[0], 0)),
      numSources(e.dim(op.getX(), 0)), numColumns(getNumColumns(e, op)),
      lhs(e, op), codes(e, op, lhs.product),
      sums(e, op, numSources, numColumns) {}

PanelShape QuantizedLinearKernel::getShape() {
  bool hasHalves = op.getGate() == GateLayout::Concatenated;
  return PanelShape(e, numColumns, hasHalves ? numColumns : Value(),
                    /*areEven=*/op.isGated(), kTileVectors);
}

/// Registers hold sums of blocks, sums of all blocks, and what is multiplied.
int64_t QuantizedLinearKernel::getTileRows() const {
  constexpr int64_t kOthers = 8;
  return (e.target.vectorRegisters - kOthers) / (2 * kTileVectors);
}

SmallVector<QuantizedLinearKernel::Column>
QuantizedLinearKernel::getColumns(const PanelGroup &group, Value slot) {
  PanelShape shape = getShape();
  Value first =
      e.add(group.column, e.mul(slot, e.index(shape.getNumColumns())));
  SmallVector<Column> columns;
  for (int64_t vector = 0; vector < group.numVectors; ++vector) {
    Value column = shape.getColumn(first, group.numVectors, vector);
    bool isSecond = shape.pairOffset && vector >= group.numVectors / 2;
    Value number = isSecond ? e.sub(column, shape.pairOffset) : column;
    columns.push_back(
        {findInPanels(e, op, numColumns, column), number, isSecond});
  }
  return columns;
}

void QuantizedLinearKernel::packRows(Value first, Value end) {
  e.loop(first, end, 1, [&](Value row) {
    lhs.pack(readRow(e, op.getRows(), row, numSources), e.sub(row, first));
  });
}

//===----------------------------------------------------------------------===//
// A tile
//===----------------------------------------------------------------------===//

/// Asks for what is read a few kilobytes later; the hardware foresees it only
/// within a page.
void QuantizedLinearKernel::prefetchAhead(Value expert, const Column &column,
                                          Value block) {
  int64_t lines = codes.getLines(lhs.blockSize);
  Value first = e.mul(block, e.index(lines));
  int64_t bytesOfLine = 4 * *op.getPacked();
  int64_t ahead =
      CPUTarget::kCodeLinesAhead * CPUTarget::kLineBytes / bytesOfLine;
  for (int64_t line = 0; line < lines; ++line)
    prefetchLine(e, op.getW(),
                 {expert, column.place.panel,
                  e.add(first, e.index(ahead + line)), column.place.lane,
                  e.index(0)},
                 kFirstCache);
}

/// The sums of products of a block, row by row.
Values QuantizedLinearKernel::multiplyBlock(Value expert,
                                            ArrayRef<Column> columns,
                                            ValueRange rows, Value block) {
  bool areIntegers = lhs.product == CodeProduct::Bytes;
  Values products(rows.size() * columns.size(),
                  areIntegers ? e.i32(0) : e.f32(0.0));
  int64_t lines = codes.getLines(lhs.blockSize), quads = codes.getQuads();
  for (int64_t line = 0; line < lines; ++line) {
    Value number = e.add(e.mul(block, e.index(lines)), e.index(line));
    SmallVector<Values> loaded;
    for (const Column &column : columns)
      loaded.push_back(codes.load(
          {expert, column.place.panel, number, column.place.lane, e.index(0)}));
    for (int64_t quad = 0; quad < quads; ++quad) {
      Value quadOfRow = e.add(e.mul(number, e.index(quads)), e.index(quad));
      SmallVector<Values> expanded;
      for (const Values &each : loaded)
        expanded.push_back(codes.expand(each[quad]));
      for (size_t i = 0; i < expanded.front().size(); ++i)
        for (auto [row, position] : llvm::enumerate(rows)) {
          Value features = lhs.splat(position, quadOfRow)[i];
          for (size_t column = 0; column < columns.size(); ++column) {
            Value &sum = products[row * columns.size() + column];
            sum = codes.multiplyAdd(expanded[column][i], features, sum);
          }
        }
    }
  }
  return products;
}

/// The totals with a block added: scale (products - zero sum of x).
Values QuantizedLinearKernel::addBlock(Value expert, ArrayRef<Column> columns,
                                       ValueRange rows, Value block,
                                       ValueRange products, ValueRange totals) {
  int64_t group = op.getGroup().value_or(0);
  Value number = e.index(0);
  if (group)
    number = group == lhs.blockSize
                 ? block
                 : Value(arith::DivUIOp::create(
                       e, block, e.index(group / lhs.blockSize)));
  Values scales, negatedZeros;
  for (const Column &column : columns) {
    Values at{expert, column.place.panel, number, column.place.lane};
    scales.push_back(e.loadFloats(op.getScales(), at));
    Value zero = e.f32(-codes.getZero());
    if (op.getZeros())
      zero = e.sub(zero, e.loadFloats(op.getZeros(), at));
    negatedZeros.push_back(zero);
  }
  Values next;
  for (auto [row, position] : llvm::enumerate(rows)) {
    Value sum = lhs.splatSum(position, block);
    Value ofRow = lhs.splatScale(position, block);
    for (size_t column = 0; column < columns.size(); ++column) {
      size_t at = row * columns.size() + column;
      Value product = products[at];
      if (lhs.product == CodeProduct::Bytes)
        product = arith::SIToFPOp::create(e, e.floats(), product);
      product = e.fma(negatedZeros[column], sum, product);
      Value scale = scales[column];
      if (ofRow)
        scale = e.mul(scale, ofRow);
      next.push_back(e.fma(product, scale, totals[at]));
    }
  }
  return next;
}

void QuantizedLinearKernel::multiplyTile(const LayerPart &part,
                                         ArrayRef<Column> columns, Value first,
                                         int64_t numRows) {
  Values rows, positions;
  for (int64_t row = 0; row < numRows; ++row) {
    rows.push_back(e.add(first, e.index(row)));
    positions.push_back(e.sub(rows.back(), part.firstRow));
  }
  Values totals(numRows * columns.size(), e.f32(0.0));
  totals = e.loop(e.index(0), e.index(lhs.numBlocks), 1, totals,
                  [&](Value block, ValueRange carried) {
                    if (numRows <= 2)
                      for (const Column &column : columns)
                        prefetchAhead(part.expert, column, block);
                    Values products =
                        multiplyBlock(part.expert, columns, positions, block);
                    return addBlock(part.expert, columns, positions, block,
                                    products, carried);
                  });
  ProductSums all = sums.get(part);
  for (auto [i, total] : llvm::enumerate(totals)) {
    const Column &column = columns[i % columns.size()];
    Values at =
        all.at(rows[i / columns.size()], column.number, column.isSecond);
    if (codes.getUnit() != 1.0)
      total = e.mul(total, e.f32(codes.getUnit()));
    Value lanes;
    if (part.group.hasTail)
      lanes = e.firstLanes(e.sub(numColumns, column.number));
    Value before = e.loadFloats(all.memref, at, lanes);
    e.storeVector(e.add(before, total), all.memref, at, lanes);
  }
}

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

void QuantizedLinearKernel::emitPart(const LayerPart &part) {
  sums.start(part);
  Value count = e.sub(part.endRow, part.firstRow);
  int64_t tileRows = getTileRows();
  Value numTiles = arith::CeilDivSIOp::create(e, count, e.index(tileRows));
  auto getFirst = [&](Value number) -> Value {
    Value before = arith::DivSIOp::create(e, e.mul(number, count), numTiles);
    return e.add(part.firstRow, before);
  };
  // Without rows of x there is nothing to read.
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, e.index(0)), [&] {
    e.loop(e.index(0), part.group.numPanels, 1, [&](Value slot) {
      SmallVector<Column> columns = getColumns(part.group, slot);
      e.loop(e.index(0), numTiles, 1, [&](Value number) {
        Value first = getFirst(number);
        Value size = e.sub(getFirst(e.add(number, e.index(1))), first);
        e.switchIndex(size, 1, tileRows, [&](int64_t numRows) {
          multiplyTile(part, columns, first, numRows);
        });
      });
    });
  });
  sums.finish(part);
}

void QuantizedLinearKernel::emit() {
  Value numExperts = e.dim(op.getW(), 0);
  Value zero = e.index(0), last = e.sub(numExperts, e.index(1));
  Value offsets = op.getOffsets();
  sums.clearRows(zero, readRun(e, offsets, zero, numRows).begin);
  sums.clearRows(readRun(e, offsets, last, numRows).end, numRows);
  PanelShape shape = getShape();
  forEachPartOfPanels(
      e, numExperts, shape.getNumPanels(),
      [&](Value expert, Value firstPanel, Value endPanel) {
        lhs.allocate();
        ExpertRun run = readRun(e, offsets, expert, numRows);
        int64_t most = lhs.getMostRows();
        e.loop(run.begin, run.end, most, [&](Value first) {
          Value end = e.minSigned(e.add(first, e.index(most)), run.end);
          e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, zero),
                   [&] { packRows(first, end); });
          shape.forEachGroup(firstPanel, endPanel,
                             [&](const PanelGroup &group) {
                               sums.allocate(group);
                               emitPart({expert, first, end, group});
                             });
        });
      });
}

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

/// Why there is no kernel for an op with a weight of codes; empty if there is.
static StringRef whyNoKernel(GroupedLinearOp op, int64_t vectorWidth) {
  int64_t parts = op.hasPanelsOfHalves() ? 2 : 1;
  if (!op.getPacked() || *op.getPacked() % (parts * vectorWidth) != 0)
    return "expected codes in panels, or halves of panels, of whole vectors";
  if (op.getProductBlock() % vectorWidth != 0)
    return "expected groups of whole vectors";
  if (op.getFormat() == WeightFormat::Fp4E2M1 && vectorWidth != 8 &&
      vectorWidth != 16)
    return "expected vectors of 8 or 16 lanes with floats of 4 bits";
  if (cast<ShapedType>(op.getX().getType()).isDynamicDim(1))
    return "expected a static number of features";
  return "";
}

bool mlir::moe::hasQuantizedKernel(GroupedLinearOp op, int64_t vectorWidth) {
  return whyNoKernel(op, vectorWidth).empty();
}

namespace {
struct QuantizedLinearPattern
    : KernelPattern<GroupedLinearOp, QuantizedLinearKernel> {
  using KernelPattern::KernelPattern;

  LogicalResult matchAndRewrite(GroupedLinearOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.isQuantized())
      return rewriter.notifyMatchFailure(op, "expected a weight of codes");
    StringRef reason = whyNoKernel(op, options.vectorWidth);
    if (!reason.empty())
      return rewriter.notifyMatchFailure(op, reason);
    return KernelPattern::matchAndRewrite(op, rewriter);
  }
};
} // namespace

void mlir::moe::populateQuantizedLinearToCPUPatterns(
    RewritePatternSet &patterns, const CPUTarget &options) {
  patterns.add<QuantizedLinearPattern>(patterns.getContext(), options);
}
