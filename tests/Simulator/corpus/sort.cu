// Sorts within a block.
#include "ptx.cuh"

// Bitonic sort of 256 keys by 128 threads.
extern "C" __global__ void bitonic_sort(unsigned *keys) {
  __shared__ unsigned tile[256];
  int t = threadIdx.x;
  unsigned *mine = keys + blockIdx.x * 256;
  tile[t] = mine[t];
  tile[t + 128] = mine[t + 128];
#pragma unroll 1
  for (int size = 2; size <= 256; size *= 2)
#pragma unroll 1
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      int low = 2 * t - (t & (stride - 1));
      bool descending = (low & size) != 0;
      unsigned a = tile[low], b = tile[low + stride];
      if ((a > b) != descending) {
        tile[low] = b;
        tile[low + stride] = a;
      }
    }
  __syncthreads();
  mine[t] = tile[t];
  mine[t + 128] = tile[t + 128];
}

// Least significant digit radix sort, one bit a pass, stable: ballots give the
// rank within a warp, a short loop over the warps' counts the rest.
extern "C" __global__ void radix_sort(unsigned *keys, int *order, int bits) {
  __shared__ unsigned tile[128];
  __shared__ int index[128];
  __shared__ int zeros[4];
  int t = threadIdx.x, warp = t / 32, lane = t % 32;
  unsigned key = keys[blockIdx.x * 128 + t];
  int from = t;
#pragma unroll 1
  for (int bit = 0; bit < bits; ++bit) {
    bool one = key >> bit & 1;
    unsigned ones = __ballot_sync(~0u, one);
    if (lane == 0)
      zeros[warp] = 32 - __popc(ones);
    __syncthreads();
    int zerosBefore = 0, zerosAll = 0;
    for (int w = 0; w < 4; ++w) {
      if (w < warp)
        zerosBefore += zeros[w];
      zerosAll += zeros[w];
    }
    int onesBelow = __popc(ones & ((1u << lane) - 1));
    int zeroRank = zerosBefore + lane - onesBelow;
    int rank = one ? zerosAll + t - zeroRank : zeroRank;
    tile[rank] = key;
    index[rank] = from;
    __syncthreads();
    key = tile[t];
    from = index[t];
  }
  keys[blockIdx.x * 128 + t] = key;
  order[blockIdx.x * 128 + t] = from;
}
