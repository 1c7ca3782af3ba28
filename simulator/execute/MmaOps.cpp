//===- MmaOps.cpp - mma.sync ----------------------------------------------===//
//
// With p elements in a 32-bit register, lane l = 4 g + t, register r of
//
//   A holds row g + 8 (r & 1), columns 4 p (r >> 1) + t p ... + p - 1
//   B holds column g, rows 4 p r + t p ... + p - 1
//   C, D hold row g + 8 (r >> 1), column 2 t + (r & 1)   (32-bit elements)
//
// So the 32 lanes of one A register are, in memory order, an 8 x 4p block by
// rows, and those of a B register one by columns: no index arithmetic needed.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "Machine.h"
#include "Mma.h"
#include "decode/Conversion.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace moe::sim::MOE_SIM_ISA {
namespace {

//===----------------------------------------------------------------------===//
// The inner loops
//===----------------------------------------------------------------------===//

using Vec = float __attribute__((vector_size(32), aligned(4)));
using Vec4 = float __attribute__((vector_size(16), aligned(4)));

// Their alignment is a float's, and nothing here is compiled with type-based
// alias analysis.
template <typename V>
inline V loadVector(const float *from) {
  return *reinterpret_cast<const V *>(from);
}

template <typename V>
inline void storeVector(float *to, V v) {
  *reinterpret_cast<V *>(to) = v;
}

// Products of the tensor-core formats are exact in f32, so a fused and a
// separate addition round alike.
inline Vec multiplyAdd(Vec a, Vec b, Vec c) {
#ifdef __FMA__
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x}; }

/// Eight rows of D, eight columns: the sums stay in registers.
inline void multiplyTile(float *d, const float *a, const float *b, u32 n,
                         u32 k) {
  Vec sum[8];
#pragma GCC unroll 8
  for (u32 i = 0; i < 8; ++i)
    sum[i] = loadVector<Vec>(d + i * n);
  for (u32 i = 0; i < k; ++i) {
    Vec right = loadVector<Vec>(b + i * n);
#pragma GCC unroll 8
    for (u32 j = 0; j < 8; ++j)
      sum[j] = multiplyAdd(splat(a[j * k + i]), right, sum[j]);
  }
#pragma GCC unroll 8
  for (u32 i = 0; i < 8; ++i)
    storeVector(d + i * n, sum[i]);
}

void multiply(float *d, const float *a, const float *b, u32 rows, u32 n,
              u32 k) {
  for (u32 row = 0; row < rows; row += 8)
    for (u32 column = 0; column < n; column += 8)
      multiplyTile(d + row * n + column, a + row * k, b + column, n, k);
}

void widenF16(float *to, const u16 *from, u32 count) {
  u32 i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8) {
    __m128i half;
    std::memcpy(&half, from + i, sizeof half);
    storeVector(to + i, (Vec)_mm256_cvtph_ps(half));
  }
#endif
  for (; i < count; ++i)
    to[i] = f16ToFloat(from[i]);
}

void widenBF16(float *to, const u16 *from, u32 count) {
  for (u32 i = 0; i < count; ++i)
    to[i] = bf16ToFloat(from[i]);
}

//===----------------------------------------------------------------------===//
// Fragments
//===----------------------------------------------------------------------===//

/// 32 registers' worth of elements as f32.
void widen(float *to, const u32 *from, NumberType type) {
  switch (type) {
  case NumberType::F16:
    widenF16(to, reinterpret_cast<const u16 *>(from), 64);
    return;
  case NumberType::BF16:
    widenBF16(to, reinterpret_cast<const u16 *>(from), 64);
    return;
  case NumberType::E4M3:
  case NumberType::E5M2: {
    Conversion c{NumberType::F32, type};
    const u8 *bytes = reinterpret_cast<const u8 *>(from);
    for (u32 i = 0; i < 128; ++i)
      to[i] = std::bit_cast<float>(static_cast<u32>(convert(bytes + i, c)));
    return;
  }
  default:
    // tf32: the low 13 bits are not read.
    for (u32 i = 0; i < 32; ++i)
      to[i] = std::bit_cast<float>(from[i] & 0xffffe000);
    return;
  }
}

template <typename T>
struct Fragments {
  T a[16 * 256];
  T b[256 * 8];
};

/// `block` is 8 x width by rows.
template <typename T>
void placeA(T *a, const T *block, u32 r, u32 width, u32 k) {
  // A multiple of four: no call of memcpy for rows of 16 or 32 bytes.
  for (u32 row = 0; row < 8; ++row)
    for (u32 i = 0; i < width; i += 4)
      std::copy_n(block + row * width + i, 4,
                  a + (row + 8 * (r & 1)) * k + width * (r >> 1) + i);
}

/// widen and placeA in one, for rows of eight 16-bit elements.
void placeHalfA(float *a, const u32 *from, u32 r, u32 k, bool isBF16) {
  const u16 *halves = reinterpret_cast<const u16 *>(from);
  for (u32 row = 0; row < 8; ++row) {
    float *to = a + (row + 8 * (r & 1)) * k + 8 * (r >> 1);
    if (isBF16)
      widenBF16(to, halves + 8 * row, 8);
    else
      widenF16(to, halves + 8 * row, 8);
  }
}

/// Eight columns, `width` floats apart, become eight rows.
inline void transpose8(float *to, const float *from, u32 width) {
  Vec r[8], s[8];
#pragma GCC unroll 8
  for (u32 i = 0; i < 8; ++i)
    r[i] = loadVector<Vec>(from + i * width);
#pragma GCC unroll 4
  for (u32 i = 0; i < 8; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] =
        __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (u32 i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (u32 j = 0; j < 2; ++j) {
      r[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9,
                                             4, 5, 12, 13);
      r[i + 2 * j + 1] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3,
                                                 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
  for (u32 i = 0; i < 4; ++i) {
    storeVector(to + 8 * i, __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3,
                                                    8, 9, 10, 11));
    storeVector(
        to + 8 * (i + 4),
        __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

template <typename T>
void placeB(T *b, const T *block, u32 r, u32 width) {
  if constexpr (std::is_same_v<T, float>)
    if (width % 8 == 0) {
      for (u32 i = 0; i < width; i += 8)
        transpose8(b + (width * r + i) * 8, block + i, width);
      return;
    }
  for (u32 i = 0; i < width; ++i)
    for (u32 column = 0; column < 8; ++column)
      b[(width * r + i) * 8 + column] = block[column * width + i];
}

/// Rows of C and D hold the even columns in one register, the odd ones in the
/// next, four lanes a row.
void loadC(Warp &warp, const u32 *places, float *c, bool half) {
  if (half) {
    for (u32 r = 0; r < 2; ++r) {
      const u32 *from = lanesOf<u32>(warp, places[r]);
      for (u32 l = 0; l < kWarpSize; ++l) {
        float *to = c + (l / 4 + 8 * r) * 8 + l % 4 * 2;
        to[0] = f16ToFloat(static_cast<u16>(from[l]));
        to[1] = f16ToFloat(static_cast<u16>(from[l] >> 16));
      }
    }
    return;
  }
  for (u32 r = 0; r < 4; r += 2) {
    const float *even = lanesOf<float>(warp, places[r]);
    const float *odd = lanesOf<float>(warp, places[r + 1]);
    for (u32 g = 0; g < 8; ++g) {
      Vec4 e = loadVector<Vec4>(even + 4 * g),
           o = loadVector<Vec4>(odd + 4 * g);
      float *row = c + (g + 4 * r) * 8;
      storeVector(row, __builtin_shufflevector(e, o, 0, 4, 1, 5));
      storeVector(row + 4, __builtin_shufflevector(e, o, 2, 6, 3, 7));
    }
  }
}

void storeD(Warp &warp, const u32 *places, const float *d, bool half) {
  if (half) {
    for (u32 r = 0; r < 2; ++r) {
      u32 *to = lanesOf<u32>(warp, places[r]);
      for (u32 l = 0; l < kWarpSize; ++l) {
        const float *from = d + (l / 4 + 8 * r) * 8 + l % 4 * 2;
        to[l] =
            static_cast<u32>(floatToF16(from[1])) << 16 | floatToF16(from[0]);
      }
    }
    return;
  }
  for (u32 r = 0; r < 4; r += 2) {
    float *even = lanesOf<float>(warp, places[r]);
    float *odd = lanesOf<float>(warp, places[r + 1]);
    for (u32 g = 0; g < 8; ++g) {
      const float *row = d + (g + 4 * r) * 8;
      Vec4 low = loadVector<Vec4>(row), high = loadVector<Vec4>(row + 4);
      storeVector(even + 4 * g, __builtin_shufflevector(low, high, 0, 2, 4, 6));
      storeVector(odd + 4 * g, __builtin_shufflevector(low, high, 1, 3, 5, 7));
    }
  }
}

//===----------------------------------------------------------------------===//
// Floating point
//===----------------------------------------------------------------------===//

void runMma(Warp &warp, const Inst &inst, u32) {
  MmaShape shape = MmaShape::unpack(inst.imm);
  u32 width = 4 * (4 / shape.elementBytes), k = shape.k;
  u32 registersA = 2 * k / width, registersB = k / width;
  alignas(32) Fragments<float> f;
  alignas(32) float block[128], c[16 * 8];
  bool half = shape.elementBytes == 2;
  for (u32 r = 0; r < registersA; ++r) {
    const u32 *from = lanesOf<u32>(warp, inst.s[r]);
    if (half) {
      placeHalfA(f.a, from, r, k, shape.typeA == NumberType::BF16);
      continue;
    }
    widen(block, from, shape.typeA);
    placeA(f.a, block, r, width, k);
  }
  for (u32 r = 0; r < registersB; ++r) {
    widen(block, lanesOf<u32>(warp, inst.s[registersA + r]), shape.typeB);
    placeB(f.b, block, r, width);
  }
  loadC(warp, inst.s + registersA + registersB, c, shape.halfC);
  if (warp.block->launch->numerics == Numerics::Exact)
    multiply(c, f.a, f.b, 16, 8, k);
  else
    multiplyInexact(warp, c, f.a, f.b, 16, 8, k);
  storeD(warp, inst.d, c, shape.halfD);
}

//===----------------------------------------------------------------------===//
// Integers
//===----------------------------------------------------------------------===//

template <typename T>
void spread(i32 *to, const u32 *from, u32 bits) {
  u32 perRegister = 32 / bits;
  for (u32 l = 0; l < kWarpSize; ++l)
    for (u32 i = 0; i < perRegister; ++i) {
      u32 field = from[l] << (32 - bits * (i + 1));
      to[l * perRegister + i] =
          static_cast<i32>(static_cast<T>(field) >> (32 - bits));
    }
}

void runIntegerMma(Warp &warp, const Inst &inst, u32) {
  MmaShape shape = MmaShape::unpack(inst.imm);
  u32 bits = shape.elementBits, width = 4 * (32 / bits), k = shape.k;
  u32 registersA = 2 * k / width, registersB = k / width;
  static thread_local Fragments<i32> f;
  i32 block[kWarpSize * 32];
  auto load = [&](u32 place, bool isSigned) {
    const u32 *from = lanesOf<u32>(warp, place);
    if (isSigned)
      spread<i32>(block, from, bits);
    else
      spread<u32>(block, from, bits);
  };
  for (u32 r = 0; r < registersA; ++r) {
    load(inst.s[r], shape.signedA);
    placeA(f.a, block, r, width, k);
  }
  for (u32 r = 0; r < registersB; ++r) {
    load(inst.s[registersA + r], shape.signedB);
    placeB(f.b, block, r, width);
  }
  const u32 *places = inst.s + registersA + registersB;
  i32 result[4][kWarpSize];
  for (u32 r = 0; r < 4; ++r) {
    const i32 *c = lanesOf<i32>(warp, places[r]);
    for (u32 l = 0; l < kWarpSize; ++l) {
      u32 row = l / 4 + 8 * (r >> 1), column = l % 4 * 2 + (r & 1);
      i64 sum = c[l];
      for (u32 i = 0; i < k; ++i)
        sum += static_cast<i64>(f.a[row * k + i]) * f.b[i * 8 + column];
      if (shape.saturates)
        sum = std::clamp<i64>(sum, std::numeric_limits<i32>::min(),
                              std::numeric_limits<i32>::max());
      result[r][l] = static_cast<i32>(sum);
    }
  }
  for (u32 r = 0; r < 4; ++r)
    std::copy_n(result[r], kWarpSize, lanesOf<i32>(warp, inst.d[r]));
}

} // namespace

void addMmaOps(HandlerTable &table) {
  table["mma.float"] = runMma;
  table["mma.integer"] = runIntegerMma;
}

MatrixKernels matrixKernels() { return {multiply, widenF16, widenBF16}; }

} // namespace moe::sim::MOE_SIM_ISA
