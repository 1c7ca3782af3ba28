//===- CarryOps.cpp - Extended-precision arithmetic -----------------------===//

#include "CarryOps.h"
#include "Machine.h"

#include <type_traits>

namespace moe::sim {
namespace {

enum CarryOp : u8 { Add, Subtract, MadLow, MadHigh };

/// aux: the operation; aux2: takes the carry in. s: carry, a, b (, c);
/// d: result (, carry).
template <typename T>
void runCarry(Warp &warp, const Inst &inst, u32 mask) {
  using U = std::make_unsigned_t<T>;
  using Wide =
      std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  constexpr u32 bits = sizeof(T) * 8;
  u32 carryIn = inst.aux2 ? predicateOf(warp, inst.s[0]) : 0, carryOut = 0;
  auto source = [&](u32 i, u32 l) { return lanesOf<T>(warp, inst.s[i])[l]; };
  for (u32 l : Lanes(mask)) {
    U a = static_cast<U>(source(1, l)), b = static_cast<U>(source(2, l));
    if (inst.aux >= MadLow) {
      Wide product = static_cast<Wide>(source(1, l)) * source(2, l);
      a = static_cast<U>(inst.aux == MadLow ? product : product >> bits);
      b = static_cast<U>(source(3, l));
    }
    U in = carryIn >> l & 1;
    unsigned __int128 sum = inst.aux == Subtract
                                ? static_cast<unsigned __int128>(a) - b - in
                                : static_cast<unsigned __int128>(a) + b + in;
    // The borrow shows as the bit above the result, as the carry does.
    carryOut |= static_cast<u32>(sum >> bits & 1) << l;
    lanesOf<U>(warp, inst.d[0])[l] = static_cast<U>(sum);
  }
  if (inst.nd > 1)
    setPredicate(warp, inst.d[1], mask, carryOut);
}

} // namespace

void addCarryOps(HandlerTable &table) {
  table["carry.u32"] = runCarry<u32>;
  table["carry.s32"] = runCarry<i32>;
  table["carry.u64"] = runCarry<u64>;
  table["carry.s64"] = runCarry<i64>;
}

} // namespace moe::sim
