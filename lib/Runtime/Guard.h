//===- Guard.h - Ending a kernel that cannot go on --------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_GUARD_H
#define MOE_LIB_RUNTIME_GUARD_H

#include <stdint.h>

namespace moe::runtime {

/// Why a kernel ended; plain data, since it is written before a jump.
struct Failure {
  /// As moe_call returns it; 0 is none.
  int64_t status = 0;
  /// Of a failed assertion, with a zero at its end.
  char message[512];
};

/// Calls body(context), which may end in `fail`: then sets `failure`. What the
/// body allocated in this thread and did not free is free then. The frames
/// between `guard` and `fail` are left without running destructors: compiled
/// code and the C functions of this library.
void guard(void (*body)(void *), void *context, Failure &failure);

/// Ends the innermost `guard` of this thread; without one, the process.
[[noreturn]] void fail(const Failure &failure);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_GUARD_H
