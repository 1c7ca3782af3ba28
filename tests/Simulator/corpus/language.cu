// Parts of the language that the other kernels do not reach: calls, local
// arrays, jump tables, constant and global variables, 64-bit arithmetic.
#include "ptx.cuh"

__constant__ int weights[8] = {3, -1, 4, 1, -5, 9, 2, -6};
__device__ int table[4] = {10, 20, 30, 40};

__device__ __noinline__ int power(int base, int exponent) {
  int result = 1;
  while (exponent-- > 0)
    result *= base;
  return result;
}

__device__ __noinline__ void sortThree(int *v) {
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2 - i; ++j)
      if (v[j] > v[j + 1]) {
        int other = v[j];
        v[j] = v[j + 1];
        v[j + 1] = other;
      }
}

extern "C" __global__ void calls(const int *x, int *out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int v[3] = {x[i], weights[i % 8], table[i % 4]};
  sortThree(v);
  out[i * 2] = v[0] * 10000 + v[1] * 100 + v[2];
  out[i * 2 + 1] = power(x[i], i % 7);
}

// A switch with dense cases becomes brx.idx or a branch tree; the lanes of a
// warp take all of them, for a different number of turns.
extern "C" __global__ void divergent(const unsigned *x, unsigned *out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned v = x[i];
  for (unsigned turn = 0; turn <= v % 5; ++turn)
    switch ((v + turn) % 8) {
    case 0: v = v * 3 + 1; break;
    case 1: v ^= v >> 3; break;
    case 2: v = __brev(v); break;
    case 3: v -= 77; break;
    case 4: v = __popc(v) * 1001; break;
    case 5: v = v / 7; break;
    case 6: v = __clz(v) + (v << 2); break;
    default: v = ~v;
    }
  out[i] = v;
}

extern "C" __global__ void wide(const long long *a, const long long *b,
                                long long *out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i * 4 + 0] = a[i] / b[i];
  out[i * 4 + 1] = a[i] % b[i];
  out[i * 4 + 2] = __mul64hi(a[i], b[i]);
  out[i * 4 + 3] = (long long)((unsigned long long)a[i] % 1000003ull);
}

extern "C" __global__ void doubles(const double *a, double *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    out[i] = sqrt(fabs(a[i])) / (1.0 + a[i] * a[i]) + floor(a[i]);
}
