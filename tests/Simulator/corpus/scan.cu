// Prefix sums: within a warp, a block, and across blocks.
#include "ptx.cuh"

__device__ int warpInclusiveScan(int v) {
  int lane = threadIdx.x % 32;
  for (int delta = 1; delta < 32; delta *= 2) {
    int other = __shfl_up_sync(~0u, v, delta);
    if (lane >= delta)
      v += other;
  }
  return v;
}

// Inclusive sum over 128 threads; `warps` is scratch, `total` the block's sum.
__device__ int blockInclusiveScan(int v, int *warps, int &total) {
  int warp = threadIdx.x / 32;
  v = warpInclusiveScan(v);
  if (threadIdx.x % 32 == 31)
    warps[warp] = v;
  __syncthreads();
  total = 0;
  int before = 0;
  for (int w = 0; w < 4; ++w) {
    if (w == warp)
      before = total;
    total += warps[w];
  }
  return v + before;
}

extern "C" __global__ void warp_scan(const int *x, int *out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = warpInclusiveScan(x[i]);
}

// A block walks over its row tile by tile and carries the running total.
extern "C" __global__ void block_scan(const int *x, int *out, int n) {
  __shared__ int warps[4];
  int carry = 0;
#pragma unroll 1
  for (int base = 0; base < n; base += 128) {
    int i = base + threadIdx.x;
    int total;
    int v = blockInclusiveScan(i < n ? x[i] : 0, warps, total);
    if (i < n)
      out[i] = carry + v;
    carry += total;
    __syncthreads(); // before the next tile overwrites `warps`
  }
}

// Hillis and Steele, double buffered in shared memory.
extern "C" __global__ void hillis_steele_scan(const float *x, float *out) {
  __shared__ float buffer[2][128];
  int t = threadIdx.x, current = 0;
  buffer[0][t] = x[blockIdx.x * 128 + t];
  for (int delta = 1; delta < 128; delta *= 2) {
    __syncthreads();
    float v = buffer[current][t];
    if (t >= delta)
      v += buffer[current][t - delta];
    current ^= 1;
    buffer[current][t] = v;
  }
  out[blockIdx.x * 128 + t] = buffer[current][t];
}

constexpr uint64_t kAggregate = 1ull << 32, kPrefix = 2ull << 32;

// Decoupled look-back (Merrill and Garland 2016): status and value share one
// 64-bit word, published by release and read by acquire. Blocks are numbered
// by a ticket, so that a block only ever waits for blocks that have started.
extern "C" __global__ void lookback_scan(const int *x, int *out,
                                         uint64_t *status, unsigned *ticket,
                                         int n) {
  __shared__ int warps[4];
  __shared__ int block, before;
  if (threadIdx.x == 0)
    block = atomicAdd(ticket, 1);
  __syncthreads();
  int i = block * 128 + threadIdx.x;
  int total;
  int v = blockInclusiveScan(i < n ? x[i] : 0, warps, total);
  if (threadIdx.x == 0) {
    int sum = 0;
    if (block > 0)
      ptx::storeRelease(&status[block], kAggregate | uint32_t(total));
    for (int b = block - 1; b >= 0; --b) {
      uint64_t word;
      do
        word = ptx::loadAcquire(&status[b]);
      while (word >> 32 == 0);
      sum += int(uint32_t(word));
      if (word >> 32 == 2)
        break;
    }
    ptx::storeRelease(&status[block], kPrefix | uint32_t(sum + total));
    before = sum;
  }
  __syncthreads();
  if (i < n)
    out[i] = before + v;
}

// The older form: values and flags apart, volatile accesses and fences.
extern "C" __global__ void lookback_fence_scan(const int *x, int *out,
                                               int *prefix, int *flag,
                                               unsigned *ticket, int n) {
  __shared__ int warps[4];
  __shared__ int block, before;
  if (threadIdx.x == 0)
    block = atomicAdd(ticket, 1);
  __syncthreads();
  int i = block * 128 + threadIdx.x;
  int total;
  int v = blockInclusiveScan(i < n ? x[i] : 0, warps, total);
  if (threadIdx.x == 0) {
    int sum = 0;
    if (block > 0) {
      while (*(volatile int *)&flag[block - 1] == 0) {
      }
      __threadfence();
      sum = prefix[block - 1];
    }
    prefix[block] = sum + total;
    __threadfence();
    *(volatile int *)&flag[block] = 1;
    before = sum;
  }
  __syncthreads();
  if (i < n)
    out[i] = before + v;
}
