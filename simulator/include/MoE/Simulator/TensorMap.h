//===- TensorMap.h - The simulator's CUtensorMap ----------------*- C++ -*-===//
//
// 128 bytes that a kernel takes as a parameter, as the driver's CUtensorMap.
// The driver's layout is secret, so this is the simulator's own.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_SIMULATOR_TENSORMAP_H
#define MOE_SIMULATOR_TENSORMAP_H

#include <cstdint>

namespace moe::sim {

/// Kernels may build one themselves, on zeros: zero stands for what it stands
/// for there.
struct TensorMap {
  static constexpr uint64_t kMagic = 0x50414d524f534e54; // "TNSORMAP"

  uint64_t magic;
  uint64_t address;
  /// The rank less one.
  uint8_t lastDimension;
  /// Numbered as CUtensorMapDataType.
  uint8_t dataType;
  /// 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes.
  uint8_t swizzle;
  uint8_t nanFill;
  uint8_t interleave;
  uint8_t swizzleAtomicity;
  uint16_t box[5];
  /// Innermost first.
  uint32_t dims[5];
  /// Bytes from one index of dimension i + 1 to the next.
  uint64_t outerStrides[4];
  uint32_t elementStrides[5];
  uint8_t reserved[20];

  uint32_t rank() const { return lastDimension + 1u; }
  /// 0 if there is no such type.
  uint32_t elementBytes() const;
  /// Elements of the box along a dimension: one of each element stride.
  uint32_t extent(uint32_t dimension) const;
  /// Why the driver would refuse the map, or null.
  const char *problem() const;
};
static_assert(sizeof(TensorMap) == 128);

/// What cuTensorMapEncodeTiled is given.
struct TensorMapFields {
  uint64_t address = 0;
  /// CUtensorMapDataType.
  uint32_t dataType = 0;
  uint32_t rank = 1;
  const uint64_t *dims = nullptr;
  /// Of all but the innermost dimension.
  const uint64_t *outerStrides = nullptr;
  const uint32_t *box = nullptr;
  /// Null: all one.
  const uint32_t *elementStrides = nullptr;
  uint32_t interleave = 0;
  uint32_t swizzle = 0;
  bool nanFill = false;
};

/// Fills `map`; returns null, or why the driver would refuse these values.
const char *encodeTensorMap(TensorMap &map, const TensorMapFields &fields);

} // namespace moe::sim

#endif // MOE_SIMULATOR_TENSORMAP_H
