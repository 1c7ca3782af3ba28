//===- Parallel.h - Threads of compiled CPU kernels -------------*- C++ -*-===//
//
// The only thing that a compiled CPU kernel asks of its surroundings besides
// libc: a parallel loop. Plain C, no LLVM, so that C programs can link kernels
// against libmoe_runtime too.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_PARALLEL_H
#define MOE_RUNTIME_PARALLEL_H

#include <stdint.h>

#if defined(__GNUC__)
#define MOE_RUNTIME_EXPORT __attribute__((visibility("default")))
#else
#define MOE_RUNTIME_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// A loop body over the half-open range of iterations [begin, end).
typedef void (*MoEParallelBody)(int64_t begin, int64_t end, void *context);

/// Runs [0, count) as contiguous chunks, at most two a thread and each
/// non-empty, and returns when all are done. A thread's second chunk mirrors
/// its first, so that work which grows with the iteration is dealt out evenly.
/// Inside another parallel region, and for one iteration or one thread, the
/// body runs in the calling thread. The partition decides only who computes an
/// iteration, never its result: kernels write disjoint slices.
MOE_RUNTIME_EXPORT void moe_parallel_for(int64_t count, MoEParallelBody body,
                                         void *context);

/// The most threads a loop may use. 0, the initial value, follows OpenMP's own
/// setting, which in a process with torch is torch.set_num_threads.
/// Negative values count as 0.
MOE_RUNTIME_EXPORT void moe_set_num_threads(int32_t threads);

/// The number of threads that a large loop started here would use. A process
/// that was forked, rather than started, has one: OpenMP's do not survive it.
MOE_RUNTIME_EXPORT int32_t moe_get_num_threads(void);

#ifdef __cplusplus
}
#endif

#endif // MOE_RUNTIME_PARALLEL_H
