// Reductions: warp shuffles, shared trees, across blocks.
#include "ptx.cuh"

__device__ float warpSum(float v) {
  for (int delta = 16; delta > 0; delta /= 2)
    v += __shfl_xor_sync(~0u, v, delta);
  return v;
}

// out[block] = sum over the block's grid-stride share of x.
extern "C" __global__ void block_sum(const float *x, float *out, int n) {
  __shared__ float partial[32];
  float v = 0;
#pragma unroll 1
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
       i += gridDim.x * blockDim.x)
    v += x[i];
  v = warpSum(v);
  if (threadIdx.x % 32 == 0)
    partial[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0.0f;
    v = warpSum(v);
    if (threadIdx.x == 0)
      out[blockIdx.x] = v;
  }
}

// The textbook tree in shared memory; out[block] = max of 256 elements.
extern "C" __global__ void tree_max(const int *x, int *out, int n) {
  __shared__ int tile[256];
  int i = blockIdx.x * 256 + threadIdx.x;
  tile[threadIdx.x] = i < n ? x[i] : INT32_MIN;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      tile[threadIdx.x] = max(tile[threadIdx.x], tile[threadIdx.x + half]);
  }
  if (threadIdx.x == 0)
    out[blockIdx.x] = tile[0];
}

// Warp-synchronous code needs __syncwarp where a block would need a barrier:
// every lane adds its neighbour's sum, in place.
extern "C" __global__ void syncwarp_sum(const int *x, int *out) {
  __shared__ int tile[64];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int *mine = tile + warp * 32;
  mine[lane] = x[blockIdx.x * 64 + threadIdx.x];
#pragma unroll 1
  for (int delta = 16; delta > 0; delta /= 2) {
    __syncwarp();
    int v = mine[(lane + delta) % 32];
    __syncwarp();
    mine[lane] += v;
  }
  if (lane == 0)
    out[blockIdx.x * 2 + warp] = mine[0];
}

// One warp a row: integer redux instructions. out[row] = {sum, min, max, or}.
extern "C" __global__ void redux_rows(const int *x, int *out, int rows) {
  int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows)
    return;
  int lane = threadIdx.x % 32;
  int v = x[row * 32 + lane];
  int sum = __reduce_add_sync(~0u, v);
  int low = __reduce_min_sync(~0u, v);
  int high = __reduce_max_sync(~0u, v);
  unsigned any = __reduce_or_sync(~0u, unsigned(v));
  if (lane == 0) {
    out[row * 4 + 0] = sum;
    out[row * 4 + 1] = low;
    out[row * 4 + 2] = high;
    out[row * 4 + 3] = int(any);
  }
}

// Whichever block takes the last ticket adds up the partial sums, in order.
// __threadfence before the ticket releases, the one after it acquires.
extern "C" __global__ void last_block_sum(const int *x, int *partial,
                                          unsigned *ticket, int *out, int n) {
  __shared__ int warps[2];
  __shared__ bool last;
  int i = blockIdx.x * 64 + threadIdx.x;
  int v = __reduce_add_sync(~0u, i < n ? x[i] : 0);
  if (threadIdx.x % 32 == 0)
    warps[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = warps[0] + warps[1];
    __threadfence();
    last = atomicAdd(ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last)
    return;
  int sum = 0;
#pragma unroll 1
  for (int b = threadIdx.x; b < gridDim.x; b += 64)
    sum += partial[b];
  sum = __reduce_add_sync(~0u, sum);
  if (threadIdx.x % 32 == 0)
    warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    *out = warps[0] + warps[1];
}

// The same with an acquire-release ticket instead of fences. Every thread
// writes its own partial sum, which the barrier hands to thread 0's release.
extern "C" __global__ void last_block_acq_rel(const int *x, int *partial,
                                              unsigned *ticket, int *out,
                                              int n) {
  __shared__ bool last;
  int i = blockIdx.x * 64 + threadIdx.x;
  partial[i] = i < n ? x[i] * 2 : 0;
  __syncthreads();
  if (threadIdx.x == 0)
    last = ptx::addAcqRel(ticket, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last)
    return;
  int sum = 0;
#pragma unroll 1
  for (int b = 0; b < gridDim.x; ++b)
    sum += partial[b * 64 + threadIdx.x];
  out[threadIdx.x] = sum;
}

// Split-K style accumulation through floating point atomics.
extern "C" __global__ void atomic_sum(const float *x, float *out, int n,
                                      int cols) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    atomicAdd(&out[i % cols], x[i]);
}
