// Warps with different roles, tied by named barriers.
#include "ptx.cuh"

// Warp 0 produces tiles, warp 1 consumes them; barriers 1 and 2 say "full",
// 3 and 4 say "empty" (one pair a buffer).
extern "C" __global__ void named_barriers(const int *x, int *out, int tiles) {
  __shared__ int buffer[2][32];
  int lane = threadIdx.x % 32;
  const int *mine = x + blockIdx.x * tiles * 32;
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      int s = tile % 2;
      if (tile >= 2)
        ptx::namedSync(3 + s, 64);
      buffer[s][lane] = mine[tile * 32 + lane] * 3;
      ptx::namedArrive(1 + s, 64);
    }
#pragma unroll 1
    for (int tile = max(tiles - 2, 0); tile < tiles; ++tile)
      ptx::namedSync(3 + tile % 2, 64); // the last arrivals
  } else {
    int sum = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      int s = tile % 2;
      ptx::namedSync(1 + s, 64);
      sum += buffer[s][31 - lane];
      ptx::namedArrive(3 + s, 64);
    }
    out[blockIdx.x * 32 + lane] = sum;
  }
}

// Two pairs of warps work on two halves and meet only within the pair.
extern "C" __global__ void partial_barriers(const int *x, int *out) {
  __shared__ int tile[2][64];
  int half = threadIdx.x / 64, t = threadIdx.x % 64;
  tile[half][t] = x[blockIdx.x * 128 + threadIdx.x];
  ptx::namedSync(1 + half, 64);
  int v = tile[half][63 - t];
  ptx::namedSync(1 + half, 64);
  tile[half][t] = v * 2;
  __syncthreads();
  out[blockIdx.x * 128 + threadIdx.x] = tile[1 - half][t];
}

// The barriers that also reduce a predicate: count, all, any.
extern "C" __global__ void barrier_votes(const int *x, int *out) {
  int v = x[blockIdx.x * 96 + threadIdx.x];
  int count = __syncthreads_count(v > 0);
  int all = __syncthreads_and(v > -100);
  int any = __syncthreads_or(v > 90);
  if (threadIdx.x == 95) {
    out[blockIdx.x * 3] = count;
    out[blockIdx.x * 3 + 1] = all != 0;
    out[blockIdx.x * 3 + 2] = any != 0;
  }
}
