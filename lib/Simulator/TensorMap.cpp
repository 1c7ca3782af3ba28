//===- TensorMap.cpp - The simulator's CUtensorMap ------------------------===//

#include "MoE/Simulator/TensorMap.h"

#include <cstring>

namespace moe::sim {

const char *encodeTensorMap(TensorMap &map, uint64_t address, uint32_t dataType,
                            uint32_t rank, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box,
                            uint32_t swizzle, bool nanFill) {
  // The limits are those of cuTensorMapEncodeTiled.
  if (rank < 1 || rank > 5)
    return "expected a tensor of 1 to 5 dimensions";
  if (address % 16)
    return "expected the tensor's address to be a multiple of 16";
  // u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, f32 with flushed
  // denormals, tf32, and tf32 with flushed denormals.
  static constexpr uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (dataType >= sizeof sizes)
    return "expected an element type of cuTensorMapEncodeTiled, u8 to tf32";
  uint32_t elementBytes = sizes[dataType];
  if (swizzle > 3)
    return "expected swizzle none, 32B, 64B or 128B";
  std::memset(&map, 0, sizeof map);
  map.magic = TensorMap::kMagic;
  map.address = address;
  map.rank = static_cast<uint8_t>(rank);
  map.dataType = static_cast<uint8_t>(dataType);
  map.elementBytes = static_cast<uint8_t>(elementBytes);
  map.swizzle = static_cast<uint8_t>(swizzle);
  map.nanFill = nanFill;
  for (uint32_t i = 0; i < rank; ++i) {
    if (dims[i] < 1 || dims[i] > 0xffffffff)
      return "expected every dimension to be in [1, 2^32)";
    if (box[i] < 1 || box[i] > 256)
      return "expected every box extent to be in [1, 256]";
    if (i > 0 && strides[i] % 16)
      return "expected every outer stride to be a multiple of 16 bytes";
    map.dims[i] = static_cast<uint32_t>(dims[i]);
    map.strides[i] = strides[i];
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  uint32_t inner = box[0] * elementBytes;
  if (inner % 16)
    return "expected the box's inner extent to be a multiple of 16 bytes";
  static constexpr uint32_t spans[] = {~0u, 32, 64, 128};
  if (inner > spans[swizzle])
    return "expected the box's inner extent to fit the swizzle's span";
  return nullptr;
}

} // namespace moe::sim
