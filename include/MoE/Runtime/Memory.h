//===- Memory.h - Memory and errors of compiled CPU kernels -----*- C++ -*-===//
//
// Kernels keep small buffers on the stack and ask for the others here. One that
// gets none cannot go on, nor one that is given an index out of range: its call
// ends, what it holds is freed, and moe_call says so. Plain C, as Parallel.h.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_MEMORY_H
#define MOE_RUNTIME_MEMORY_H

#include "MoE/Runtime/Parallel.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Why a call ended, as moe_call returns it: the kinds of moe.assert.
enum MoECallError {
  MoECallError_Index = -1,
  MoECallError_ZeroDivision = -2,
  MoECallError_Value = -3,
};

/// Calls a packed entry `__moe_call_f` of compiled code. Returns 0, the number
/// of bytes that the kernel asked for and did not get, or a MoECallError, which
/// is below 0; of these the results hold anything. Without moe_call around it
/// such a kernel ends the process with a message.
MOE_RUNTIME_EXPORT int64_t moe_call(void (*entry)(void **values),
                                    void **values);

/// The message of the last moe_call of this thread that returned a
/// MoECallError; it stays until the next one.
MOE_RUNTIME_EXPORT const char *moe_error(void);

/// What a failed moe.assert calls: ends the call. `error` is the kind; values
/// stand in the places {0} to {7} of the message.
MOE_RUNTIME_EXPORT void moe_fail(int32_t error, const char *message,
                                 const int64_t *values);

/// What MLIR's finalize-memref-to-llvm calls for memref.alloc.
MOE_RUNTIME_EXPORT void *_mlir_memref_to_llvm_alloc(size_t bytes);
/// What it calls for memref.dealloc.
MOE_RUNTIME_EXPORT void _mlir_memref_to_llvm_free(void *memory);

#ifdef __cplusplus
}
#endif

#endif // MOE_RUNTIME_MEMORY_H
