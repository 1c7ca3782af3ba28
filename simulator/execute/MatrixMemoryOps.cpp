//===- MatrixMemoryOps.cpp - ldmatrix, stmatrix, movmatrix ----------------===//
//
// An 8 x 8 matrix of 16-bit elements: lane l = 4 g + t holds row g, columns
// 2 t and 2 t + 1; transposed, column g, rows 2 t and 2 t + 1. Lanes 8 q ...
// 8 q + 7 give the addresses of the rows of matrix q.
//
//===----------------------------------------------------------------------===//

#include "Handlers.h"
#include "Mma.h"
#include "memory/Memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace moe::sim {
namespace {

constexpr u32 kRowBytes = 16;

void resolveRows(Warp &warp, const Inst &inst, MemoryRequest request,
                 Places &rows) {
  u32 lanes = inst.vec == 4 ? kAllLanes : (1u << (8 * inst.vec)) - 1;
  request.bytes = kRowBytes;
  resolveOperand(warp, inst, lanes, request, rows);
}

u16 element(const u8 *row, u32 column) {
  u16 value;
  std::memcpy(&value, row + 2 * column, sizeof value);
  return value;
}

void runLdmatrix(Warp &warp, const Inst &inst, u32) {
  Places rows;
  MemoryRequest request;
  request.read = true;
  resolveRows(warp, inst, request, rows);
  static const u8 poison[kRowBytes] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                       0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                       0xff, 0xff, 0xff, 0xff};
  for (u32 q = 0; q < inst.vec; ++q) {
    const u8 *matrix[8];
    for (u32 r = 0; r < 8; ++r)
      matrix[r] =
          rows.good >> (8 * q + r) & 1 ? rows.pointers[8 * q + r] : poison;
    u32 *d = lanesOf<u32>(warp, inst.d[q]);
    if (!inst.aux) {
      for (u32 r = 0; r < 8; ++r)
        std::memcpy(d + 4 * r, matrix[r], kRowBytes);
      continue;
    }
    for (u32 l = 0; l < kWarpSize; ++l)
      d[l] = element(matrix[l % 4 * 2], l / 4) |
             static_cast<u32>(element(matrix[l % 4 * 2 + 1], l / 4)) << 16;
  }
}

void runStmatrix(Warp &warp, const Inst &inst, u32) {
  // Row r of matrix q is what lane 8 q + r stores.
  u8 values[kWarpSize][kRowBytes];
  for (u32 q = 0; q < inst.vec; ++q) {
    const u32 *s = lanesOf<u32>(warp, inst.s[1 + q]);
    for (u32 l = 0; l < kWarpSize; ++l)
      for (u32 half = 0; half < 2; ++half) {
        u32 g = l / 4, t = l % 4 * 2 + half;
        u16 value = static_cast<u16>(s[l] >> (16 * half));
        u32 row = inst.aux ? t : g, column = inst.aux ? g : t;
        std::memcpy(&values[8 * q + row][2 * column], &value, sizeof value);
      }
  }
  MemoryRequest request;
  request.write = true;
  request.values = &values[0][0];
  Places rows;
  resolveRows(warp, inst, request, rows);
  for (u32 l : Lanes(rows.good))
    std::memcpy(rows.pointers[l], values[l], kRowBytes);
  warp.block->executor->progressed = true;
}

void runMovmatrix(Warp &warp, const Inst &inst, u32) {
  u32 from[kWarpSize];
  std::copy_n(lanesOf<u32>(warp, inst.s[0]), kWarpSize, from);
  u32 *d = lanesOf<u32>(warp, inst.d[0]);
  auto at = [&](u32 row, u32 column) {
    return from[4 * row + column / 2] >> (16 * (column % 2)) & 0xffff;
  };
  for (u32 l = 0; l < kWarpSize; ++l)
    d[l] = at(l % 4 * 2, l / 4) | at(l % 4 * 2 + 1, l / 4) << 16;
}

//===----------------------------------------------------------------------===//
// Inexact numerics
//===----------------------------------------------------------------------===//

/// Bits of an addend behind the place of the largest exponent.
constexpr int kFractionBits = 25;

/// c + a b of one instruction. The addends are aligned to the largest exponent,
/// of products that of their factors' sum, cut off behind kFractionBits, and
/// summed; the sum is truncated. So does an H100, bit for bit, with f16, bf16
/// and tf32 (tests/python/sim/hardware); its 8-bit types nobody has measured.
float tensorCoreSum(float c, const float *a, const float *b, u32 stride,
                    u32 k) {
  constexpr int none = std::numeric_limits<int>::min();
  int largest = c == 0 ? none : std::ilogb(c);
  double plain = c;
  for (u32 i = 0; i < k; ++i) {
    float x = a[i], y = b[i * stride];
    plain += static_cast<double>(x) * y;
    if (x != 0 && y != 0)
      largest = std::max(largest, std::ilogb(x) + std::ilogb(y));
  }
  if (largest == none || !std::isfinite(plain))
    return static_cast<float>(plain);
  double scale = std::ldexp(1.0, kFractionBits - largest);
  double sum = std::trunc(c * scale);
  for (u32 i = 0; i < k; ++i)
    sum += std::trunc(static_cast<double>(a[i]) * b[i * stride] * scale);
  sum /= scale;
  float rounded = static_cast<float>(sum);
  return std::fabs(static_cast<double>(rounded)) > std::fabs(sum)
             ? std::nextafter(rounded, 0.0f)
             : rounded;
}

} // namespace

void multiplyInexact(Warp &warp, float *d, const float *a, const float *b,
                     u32 rows, u32 n, u32 k) {
  bool perturbed = warp.block->launch->numerics == Numerics::Perturbed;
  u32 order[256];
  std::iota(order, order + k, 0);
  if (perturbed)
    warp.block->random.shuffle(order, k);
  for (u32 row = 0; row < rows; ++row)
    for (u32 column = 0; column < n; ++column) {
      float &sum = d[row * n + column];
      if (!perturbed) {
        sum = tensorCoreSum(sum, a + row * k, b + column, n, k);
        continue;
      }
      for (u32 i = 0; i < k; ++i)
        sum += a[row * k + order[i]] * b[order[i] * n + column];
    }
}

void addMatrixMemoryOps(HandlerTable &table) {
  table["ldmatrix"] = runLdmatrix;
  table["stmatrix"] = runStmatrix;
  table["movmatrix"] = runMovmatrix;
}

} // namespace moe::sim
