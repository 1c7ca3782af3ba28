// Blocks of a cluster share their shared memory (sm_90).
#include "ptx.cuh"
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// The histogram of bins spread over the shared memory of a cluster's blocks.
extern "C" __global__ void __cluster_dims__(2, 1, 1)
    cluster_histogram(const int *bins, int *counts, int n) {
  __shared__ int local[16];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t < 16)
    local[t] = 0;
  cluster.sync();
  int first = blockIdx.x / 2 * 2;
#pragma unroll 1
  for (int i = first * 64 + rank * 64 + t; i < n; i += gridDim.x * 64) {
    int *remote = cluster.map_shared_rank(local, bins[i] / 16);
    atomicAdd(&remote[bins[i] % 16], 1);
  }
  cluster.sync();
  if (t < 16)
    atomicAdd(&counts[rank * 16 + t], local[t]);
}

// Each block reads its neighbour's sum, and leaves only after it was read.
extern "C" __global__ void __cluster_dims__(4, 1, 1)
    cluster_shift(const int *x, int *out) {
  __shared__ int tile[32];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x;
  tile[t] = x[blockIdx.x * 32 + t];
  cluster.sync();
  int *next = cluster.map_shared_rank(tile, (cluster.block_rank() + 1) % 4);
  out[blockIdx.x * 32 + t] = next[31 - t];
  cluster.sync();
}
