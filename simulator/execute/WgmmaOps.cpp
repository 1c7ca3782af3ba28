//===- WgmmaOps.cpp - wgmma -----------------------------------------------===//
//
// Each warp of a warpgroup computes its 16 of the 64 rows when it issues the
// instruction. Until a wait_group covers it, its shared operands are pending
// reads by the asynchronous proxy and its registers must not be touched.
//
// A matrix in shared memory is a grid of core matrices, 8 rows of 16 bytes;
// its descriptor says where it starts and how far apart core matrices are
// along both dimensions. With a swizzle the rows of 8 core matrices side by
// side interleave into rows of 32, 64 or 128 bytes.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "Mma.h"
#include "checks/Shadow.h"
#include "checks/WarpgroupAgreement.h"
#include "decode/Wgmma.h"
#include "memory/Memory.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace moe::sim {
namespace {

constexpr u32 kRows = 16; // of one warp
constexpr u32 kRowBytes = 32;
constexpr u32 kMaxK = 32;
constexpr u32 kMaxN = 256;

//===----------------------------------------------------------------------===//
// Matrices in shared memory
//===----------------------------------------------------------------------===//

struct Descriptor {
  u64 start;
  u64 leading;
  u64 stride;
  u32 swizzle; // 0 none, 1 128 bytes, 2 64, 3 32
  /// Rows of 128 bytes from a multiple of 1024 to where the pattern starts.
  u32 baseOffset;

  explicit Descriptor(u64 bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4),
        swizzle(static_cast<u32>(bits >> 62)),
        baseOffset(static_cast<u32>(bits >> 49 & 7)) {}

  u32 spanBytes() const {
    static constexpr u32 spans[] = {16, 128, 64, 32};
    return spans[swizzle];
  }

  u64 swizzled(u64 address) const {
    static constexpr u64 masks[] = {0, 7, 3, 1};
    return address ^ (((address >> 7) - baseOffset & masks[swizzle]) << 4);
  }

  /// Row (of M or N) by row, K in bytes within.
  u64 kMajor(u32 row, u32 kByte) const {
    u64 core = start + row / 8 * stride;
    if (!swizzle)
      return core + kByte / 16 * leading + row % 8 * 16 + kByte % 16;
    return swizzled(core + row % 8 * spanBytes() + kByte);
  }

  /// K by K, rows within: 16-bit elements only.
  u64 mnMajor(u32 row, u32 k) const {
    if (!swizzle)
      return start + row / 8 * stride + k / 8 * leading + k % 8 * 16 +
             row % 8 * 2;
    u32 perSpan = spanBytes() / 2;
    return swizzled(start + row / perSpan * leading + k / 8 * stride +
                    k % 8 * spanBytes() + row % perSpan * 2);
  }
};

class Operand {
public:
  Operand(Warp &warp, const Inst &inst, WgmmaInFlight &flight)
      : warp(warp), inst(inst), flight(flight),
        access(warp, warp.live, pcOf(warp, inst), kAsync | kPending) {
    access.read = true;
  }

  /// rows x 32 bytes into `to`, K within a row.
  void load(u8 *to, u64 bits, u32 firstRow, u32 rows, u32 elementBytes,
            bool transposed) {
    Descriptor d(bits);
    if (!transposed) {
      for (u32 row = 0; row < rows; ++row)
        for (u32 byte = 0; byte < kRowBytes; byte += 16)
          fetch(to + row * kRowBytes + byte, d.kMajor(firstRow + row, byte));
      return;
    }
    // Chunks of 16 bytes run along the rows.
    for (u32 k = 0; k < kRowBytes / elementBytes; ++k)
      for (u32 row = 0; row < rows; row += 8) {
        u16 chunk[8];
        fetch(reinterpret_cast<u8 *>(chunk), d.mnMajor(firstRow + row, k));
        for (u32 i = 0; i < 8; ++i)
          std::memcpy(to + (row + i) * kRowBytes + k * 2, &chunk[i], 2);
      }
  }

private:
  void fetch(u8 *to, u64 address) {
    const u8 *from = touchShared(warp, address, 16, access);
    if (!from) {
      std::memset(to, 0xff, 16);
      return;
    }
    std::memcpy(to, from, 16);
    u64 offset = static_cast<u64>(from - warp.block->shared);
    auto &reads = flight.reads;
    if (!reads.empty() && reads.back().offset + reads.back().bytes == offset)
      reads.back().bytes += 16;
    else
      reads.push_back({offset, 16});
  }

  Warp &warp;
  const Inst &inst;
  WgmmaInFlight &flight;
  Access access;
};

//===----------------------------------------------------------------------===//
// Arithmetic
//===----------------------------------------------------------------------===//

void widen(float *to, const u8 *from, u32 rows, NumberType type, bool negate) {
  switch (type) {
  case NumberType::F16:
    matrixKernels().widenF16(to, reinterpret_cast<const u16 *>(from),
                             rows * kRowBytes / 2);
    break;
  case NumberType::BF16:
    matrixKernels().widenBF16(to, reinterpret_cast<const u16 *>(from),
                              rows * kRowBytes / 2);
    break;
  case NumberType::TF32:
    for (u32 i = 0; i < rows * 8; ++i) {
      u32 bits;
      std::memcpy(&bits, from + 4 * i, 4);
      to[i] = std::bit_cast<float>(bits & 0xffffe000);
    }
    break;
  default: {
    Conversion c{NumberType::F32, type};
    for (u32 i = 0; i < rows * kRowBytes; ++i)
      to[i] = std::bit_cast<float>(static_cast<u32>(convert(from + i, c)));
    break;
  }
  }
  if (negate)
    for (u32 i = 0;
         i < rows * kRowBytes /
                 (type == NumberType::TF32                              ? 4
                  : type == NumberType::F16 || type == NumberType::BF16 ? 2
                                                                        : 1);
         ++i)
      to[i] = -to[i];
}

/// Register q of D: row g + 8 (q / 2 & 1), column 8 (q / 4) + 2 t + (q & 1).
u32 placeOf(u32 q, u32 lane, u32 n) {
  return (lane / 4 + 8 * (q / 2 & 1)) * n + 8 * (q / 4) + lane % 4 * 2 +
         (q & 1);
}

void loadAccumulators(Warp &warp, const Inst &inst, const WgmmaShape &shape,
                      float *d) {
  for (u32 i = 0; i < inst.nd; ++i) {
    const u32 *from = lanesOf<u32>(warp, inst.d[i]);
    for (u32 l = 0; l < kWarpSize; ++l) {
      if (shape.halfD) {
        d[placeOf(2 * i, l, shape.n)] = f16ToFloat(static_cast<u16>(from[l]));
        d[placeOf(2 * i + 1, l, shape.n)] =
            f16ToFloat(static_cast<u16>(from[l] >> 16));
      } else {
        d[placeOf(i, l, shape.n)] = std::bit_cast<float>(from[l]);
      }
    }
  }
}

void storeAccumulators(Warp &warp, const Inst &inst, const WgmmaShape &shape,
                       const float *d) {
  for (u32 i = 0; i < inst.nd; ++i) {
    u32 *to = lanesOf<u32>(warp, inst.d[i]);
    for (u32 l = 0; l < kWarpSize; ++l)
      to[l] =
          shape.halfD
              ? static_cast<u32>(floatToF16(d[placeOf(2 * i + 1, l, shape.n)]))
                        << 16 |
                    floatToF16(d[placeOf(2 * i, l, shape.n)])
              : std::bit_cast<u32>(d[placeOf(i, l, shape.n)]);
  }
}

struct Workspace {
  alignas(64) u8 bytesA[kRows * kRowBytes];
  alignas(64) u8 bytesB[kMaxN * kRowBytes];
  alignas(64) float a[kRows * kMaxK];
  alignas(64) float rowsB[kMaxN * kMaxK];
  alignas(64) float b[kMaxK * kMaxN];
  alignas(64) float d[kRows * kMaxN];
};

void computeFloat(Warp &warp, const Inst &inst, const WgmmaShape &shape,
                  Workspace &w, bool scaleD) {
  u32 n = shape.n, k = kRowBytes / shape.elementBytes;
  widen(w.a, w.bytesA, kRows, shape.typeA, shape.negateA);
  widen(w.rowsB, w.bytesB, n, shape.typeB, shape.negateB);
  for (u32 i = 0; i < k; ++i)
    for (u32 column = 0; column < n; ++column)
      w.b[i * n + column] = w.rowsB[column * k + i];
  if (scaleD)
    loadAccumulators(warp, inst, shape, w.d);
  else
    std::fill_n(w.d, kRows * n, 0.0f);
  if (warp.block->launch->numerics == Numerics::Exact)
    matrixKernels().multiply(w.d, w.a, w.b, kRows, n, k);
  else
    multiplyInexact(warp, w.d, w.a, w.b, kRows, n, k);
  storeAccumulators(warp, inst, shape, w.d);
}

void computeInteger(Warp &warp, const Inst &inst, const WgmmaShape &shape,
                    const Workspace &w, bool scaleD) {
  auto read = [](const u8 *from, NumberType type) -> i64 {
    return type == NumberType::S8 ? static_cast<i8>(*from) : *from;
  };
  for (u32 q = 0; q < inst.nd; ++q) {
    i32 *d = lanesOf<i32>(warp, inst.d[q]);
    for (u32 l = 0; l < kWarpSize; ++l) {
      u32 place = placeOf(q, l, shape.n);
      u32 row = place / shape.n, column = place % shape.n;
      i64 sum = scaleD ? d[l] : 0;
      for (u32 i = 0; i < kRowBytes; ++i)
        sum += read(w.bytesA + row * kRowBytes + i, shape.typeA) *
               read(w.bytesB + column * kRowBytes + i, shape.typeB);
      if (shape.saturates)
        sum = std::clamp<i64>(sum, std::numeric_limits<i32>::min(),
                              std::numeric_limits<i32>::max());
      d[l] = static_cast<i32>(sum);
    }
  }
}

/// A in registers: as mma's A fragments, 16 rows of 32 bytes.
void loadRegistersA(Warp &warp, const Inst &inst, u8 *to) {
  for (u32 r = 0; r < 4; ++r) {
    const u32 *from = lanesOf<u32>(warp, inst.s[2 + r]);
    for (u32 l = 0; l < kWarpSize; ++l)
      std::memcpy(to + (l / 4 + 8 * (r & 1)) * kRowBytes + 16 * (r >> 1) +
                      l % 4 * 4,
                  &from[l], 4);
  }
}

void report(Warp &warp, u32 pc, FindingKind kind, const std::string &what,
            u32 otherPc = kNone) {
  LaunchState &launch = *warp.block->launch;
  if (launch.checks.race && !launch.reporter->repeats(kind, warp, pc, otherPc))
    launch.reporter->add(
        kind, warp, __builtin_ctz(warp.live), pc, what, otherPc,
        otherPc == kNone ? "" : launch.reporter->describe(otherPc));
}

/// A descriptor, which must be the same in all lanes; 0 for no lanes.
u64 uniform(Warp &warp, const Inst &inst, u32 source, u32 lanes) {
  if (!lanes)
    return 0;
  const u64 *values = lanesOf<u64>(warp, inst.s[source]);
  u64 value = values[__builtin_ctz(lanes)];
  for (u32 lane : Lanes(lanes))
    if (values[lane] != value) {
      report(warp, pcOf(warp, inst), FindingKind::Deadlock,
             "expected the same descriptor in all lanes, found lane " +
                 std::to_string(lane) + " with another one");
      break;
    }
  return value;
}

/// s: scale-d, B's descriptor, A's descriptor or its four registers.
void runWgmma(Warp &warp, const Inst &inst, u32) {
  static thread_local Workspace w;
  WgmmaShape shape = WgmmaShape::unpack(inst.imm);
  u32 pc = pcOf(warp, inst);
  if (!warp.wgmmaFenced)
    report(warp, pc, FindingKind::Race,
           "expected wgmma.fence between the last write to a register that "
           "wgmma uses and this wgmma");
  WgmmaInFlight flight;
  flight.group = warp.wgmmaGroup;
  flight.pc = pc;
  flight.accumulators = inst.d;
  flight.numAccumulators = inst.nd;
  flight.registersA = inst.s + 2;
  flight.numRegistersA = shape.registersA ? inst.ns - 2 : 0;
  u32 lane = __builtin_ctz(warp.live);
  u64 descriptorA = uniform(warp, inst, 2, shape.registersA ? 0 : warp.live);
  u64 descriptorB = uniform(warp, inst, 1, warp.live);
  Operand operand(warp, inst, flight);
  if (shape.registersA)
    loadRegistersA(warp, inst, w.bytesA);
  else
    operand.load(w.bytesA, descriptorA, warp.index % 4 * kRows, kRows,
                 shape.elementBytes, shape.transposeA);
  operand.load(w.bytesB, descriptorB, 0, shape.n, shape.elementBytes,
               shape.transposeB);
  bool scaleD = predicateOf(warp, inst.s[0]) >> lane & 1;
  checkAgreement(warp, pc, {descriptorA, descriptorB, scaleD});
  if (shape.integer)
    computeInteger(warp, inst, shape, w, scaleD);
  else
    computeFloat(warp, inst, shape, w, scaleD);
  warp.wgmmas.push_back(std::move(flight));
}

void setReads(Warp &warp, const WgmmaInFlight &flight, bool complete) {
  Access access(warp, warp.live, flight.pc, kAsync | kPending);
  access.read = true;
  u64 base = warp.block->launch->sharedBase;
  for (const SharedRange &range : flight.reads) {
    if (complete)
      warp.block->shadow->completeRead(access, range.offset, range.bytes);
    else
      warp.block->shadow->touch(access, range.offset, range.bytes, base);
  }
}

/// imm: groups that may stay in flight.
void runWait(Warp &warp, const Inst &inst, u32) {
  auto covered = [&](const WgmmaInFlight &flight) {
    return flight.group + inst.imm < warp.wgmmaGroup;
  };
  const Checks &checks = warp.block->launch->checks;
  if (checks.race || checks.uninit) {
    bool any = false;
    for (const WgmmaInFlight &flight : warp.wgmmas)
      if (covered(flight)) {
        setReads(warp, flight, true);
        any = true;
      }
    // Groups still in flight may read the same bytes.
    for (const WgmmaInFlight &flight : warp.wgmmas)
      if (any && !covered(flight))
        setReads(warp, flight, false);
  }
  std::erase_if(warp.wgmmas, covered);
}

} // namespace

void addWgmmaOps(HandlerTable &table) {
  table["wgmma.mma_async"] = runWgmma;
  table["wgmma.wait_group"] = runWait;
  table["wgmma.fence"] = [](Warp &warp, const Inst &, u32) {
    warp.wgmmaFenced = true;
  };
  table["wgmma.commit_group"] = [](Warp &warp, const Inst &, u32) {
    ++warp.wgmmaGroup;
  };
}

} // namespace moe::sim
