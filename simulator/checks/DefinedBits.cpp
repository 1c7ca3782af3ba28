//===- DefinedBits.cpp - Bits of registers that nothing has written -------===//

#include "DefinedBits.h"
#include "decode/Conversion.h"
#include "execute/Handlers.h"
#include "memory/Memory.h"

#include <cstring>

namespace moe::sim {

//===----------------------------------------------------------------------===//
// Rules
//===----------------------------------------------------------------------===//

namespace {

using TransferTable = std::unordered_map<Handler, BitTransfer>;

BitTransfer transferNamed(const std::string &key) {
  std::string op = key.substr(0, key.find('.'));
  static const std::unordered_map<std::string, BitTransfer> byOperation = {
      {"and", {BitRule::And}},        {"or", {BitRule::Or}},
      {"xor", {BitRule::Xor}},        {"not", {BitRule::Xor}},
      {"lop3", {BitRule::Lop3}},      {"shfl", {BitRule::Own}},
      {"mov", {BitRule::Moves, 1}},   {"resize", {BitRule::Moves, 1}},
      {"shl", {BitRule::Moves, 1}},   {"shr", {BitRule::Moves, 1}},
      {"brev", {BitRule::Moves, 1}},  {"bfe", {BitRule::Moves, 1}},
      {"bfi", {BitRule::Moves, 2}},   {"shf", {BitRule::Moves, 2}},
      {"prmt", {BitRule::Moves, 2}},  {"selp", {BitRule::Moves, 2}},
      {"pack", {BitRule::Moves, 16}}, {"unpack", {BitRule::Moves, 1}}};
  if (auto it = byOperation.find(op); it != byOperation.end())
    return it->second;
  if (key == "cvt")
    return {BitRule::Elements};
  if (key == "cvt.rn.f16x2.f32" || key == "cvt.rn.bf16x2.f32")
    return {BitRule::PackHalves};
  bool carries = op == "add" || op == "sub" || key.starts_with("mul.lo.") ||
                 key.starts_with("mad.lo.");
  for (const char *type : {".u16", ".s16", ".u32", ".s32", ".u64", ".s64"})
    if (carries && key.ends_with(type) && key.find(".sat") == key.npos)
      return {BitRule::Carries};
  if (key.ends_with("16x2") && !key.starts_with("cvt") &&
      !key.starts_with("setp") && !key.starts_with("atom"))
    return {BitRule::Halves};
  return {};
}

} // namespace

BitTransfer bitTransferOf(Handler run) {
  static const TransferTable table = [] {
    TransferTable transfers;
    for (const auto &[key, handler] : handlers())
      transfers[handler] = transferNamed(key);
    return transfers;
  }();
  auto it = table.find(run);
  return it == table.end() ? BitTransfer() : it->second;
}

//===----------------------------------------------------------------------===//
// Following an instruction
//===----------------------------------------------------------------------===//

namespace {

void report(Warp &warp, u32 pc, u32 lanes, const char *what) {
  LaunchState &launch = *warp.block->launch;
  if (launch.checks.uninit &&
      !launch.reporter->repeats(FindingKind::Uninit, warp, pc))
    launch.reporter->add(FindingKind::Uninit, warp, __builtin_ctz(lanes), pc,
                         what);
}

/// The bits of one lane of a register, or of its shadow; a predicate is one.
u64 bitsAt(const Warp &warp, u32 place, u32 bytes, u32 lane) {
  u64 bits = 0;
  if (bytes) {
    std::memcpy(&bits, warp.registers + place + lane * bytes,
                std::min(bytes, 8u));
    return bits;
  }
  std::memcpy(&bits, warp.registers + place, 4);
  return bits >> lane & 1;
}

/// All bits of one lane of a shadow.
void fillShadow(Warp &warp, const Kernel::Tracked &slot, u32 lane,
                bool undefined) {
  u8 *at = warp.registers + slot.shadow;
  if (slot.bytes) {
    std::memset(at + lane * slot.bytes, undefined ? 0xff : 0, slot.bytes);
    return;
  }
  u32 &mask = *reinterpret_cast<u32 *>(at);
  mask = (mask & ~(1u << lane)) | static_cast<u32>(undefined) << lane;
}

void putShadow(Warp &warp, const Kernel::Tracked &slot, u32 lane, u64 bits) {
  if (slot.bytes && slot.bytes <= 8)
    std::memcpy(warp.registers + slot.shadow + lane * slot.bytes, &bits,
                slot.bytes);
  else
    fillShadow(warp, slot, lane, bits != 0);
}

u64 ones(u32 bytes) { return bytes < 8 ? (1ull << 8 * bytes) - 1 : ~0ull; }

bool anyUndefined(const Warp &warp, const Kernel::Tracked &slot, u32 lane) {
  u64 bits = bitsAt(warp, slot.shadow, slot.bytes, lane);
  if (slot.bytes > 8) {
    u64 high;
    std::memcpy(&high, warp.registers + slot.shadow + lane * slot.bytes + 8, 8);
    bits |= high;
  }
  return bits != 0;
}

class Follower {
public:
  Follower(Warp &warp, const Inst &inst, const Kernel::TrackedUse &use)
      : warp(warp), inst(inst), use(use), kernel(*warp.block->launch->kernel) {}

  /// For lanes in which some source is not wholly defined.
  void run(u32 lanes) {
    BitTransfer transfer = bitTransferOf(inst.run);
    bool moves = transfer.rule == BitRule::Moves &&
                 controlsDefined(transfer.data, lanes);
    if (transfer.rule == BitRule::Own)
      return;
    if (moves) {
      Inst shadowed = inst;
      shadowed.d = use.shadowResults.data();
      shadowed.s = use.shadowSources.data();
      inst.run(warp, shadowed, lanes);
    } else {
      for (u32 lane : Lanes(lanes))
        compute(transfer.rule, lane);
    }
    for (u32 slot : use.writes)
      for (u32 lane : Lanes(lanes)) {
        u32 bit = 1u << lane;
        bool bad = anyUndefined(warp, kernel.tracked[slot], lane);
        warp.defined[slot] = (warp.defined[slot] & ~bit) | (bad ? 0 : bit);
      }
  }

private:
  /// Of Moves: the sources that say where the bits go.
  bool controlsDefined(u32 data, u32 lanes) const {
    if (inst.guard != kNone && definedLanes(warp, inst.guard, lanes) != lanes)
      return false;
    for (u32 i = data; i < inst.ns; ++i)
      if (definedLanes(warp, inst.s[i], lanes) != lanes)
        return false;
    return true;
  }

  u64 undefined(u32 source, u32 bytes, u32 lane) const {
    return bitsAt(warp, use.shadowSources[source], bytes, lane);
  }

  void compute(BitRule rule, u32 lane) {
    for (size_t i = 0; i < use.writes.size(); ++i) {
      const Kernel::Tracked &slot = kernel.tracked[use.writes[i]];
      bool byBits = rule != BitRule::Whole && rule != BitRule::Moves &&
                    i == 0 && slot.bytes <= 8;
      if (byBits)
        putShadow(warp, slot, lane, undefinedBits(rule, slot.bytes, lane));
      else
        fillShadow(warp, slot, lane, true);
    }
  }

  /// Which elements of a conversion depend on undefined bits.
  u64 undefinedElements(u32 lane) const {
    Conversion c = Conversion::unpack(inst.imm);
    u32 to = bytesOf(c.to), from = bytesOf(c.from);
    if (!c.packed)
      return undefined(0, from, lane) ? ones(to) : 0;
    u64 bits = 0;
    for (u32 i = 0; i < 2; ++i) { // the first of two sources is the high one
      bool bad = inst.ns == 2 ? undefined(1 - i, from, lane)
                              : undefined(0, 2 * from, lane) >> 8 * from * i &
                                    ones(from);
      bits |= bad ? ones(to) << 8 * to * i : 0;
    }
    return bits;
  }

  u64 undefinedBits(BitRule rule, u32 bytes, u32 lane) const {
    if (rule == BitRule::Elements)
      return undefinedElements(lane);
    u64 u[3] = {}, v[3] = {}, any = 0;
    for (u32 i = 0; i < std::min<u32>(inst.ns, 3); ++i) {
      u[i] = undefined(i, bytes, lane);
      v[i] = bitsAt(warp, inst.s[i], bytes, lane);
      any |= u[i];
    }
    switch (rule) {
    case BitRule::And: // a defined zero decides
      return any & (u[0] | v[0]) & (u[1] | v[1]);
    case BitRule::Or:
      return any & (u[0] | ~v[0]) & (u[1] | ~v[1]);
    case BitRule::Lop3:
      return undefinedLogic(u, v);
    case BitRule::Carries:
      return any ? ~((any & -any) - 1) : 0;
    case BitRule::Halves:
      return (any & 0xffff ? 0xffff : 0) | (any >> 16 ? 0xffff0000 : 0);
    case BitRule::PackHalves:
      return (u[1] ? 0xffff : 0) | (u[0] ? 0xffff0000 : 0);
    default:
      return any;
    }
  }

  /// Bits whose value depends on what the undefined sources hold.
  u64 undefinedLogic(const u64 *u, const u64 *v) const {
    u64 zero = 0, one = 0;
    for (u32 i = 0; i < 8; ++i) {
      u64 possible = ~0ull;
      for (u32 k = 0; k < 3; ++k)
        possible &= u[k] | (i >> (2 - k) & 1 ? v[k] : ~v[k]);
      (inst.imm >> i & 1 ? one : zero) |= possible;
    }
    return zero & one;
  }

  Warp &warp;
  const Inst &inst;
  const Kernel::TrackedUse &use;
  const Kernel &kernel;
};

} // namespace

void trackDefinedness(Warp &warp, const Inst &inst, u32 pc, u32 group,
                      u32 mask) {
  const Kernel &kernel = *warp.block->launch->kernel;
  if (inst.guard != kNone) {
    u32 bad = group & ~definedLanes(warp, inst.guard, group);
    if (bad)
      report(warp, pc, bad, "depends on a predicate that nothing has written");
  }
  if (inst.addressed && mask) {
    u32 bad = mask & ~definedLanes(warp, inst.s[0], mask);
    if (bad)
      report(warp, pc, bad,
             "uses an address register that nothing has written");
  }
  const Kernel::TrackedUse &use = kernel.trackedUses.at(pc);
  u32 defined = mask;
  for (u32 slot : use.reads)
    defined &= warp.defined[slot];
  if (mask & ~defined)
    Follower(warp, inst, use).run(mask & ~defined);
  for (u32 slot : use.writes) {
    for (u32 lane : Lanes(defined & ~warp.defined[slot]))
      fillShadow(warp, kernel.tracked[slot], lane, false);
    warp.defined[slot] |= defined;
  }
}

u32 partlyDefinedLanes(Warp &warp, u32 place, u32 bytes, u32 mask) {
  const Kernel &kernel = *warp.block->launch->kernel;
  auto it = kernel.trackedIndex.find(place);
  if (it == kernel.trackedIndex.end())
    return mask;
  const Kernel::Tracked &slot = kernel.tracked[it->second];
  u64 all = ones(bytes);
  u32 lanes = mask & warp.defined[it->second];
  for (u32 lane : Lanes(mask & ~lanes))
    if ((bitsAt(warp, slot.shadow, slot.bytes, lane) & all) != all)
      lanes |= 1u << lane;
  return lanes;
}

void shuffleDefinedness(Warp &warp, const Inst &inst, u32 mask,
                        const u32 *from) {
  const Kernel &kernel = *warp.block->launch->kernel;
  auto to = kernel.trackedIndex.find(inst.d[0]);
  if (to == kernel.trackedIndex.end())
    return;
  const Kernel::Tracked &slot = kernel.tracked[to->second];
  auto source = kernel.trackedIndex.find(inst.s[0]);
  u32 bits[kWarpSize] = {};
  if (source != kernel.trackedIndex.end())
    std::memcpy(bits, warp.registers + kernel.tracked[source->second].shadow,
                sizeof bits);
  u32 controls = mask;
  for (u32 i = 1; i < inst.ns; ++i)
    controls &= definedLanes(warp, inst.s[i], mask);
  u32 &defined = warp.defined[to->second];
  for (u32 l : Lanes(mask)) {
    bool known = (mask >> from[l] & 1) && (controls >> l & 1);
    u32 undefined = known ? bits[from[l]] : ~0u;
    putShadow(warp, slot, l, undefined);
    defined = (defined & ~(1u << l)) | static_cast<u32>(!undefined) << l;
  }
}

} // namespace moe::sim
