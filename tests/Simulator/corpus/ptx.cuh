// Thin wrappers of the PTX instructions that CUDA C++ has no name for. One
// instruction each, so that a mutant of the generated PTX maps to one call.
#pragma once
#include <cstdint>

namespace ptx {

__device__ inline uint32_t sharedAddress(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- acquire, release, fences ----------------------------------------------

__device__ inline uint64_t loadAcquire(const uint64_t *p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
               : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline void storeRelease(uint64_t *p, uint64_t v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;"
               :: "l"(p), "l"(v) : "memory");
}

__device__ inline unsigned addAcqRel(unsigned *p, unsigned v) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Generic-proxy writes become visible to the async proxy (TMA, wgmma).
__device__ inline void fenceProxyAsync() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// --- cp.async (sm_80) ------------------------------------------------------

__device__ inline void copyAsync16(void *dst, const void *src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"(sharedAddress(dst)), "l"(src) : "memory");
}

// Copies `bytes` (0 to 16) and fills the rest of the 16 bytes with zeros.
__device__ inline void copyAsync16(void *dst, const void *src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(sharedAddress(dst)), "l"(src), "r"(bytes) : "memory");
}

__device__ inline void copyAsync4(void *dst, const void *src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :: "r"(sharedAddress(dst)), "l"(src) : "memory");
}

__device__ inline void commitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ inline void waitCopies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// --- mbarrier --------------------------------------------------------------

__device__ inline void barrierInit(uint64_t *bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;"
               :: "r"(sharedAddress(bar)), "r"(count) : "memory");
}

__device__ inline void fenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrierArrive(uint64_t *bar) {
  asm volatile("{\n\t.reg .b64 state;\n\t"
               "mbarrier.arrive.shared.b64 state, [%0];\n\t}"
               :: "r"(sharedAddress(bar)) : "memory");
}

__device__ inline void barrierArriveExpect(uint64_t *bar, uint32_t bytes) {
  asm volatile("{\n\t.reg .b64 state;\n\t"
               "mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n\t}"
               :: "r"(sharedAddress(bar)), "r"(bytes) : "memory");
}

__device__ inline void barrierWait(uint64_t *bar, uint32_t parity) {
  asm volatile("{\n\t.reg .pred done;\n\t"
               "WAIT:\n\t"
               "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
               "@!done bra WAIT;\n\t}"
               :: "r"(sharedAddress(bar)), "r"(parity) : "memory");
}

// The sm_80 form: test_wait does not suspend.
__device__ inline void barrierTestWait(uint64_t *bar, uint32_t parity) {
  asm volatile("{\n\t.reg .pred done;\n\t"
               "WAIT:\n\t"
               "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
               "@!done bra WAIT;\n\t}"
               :: "r"(sharedAddress(bar)), "r"(parity) : "memory");
}

// The barrier gets one arrival when this thread's copies so far have landed.
__device__ inline void copyAsyncArrive(uint64_t *bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
               :: "r"(sharedAddress(bar)) : "memory");
}

// --- bulk copies (sm_90) ---------------------------------------------------

__device__ inline void bulkLoad(void *dst, const void *src, uint32_t bytes,
                                uint64_t *bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx"
               "::bytes [%0], [%1], %2, [%3];"
               :: "r"(sharedAddress(dst)), "l"(src), "r"(bytes),
                  "r"(sharedAddress(bar)) : "memory");
}

__device__ inline void bulkStore(void *dst, const void *src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(dst), "r"(sharedAddress(src)), "r"(bytes) : "memory");
}

__device__ inline void bulkAddF32(float *dst, const float *src,
                                  uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
               "[%0], [%1], %2;"
               :: "l"(dst), "r"(sharedAddress(src)), "r"(bytes) : "memory");
}

__device__ inline void commitBulk() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int N> __device__ inline void waitBulk() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");
}

// Waits only until the sources may be overwritten.
template <int N> __device__ inline void waitBulkRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}

// --- named barriers --------------------------------------------------------

__device__ inline void namedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ inline void namedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// --- matrix loads ----------------------------------------------------------

__device__ inline void loadMatrix4(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(sharedAddress(row)) : "memory");
}

__device__ inline void loadMatrix2(uint32_t (&r)[2], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(sharedAddress(row)) : "memory");
}

__device__ inline void loadMatrix2Transposed(uint32_t (&r)[2],
                                             const void *row) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
      : "=r"(r[0]), "=r"(r[1])
      : "r"(sharedAddress(row)) : "memory");
}

// --- registers (sm_90a) ----------------------------------------------------

template <int N> __device__ inline void takeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

template <int N> __device__ inline void giveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}

// --- tensor maps that a kernel builds (sm_90a) ------------------------------

enum MapField {
  GlobalAddress, Rank, BoxDim, GlobalDim, GlobalStride, ElementStride
};

// Rank (less one), box_dim, global_dim and element_stride; `map` lies in shared
// memory, and the dimension must be a constant.
template <MapField Field>
__device__ __forceinline__ void setMap32(void *map, int dimension,
                                         uint32_t value) {
  uint32_t at = sharedAddress(map);
#define SET(name, order)                                                       \
  asm volatile("tensormap.replace.tile." name ".shared::cta.b1024.b32 [%0], "  \
               order "%1;" :: "r"(at), "r"(value) : "memory")
#define SET_DIMENSION(name)                                                    \
  if (dimension)                                                               \
    SET(name, "1, ");                                                          \
  else                                                                         \
    SET(name, "0, ")
  if constexpr (Field == Rank)
    SET("rank", "");
  else if constexpr (Field == BoxDim)
    SET_DIMENSION("box_dim");
  else if constexpr (Field == GlobalDim)
    SET_DIMENSION("global_dim");
  else
    SET_DIMENSION("element_stride");
#undef SET_DIMENSION
#undef SET
}

template <MapField Field>
__device__ __forceinline__ void setMap64(void *map, int, uint64_t value) {
  uint32_t at = sharedAddress(map);
  if constexpr (Field == GlobalAddress)
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 "
                 "[%0], %1;" :: "r"(at), "l"(value) : "memory");
  else
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 "
                 "[%0], 0, %1;" :: "r"(at), "l"(value) : "memory");
}

// 32-bit integers, no swizzle.
__device__ inline void setMapType(void *map) {
  asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 3;"
               :: "r"(sharedAddress(map)) : "memory");
}

__device__ inline void publishMap(void *to, const void *from) {
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic"
               ".release.gpu.sync.aligned [%0], [%1], 128;"
               :: "l"(to), "r"(sharedAddress(from)) : "memory");
}

__device__ inline void acquireMap(const void *map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;"
               :: "l"(map) : "memory");
}

__device__ inline void loadBox(void *dst, const void *map, int x, int y,
                               uint64_t *bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::"
               "complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(sharedAddress(dst)), "l"(map), "r"(x), "r"(y),
                  "r"(sharedAddress(bar)) : "memory");
}

} // namespace ptx
