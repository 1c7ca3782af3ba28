// Row softmax in two shapes.
#include "ptx.cuh"

// One warp a row, rows of at most 64 columns.
extern "C" __global__ void warp_softmax(const float *x, float *y, int rows,
                                        int cols) {
  int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows)
    return;
  int lane = threadIdx.x % 32;
  float v[2], top = -INFINITY, sum = 0;
  for (int i = 0; i < 2; ++i) {
    int col = lane + 32 * i;
    v[i] = col < cols ? x[row * cols + col] : -INFINITY;
    top = fmaxf(top, v[i]);
  }
  for (int delta = 16; delta > 0; delta /= 2)
    top = fmaxf(top, __shfl_xor_sync(~0u, top, delta));
  for (int i = 0; i < 2; ++i)
    sum += v[i] = __expf(v[i] - top);
  for (int delta = 16; delta > 0; delta /= 2)
    sum += __shfl_xor_sync(~0u, sum, delta);
  for (int i = 0; i < 2; ++i)
    if (lane + 32 * i < cols)
      y[row * cols + lane + 32 * i] = v[i] / sum;
}

// One block a row of any length: online (max, sum) pairs, merged in a tree.
extern "C" __global__ void block_softmax(const float *x, float *y, int cols) {
  __shared__ float tops[128], sums[128];
  const float *row = x + blockIdx.x * cols;
  float top = -INFINITY, sum = 0;
#pragma unroll 1
  for (int col = threadIdx.x; col < cols; col += 128) {
    float next = fmaxf(top, row[col]);
    sum = sum * __expf(top - next) + __expf(row[col] - next);
    top = next;
  }
  tops[threadIdx.x] = top;
  sums[threadIdx.x] = sum;
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      float a = tops[threadIdx.x], b = tops[threadIdx.x + half];
      float next = fmaxf(a, b);
      sums[threadIdx.x] = sums[threadIdx.x] * __expf(a - next) +
                          sums[threadIdx.x + half] * __expf(b - next);
      tops[threadIdx.x] = next;
    }
  }
  __syncthreads();
  top = tops[0];
  sum = sums[0];
#pragma unroll 1
  for (int col = threadIdx.x; col < cols; col += 128)
    y[blockIdx.x * cols + col] = __expf(row[col] - top) / sum;
}
