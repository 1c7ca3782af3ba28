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

struct TensorMap {
  static constexpr uint64_t kMagic = 0x50414d524f534e54; // "TNSORMAP"

  uint64_t magic;
  uint64_t address;
  uint8_t rank;
  uint8_t elementBytes;
  /// 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes.
  uint8_t swizzle;
  uint8_t nanFill;
  uint16_t box[5];
  /// The element type, numbered as CUtensorMapDataType.
  uint8_t dataType;
  uint8_t reserved;
  /// Innermost first.
  uint32_t dims[5];
  uint32_t reserved2;
  uint64_t strides[5];
  uint64_t reserved3[4];
};
static_assert(sizeof(TensorMap) == 128);

/// Fills `map`; returns null, or why the driver would refuse these values.
const char *encodeTensorMap(TensorMap &map, uint64_t address, uint32_t dataType,
                            uint32_t rank, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box,
                            uint32_t swizzle, bool nanFill);

} // namespace moe::sim

#endif // MOE_SIMULATOR_TENSORMAP_H
