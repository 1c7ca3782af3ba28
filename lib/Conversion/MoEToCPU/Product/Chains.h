//===- Chains.h - The order in which products are added ---------*- C++ -*-===//
//
// A sum over k is formed in chains: some products are added one after the other
// from 0 on, and the sums of chains are added in their order. One long chain
// would round the sum of k products k times. The lengths of chains are fixed,
// so that a result depends on k alone: not on the number of rows, their places,
// tiles or threads, nor on where weights lie.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_CHAINS_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_CHAINS_H

#include "Emit/Emitter.h"

namespace mlir::moe {

/// The products of a chain, or pairs of them where they are summed by one
/// instruction: of a linear layer, and of the features of two tokens, whose
/// log-sum-exps would leave their tolerance from 352 features on.
inline constexpr int64_t kProductChain = 256, kFeatureChain = 64;

/// The chains of a sum over `numK` ks, `length` of them each but for the last.
struct Chains {
  Value numK;
  int64_t length;

  /// Calls `body` for each chain from k `begin` on, with its first k.
  void forEach(Emitter &e, Value begin,
               function_ref<void(Value first)> body) const;
  /// The ks of the chain from `first` on. Bounds of loops that are constants
  /// need no code for the rest.
  Value getCount(Emitter &e, Value first) const;
  /// Where the chain from `first` on ends.
  Value getEnd(Emitter &e, Value first) const;
  /// The sums over all chains in order; `zeros` for none.
  Values sum(Emitter &e, ValueRange zeros,
             function_ref<Values(Value first, Value end)> sumChain) const;
};

/// `totals` with what one more chain came to.
Values addChain(Emitter &e, ValueRange totals, ValueRange chain);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_CHAINS_H
