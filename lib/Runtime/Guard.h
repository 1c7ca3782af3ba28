//===- Guard.h - Ending a kernel that has no memory -------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_GUARD_H
#define MOE_LIB_RUNTIME_GUARD_H

#include <stdint.h>

namespace moe::runtime {

/// Calls body(context), which may end in `fail`. Returns 0, or the bytes that
/// were missing; what the body allocated in this thread and did not free is
/// free then. The frames between `guard` and `fail` are left without running
/// destructors: compiled code and the C functions of this library.
int64_t guard(void (*body)(void *), void *context);

/// Ends the innermost `guard` of this thread; without one, the process.
[[noreturn]] void fail(int64_t bytes);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_GUARD_H
