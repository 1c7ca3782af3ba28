// CUB's block primitives: code that the simulator's authors did not write.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

extern "C" __global__ void cub_radix_sort(const float *x, float *sorted,
                                          int *order) {
  using Sort = cub::BlockRadixSort<float, 64, 2, int>;
  __shared__ typename Sort::TempStorage storage;
  float keys[2];
  int values[2];
  for (int i = 0; i < 2; ++i) {
    values[i] = threadIdx.x * 2 + i;
    keys[i] = x[blockIdx.x * 128 + values[i]];
  }
  Sort(storage).Sort(keys, values);
  for (int i = 0; i < 2; ++i) {
    sorted[blockIdx.x * 128 + threadIdx.x * 2 + i] = keys[i];
    order[blockIdx.x * 128 + threadIdx.x * 2 + i] = values[i];
  }
}

extern "C" __global__ void cub_scan(const int *x, int *out, int *total) {
  using Scan = cub::BlockScan<int, 128>;
  __shared__ typename Scan::TempStorage storage;
  int v = x[blockIdx.x * 128 + threadIdx.x], sum, prefix;
  Scan(storage).ExclusiveSum(v, prefix, sum);
  out[blockIdx.x * 128 + threadIdx.x] = prefix;
  if (threadIdx.x == 0)
    total[blockIdx.x] = sum;
}

extern "C" __global__ void cub_reduce(const float *x, float *out) {
  using Reduce =
      cub::BlockReduce<float, 128, cub::BLOCK_REDUCE_RAKING>;
  __shared__ typename Reduce::TempStorage storage;
  float sum = Reduce(storage).Sum(x[blockIdx.x * 128 + threadIdx.x]);
  if (threadIdx.x == 0)
    out[blockIdx.x] = sum;
}
