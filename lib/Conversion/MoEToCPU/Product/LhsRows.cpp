//===- LhsRows.cpp - The left operand as rows of tiles --------------------===//

#include "LhsRows.h"

using namespace mlir;
using namespace mlir::moe;

LhsRows::LhsRows(const ProductProblem &problem, int64_t numChains)
    : problem(problem), e(problem.e) {
  if (mustWiden() || hasCacheAliasing())
    packed =
        e.scratch({e.getIndexAttr(problem.getTileRows()),
                   e.getIndexAttr(numChains * problem.getPackedKsOfChain())},
                  problem.getPackedType());
}

/// Whether rows can only be read from a copy: those of 16 bits, which it
/// widens, unless all of their ks are pairs, and those that end within a pair.
bool LhsRows::mustWiden() const {
  std::optional<int64_t> numK = getConstantIntValue(problem.numK);
  bool isEven = numK && *numK % 2 == 0;
  return (!getElementType(problem.lhs.memref).isF32() &&
          !(problem.usesBf16Dot && isEven)) ||
         (problem.getRhsKPack() == 2 && !isEven);
}

/// Whether rows are a multiple of 4 KiB apart, or of 2 KiB where the first
/// cache holds a panel as well: several tiles of them compete for few places of
/// it, and are read from copies.
bool LhsRows::hasCacheAliasing() const {
  auto type = cast<MemRefType>(problem.lhs.memref.getType());
  SmallVector<int64_t> strides;
  int64_t offset;
  if (!problem.lhs.isContiguous || type.getRank() < 2 ||
      failed(type.getStridesAndOffset(strides, offset)))
    return false;
  int64_t stride = strides[strides.size() - 2];
  int64_t panelBytes =
      4 * kProductChain * problem.shape.getNumVectors() * e.width;
  bool holdsPanel = panelBytes <= CPUTarget::kL1Bytes / 2;
  int64_t period =
      holdsPanel ? CPUTarget::kL1AliasBytes / 2 : CPUTarget::kL1AliasBytes;
  return !ShapedType::isDynamic(stride) && stride > 0 &&
         stride * type.getElementTypeBitWidth() / 8 % period == 0;
}

void LhsRows::packOnlyToWiden() {
  if (!mustWiden())
    packed = {};
}

bool LhsRows::packAllKs(const RowRange &rows) {
  std::optional<int64_t> numK = getConstantIntValue(problem.numK);
  if (!mustWiden() || !numK)
    return false;
  int64_t size = llvm::alignTo(*numK, 2 * e.width);
  if (problem.getTileRows() * size * 4 > e.target.l2Bytes / 4)
    return false;
  packed =
      e.scratch({e.getIndexAttr(problem.getTileRows()), e.getIndexAttr(size)},
                problem.getPackedType());
  Value zero = e.index(0);
  e.loop(zero, e.sub(rows.end, rows.first), 1, [&](Value number) {
    pack(e.add(rows.first, number), number, zero, problem.numK);
  });
  return true;
}

TileRows LhsRows::get(Value firstRow, int64_t numRows, Value k, Value count,
                      bool mayPack) const {
  TileRows tile;
  for (int64_t i = 0; i < numRows; ++i) {
    tile.rows.push_back(e.add(firstRow, e.index(i)));
    tile.lhsRows.push_back(problem.lhs.getMemrefRow(tile.rows.back()));
  }
  if (packed && mayPack)
    packRows(tile.lhsRows, e.index(0), k, count);
  return tile;
}

void LhsRows::pack(Value row, Value number, Value k, Value count) const {
  packRows(problem.lhs.getMemrefRow(row), number, k, count);
}

/// 16-bit numbers as splats read them: widened, or in pairs, of which the last
/// may have a zero.
void LhsRows::packRows(ArrayRef<Value> lhsRows, Value firstNumber, Value k,
                       Value count) const {
  const ProductLhs &lhs = problem.lhs;
  if (!lhs.isContiguous) {
    e.loop(e.index(0), count, 1, [&](Value packedK) {
      for (auto [i, row] : llvm::enumerate(lhsRows))
        e.store(e.toF32(e.load(lhs.memref, lhs.at(row, e.add(k, packedK)))),
                packed, {e.add(firstNumber, e.index(i)), packedK});
    });
    return;
  }
  int64_t perVector = (problem.usesBf16Dot ? 2 : 1) * e.width;
  std::optional<int64_t> constant = getConstantIntValue(count);
  bool isWhole = constant && *constant % perVector == 0;
  e.loop(e.index(0), count, perVector, [&](Value first) {
    Value rest = isWhole ? Value() : Value(e.sub(count, first));
    for (auto [i, row] : llvm::enumerate(lhsRows)) {
      Values at = lhs.at(row, e.add(k, first));
      Value lanes = problem.usesBf16Dot
                        ? e.loadPairs(lhs.memref, at, rest)
                        : e.loadFloats(lhs.memref, at,
                                       rest ? e.firstLanes(rest) : Value());
      e.storeVector(lanes, packed,
                    {e.add(firstNumber, e.index(i)), problem.toPackedK(first)});
    }
  });
}

Value LhsRows::splat(Value number, Value lhsRow, Value k, Value packedK) const {
  if (packed)
    return e.splat(e.load(packed, {number, packedK}));
  Values at = problem.lhs.at(lhsRow, k);
  if (!problem.usesBf16Dot)
    return e.splat(e.load(problem.lhs.memref, at));
  return e.splatPair(problem.lhs.memref, at);
}
