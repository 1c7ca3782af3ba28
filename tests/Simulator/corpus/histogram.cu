// Counting: shared and global atomics, aggregated within a warp.
#include "ptx.cuh"

// counts[b] += occurrences of b, through a shared histogram a block.
extern "C" __global__ void histogram(const int *bins, int *counts, int n,
                                     int e) {
  extern __shared__ int local[];
#pragma unroll 1
  for (int b = threadIdx.x; b < e; b += blockDim.x)
    local[b] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
       i += gridDim.x * blockDim.x)
    atomicAdd(&local[bins[i]], 1);
  __syncthreads();
#pragma unroll 1
  for (int b = threadIdx.x; b < e; b += blockDim.x)
    if (local[b] != 0)
      atomicAdd(&counts[b], local[b]);
}

// The leader of each group of equal bins adds once for the group, and every
// token learns its slot within its bin.
extern "C" __global__ void slots(const int *bins, int *counts, int *slot,
                                 int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned active = __ballot_sync(~0u, i < n);
  if (i >= n)
    return;
  int lane = threadIdx.x % 32;
  unsigned peers = __match_any_sync(active, bins[i]);
  int leader = __ffs(peers) - 1;
  int base = 0;
  if (lane == leader)
    base = atomicAdd(&counts[bins[i]], __popc(peers));
  base = __shfl_sync(peers, base, leader);
  slot[i] = base + __popc(peers & ((1u << lane) - 1));
}

// 8- and 16-bit stores of neighbouring threads: distinct bytes of one word.
extern "C" __global__ void narrow_stores(const int *x, unsigned char *bytes,
                                         unsigned short *halves) {
  __shared__ unsigned char tile[64];
  int i = blockIdx.x * 64 + threadIdx.x;
  tile[threadIdx.x] = x[i];
  __syncthreads();
  bytes[i] = tile[63 - threadIdx.x];
  halves[i] = tile[threadIdx.x ^ 1] * 3;
}

// A lock made of compare-and-swap guards a shared record.
extern "C" __global__ void locked_minimum(const int *x, int *out) {
  __shared__ int lock, best, where;
  if (threadIdx.x == 0)
    lock = 0, best = INT32_MAX, where = -1;
  __syncthreads();
  int v = x[blockIdx.x * 64 + threadIdx.x];
  for (bool done = false; !done;)
    if (atomicCAS(&lock, 0, 1) == 0) {
      __threadfence_block();
      if (v < best || (v == best && int(threadIdx.x) < where))
        best = v, where = threadIdx.x;
      __threadfence_block();
      atomicExch(&lock, 0);
      done = true;
    }
  __syncthreads();
  if (threadIdx.x == 0) {
    out[blockIdx.x * 2] = best;
    out[blockIdx.x * 2 + 1] = where;
  }
}
