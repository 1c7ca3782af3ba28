// Tiles of D = A x B on mma.sync, one 32x32 tile a block of four warps, A
// row-major m x k, B column-major (n x k in memory), `steps` instructions deep.
#include "ptx.cuh"

struct F16 {
  using In = unsigned short;
  using Acc = float;
  static constexpr int step = 16;
  __device__ static void mma(float (&d)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

struct BF16 : F16 {
  __device__ static void mma(float (&d)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

struct TF32 {
  using In = float;
  using Acc = float;
  static constexpr int step = 8;
  __device__ static void mma(float (&d)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

struct S8 {
  using In = signed char;
  using Acc = int;
  static constexpr int step = 32;
  __device__ static void mma(int (&d)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

#if __CUDA_ARCH__ >= 890
struct E4M3 {
  using In = unsigned char;
  using Acc = float;
  static constexpr int step = 32;
  __device__ static void mma(float (&d)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
#endif

// A step is always 32 bytes of K, whatever the type: two 16-byte chunks.
// cp.async fills one buffer while ldmatrix and mma use the other; rows are
// padded to 48 bytes against bank conflicts.
template <class T>
__device__ void gemm(const typename T::In *a, const typename T::In *b,
                     typename T::Acc *d, int n, int steps) {
  constexpr int pitch = 48;
  __shared__ __align__(16) unsigned char tileA[2][32 * pitch];
  __shared__ __align__(16) unsigned char tileB[2][32 * pitch];
  int t = threadIdx.x, warp = t / 32, lane = t % 32;
  int row0 = blockIdx.y * 32, col0 = blockIdx.x * 32;
  int k = steps * T::step;

  // 128 threads: 2 tiles x 32 rows x 2 chunks.
  auto load = [&](int step, int buffer) {
    int row = t / 2 % 32, chunk = t % 2;
    auto *tile = t < 64 ? tileA[buffer] : tileB[buffer];
    const auto *from = t < 64 ? a + (row0 + row) * k : b + (col0 + row) * k;
    ptx::copyAsync16(tile + row * pitch + chunk * 16,
                     reinterpret_cast<const unsigned char *>(
                         from + step * T::step) + chunk * 16);
    ptx::commitCopies();
  };

  int rowW = warp / 2 * 16, colW = warp % 2 * 16;
  typename T::Acc acc[2][4] = {};
  if (steps > 0)
    load(0, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::waitCopies<0>();
    __syncthreads();
    if (step + 1 < steps)
      load(step + 1, (step + 1) % 2);
    const auto *tA = tileA[step % 2], *tB = tileB[step % 2];
    uint32_t fragA[4];
    ptx::loadMatrix4(fragA,
                     tA + (rowW + lane % 16) * pitch + lane / 16 * 16);
    for (int half = 0; half < 2; ++half) {
      uint32_t fragB[2];
      ptx::loadMatrix2(fragB, tB + (colW + half * 8 + lane % 8) * pitch +
                                  lane / 8 % 2 * 16);
      T::mma(acc[half], fragA, fragB);
    }
  }
  for (int half = 0; half < 2; ++half)
    for (int r = 0; r < 4; ++r)
      d[(row0 + rowW + lane / 4 + r / 2 * 8) * n + col0 + colW + half * 8 +
        lane % 4 * 2 + r % 2] = acc[half][r];
}

#define GEMM(name, type)                                                      \
  extern "C" __global__ void name(const type::In *a, const type::In *b,       \
                                  type::Acc *d, int n, int steps) {               \
    gemm<type>(a, b, d, n, steps);                                              \
  }

#if __CUDA_ARCH__ >= 890
GEMM(gemm_e4m3, E4M3)
#else
GEMM(gemm_f16, F16)
GEMM(gemm_bf16, BF16)
GEMM(gemm_tf32, TF32)
GEMM(gemm_s8, S8)

// B row-major (k x n in memory), so its fragments need ldmatrix.trans; B is
// loaded by plain loads and stores between two barriers a step.
extern "C" __global__ void gemm_transposed(const unsigned short *a,
                                           const unsigned short *b, float *d,
                                           int n, int steps) {
  __shared__ __align__(16) unsigned short tileA[16][24], tileB[16][24];
  int t = threadIdx.x, warp = t / 32, lane = t % 32;
  int row0 = blockIdx.y * 16, col0 = blockIdx.x * 16;
  int k = steps * 16;
  float acc[4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int k0 = step * 16;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 256; i += 64) {
      int row = (i + t) / 16, col = t % 16;
      tileA[row][col] = a[(row0 + row) * k + k0 + col];
      tileB[row][col] = b[(k0 + row) * n + col0 + col];
    }
    __syncthreads();
    uint32_t fragA[4], fragB[2];
    ptx::loadMatrix4(fragA, &tileA[lane % 16][lane / 16 * 8]);
    ptx::loadMatrix2Transposed(fragB, &tileB[lane % 16][warp * 8]);
    F16::mma(acc, fragA, fragB);
  }
  for (int r = 0; r < 4; ++r)
    d[(row0 + lane / 4 + r / 2 * 8) * n + col0 + warp * 8 + lane % 4 * 2 +
      r % 2] = acc[r];
}
#endif
