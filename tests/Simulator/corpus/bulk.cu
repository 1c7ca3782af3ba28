// Bulk copies of sm_90 (1-D) with transaction barriers.
#include "ptx.cuh"

// Global to shared and back, one tile a block; first[block] is read from what
// the copy has written.
extern "C" __global__ void bulk_reverse(const int *x, int *out, int *first) {
  __shared__ __align__(128) int in[256], reversed[256];
  __shared__ uint64_t bar;
  int t = threadIdx.x;
  if (t == 0) {
    ptx::barrierInit(&bar, 1);
    ptx::fenceBarrierInit();
  }
  __syncthreads();
  if (t == 0) {
    ptx::barrierArriveExpect(&bar, sizeof(in));
    ptx::bulkLoad(in, x + blockIdx.x * 256, sizeof(in), &bar);
  }
  ptx::barrierWait(&bar, 0);
#pragma unroll 1
  for (int i = 0; i < 256; i += 128)
    reversed[255 - i - t] = in[i + t] + 1;
  ptx::fenceProxyAsync();
  __syncthreads();
  if (t == 0) {
    ptx::bulkStore(out + blockIdx.x * 256, reversed, sizeof(reversed));
    ptx::commitBulk();
    ptx::waitBulk<0>();
    first[blockIdx.x] = out[blockIdx.x * 256];
  }
}

// A ring of two stages: warp 0's lane 0 produces, warps 1 and 2 consume.
extern "C" __global__ void bulk_ring(const float *x, float *out, int tiles) {
  __shared__ __align__(128) float stage[2][128];
  __shared__ uint64_t full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) {
    for (int s = 0; s < 2; ++s) {
      ptx::barrierInit(&full[s], 1);
      ptx::barrierInit(&empty[s], 64);
    }
    ptx::fenceBarrierInit();
  }
  __syncthreads();
  const float *mine = x + blockIdx.x * tiles * 128;
  if (t == 0) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      int s = tile % 2;
      // The phase before the first one counts as complete.
      ptx::barrierWait(&empty[s], (tile / 2 + 1) % 2);
      ptx::barrierArriveExpect(&full[s], sizeof(stage[s]));
      ptx::bulkLoad(stage[s], mine + tile * 128, sizeof(stage[s]), &full[s]);
    }
  } else if (t >= 32) {
    int c = t - 32;
    float sum = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      int s = tile % 2;
      ptx::barrierWait(&full[s], tile / 2 % 2);
      sum += stage[s][c] * stage[s][127 - c];
      ptx::barrierArrive(&empty[s]);
    }
    out[blockIdx.x * 64 + c] = sum;
  }
}

// Blocks add their rows into one output by bulk reductions; the staging buffer
// is written again as soon as it has been read.
extern "C" __global__ void bulk_add(const float *x, float *out, int rows) {
  __shared__ __align__(128) float tile[64];
  int t = threadIdx.x;
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    tile[t] = x[row * 64 + t] * 2.0f;
    ptx::fenceProxyAsync();
    __syncthreads();
    if (t == 0) {
      ptx::bulkAddF32(out, tile, sizeof(tile));
      ptx::commitBulk();
      ptx::waitBulkRead<0>();
    }
    __syncthreads();
  }
}
