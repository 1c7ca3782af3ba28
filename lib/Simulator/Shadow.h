//===- Shadow.h - Last accesses to every byte -------------------*- C++ -*-===//
//
// The race detector's memory. One Cell stands for four bytes while all
// accesses cover the whole word, which is nearly always; the first narrower
// access splits it into four cells of one byte, so neighbouring 8- and 16-bit
// stores never look like a race.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_SHADOW_H
#define MOE_LIB_SIMULATOR_SHADOW_H

#include "Types.h"

#include <atomic>
#include <memory>
#include <vector>

namespace moe::sim {

struct Warp;
struct Region;

/// Flags of a stamp, above the pc and the lane in its `info`.
constexpr u32 kPcBits = 20;
constexpr u32 kPcMask = (1u << kPcBits) - 1;
constexpr u32 kLaneShift = kPcBits;
/// In flight: an asynchronous copy or wgmma that nobody has waited for.
constexpr u32 kPending = 1u << 25;
/// Atomics, volatile, relaxed, acquire and release accesses.
constexpr u32 kStrong = 1u << 26;
constexpr u32 kCtaScope = 1u << 27;
/// By the asynchronous proxy.
constexpr u32 kAsync = 1u << 28;

struct Access {
  Warp *warp;
  u32 lanes;
  u32 pc;
  /// kPending, kStrong, kCtaScope, kAsync.
  u32 flags = 0;
  bool read = false;
  bool write = false;
  /// The stored value is undefined: the bytes count as uninitialised.
  bool undefined = false;
  /// What memory holds and what is stored, to tell benign equal stores.
  const u8 *memory = nullptr;
  const u8 *value = nullptr;
  /// completeWrite: the asynchronous actor that takes the write over, unless
  /// ~0, with its lane and time.
  u32 actor = ~0u;
  u32 actorLane = 0;
  u32 time = 0;
};

/// Who reads a word. Actors are numbered from 1; 0 is nobody.
struct Reader {
  u32 actor = 0;
  u32 time = 0;
  u32 lanes = 0;
  u32 info = 0;
};

struct Cell {
  u32 writer = 0;
  u32 writeTime = 0;
  u32 writeInfo = 0;
  Reader reader;
  /// Bits 0-3: bytes initialised. Bit 4: split. Bit 5: several readers.
  /// From bit 6: index of the split cells or of the reader set, 0 if none.
  u32 state = 0;
};
static_assert(sizeof(Cell) == 32);

/// The cells of one block's shared memory or of one page of a buffer.
class ShadowPage {
public:
  /// `denseActors` reader slots, one for each actor from `firstActor`, if not
  /// zero; else a few slots for any actor.
  void reset(u32 words, u32 firstActor, u32 denseActors, bool tracksInit,
             const char *what);

  /// Checks and records an access to `bytes` bytes at `offset` of the page;
  /// `origin` is added to offsets in messages.
  void touch(const Access &access, u64 offset, u32 bytes, u64 origin);

  /// The pending accesses of the warp's `lanes` to these bytes are done.
  void completeWrite(const Access &access, u64 offset, u32 bytes);
  void completeRead(const Access &access, u64 offset, u32 bytes);

  void lock() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { busy.clear(std::memory_order_release); }

private:
  static constexpr u32 kSplit = 1u << 4;
  static constexpr u32 kMany = 1u << 5;
  static constexpr u32 kIndexShift = 6;
  static constexpr u32 kSparseReaders = 4;

  struct Sub {
    Cell bytes[4];
  };

  void touchCell(const Access &access, Cell &cell, u32 initBits, u64 address,
                 u32 valueOffset, u32 valueBytes);
  void recordRead(const Access &access, Cell &cell);
  void addReader(const Access &access, Cell &cell, const Reader &reader);
  Reader *readers(Cell &cell, u32 &count);
  void clearReaders(Cell &cell);
  Sub &split(Cell &cell);
  template <typename Fn>
  void forCells(u64 offset, u32 bytes, Fn fn);

  u32 readerSlots() const { return dense ? dense + 2 : kSparseReaders; }

  std::vector<Cell> cells;
  std::vector<Reader> readerSets;
  std::vector<Sub> subs;
  u32 first = 0;
  u32 dense = 0;
  bool init = false;
  const char *name = "";
  u32 reservoir = 1;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
};

/// The shadow of one buffer, built page by page as it is touched.
class RegionShadow {
public:
  static constexpr u64 kPageBytes = 4096;

  explicit RegionShadow(u64 bytes)
      : pages((bytes + kPageBytes - 1) / kPageBytes) {}
  ~RegionShadow();

  void touch(const Access &access, u64 offset, u64 bytes, bool concurrent,
             const char *what);
  void completeWrite(const Access &access, u64 offset, u64 bytes);

private:
  ShadowPage &page(u64 index, const char *what);

  std::vector<std::atomic<ShadowPage *>> pages;
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_SHADOW_H
