/*===- CApi.h - The simulator for C and ctypes ---------------------*- C -*-===
 *
 * Strings that functions return belong to the caller and go to moe_sim_free.
 *
 *===----------------------------------------------------------------------===*/

#ifndef MOE_SIMULATOR_CAPI_H
#define MOE_SIMULATOR_CAPI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Names as in C. NOLINTBEGIN(readability-identifier-naming) */

typedef struct MoeSimModule MoeSimModule;

typedef struct {
  void *data;
  uint64_t bytes;
  uint32_t read_only;
  uint32_t reserved;
  const char *name;
} MoeSimBuffer;

enum {
  MOE_SIM_CHECK_RACE = 1,
  MOE_SIM_CHECK_BOUNDS = 2,
  MOE_SIM_CHECK_UNINIT = 4,
  MOE_SIM_CHECK_ALIGN = 8,
  /* What the checks let pass, in the same word. */
  MOE_SIM_ALLOW_EQUAL_STORES = 16,
  MOE_SIM_ALLOW_UNFENCED_INIT = 32,
  MOE_SIM_ALLOW_EQUAL_SHARED_STORES = 64,
  MOE_SIM_ALLOW_REPEATED_SETMAXNREG = 128,
  /* Dynamic shared memory is only as aligned as the kernel declares it. */
  MOE_SIM_DECLARED_ALIGNMENT = 256,
  /* The host has not opted in to more than 48 KB of shared memory. */
  MOE_SIM_NO_SMEM_OPT_IN = 512,
  /* The host has opted in to clusters of more than 8 blocks. */
  MOE_SIM_NONPORTABLE_CLUSTER = 1024,
  /* The report lists every access to shared memory. */
  MOE_SIM_TRACE_SHARED = 2048,
};

typedef struct {
  /* sizeof(MoeSimLaunch), so that the struct can grow. */
  uint32_t struct_size;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint64_t dynamic_smem;
  uint32_t checks;
  uint32_t policy;
  uint64_t seed;
  uint32_t numerics;
  uint32_t threads;
  const void *params;
  uint64_t params_size;
  const MoeSimBuffer *buffers;
  uint64_t num_buffers;
} MoeSimLaunch;

/* Null on failure; *error then says why. */
MoeSimModule *moe_sim_load(const char *ptx, uint64_t length, char **error);
void moe_sim_unload(MoeSimModule *module);

/* JSON: {"kernels": [{"name", "params": [{"name", "type", "offset", "size",
 * "count"}], "param_bytes", "shared_bytes", "local_bytes", ...}]} */
char *moe_sim_describe(const MoeSimModule *module);

/* The report as JSON; null if the launch itself is wrong. */
char *moe_sim_launch(MoeSimModule *module, const char *kernel,
                     const MoeSimLaunch *launch, char **error);

/* Writes 128 bytes; returns null, or why the values are refused. data_type is
 * a CUtensorMapDataType, outer_strides leave the innermost dimension out, and
 * element_strides may be null: all one. */
char *moe_sim_encode_tensor_map(void *out, void *address, uint32_t data_type,
                                uint32_t rank, const uint64_t *dims,
                                const uint64_t *outer_strides,
                                const uint32_t *box,
                                const uint32_t *element_strides,
                                uint32_t swizzle, uint32_t nan_fill);

void moe_sim_free(char *text);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
}
#endif

#endif /* MOE_SIMULATOR_CAPI_H */
