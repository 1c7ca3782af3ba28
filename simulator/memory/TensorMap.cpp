//===- TensorMap.cpp - The simulator's CUtensorMap ------------------------===//

#include "MoE/Simulator/TensorMap.h"

#include <cstring>

namespace moe::sim {

uint32_t TensorMap::elementBytes() const {
  // u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, f32 with flushed
  // denormals, tf32, and tf32 with flushed denormals.
  static constexpr uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return dataType < sizeof sizes ? sizes[dataType] : 0;
}

uint32_t TensorMap::extent(uint32_t dimension) const {
  // Without interleaving nothing strides along the innermost dimension.
  uint32_t step = dimension ? elementStrides[dimension] : 1;
  return (box[dimension] + step - 1) / step;
}

/// The limits are those of cuTensorMapEncodeTiled.
const char *TensorMap::problem() const {
  if (rank() > 5)
    return "expected a tensor of 1 to 5 dimensions";
  if (address % 16)
    return "expected the tensor's address to be a multiple of 16";
  if (!elementBytes())
    return "expected an element type of cuTensorMapEncodeTiled, u8 to tf32";
  if (interleave)
    return "expected no interleaved layout: the simulator has none";
  if (swizzle > 3 || swizzleAtomicity)
    return "expected swizzle none, 32B, 64B or 128B, of atoms of 16 bytes";
  for (uint32_t i = 0; i < rank(); ++i) {
    if (dims[i] < 1)
      return "expected every dimension to be in [1, 2^32)";
    if (box[i] < 1 || box[i] > 256)
      return "expected every box extent to be in [1, 256]";
    if (elementStrides[i] < 1 || elementStrides[i] > 8)
      return "expected every element stride to be in [1, 8]";
    if (i > 0 && (outerStrides[i - 1] % 16 || outerStrides[i - 1] >> 40))
      return "expected every outer stride to be a multiple of 16 bytes below "
             "2^40";
  }
  uint32_t inner = box[0] * elementBytes();
  if (inner % 16)
    return "expected the box's inner extent to be a multiple of 16 bytes";
  static constexpr uint32_t spans[] = {~0u, 32, 64, 128};
  if (inner > spans[swizzle])
    return "expected the box's inner extent to fit the swizzle's span";
  return nullptr;
}

const char *encodeTensorMap(TensorMap &map, const TensorMapFields &fields) {
  std::memset(&map, 0, sizeof map);
  if (fields.rank < 1 || fields.rank > 5)
    return "expected a tensor of 1 to 5 dimensions";
  map.magic = TensorMap::kMagic;
  map.address = fields.address;
  map.lastDimension = static_cast<uint8_t>(fields.rank - 1);
  map.dataType =
      static_cast<uint8_t>(fields.dataType < 256 ? fields.dataType : 255);
  map.swizzle =
      static_cast<uint8_t>(fields.swizzle < 256 ? fields.swizzle : 255);
  map.interleave = fields.interleave != 0;
  map.nanFill = fields.nanFill;
  for (uint32_t i = 0; i < fields.rank; ++i) {
    // What does not fit is refused as zero is.
    map.dims[i] =
        fields.dims[i] >> 32 ? 0 : static_cast<uint32_t>(fields.dims[i]);
    map.box[i] = static_cast<uint16_t>(fields.box[i] > 256 ? 0 : fields.box[i]);
    map.elementStrides[i] =
        fields.elementStrides ? fields.elementStrides[i] : 1;
    if (i > 0)
      map.outerStrides[i - 1] = fields.outerStrides[i - 1];
  }
  return map.problem();
}

} // namespace moe::sim
