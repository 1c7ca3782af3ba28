//===- QuantizedBlocks.cpp - Blocks of codes times tiles of rows ----------===//

#include "QuantizedBlocks.h"

#include "Product/RegisterTile.h"

using namespace mlir;
using namespace mlir::moe;

void QuantizedBlocks::prefetchAhead(const QuantizedTile &tile, Value block) {
  if (!e.target.streamPrefetcher)
    for (const QuantizedColumn &column : tile.columns)
      prefetchCodes(tile.expert, column, block);
  prefetchLine(e, op.getScales(),
               {tile.expert, tile.columns.front().place.panel,
                e.add(getScaleRow(block), e.index(CPUTarget::kScaleLinesAhead)),
                tile.columns.front().place.lane},
               kFirstCache);
}

void QuantizedBlocks::prefetchCodes(Value expert, const QuantizedColumn &column,
                                    Value block, int64_t blocksAhead) {
  int64_t lines = codes.getLines(getBlockQuads());
  Value first = e.mul(block, e.index(lines));
  int64_t bytesOfLine = 4 * *op.getPacked();
  int64_t ahead =
      CPUTarget::kCodeLinesAhead * CPUTarget::kLineBytes / bytesOfLine;
  if (blocksAhead)
    ahead = blocksAhead * lines;
  for (int64_t line = 0; line < lines; ++line)
    prefetchLine(e, op.getW(),
                 {expert, column.place.panel,
                  e.add(first, e.index(ahead + line)), column.place.lane,
                  e.index(0)},
                 kFirstCache);
}

SmallVector<Values> QuantizedBlocks::readQuad(const QuantizedTile &tile,
                                              Value block, int64_t quad,
                                              SmallVector<Values> &line) {
  int64_t quads = codes.getQuads();
  if (quad % quads == 0) {
    Value number = e.add(e.mul(block, e.index(codes.getLines(getBlockQuads()))),
                         e.index(codes.getLines(quad)));
    line.clear();
    for (const QuantizedColumn &column : tile.columns)
      line.push_back(codes.load({tile.expert, column.place.panel, number,
                                 column.place.lane, e.index(0)}));
  }
  return llvm::map_to_vector(line, [&](const Values &each) {
    return codes.expand(each[quad % quads]);
  });
}

Values QuantizedBlocks::multiplyRun(
    const QuantizedTile &tile, Value firstQuad, ValueRange sums,
    function_ref<Values(int64_t quad, int64_t i)> read) {
  int64_t numColumns = tile.columns.size();
  Values parts = sums;
  if (codes.sumsWords())
    parts.assign(sums.size(), Value());
  for (int64_t quad = 0; quad < getRun(); ++quad) {
    Value quadOfRow = e.add(firstQuad, e.index(quad));
    // Registers hold the sums, one vector of each column, and one of a row.
    for (int64_t i = 0; i < codes.getNumExpanded(); ++i) {
      Values weights = read(quad, i);
      for (auto [row, position] : llvm::enumerate(tile.positions)) {
        Value features = lhs.splat(position, quadOfRow, i);
        for (int64_t column = 0; column < numColumns; ++column) {
          Value &part = parts[row * numColumns + column];
          part = codes.multiplyAdd(weights[column], features, part);
        }
      }
    }
  }
  if (codes.sumsWords())
    for (auto [part, sum] : llvm::zip_equal(parts, sums))
      part = e.addWords(part, sum);
  return parts;
}

Values QuantizedBlocks::multiplyBlock(const QuantizedTile &tile, Value block) {
  Values products(tile.rows.size() * tile.columns.size(), getZeroSum());
  SmallVector<Values> line, weights;
  for (int64_t first = 0; first < getBlockQuads(); first += getRun()) {
    Value number =
        e.add(e.mul(block, e.index(getBlockQuads())), e.index(first));
    auto read = [&](int64_t quad, int64_t i) {
      if (i == 0)
        weights = readQuad(tile, block, first + quad, line);
      return llvm::map_to_vector(
          weights, [&](const Values &each) -> Value { return each[i]; });
    };
    products = multiplyRun(tile, number, products, read);
  }
  return products;
}

static Value divide(Emitter &e, Value number, int64_t by) {
  return by == 1 ? number
                 : Value(arith::DivUIOp::create(e, number, e.index(by)));
}

int64_t QuantizedBlocks::getSuperblock() {
  return op.hasTwoLevels() ? GroupedLinearOp::kSuperblock / lhs.blockSize : 0;
}

Value QuantizedBlocks::getScaleRow(Value block) {
  int64_t group = op.getGroup().value_or(0);
  if (!group)
    return e.index(0);
  Value number = divide(e, block, group / lhs.blockSize);
  if (!op.hasTwoLevels())
    return number;
  // Behind the bytes of each superblock before it lie those of an f16.
  Value superblock = divide(e, block, getSuperblock());
  return e.add(number, e.mul(superblock, e.index(2)));
}

Values QuantizedBlocks::loadUnits(Value operand, const QuantizedTile &tile,
                                  Value superblock) {
  auto shorts = VectorType::get({e.width}, e.getI16Type());
  Value eight =
      arith::ConstantOp::create(e, DenseElementsAttr::get(shorts, int16_t(8)));
  int64_t size = op.getSuperblockScales();
  Value low = e.add(e.mul(superblock, e.index(size)), e.index(size - 2));
  return llvm::map_to_vector(tile.columns, [&](const QuantizedColumn &column) {
    auto load = [&](Value row) -> Value {
      Values at{tile.expert, column.place.panel, row, column.place.lane};
      return arith::ExtUIOp::create(e, shorts, e.loadVector(operand, at));
    };
    Value high = arith::ShLIOp::create(e, load(e.add(low, e.index(1))), eight);
    Value halves =
        vector::BitCastOp::create(e, VectorType::get({e.width}, e.getF16Type()),
                                  arith::OrIOp::create(e, high, load(low)));
    return Value(arith::ExtFOp::create(e, e.floats(), halves));
  });
}

QuantizedBlocks::Units QuantizedBlocks::loadUnits(const QuantizedTile &tile,
                                                  Value superblock) {
  Units units{loadUnits(op.getScales(), tile, superblock), {}};
  if (op.getZeros())
    units.ofMinima = loadUnits(op.getZeros(), tile, superblock);
  return units;
}

QuantizedBlocks::Scales QuantizedBlocks::loadScales(const QuantizedTile &tile,
                                                    Value block) {
  Units units;
  if (op.hasTwoLevels())
    units = loadUnits(tile, divide(e, block, getSuperblock()));
  return loadScales(tile, block, units);
}

QuantizedBlocks::Scales QuantizedBlocks::loadScales(const QuantizedTile &tile,
                                                    Value block,
                                                    const Units &units) {
  Value row = getScaleRow(block);
  Scales of;
  for (auto [i, column] : llvm::enumerate(tile.columns)) {
    Values at{tile.expert, column.place.panel, row, column.place.lane};
    auto load = [&](Value operand, ArrayRef<Value> units) -> Value {
      if (!op.hasTwoLevels())
        return e.loadFloats(operand, at);
      Value bytes =
          arith::ExtSIOp::create(e, e.ints(), e.loadVector(operand, at));
      return e.mul(arith::SIToFPOp::create(e, e.floats(), bytes), units[i]);
    };
    of.scales.push_back(load(op.getScales(), units.ofScales));
    Value zero = e.f32(-codes.getZero());
    bool hasZero = codes.getZero() != 0.0;
    if (op.getZeros()) {
      Value given = load(op.getZeros(), units.ofMinima);
      if (op.hasTwoLevels()) {
        of.negatedMinima.push_back(e.neg(given));
      } else {
        zero = e.sub(zero, given);
        hasZero = true;
      }
    }
    if (hasZero)
      of.negatedZeros.push_back(zero);
  }
  return of;
}

Values QuantizedBlocks::addBlock(const QuantizedTile &tile, Value block,
                                 const Scales &of, ValueRange products,
                                 ValueRange totals) {
  Values next;
  for (auto [row, position] : llvm::enumerate(tile.positions)) {
    Value sum = codes.hasZero() ? lhs.splatSum(position, block) : Value();
    Value ofRow = lhs.splatScale(position, block);
    Value scaledSum = sum;
    if (ofRow && !of.negatedMinima.empty())
      scaledSum = e.mul(sum, ofRow);
    for (size_t column = 0; column < tile.columns.size(); ++column) {
      size_t at = row * tile.columns.size() + column;
      Value product = products[at];
      if (areIntegers(lhs.product))
        product = arith::SIToFPOp::create(e, e.floats(), product);
      if (!of.negatedZeros.empty())
        product = e.fma(of.negatedZeros[column], sum, product);
      Value scale = of.scales[column], total = totals[at];
      if (ofRow)
        scale = e.mul(scale, ofRow);
      if (!of.negatedMinima.empty())
        total = e.fma(of.negatedMinima[column], scaledSum, total);
      next.push_back(e.fma(product, scale, total));
    }
  }
  return next;
}

Values QuantizedBlocks::multiplyBlocks(const QuantizedTile &tile,
                                       ValueRange totals, bool prefetches) {
  auto addBlocks = [&](Value begin, Value end, ValueRange before,
                       const Units &units) {
    return e.loop(begin, end, 1, before, [&](Value block, ValueRange carried) {
      if (prefetches)
        prefetchAhead(tile, block);
      return addBlock(tile, block, loadScales(tile, block, units),
                      multiplyBlock(tile, block), carried);
    });
  };
  Value zero = e.index(0), numBlocks = e.index(lhs.numBlocks);
  int64_t size = getSuperblock();
  if (!size)
    return addBlocks(zero, numBlocks, totals, {});
  return e.loop(
      zero, numBlocks, size, totals, [&](Value first, ValueRange carried) {
        Value end = e.minSigned(e.add(first, e.index(size)), numBlocks);
        Units units = loadUnits(tile, divide(e, first, size));
        return addBlocks(first, end, carried, units);
      });
}
