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
                e.add(getGroup(block), e.index(CPUTarget::kScaleLinesAhead)),
                tile.columns.front().place.lane},
               kFirstCache);
}

void QuantizedBlocks::prefetchCodes(Value expert, const QuantizedColumn &column,
                                    Value block, int64_t blocksAhead) {
  int64_t lines = getBlockQuads() / codes.getQuads();
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
    int64_t lines = getBlockQuads() / quads;
    Value number = e.add(e.mul(block, e.index(lines)), e.index(quad / quads));
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

Value QuantizedBlocks::getGroup(Value block) {
  int64_t group = op.getGroup().value_or(0);
  if (!group)
    return e.index(0);
  int64_t blocks = group / lhs.blockSize;
  return blocks == 1 ? block
                     : Value(arith::DivUIOp::create(e, block, e.index(blocks)));
}

QuantizedBlocks::Scales QuantizedBlocks::loadScales(const QuantizedTile &tile,
                                                    Value block) {
  Value number = getGroup(block);
  Scales of;
  for (const QuantizedColumn &column : tile.columns) {
    Values at{tile.expert, column.place.panel, number, column.place.lane};
    of.scales.push_back(e.loadFloats(op.getScales(), at));
    if (!codes.hasZero())
      continue;
    Value zero = e.f32(-codes.getZero());
    if (op.getZeros())
      zero = e.sub(zero, e.loadFloats(op.getZeros(), at));
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
    for (size_t column = 0; column < tile.columns.size(); ++column) {
      size_t at = row * tile.columns.size() + column;
      Value product = products[at];
      if (areIntegers(lhs.product))
        product = arith::SIToFPOp::create(e, e.floats(), product);
      if (sum)
        product = e.fma(of.negatedZeros[column], sum, product);
      Value scale = of.scales[column];
      if (ofRow)
        scale = e.mul(scale, ofRow);
      next.push_back(e.fma(product, scale, totals[at]));
    }
  }
  return next;
}
