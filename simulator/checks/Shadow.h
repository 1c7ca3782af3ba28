//===- Shadow.h - Last accesses to every byte -------------------*- C++ -*-===//
//
// The race detector's memory: who wrote a byte last, and who has read it since.
//
// Neighbouring bytes nearly always share their history, so a Cell stands for
// 64 bytes until an access covers a part of it only; then it splits into four
// cells of 16 bytes, those into four of 4, and those into single bytes. A
// store to all of a cell joins its parts again. Shared memory starts with cells
// of 16 bytes: that is what ldmatrix and most copies access.
//
// One coalesced access of a warp covers a cell with several lanes, one after
// the other. A stamp says so exactly, with the first lane and the bytes of
// each lane:
//
//   st.shared.f32 by lanes 0 ... 31 to bytes 0 ... 127 leaves two stamps,
//     (lane 0, 4 bytes a lane) on bytes 0 ... 63 and
//     (lane 16, 4 bytes a lane) on bytes 64 ... 127
//
// While all lanes of two stamps are ordered, or each byte has the same lane in
// both, nobody needs to know more. Only if neither holds is the cell split,
// down to parts that have one lane each, and judged there. So cells are never
// coarser than what is reported: neighbouring 8-bit stores do not look like a
// race.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_SHADOW_H
#define MOE_LIB_SIMULATOR_SHADOW_H

#include "Types.h"

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

namespace moe::sim {

struct Warp;
struct Region;

/// A stamp's `info`: pc, first lane, flags, and log2 of the bytes of a lane.
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
constexpr u32 kStrideShift = 29;
/// Instead of log2 of the bytes of a lane: every lane covers every byte.
constexpr u32 kWhole = 7;

/// An access to consecutive bytes.
struct Access {
  Access(Warp &warp, u32 lanes, u32 pc, u32 flags = 0);

  bool knows(u32 ofActor, u32 atTime) const {
    u32 local = ofActor - firstActor;
    return local < numKnown && atTime < known[local];
  }

  Warp *warp;
  u32 lanes;
  u32 pc;
  /// kPending, kStrong, kCtaScope, kAsync.
  u32 flags;
  /// kWhole: every lane accesses all bytes. Else consecutive lanes access
  /// 1 << stride bytes each, one after the other.
  u32 stride = kWhole;
  bool read = false;
  bool write = false;
  /// The stored value is undefined: the bytes count as uninitialised.
  bool undefined = false;
  bool checksRaces;
  /// What memory holds and what is stored, to tell benign equal stores.
  const u8 *memory = nullptr;
  const u8 *value = nullptr;
  /// What all lanes of the instruction store, `bytes` each.
  struct {
    const u8 *values = nullptr;
    u32 bytes = 0;
    u32 mask = 0;
    const u64 *addresses = nullptr;
  } warpStore;
  /// Who accesses, and what the whole warp knows of the block's actors.
  u32 actor;
  u32 time;
  u32 firstActor;
  u32 numKnown;
  const u32 *known;
  /// Of the block's other actors, no lane knows more than that.
  bool exact;
};

/// An access as cells remember it. Actors are numbered from 1; 0 is nobody.
struct Stamp {
  u32 actor = 0;
  u32 time = 0;
  u32 lanes = 0;
  u32 info = 0;

  u32 lane() const { return info >> kLaneShift & 31; }
  u32 stride() const { return info >> kStrideShift; }
  bool strided() const { return stride() != kWhole; }
  bool pending() const { return info & kPending; }
};

struct Cell {
  /// The last write, less its lanes: those follow from `info`.
  u32 writer = 0;
  u32 writeTime = 0;
  u32 writeInfo = kWhole << kStrideShift;
  /// Bit 0: initialised. Bit 1: split. Bit 2: more than two readers. From bit
  /// 3: index of the parts or of the reader set, 0 if none.
  u32 state = 0;
  /// Unless there are more; tiles are often read by two warps.
  Stamp readers[2];

  Stamp written(u32 bytes) const;
};
static_assert(sizeof(Cell) == 48);

/// What takes over a write that has completed: the asynchronous actor of a
/// bulk copy, or (actor 0) whoever issued it.
struct Completion {
  u32 actor = 0;
  u32 lane = 0;
  u32 time = 0;
};

/// The cells of one block's shared memory or of one page of a buffer.
class ShadowPage {
public:
  /// `denseActors` reader slots, one for each actor from `firstActor`, if not
  /// zero; else a few slots for any actor.
  void reset(u64 bytes, u32 firstActor, u32 denseActors, bool tracksInit,
             const char *what);

  /// Checks and records an access to `bytes` bytes at `offset` of the page;
  /// `origin` is added to offsets in messages.
  void touch(const Access &access, u64 offset, u32 bytes, u64 origin);

  /// The pending accesses of the warp's lanes to these bytes are done.
  void completeWrite(const Access &access, u64 offset, u32 bytes,
                     const Completion &by = {});
  void completeRead(const Access &access, u64 offset, u32 bytes);

  /// The last writes to these bytes, as far as there are any.
  void forWriters(u64 offset, u32 bytes,
                  const std::function<void(const Stamp &)> &fn);

  void lock() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { busy.clear(std::memory_order_release); }

private:
  static constexpr u32 kInit = 1u << 0;
  static constexpr u32 kSplit = 1u << 1;
  static constexpr u32 kMany = 1u << 2;
  static constexpr u32 kIndexShift = 3;
  static constexpr u32 kParts = 4;
  static constexpr u32 kSparseReaders = 4;

  /// The bytes [from, to) that an access covers.
  struct Span {
    u64 from;
    u64 to;
    u64 origin;

    bool covers(u64 start, u32 bytes) const {
      return from <= start && start + bytes <= to;
    }
    bool meets(u64 start, u32 bytes) const {
      return start < to && from < start + bytes;
    }
  };

  /// Parts of split cells, in chunks that never move.
  class Arena {
  public:
    u32 take();
    void give(u32 index) { unused.push_back(index); }
    void clear() {
      count = 1;
      unused.clear();
    }
    Cell *operator[](u32 index) {
      return &chunks[index / kChunk][index % kChunk * kParts];
    }

  private:
    static constexpr u32 kChunk = 32;
    std::vector<std::unique_ptr<Cell[]>> chunks;
    std::vector<u32> unused;
    /// Index 0 means none.
    u32 count = 1;
  };

  void visit(const Access &access, Cell &cell, u64 start, u32 bytes,
             const Span &span);
  void visitParts(const Access &access, Cell &cell, u64 start, u32 bytes,
                  const Span &span);
  bool touchWhole(const Access &access, Cell &cell, u64 start, u32 bytes,
                  const Span &span);
  bool checkWriter(const Access &access, const Cell &cell, const Stamp &mine,
                   u32 bytes, u64 start, const Span &span);
  bool checkReaders(const Access &access, Cell &cell, const Stamp &mine,
                    u64 address);
  bool recordRead(const Access &access, Cell &cell, const Stamp &mine);
  bool addReader(const Access &access, Cell &cell, const Stamp &mine);
  void recordWrite(const Access &access, Cell &cell, const Stamp &mine);
  Stamp *readers(Cell &cell, u32 &count);
  Stamp *promote(Cell &cell);
  void clearReaders(Cell &cell);
  Cell *split(Cell &cell, u32 bytes);
  void release(Cell &cell);
  template <typename Fn>
  void forCells(Cell &cell, u64 start, u32 bytes, const Span &span, Fn fn);
  template <typename Fn>
  void forCells(u64 offset, u32 bytes, Fn fn);

  /// Reads of what nobody wrote are found in shared memory alone.
  bool isShared() const { return init; }
  u32 readerSlots() const { return dense ? dense + 2 : kSparseReaders; }

  /// log2 of the bytes of the largest cells.
  u32 rootShift = 6;
  std::vector<Cell> cells;
  Arena parts;
  std::vector<Stamp> readerSets;
  std::vector<u32> unusedSets;
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
  static constexpr u64 kPageBytes = 16384;

  explicit RegionShadow(u64 bytes)
      : pages((bytes + kPageBytes - 1) / kPageBytes) {}
  ~RegionShadow();

  void touch(const Access &access, u64 offset, u64 bytes, bool concurrent,
             const char *what);
  void completeWrite(const Access &access, u64 offset, u64 bytes);
  void forWriters(u64 offset, u64 bytes,
                  const std::function<void(const Stamp &)> &fn);

private:
  ShadowPage &page(u64 index, const char *what);
  template <typename Fn>
  void forPages(u64 offset, u64 bytes, const char *what, Fn fn);

  std::vector<std::atomic<ShadowPage *>> pages;
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_SHADOW_H
