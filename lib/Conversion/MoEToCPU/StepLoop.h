//===- StepLoop.h - Loops of multiply-adds ----------------------*- C++ -*-===//
//
// What the matrix products of all kernels have in common: a loop over steps,
// which carries the sums of a register tile, and what it asks for ahead.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_STEPLOOP_H
#define MOE_LIB_CONVERSION_MOETOCPU_STEPLOOP_H

#include "Emitter.h"

namespace mlir::moe {

/// Steps in blocks, for each of which something is fetched.
struct StepBlocks {
  Value first, end;
  int64_t size;
  /// Whether the last block has as many steps as the others.
  bool areWhole;
};

/// A loop over steps that carries sums. What is to come nearer meanwhile
/// `fetch` asks for, a block of steps at a time: addresses are not computed in
/// the loop over steps, which has a few cycles for each. Null: nothing is.
Values loopOverSteps(Emitter &e, const StepBlocks &blocks, ValueRange carried,
                     function_ref<void(Value first)> fetch,
                     function_ref<Values(Value step, ValueRange carried)> body);

/// Asks for the line of `memref` at `indices`, which is read soon from the
/// first cache or from another.
void prefetchLine(Emitter &e, Value memref, ValueRange indices,
                  unsigned locality);
/// `locality` of the first and of the second cache.
inline constexpr unsigned kFirstCache = 3, kSecondCache = 2;

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_STEPLOOP_H
