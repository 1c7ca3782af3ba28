/*===- Compiler.h - The compiler as a C library -------------------*- C -*-===*\
|*                                                                            *|
|* Parse, run passes, compile and call: everything that a binding in another  *|
|* language needs, with opaque handles and no MLIR types. The Python module   *|
|* is built on this header alone.                                             *|
|*                                                                            *|
|* Functions that can fail return a MoEError, null on success; the caller     *|
|* owns it. Outputs are written only on success. Modules are independent of   *|
|* each other: different threads may use different modules freely, one module *|
|* serves one thread at a time.                                               *|
|*                                                                            *|
\*===----------------------------------------------------------------------===*/

#ifndef MOE_C_COMPILER_H
#define MOE_C_COMPILER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct MoEOpaqueError *MoEError;
typedef struct MoEOpaqueModule *MoEModule;
typedef struct MoEOpaqueExecutable *MoEExecutable;
typedef const struct MoEOpaqueFunction *MoEFunction;
typedef struct MoEOpaqueBytes *MoEBytes;

/// Bytes that something else owns; need not end in a NUL.
typedef struct MoEStringRef {
  const char *data;
  size_t length;
} MoEStringRef;

/* Errors: at least one diagnostic, each "file:line:col: error: ..." possibly
   with notes on further lines. The strings live as long as the error. */
size_t moeErrorGetNumDiagnostics(MoEError error);
MoEStringRef moeErrorGetDiagnostic(MoEError error, size_t index);
void moeErrorDestroy(MoEError error);

/* Text or binary results. */
MoEStringRef moeBytesGet(MoEBytes bytes);
/// Warnings and remarks of the compilation that made the bytes.
size_t moeBytesGetNumRemarks(MoEBytes bytes);
MoEStringRef moeBytesGetRemark(MoEBytes bytes, size_t index);
void moeBytesDestroy(MoEBytes bytes);

/* Modules. */
MoEError moeModuleParse(MoEStringRef source, MoEStringRef filename,
                        bool allowBytecode, MoEModule *module);
MoEError moeModuleClone(MoEModule module, MoEModule *clone);
void moeModuleDestroy(MoEModule module);
MoEBytes moeModulePrint(MoEModule module, bool debugInfo);
MoEBytes moeModuleBytecode(MoEModule module);
/// Runs a textual pipeline in place: "moe-to-cpu", "builtin.module(...)". After
/// a failure the module may be half lowered.
MoEError moeModuleRun(MoEModule module, MoEStringRef pipeline);
/// Asks for a kernel, "<schedule = mma>" say, for all ops of a name,
/// "softmax_mix" say, that ask for none themselves.
MoEError moeModuleSetKernelConfig(MoEModule module, MoEStringRef opName,
                                  MoEStringRef config);
/// Warnings and remarks of the last parse or run.
size_t moeModuleGetNumRemarks(MoEModule module);
MoEStringRef moeModuleGetRemark(MoEModule module, size_t index);

/* Compilation from source. An empty dumpDir dumps nothing. */
/// `cpu` is "native" or a name that LLVM knows for this machine's architecture.
MoEError moeCompileObject(MoEStringRef source, MoEStringRef filename,
                          MoEStringRef pipeline, MoEStringRef cpu,
                          MoEStringRef dumpDir, MoEBytes *object);
MoEError moeCompilePTX(MoEStringRef source, MoEStringRef filename,
                       MoEStringRef chip, MoEStringRef dumpDir, MoEBytes *ptx);
/// JSON: {"ptx": text, "functions": how to launch the kernels}, the latter as
/// in the manifest of an artifact.
MoEError moeCompileKernels(MoEStringRef source, MoEStringRef filename,
                           MoEStringRef chip, MoEStringRef dumpDir,
                           MoEBytes *kernels);
MoEError moeAssembleCubin(MoEStringRef ptx, MoEStringRef chip, MoEBytes *cubin);

/* Executables: objects of moeCompileObject, linked into the process. */
MoEError moeExecutableLoad(MoEStringRef object, MoEExecutable *executable);
/// No call of any of its functions may be running.
void moeExecutableDestroy(MoEExecutable executable);
size_t moeExecutableGetNumFunctions(MoEExecutable executable);
/// Functions live as long as their executable.
MoEFunction moeExecutableGetFunction(MoEExecutable executable, size_t index);

typedef enum MoEElementType {
  MoEElementType_I1, /* one byte, 0 or 1 */
  MoEElementType_I8,
  MoEElementType_I16,
  MoEElementType_I32,
  MoEElementType_I64,
  MoEElementType_Index, /* 64 bits */
  MoEElementType_F16,
  MoEElementType_BF16,
  MoEElementType_F32,
  MoEElementType_F64,
} MoEElementType;

typedef struct MoEValueType {
  MoEElementType elementType;
  bool isTensor;
  bool isResult;
  int64_t rank;         /* of a tensor */
  const int64_t *shape; /* rank sizes, -1 is known only at run time */
} MoEValueType;

MoEStringRef moeFunctionGetName(MoEFunction function);
/// Arguments, then the buffers of the results.
size_t moeFunctionGetNumValues(MoEFunction function);
MoEValueType moeFunctionGetValue(MoEFunction function, size_t index);

/// The descriptor of a tensor has room for its rank: the allocation, the first
/// element, the offset in elements (0), then sizes and strides in elements.
typedef struct MoETensorHeader {
  void *allocated;
  void *aligned;
  int64_t offset;
} MoETensorHeader;

/// values[i] points to a scalar, or to a MoETensorHeader that is followed by
/// int64_t sizes[rank], strides[rank]. Arguments are not checked. To be called
/// by moe_call of MoE/Runtime/Memory.h, which says when memory runs out.
typedef void (*MoEPackedFunction)(void **values);
MoEPackedFunction moeFunctionGetEntry(MoEFunction function);

/* The machine and the toolchain. */
const char *moeLLVMVersion(void);
MoEBytes moeHostCPUName(void);
MoEBytes moeHostCPUFeatures(void);
/// The features that code for a named CPU relies on; empty for an unknown name.
MoEBytes moeCodeFeatures(MoEStringRef cpu);
/// What kernels for a named CPU follow, under which its measured numbers stand
/// in a tuning table; empty for an unknown name.
MoEBytes moeDescribeCPU(MoEStringRef cpu);
/// The pipeline "moe-to-cpu" with the options for a CPU, with the measured ones
/// of a tuning table, the text of a file, unless that is empty.
MoEError moeCPUPipeline(MoEStringRef cpu, MoEStringRef tuning,
                        MoEBytes *pipeline);
/// The path of ptxas, empty when there is none.
MoEBytes moeFindPtxas(void);
/// What is known of each of NVIDIA's chips (MoE/Support/Chips.h): an array of
/// objects in JSON.
MoEBytes moeKnownChips(void);

#ifdef __cplusplus
}
#endif

#endif /* MOE_C_COMPILER_H */
