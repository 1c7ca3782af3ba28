// Top-k routing: packed keys, so that ties go to the lower expert.
#include "ptx.cuh"

// Order-preserving map of a float to an unsigned integer.
__device__ unsigned ordered(float v) {
  unsigned bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One warp a token, e <= 64 experts: k rounds of a 32-bit maximum and a ballot
// for the lowest expert that has it; weights are renormalised softmax.
extern "C" __global__ void topk_router(const float *scores, int *experts,
                                       float *weights, int *counts, int n,
                                       int e, int k) {
  extern __shared__ int local[];
#pragma unroll 1
  for (int b = threadIdx.x; b < e; b += blockDim.x)
    local[b] = 0;
  __syncthreads();
  int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (token < n) {
    unsigned key[2];
    for (int i = 0; i < 2; ++i)
      key[i] = lane + 32 * i < e ? ordered(scores[token * e + lane + 32 * i])
                                 : 0;
    float first = 0, sum = 0;
#pragma unroll 1
    for (int round = 0; round < k; ++round) {
      unsigned best = __reduce_max_sync(~0u, max(key[0], key[1]));
      unsigned low = __ballot_sync(~0u, key[0] == best);
      unsigned high = __ballot_sync(~0u, key[1] == best);
      int expert = low ? __ffs(low) - 1 : 31 + __ffs(high);
      if (lane == expert % 32)
        key[expert / 32] = 0;
      unsigned bits = best & 0x80000000u ? best ^ 0x80000000u : ~best;
      float score = __uint_as_float(bits);
      if (round == 0)
        first = score;
      float weight = __expf(score - first);
      sum += weight;
      if (lane == 0) {
        experts[token * k + round] = expert;
        weights[token * k + round] = weight;
        atomicAdd(&local[expert], 1);
      }
    }
    if (lane == 0)
#pragma unroll 1
      for (int round = 0; round < k; ++round)
        weights[token * k + round] /= sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int b = threadIdx.x; b < e; b += blockDim.x)
    atomicAdd(&counts[b], local[b]);
}
