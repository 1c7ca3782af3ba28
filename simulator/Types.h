//===- Types.h - Short names used all over the simulator --------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_TYPES_H
#define MOE_LIB_SIMULATOR_TYPES_H

#include <cstdint>

namespace moe::sim {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr u32 kWarpSize = 32;
constexpr u32 kAllLanes = ~0u;

/// PTX state spaces. Generic addresses are host pointers.
enum class Space : u8 {
  Generic,
  Global,
  Shared,
  SharedCluster,
  Local,
  Param,
  Const,
};

/// The lanes of `mask`, lowest first: `for (u32 lane : Lanes(mask))`.
class Lanes {
public:
  class Iterator {
  public:
    explicit Iterator(u32 mask) : mask(mask) {}
    u32 operator*() const { return __builtin_ctz(mask); }
    Iterator &operator++() {
      mask &= mask - 1;
      return *this;
    }
    bool operator!=(const Iterator &other) const { return mask != other.mask; }

  private:
    u32 mask;
  };

  explicit Lanes(u32 mask) : mask(mask) {}
  Iterator begin() const { return Iterator(mask); }
  Iterator end() const { return Iterator(0); }

private:
  u32 mask;
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_TYPES_H
