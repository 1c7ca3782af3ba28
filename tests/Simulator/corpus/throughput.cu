// Kernels of the size that users write: what utils/bench_simulator.py times.
#include "ptx.cuh"

// D (m x n, f32) = A (m x k, f16) x B (n x k, f16) in tiles of 64 x 64 x 32:
// four warps of 32 x 32, cp.async in two buffers, rows padded to 80 bytes
// against bank conflicts. m, n and k are multiples of the tile.
extern "C" __global__ void __launch_bounds__(128)
    tiled_gemm(const unsigned short *a, const unsigned short *b, float *d,
               int n, int k) {
  constexpr int pitch = 80, tileBytes = 64 * pitch;
  __shared__ __align__(16) unsigned char tileA[2][tileBytes],
      tileB[2][tileBytes];
  int t = threadIdx.x, warp = t / 32, lane = t % 32;
  int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;

  // 64 rows x 4 chunks of 16 bytes, twice: two chunks a thread and tile.
  auto load = [&](int k0, int buffer) {
    for (int half = 0; half < 2; ++half) {
      int row = half * 32 + t / 4, chunk = t % 4;
      ptx::copyAsync16(tileA[buffer] + row * pitch + chunk * 16,
                       a + (row0 + row) * k + k0 + chunk * 8);
      ptx::copyAsync16(tileB[buffer] + row * pitch + chunk * 16,
                       b + (col0 + row) * k + k0 + chunk * 8);
    }
    ptx::commitCopies();
  };

  int rowW = warp / 2 * 32, colW = warp % 2 * 32;
  float acc[2][4][4] = {};
  if (k > 0)
    load(0, 0);
#pragma unroll 1
  for (int k0 = 0; k0 < k; k0 += 32) {
    int now = k0 / 32 % 2;
    ptx::waitCopies<0>();
    __syncthreads();
    if (k0 + 32 < k)
      load(k0 + 32, 1 - now);
    for (int step = 0; step < 2; ++step) {
      uint32_t fragA[2][4], fragB[2][4];
      for (int i = 0; i < 2; ++i) {
        ptx::loadMatrix4(fragA[i], tileA[now] +
                                       (rowW + i * 16 + lane % 16) * pitch +
                                       step * 32 + lane / 16 * 16);
        ptx::loadMatrix4(fragB[i], tileB[now] +
                                       (colW + i * 16 + lane / 16 * 8 +
                                        lane % 8) * pitch +
                                       step * 32 + lane / 8 % 2 * 16);
      }
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j) {
          float(&c)[4] = acc[i][j];
          asm volatile(
              "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
              "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
              : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
              : "r"(fragA[i][0]), "r"(fragA[i][1]), "r"(fragA[i][2]),
                "r"(fragA[i][3]), "r"(fragB[j / 2][j % 2 * 2]),
                "r"(fragB[j / 2][j % 2 * 2 + 1]));
        }
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      for (int half = 0; half < 2; ++half) {
        int row = row0 + rowW + i * 16 + half * 8 + lane / 4;
        int col = col0 + colW + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2 *>(d + row * n + col) =
            make_float2(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
      }
}

// One row a block of two warps or more: the sum of its squares.
extern "C" __global__ void row_sum_squares(const float *x, float *out,
                                           int cols) {
  __shared__ float partial[32];
  int t = threadIdx.x, lane = t % 32;
  const float *row = x + blockIdx.x * cols;
  float sum = 0;
  for (int i = t; i < cols; i += blockDim.x)
    sum += row[i] * row[i];
  for (int step = 16; step > 0; step /= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (lane == 0)
    partial[t / 32] = sum;
  __syncthreads();
  if (t != 0)
    return;
  int w = 1;
#pragma unroll 1
  do
    sum += partial[w];
  while (++w < blockDim.x / 32);
  out[blockIdx.x] = sum;
}
