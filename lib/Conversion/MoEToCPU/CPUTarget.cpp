//===- CPUTarget.cpp - What kernels ask of a CPU --------------------------===//

#include "MoE/Conversion/CPUTarget.h"

#include "Product/Chains.h"

#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/MathExtras.h"

#include <algorithm>

using namespace mlir::moe;

int64_t CPUTarget::getProductVectors() const {
  return productVectors ? productVectors : vectorRegisters / 8;
}

int64_t CPUTarget::getProductRows() const {
  if (productRows)
    return productRows;
  int64_t vectors = getProductVectors();
  return std::max<int64_t>((vectorRegisters - vectors - 1) / vectors, 1);
}

int64_t CPUTarget::getProductPanels() const {
  if (productPanels)
    return productPanels;
  constexpr int64_t kLaneBytes = 4;
  int64_t panelBytes =
      kLaneBytes * kProductChain * getProductVectors() * vectorWidth;
  return std::max<int64_t>(l2Bytes / 4 / panelBytes, 1);
}

llvm::Error CPUTarget::verify() const {
  struct Rule {
    const char *name;
    int64_t found;
    bool isKept;
    const char *expected;
  };
  int64_t vectors = getProductVectors(), panels = getProductPanels();
  auto isUpTo = [](int64_t number, int64_t most) {
    return number >= 0 && number <= most;
  };
  const Rule rules[] = {
      {"vector-width", vectorWidth,
       vectorWidth >= 4 && llvm::isPowerOf2_64(vectorWidth),
       "a power of two of at least 4"},
      {"vector-width", vectorWidth, !bf16Dot || vectorWidth == 16,
       "16 with 'bf16-dot'"},
      {"bf16-dot", bf16Dot, bf16Dot || !bf16Tiles, "true with 'bf16-tiles'"},
      {"vector-width", vectorWidth,
       !int8Dot || vectorWidth == 8 || vectorWidth == 16,
       "8 or 16 with 'int8-dot'"},
      {"vector-width", vectorWidth,
       !bytePairs || vectorWidth == 8 || vectorWidth == 16,
       "8 or 16 with 'byte-pairs'"},
      {"vector-width", vectorWidth, !byteTable || vectorWidth == 16,
       "16 with 'byte-table'"},
      {"vector-registers", vectorRegisters, vectorRegisters >= 16,
       "at least 16"},
      {"l2-bytes", l2Bytes, l2Bytes > 0, "positive"},
      // A gate and what it multiplies are the halves of a panel.
      {"product-vectors", vectors, vectors > 0 && vectors % 2 == 0, "even"},
      {"product-rows", productRows, productRows >= 0, "0 or positive"},
      {"product-panels", panels, isUpTo(panels, kMostPanels), "0 to 64"},
      {"expert-rows", expertRows, isUpTo(expertRows, kMostRows), "0 to 1024"},
      {"mix-queries", mixQueries,
       isUpTo(mixQueries, kMostRows) && mixQueries % kMixRows == 0,
       "a multiple of the 6 rows of a tile, 0 to 1024"},
      {"fetch-bytes", fetchBytes, isUpTo(fetchBytes, kMostNumber),
       "0 to 1048576"}};
  for (const Rule &rule : rules)
    if (!rule.isKept)
      return llvm::createStringError(
          llvm::formatv("expected '{0}' to be {1}, found {2}", rule.name,
                        rule.expected, rule.found)
              .str());
  int64_t used = vectors * (getProductRows() + 1) + 1;
  if (used <= vectorRegisters)
    return llvm::Error::success();
  return llvm::createStringError(
      llvm::formatv("expected 'product-rows' ({0}) by 'product-vectors' ({1}) "
                    "to take at most {2} registers with one k of both, found "
                    "{3}",
                    getProductRows(), vectors, vectorRegisters, used)
          .str());
}
