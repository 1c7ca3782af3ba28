//===- Memory.h - Memory of compiled CPU kernels ----------------*- C++ -*-===//
//
// Kernels keep small buffers on the stack and ask for the others here. One that
// gets none cannot go on: its call ends, what it holds is freed, and moe_call
// says so. Plain C, as Parallel.h.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_MEMORY_H
#define MOE_RUNTIME_MEMORY_H

#include "MoE/Runtime/Parallel.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Calls a packed entry `__moe_call_f` of compiled code. Returns 0, or the
/// number of bytes that the kernel asked for and did not get: then its results
/// hold anything. Without moe_call around it such a kernel ends the process
/// with a message.
MOE_RUNTIME_EXPORT int64_t moe_call(void (*entry)(void **values),
                                    void **values);

/// What MLIR's finalize-memref-to-llvm calls for memref.alloc and .dealloc.
MOE_RUNTIME_EXPORT void *_mlir_memref_to_llvm_alloc(size_t bytes);
MOE_RUNTIME_EXPORT void _mlir_memref_to_llvm_free(void *memory);

#ifdef __cplusplus
}
#endif

#endif // MOE_RUNTIME_MEMORY_H
