//===- ChunkProducts.h - Products of chunks, and their sums -----*- C++ -*-===//
//
// What blocks of the loops of FewTokenRouters.cpp compute: linalg ops of the
// schedules chunk_products and chunk_sums.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_CHUNKPRODUCTS_H
#define MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_CHUNKPRODUCTS_H

#include "FeatureChunks.h"
#include "ThreadLowerings.h"

namespace mlir::moe {

/// Tokens that a block multiplies.
inline constexpr int64_t kChunkTokens = 32;
/// The warps of a block: two for the tokens by two for the experts.
inline constexpr int64_t kChunkExpertWarps = 2;
inline constexpr int64_t kChunkThreads =
    kChunkTokens / 16 * kChunkExpertWarps * kWarpSize;

void populateChunkProductToThreadsPatterns(RewritePatternSet &patterns,
                                           BlockShape block);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_CHUNKPRODUCTS_H
