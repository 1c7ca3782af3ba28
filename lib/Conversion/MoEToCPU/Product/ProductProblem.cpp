//===- ProductProblem.cpp - The operands of a matrix product --------------===//

#include "ProductProblem.h"

#include "MatrixUnit.h"

using namespace mlir;
using namespace mlir::moe;

static bool canUseBf16Dot(const Emitter &e, const ProductLhs &lhs,
                          const ProductRhs &rhs) {
  return e.target.bf16Dot && getElementType(lhs.memref).isBF16() &&
         getElementType(rhs.memref).isBF16() && lhs.isContiguous;
}

/// Steps of ks are fixed, and there are columns of a tile at least. Not every
/// layout needs both, but all have to give the same bits.
static bool canUseTiles(const Emitter &e, const PanelShape &shape, Value numK) {
  std::optional<int64_t> ks = getConstantIntValue(numK);
  std::optional<int64_t> columns = getConstantIntValue(shape.numColumns);
  return e.target.bf16Tiles && ks && *ks > 0 && *ks % 2 == 0 && columns &&
         *columns >= kUnitTileSize;
}

ProductProblem::ProductProblem(Emitter &e, ProductLhs lhs, ProductRhs rhs,
                               ProductSums sums, const PanelShape &shape,
                               Value numK)
    : e(e), lhs(std::move(lhs)), rhs(std::move(rhs)), sums(std::move(sums)),
      shape(shape), numK(numK),
      usesBf16Dot(canUseBf16Dot(e, this->lhs, this->rhs)),
      usesTiles(usesBf16Dot && canUseTiles(e, shape, numK)),
      chains{numK, usesBf16Dot ? 2 * kProductChain : kProductChain} {}

int64_t ProductProblem::getRhsKPack() const {
  bool isPair =
      rhs.layout == RhsLayout::Panels && getElementType(rhs.memref).isBF16();
  return isPair ? 2 : 1;
}

int64_t ProductProblem::getTileKPack() const {
  return usesBf16Dot ? 2 : getRhsKPack();
}

int64_t ProductProblem::getLaneKPack() const {
  return getElementType(rhs.memref).isBF16() ? 2 : 1;
}

Value ProductProblem::toPackedK(Value k) const {
  return usesBf16Dot ? Value(arith::DivSIOp::create(e, k, e.index(2))) : k;
}

Type ProductProblem::getPackedType() const {
  return usesBf16Dot ? Type(e.getI32Type()) : e.getF32Type();
}

int64_t ProductProblem::getPackedKsOfChain() const {
  int64_t ks = chains.length;
  if (std::optional<int64_t> constant = getConstantIntValue(numK))
    ks = std::min(ks, std::max<int64_t>(*constant, 1));
  return llvm::alignTo(usesBf16Dot ? llvm::divideCeil(ks, 2) : ks, e.width);
}

/// Pairs of columns that are multiplied one after the other take the registers
/// of a row.
int64_t ProductProblem::getTileRows() const {
  int64_t rows = e.target.getProductRows();
  bool isTight = e.target.vectorRegisters < 32;
  return getTileKPack() == 2 && !usesBf16Dot && isTight
             ? std::max<int64_t>(rows - 1, 1)
             : rows;
}

bool ProductProblem::isLatencyBound() const {
  return !usesBf16Dot && e.width < CPUTarget::kLanesThatHideLatency;
}
