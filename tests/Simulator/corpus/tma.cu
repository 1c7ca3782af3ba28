// Tensor-map copies of sm_90: boxes in and out of a 2-D array, with and without
// swizzle, edges filled with zeros.
#include "ptx.cuh"

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

namespace {
__device__ void boxLoad(void *dst, const TensorMap *map, int col, int row,
                        uint64_t *bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(ptx::sharedAddress(dst)), "l"(map), "r"(col), "r"(row),
                  "r"(ptx::sharedAddress(bar)) : "memory");
}

__device__ void boxStore(const TensorMap *map, int col, int row,
                         const void *src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group "
               "[%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(col), "r"(row), "r"(ptx::sharedAddress(src))
               : "memory");
}
} // namespace

// out[c][r] = x[r][c] + 1 by boxes of 16 rows x 32 columns; the last box of a
// row hangs over the edge.
extern "C" __global__ void
tma_transpose(const __grid_constant__ TensorMap x,
              const __grid_constant__ TensorMap out) {
  __shared__ __align__(128) int tile[16][32], turned[32][16];
  __shared__ uint64_t bar;
  int t = threadIdx.x, col = blockIdx.x * 32, row = blockIdx.y * 16;
  if (t == 0) {
    ptx::barrierInit(&bar, 1);
    ptx::fenceBarrierInit();
  }
  __syncthreads();
  if (t == 0) {
    ptx::barrierArriveExpect(&bar, sizeof(tile));
    boxLoad(tile, &x, col, row, &bar);
  }
  ptx::barrierWait(&bar, 0);
#pragma unroll 1
  for (int i = t; i < 512; i += 64)
    turned[i % 32][i / 32] = tile[i / 32][i % 32] + 1;
  ptx::fenceProxyAsync();
  __syncthreads();
  if (t == 0) {
    boxStore(&out, row, col, turned);
    ptx::commitBulk();
    ptx::waitBulk<0>();
  }
}

// Boxes of 8 rows x 128 bytes with the 128-byte swizzle: 16-byte chunk c of
// row r lies at chunk c ^ (r % 8). Two stages; out[t] = weighted column sums.
extern "C" __global__ void tma_swizzle(const __grid_constant__ TensorMap x,
                                       int *out, int boxes) {
  __shared__ __align__(1024) int stage[2][8][32];
  __shared__ uint64_t full[2];
  int t = threadIdx.x;
  if (t == 0) {
    ptx::barrierInit(&full[0], 1);
    ptx::barrierInit(&full[1], 1);
    ptx::fenceBarrierInit();
  }
  __syncthreads();
  auto load = [&](int box) {
    ptx::barrierArriveExpect(&full[box % 2], sizeof(stage[0]));
    boxLoad(stage[box % 2], &x, blockIdx.x * 32, box * 8, &full[box % 2]);
  };
  if (t == 0)
    load(0);
  int sum = 0;
#pragma unroll 1
  for (int box = 0; box < boxes; ++box) {
    if (t == 0 && box + 1 < boxes)
      load(box + 1);
    ptx::barrierWait(&full[box % 2], box / 2 % 2);
#pragma unroll 1
    for (int r = t / 32; r < 8; r += 2) {
      int c = t % 32;
      sum += stage[box % 2][r][(c / 4 ^ r) * 4 + c % 4] * (box * 8 + r + 1);
    }
    __syncthreads(); // before the stage is loaded again
  }
  out[blockIdx.x * 64 + t] = sum;
}
