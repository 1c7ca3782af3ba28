// Warpgroup matrix multiply of sm_90a: D (64 x 16) = A (64 x k) x B (16 x k)^T,
// f16 in, f32 out, operands in shared memory without swizzle.
#include "ptx.cuh"

namespace {
// Without swizzle, a K-major operand is made of 8 x 16-byte core matrices; the
// two core matrices of a k16 step are `leading` bytes apart, groups of eight
// rows `stride` bytes.
__device__ uint64_t descriptor(const void *p, uint32_t leading,
                               uint32_t stride) {
  uint64_t d = (ptx::sharedAddress(p) & 0x3ffff) >> 4;
  d |= uint64_t(leading >> 4) << 16;
  d |= uint64_t(stride >> 4) << 32;
  return d;
}

// Element (row, col) of a tile of core matrices, two of them (k16) wide.
__device__ int coreIndex(int row, int col) {
  return (row / 8 * 2 + col / 8) * 64 + row % 8 * 8 + col % 8;
}

__device__ void wgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ void wgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ void wgmmaWait(float (&d)[8]) {
  asm volatile("wgmma.wait_group.sync.aligned %8;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
                 "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "n"(N) : "memory");
}

__device__ void wgmmaShared(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
                 "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b) : "memory");
}

__device__ void wgmmaRegisters(float (&d)[8], const uint32_t (&a)[4],
                               uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, "
               "1, 1, 1, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
                 "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}

__device__ void storeTile(float *out, const float (&d)[8]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int r = 0; r < 8; ++r) {
    int row = warp * 16 + lane / 4 + r / 2 % 2 * 8;
    int col = r / 4 * 8 + lane % 4 * 2 + r % 2;
    out[blockIdx.x * 64 * 16 + row * 16 + col] = d[r];
  }
}
} // namespace

// Both operands from shared memory, one buffer, one k16 step a turn.
extern "C" __global__ void wgmma_shared(const unsigned short *a,
                                        const unsigned short *b, float *out,
                                        int steps) {
  __shared__ __align__(128) unsigned short tileA[64 * 16], tileB[16 * 16];
  float d[8] = {};
  int k = steps * 16;
  const unsigned short *mine = a + blockIdx.x * 64 * k;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int k0 = step * 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < 64 * 16; i += 128)
      tileA[coreIndex(i / 16, i % 16)] = mine[i / 16 * k + k0 + i % 16];
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * 16; i += 128)
      tileB[coreIndex(i / 16, i % 16)] = b[i / 16 * k + k0 + i % 16];
    ptx::fenceProxyAsync();
    __syncthreads();
    wgmmaFence();
    wgmmaShared(d, descriptor(tileA, 128, 256), descriptor(tileB, 128, 256));
    wgmmaCommit();
    wgmmaWait<0>(d);
    __syncthreads();
  }
  storeTile(out, d);
}

// A from registers; the next B is written while the group is in flight.
extern "C" __global__ void wgmma_registers(const unsigned short *a,
                                           const unsigned short *b,
                                           float *out, int steps) {
  __shared__ __align__(128) unsigned short tileB[2][16 * 16];
  float d[8] = {};
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = steps * 16;
  const unsigned short *mine = a + blockIdx.x * 64 * k;
  auto load = [&](int step) {
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * 16; i += 128)
      tileB[step % 2][coreIndex(i / 16, i % 16)] =
          b[i / 16 * k + step * 16 + i % 16];
    ptx::fenceProxyAsync();
  };
  if (steps > 0)
    load(0);
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint32_t fragA[4];
    for (int r = 0; r < 4; ++r) {
      int row = warp * 16 + lane / 4 + r % 2 * 8;
      int col = step * 16 + r / 2 * 8 + lane % 4 * 2;
      fragA[r] = *reinterpret_cast<const uint32_t *>(mine + row * k + col);
    }
    wgmmaFence();
    wgmmaRegisters(d, fragA, descriptor(tileB[step % 2], 128, 256));
    wgmmaCommit();
    if (step + 1 < steps)
      load(step + 1);
    wgmmaWait<0>(d);
    __syncthreads();
  }
  storeTile(out, d);
}
