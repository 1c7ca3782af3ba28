// Asynchronous copies of sm_80: multi-stage pipelines and their barriers.
#include "ptx.cuh"

// Three stages of cp.async; each thread reads what its neighbour copied, so
// that a step needs both the wait and the barrier.
extern "C" __global__ void three_stages(const float *x, float *out,
                                        int tiles) {
  __shared__ __align__(16) float stage[3][256];
  int t = threadIdx.x;
  const float *mine = x + blockIdx.x * tiles * 256;
  auto load = [&](int tile) {
    if (tile < tiles)
      ptx::copyAsync16(&stage[tile % 3][t * 4], mine + tile * 256 + t * 4);
    ptx::commitCopies();
  };
  load(0);
  load(1);
  float sum = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::waitCopies<1>();
    __syncthreads();
    load(tile + 2);
    int other = (t + 33) % 64;
    for (int i = 0; i < 4; ++i)
      sum += stage[tile % 3][other * 4 + i];
  }
  out[blockIdx.x * 64 + t] = sum;
}

// The tail of a row through zero fill; bytes beyond it are never read.
extern "C" __global__ void zero_fill(const float *x, float *out, int cols) {
  __shared__ __align__(16) float tile[128];
  int t = threadIdx.x, row = blockIdx.x;
  int left = max(0, min(16, (cols - t * 4) * 4));
  ptx::copyAsync16(&tile[t * 4], x + row * cols + min(t * 4, cols - 4), left);
  ptx::commitCopies();
  ptx::waitCopies<0>();
  __syncthreads();
  for (int i = 0; i < 128; i += 32)
    out[row * 128 + i + t] = tile[127 - i - t];
}

// Copies arrive on an mbarrier instead of a wait and a block barrier. Two
// stages: `full` counts the copying threads, `empty` the reading ones.
extern "C" __global__ void copy_mbarrier(const int *x, int *out, int tiles) {
  __shared__ int stage[2][128];
  __shared__ uint64_t full[2], empty[2];
  int t = threadIdx.x;
  const int *mine = x + blockIdx.x * tiles * 128;
  if (t == 0)
    for (int s = 0; s < 2; ++s) {
      ptx::barrierInit(&full[s], 128);
      ptx::barrierInit(&empty[s], 128);
    }
  __syncthreads();
  auto load = [&](int tile) {
    ptx::copyAsync4(&stage[tile % 2][t], mine + tile * 128 + t);
    ptx::copyAsyncArrive(&full[tile % 2]);
  };
  if (tiles > 0)
    load(0);
  int sum = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    int s = tile % 2;
    if (tile + 1 < tiles) {
      if (tile >= 1) // the other stage was read in the turn before
        ptx::barrierTestWait(&empty[1 - s], (tile - 1) / 2 % 2);
      load(tile + 1);
    }
    ptx::barrierTestWait(&full[s], tile / 2 % 2);
    sum += stage[s][127 - t] * (tile + 1);
    ptx::barrierArrive(&empty[s]);
  }
  out[blockIdx.x * 128 + t] = sum;
}
