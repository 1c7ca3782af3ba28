//===- SoftmaxMixPairs.h - A tile's operands and pairs ----------*- C++ -*-===//
//
// What the kernels of softmax_mix and of its gradient have in common before and
// behind the products of a register tile: views of the operands, and the tile's
// rows and vectors of columns as pairs of tokens.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXPAIRS_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXPAIRS_H

#include "SoftmaxMixTiles.h"

#include "MoE/Dialect/MoE/IR/PairLogits.h"

namespace mlir::moe {

/// `memref` at one batch and, where `head` is given, head; null for null.
Value viewTokens(Emitter &e, Value memref, Value batch, Value head = {});
/// A bias at one batch and head, whose dims of 1 are broadcast.
Value viewBias(Emitter &e, Value memref, Value batch, Value head);

/// Whether the group of rows from `position` on can form a visible pair with
/// the block of columns from `firstColumn` on; null for always.
Value isTileVisible(Emitter &e, const PairRule &rule, Value position,
                    Value firstColumn);

/// A row and a vector of columns as pairs: their positions, as far as `rule`
/// asks for them, and their levels, which may be null.
PairTerms makePairs(Emitter &e, const PairRule &rule, Value position,
                    Value firstColumn, Value rowLevel, Value columnLevels);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXPAIRS_H
