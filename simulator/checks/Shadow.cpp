//===- Shadow.cpp - Last accesses to every byte ---------------------------===//
//
// An access races with the last write, or a write with the reads since then,
// unless happens-before orders them (Clock.h) or both are strong.
//
// Reads by several actors that nothing orders are all remembered: shared
// memory has a slot for every warp of the block; pages of global memory keep a
// few, chosen at random, since every block of a grid may read a word. A page
// can thus miss a race in one run that another seed shows, and never invents
// one.
//
//===----------------------------------------------------------------------===//

#include "Shadow.h"
#include "RaceReport.h"
#include "execute/Machine.h"

#include <algorithm>
#include <cstring>

namespace moe::sim {

Access::Access(Warp &warp, u32 lanes, u32 pc, u32 flags)
    : warp(&warp), lanes(lanes), pc(pc), flags(flags),
      checksRaces(warp.block->launch->checks.race),
      actor(warp.block->firstActor + warp.index), time(warp.time),
      firstActor(warp.block->firstActor), numKnown(warp.clock.own.size()),
      known(warp.clock.own.data()),
      exact(!warp.privateLanes && warp.clock.own.exact()) {}

namespace {

constexpr u32 kLaneBits = 31u << kLaneShift;
constexpr u32 kStrideBits = kWhole << kStrideShift;

/// The `bytes >> stride` lanes from `lane`.
inline u32 lanesFrom(u32 lane, u32 bytes, u32 stride) {
  return static_cast<u32>((1ull << (bytes >> stride)) - 1) << lane;
}

/// The part of a stamp at `offset` of its cell.
void narrow(Stamp &stamp, u32 offset, u32 bytes) {
  if (!stamp.actor || !stamp.strided())
    return;
  u32 stride = stamp.stride(), lane = stamp.lane() + (offset >> stride);
  bool single = 1u << stride >= bytes;
  stamp.lanes = single ? 1u << lane : lanesFrom(lane, bytes, stride);
  stamp.info = (stamp.info & ~(kLaneBits | kStrideBits)) | lane << kLaneShift |
               (single ? kWhole : stride) << kStrideShift;
}

/// The access to `bytes` bytes of a cell, `offset` from where it begins.
inline Stamp stampOf(const Access &access, u64 offset, u32 bytes) {
  u32 lane = __builtin_ctz(access.lanes), lanes = access.lanes;
  u32 stride = access.stride;
  if (stride != kWhole) {
    lane += static_cast<u32>(offset >> stride);
    if (1u << stride >= bytes) {
      lanes = 1u << lane;
      stride = kWhole;
    } else {
      lanes = lanesFrom(lane, bytes, stride);
    }
  }
  return {access.actor, access.time, lanes,
          access.pc | access.flags | lane << kLaneShift |
              stride << kStrideShift};
}

/// Every byte has one lane, and the same in both.
inline bool sameThreads(const Stamp &a, const Stamp &b) {
  if (a.actor != b.actor || (a.info ^ b.info) & kStrideBits)
    return false;
  if (a.strided())
    return !((a.info ^ b.info) & kLaneBits);
  return a.lanes == b.lanes && !(a.lanes & (a.lanes - 1));
}

/// One stamp can say what both say.
inline bool sameShape(const Stamp &a, const Stamp &b) {
  return !((a.info ^ b.info) & kStrideBits) &&
         (!a.strided() || !((a.info ^ b.info) & kLaneBits));
}

/// By another block. What orders blocks is rare and slow to look up: reads are
/// kept without asking, and only writes ask.
inline bool isForeign(const Access &access, u32 actor) {
  return actor - access.firstActor >= access.numKnown;
}

/// All lanes of `mine` come after all lanes of `other`.
bool orderedSlow(const Access &access, const Stamp &mine, const Stamp &other) {
  const Warp &warp = *access.warp;
  const Block &block = *warp.block;
  u32 local = other.actor - block.firstActor;
  bool own = local < block.actors();
  u32 ofBlock = block.linear;
  if (!own) {
    ofBlock = (other.actor - 1) / block.actors();
    local = (other.actor - 1) % block.actors();
  }
  bool sameWarp = own && local == warp.index;
  if (!sameWarp && !(warp.privateLanes & mine.lanes))
    return warp.clock.knows(ofBlock, local, other.lanes, other.time);
  for (u32 lane : Lanes(mine.lanes)) {
    // A lane's own accesses are in program order.
    u32 others = sameWarp ? other.lanes & ~(1u << lane) : other.lanes;
    if (others && !warp.clockOf(lane).knows(ofBlock, local, others, other.time))
      return false;
  }
  return true;
}

inline bool ordered(const Access &access, const Stamp &mine,
                    const Stamp &other) {
  if (access.knows(other.actor, other.time) || sameThreads(mine, other))
    return true;
  if (access.exact && other.actor != mine.actor &&
      !isForeign(access, other.actor))
    return false;
  return orderedSlow(access, mine, other);
}

/// Both are strong, and each one's scope reaches the other.
inline bool bothStrong(const Access &access, const Stamp &other) {
  if (!(access.flags & other.info & kStrong))
    return false;
  return !((access.flags | other.info) & kCtaScope) ||
         !isForeign(access, other.actor);
}

/// A generic write needs a proxy fence before the asynchronous proxy sees it.
inline bool proxyFenced(const Access &access, const Stamp &mine,
                        const Stamp &writer) {
  if (!(access.flags & kAsync) || (writer.info & kAsync))
    return true;
  const Warp &warp = *access.warp;
  u32 local = writer.actor - access.firstActor;
  if (isForeign(access, writer.actor))
    return true;
  return warp.clockOf(__builtin_ctz(mine.lanes))
      .proxy.knows(local, writer.lanes, writer.time);
}

/// What another lane stores by the same instruction to this place, `at` bytes
/// from where the access begins; null if something else wrote last.
const u8 *storedByLane(const Access &access, const Stamp &mine,
                       const Stamp &writer, u64 at, u32 bytes) {
  const auto &store = access.warpStore;
  u32 other = writer.lane();
  if (!access.value || !store.values || writer.actor != mine.actor ||
      writer.time != mine.time || !(store.mask >> other & 1))
    return nullptr;
  // The place among the bytes of the access's first lane, then of the other.
  u32 first = __builtin_ctz(access.lanes);
  u64 place = static_cast<u64>(access.value - store.values) -
              u64(first) * store.bytes + at;
  u64 there = place + store.addresses[first] - store.addresses[other];
  return there < store.bytes && bytes <= store.bytes - there
             ? store.values + u64(other) * store.bytes + there
             : nullptr;
}

} // namespace

Stamp Cell::written(u32 bytes) const {
  Stamp stamp{writer, writeTime, 0, writeInfo};
  stamp.lanes = stamp.strided() ? lanesFrom(stamp.lane(), bytes, stamp.stride())
                                : 1u << stamp.lane();
  return stamp;
}

//===----------------------------------------------------------------------===//
// Readers
//===----------------------------------------------------------------------===//

Stamp *ShadowPage::readers(Cell &cell, u32 &count) {
  if (cell.state & kMany) {
    count = readerSlots();
    return &readerSets[(cell.state >> kIndexShift) * count];
  }
  count = 2;
  return cell.readers;
}

/// Gives the cell a reader set, which starts with the cell's own readers.
Stamp *ShadowPage::promote(Cell &cell) {
  u32 slots = readerSlots(), index = cell.state >> kIndexShift;
  if (!index) {
    if (unusedSets.empty()) {
      // Index 0 means none.
      index = std::max<u32>(1, static_cast<u32>(readerSets.size()) / slots);
      readerSets.resize((index + 1) * static_cast<size_t>(slots));
    } else {
      index = unusedSets.back();
      unusedSets.pop_back();
    }
  }
  cell.state |= kMany | index << kIndexShift;
  Stamp *set = &readerSets[index * static_cast<size_t>(slots)];
  std::fill(set, set + slots, Stamp());
  u32 others = dense;
  for (const Stamp &reader : cell.readers) {
    u32 local = reader.actor - first;
    bool own = local < dense && !set[local].actor;
    set[own ? local : others++] = reader;
  }
  return set;
}

void ShadowPage::clearReaders(Cell &cell) {
  cell.readers[0].actor = cell.readers[1].actor = 0;
  // The set stays with the cell, which will have several readers again.
  cell.state &= ~kMany;
}

/// Into the cell's reader set; false if the cell must be split first.
bool ShadowPage::addReader(const Access &access, Cell &cell,
                           const Stamp &mine) {
  u32 count;
  Stamp *set = readers(cell, count);
  Stamp *slot = nullptr;
  u32 local = mine.actor - first;
  if (dense && local < dense) {
    slot = &set[local];
  } else {
    for (u32 i = dense; i < count && !slot; ++i)
      if (set[i].actor == mine.actor)
        slot = &set[i];
    for (u32 i = dense; i < count && !slot; ++i)
      if (!set[i].actor ||
          (!isForeign(access, set[i].actor) && ordered(access, mine, set[i])))
        slot = &set[i];
    if (!slot) {
      reservoir = reservoir * 1664525 + 1013904223;
      slot = &set[dense + (reservoir >> 16) % (count - dense)];
      slot->actor = 0;
    }
  }
  bool replaces = slot->actor != mine.actor ||
                  (!slot->pending() && slot->time != mine.time &&
                   ordered(access, mine, *slot));
  if (replaces) {
    *slot = mine;
    return true;
  }
  if (!sameShape(*slot, mine))
    return false;
  // Keeps the earlier time: this may miss a race and never invents one.
  slot->lanes |= mine.lanes;
  slot->info = mine.info | (slot->info & kPending);
  return true;
}

/// False if the cell must be split first.
inline bool ShadowPage::recordRead(const Access &access, Cell &cell,
                                   const Stamp &mine) {
  if (cell.state & kMany)
    return addReader(access, cell, mine);
  Stamp *free = nullptr;
  for (Stamp &reader : cell.readers) {
    if (!reader.actor ||
        (!reader.pending() && access.knows(reader.actor, reader.time))) {
      free = free ? free : &reader;
    } else if (reader.actor == mine.actor && reader.time == mine.time &&
               !((reader.info ^ mine.info) & kPending)) {
      if (!sameShape(reader, mine))
        return false;
      reader.lanes |= mine.lanes;
      reader.info = mine.info;
      return true;
    } else if (!reader.pending() && !isForeign(access, reader.actor) &&
               ordered(access, mine, reader)) {
      free = &reader;
    }
  }
  if (free) {
    *free = mine;
    return true;
  }
  promote(cell);
  return addReader(access, cell, mine);
}

//===----------------------------------------------------------------------===//
// Cells
//===----------------------------------------------------------------------===//

inline void ShadowPage::recordWrite(const Access &access, Cell &cell,
                                    const Stamp &mine) {
  cell.writer = mine.actor;
  cell.writeTime = mine.time;
  cell.writeInfo = mine.info;
  clearReaders(cell);
  cell.state = access.undefined ? cell.state & ~kInit : cell.state | kInit;
}

/// Judges an access against the last write; false if the cell must be split
/// to tell.
bool ShadowPage::checkWriter(const Access &access, const Cell &cell,
                             const Stamp &mine, u32 bytes, u64 start,
                             const Span &span) {
  Stamp writer = cell.written(bytes);
  bool races = writer.pending() || !ordered(access, mine, writer);
  bool proxy = !races && !proxyFenced(access, mine, writer);
  if (!races && !proxy)
    return true;
  if (mine.strided() || writer.strided())
    return false;
  if (races) {
    // Asynchronous atomics may both be on their way.
    bool bothPending = access.flags & writer.info & kPending;
    if ((!writer.pending() || bothPending) && bothStrong(access, writer))
      return true;
  }
  RaceKind kind =
      access.read ? RaceKind::ReadAfterWrite : RaceKind::WriteAfterWrite;
  if (races && !writer.pending() && !access.read && access.value &&
      (writer.info & kPcMask) == access.pc) {
    u64 at = start - span.from;
    const u8 *value = access.value + at;
    const u8 *other = storedByLane(access, mine, writer, at, bytes);
    // Benign, for hardware keeps one of them.
    if (other && std::memcmp(value, other, bytes) == 0)
      return true;
    // Between warps the memory model calls it a race, though no value shows it.
    if (std::memcmp(access.memory + at, value, bytes) == 0) {
      const Allowances &allows = access.warp->block->launch->config->allows;
      if (writer.actor == mine.actor || allows.equalStores ||
          (allows.equalSharedStores && isShared()))
        return true;
      kind = RaceKind::EqualStores;
    } else if (other) {
      reportLaneStores(access, name, span.origin + start, mine, writer,
                       {value, other, bytes});
      return true;
    }
  }
  reportRace(access, kind, name, span.origin + start, mine, writer, proxy);
  return true;
}

/// Judges a write against the reads since the last one; false if the cell must
/// be split to tell.
bool ShadowPage::checkReaders(const Access &access, Cell &cell,
                              const Stamp &mine, u64 address) {
  u32 count;
  const Stamp *set = readers(cell, count);
  for (u32 i = 0; i < count; ++i) {
    const Stamp &reader = set[i];
    if (!reader.actor)
      continue;
    if (!reader.pending() &&
        (ordered(access, mine, reader) || bothStrong(access, reader)))
      continue;
    if (mine.strided() || reader.strided())
      return false;
    reportRace(access, RaceKind::WriteAfterRead, name, address, mine, reader,
               false);
    return true;
  }
  return true;
}

/// An access to all of an unsplit cell; false if the cell must be split first.
inline bool ShadowPage::touchWhole(const Access &access, Cell &cell, u64 start,
                                   u32 bytes, const Span &span) {
  Stamp mine = stampOf(access, start - span.from, bytes);
  if (init && access.read && !(cell.state & kInit)) {
    reportUninitRead(access, name, span.origin + start, mine.lane());
    cell.state |= kInit;
  }
  if (access.checksRaces) {
    // Nearly always the write is known, and no proxy comes in.
    bool known = !cell.writer || (access.knows(cell.writer, cell.writeTime) &&
                                  !(cell.writeInfo & kPending) &&
                                  !(access.flags & ~cell.writeInfo & kAsync));
    if (!known && !checkWriter(access, cell, mine, bytes, start, span))
      return false;
    bool unread =
        !access.write || (!cell.readers[0].actor && !cell.readers[1].actor &&
                          !(cell.state & kMany));
    if (!unread && !checkReaders(access, cell, mine, span.origin + start))
      return false;
  }
  if (!access.write)
    return recordRead(access, cell, mine);
  recordWrite(access, cell, mine);
  return true;
}

u32 ShadowPage::Arena::take() {
  if (!unused.empty()) {
    u32 index = unused.back();
    unused.pop_back();
    return index;
  }
  if (count / kChunk >= chunks.size())
    chunks.push_back(std::make_unique<Cell[]>(kChunk * kParts));
  return count++;
}

/// The four parts of the cell, which begin with its history.
Cell *ShadowPage::split(Cell &cell, u32 bytes) {
  if (cell.state & kSplit)
    return parts[cell.state >> kIndexShift];
  u32 index = parts.take();
  Cell *fresh = parts[index];
  Stamp writer = cell.written(bytes);
  u32 quarter = bytes / kParts, slots = readerSlots();
  for (u32 i = 0; i < kParts; ++i) {
    Cell &part = fresh[i];
    Stamp wrote = writer;
    narrow(wrote, i * quarter, quarter);
    part.writer = wrote.actor;
    part.writeTime = wrote.time;
    part.writeInfo = wrote.info;
    std::copy_n(cell.readers, 2, part.readers);
    part.state = cell.state & kInit;
    if (!(cell.state & kMany)) {
      for (Stamp &reader : part.readers)
        narrow(reader, i * quarter, quarter);
      continue;
    }
    Stamp *to = promote(part);
    const Stamp *from =
        &readerSets[(cell.state >> kIndexShift) * static_cast<size_t>(slots)];
    for (u32 slot = 0; slot < slots; ++slot) {
      to[slot] = from[slot];
      narrow(to[slot], i * quarter, quarter);
    }
  }
  release(cell);
  cell.state = kSplit | index << kIndexShift;
  return fresh;
}

/// Gives back what the cell's index stands for.
void ShadowPage::release(Cell &cell) {
  u32 index = cell.state >> kIndexShift;
  if (!index)
    return;
  if (cell.state & kSplit) {
    Cell *children = parts[index];
    for (u32 i = 0; i < kParts; ++i)
      release(children[i]);
    parts.give(index);
  } else {
    unusedSets.push_back(index);
  }
  cell.state &= kInit;
}

inline void ShadowPage::visit(const Access &access, Cell &cell, u64 start,
                              u32 bytes, const Span &span) {
  if (!(cell.state & kSplit) && span.covers(start, bytes) &&
      touchWhole(access, cell, start, bytes, span))
    return;
  visitParts(access, cell, start, bytes, span);
}

void ShadowPage::visitParts(const Access &access, Cell &cell, u64 start,
                            u32 bytes, const Span &span) {
  bool whole = span.covers(start, bytes);
  Cell *children = split(cell, bytes);
  u32 quarter = bytes / kParts;
  for (u32 i = 0; i < kParts; ++i)
    if (span.meets(start + i * quarter, quarter))
      visit(access, children[i], start + i * quarter, quarter, span);
  if (!whole || !access.write)
    return;
  // All of it has one history again, and no race is left to find.
  release(cell);
  cell = Cell();
  Access quiet = access;
  quiet.read = quiet.checksRaces = false;
  touchWhole(quiet, cell, start, bytes, span);
}

void ShadowPage::touch(const Access &access, u64 offset, u32 bytes,
                       u64 origin) {
  Span span{offset, offset + bytes, origin};
  u32 size = 1u << rootShift;
  u64 start = offset >> rootShift << rootShift;
  Cell *cell = &cells[offset >> rootShift];
  if (span.to <= start + size) {
    // Straight down to the smallest cell that holds all of it.
    while ((cell->state & kSplit) && (offset ^ (span.to - 1)) < size / kParts) {
      size /= kParts;
      u64 part = offset / size % kParts;
      cell = parts[cell->state >> kIndexShift] + part;
      start += part * size;
    }
    visit(access, *cell, start, size, span);
    return;
  }
  for (; start < span.to; start += size, ++cell)
    visit(access, *cell, start, size, span);
}

void ShadowPage::reset(u64 bytes, u32 firstActor, u32 denseActors,
                       bool tracksInit, const char *what) {
  rootShift = denseActors ? 4 : 6;
  cells.assign((bytes + (1u << rootShift) - 1) >> rootShift, Cell());
  parts.clear();
  readerSets.clear();
  unusedSets.clear();
  first = firstActor;
  dense = denseActors;
  init = tracksInit;
  name = what;
}

//===----------------------------------------------------------------------===//
// Completions
//===----------------------------------------------------------------------===//

template <typename Fn>
void ShadowPage::forCells(Cell &cell, u64 start, u32 bytes, const Span &span,
                          Fn fn) {
  if (span.covers(start, bytes) && !(cell.state & kSplit)) {
    fn(cell, start, bytes);
    return;
  }
  Cell *children = split(cell, bytes);
  u32 quarter = bytes / kParts;
  for (u32 i = 0; i < kParts; ++i)
    if (span.meets(start + i * quarter, quarter))
      forCells(children[i], start + i * quarter, quarter, span, fn);
}

template <typename Fn>
void ShadowPage::forCells(u64 offset, u32 bytes, Fn fn) {
  Span span{offset, offset + bytes, 0};
  u32 size = 1u << rootShift;
  for (u64 at = offset >> rootShift << rootShift; at < span.to; at += size)
    forCells(cells[at >> rootShift], at, size, span, fn);
}

void ShadowPage::completeWrite(const Access &access, u64 offset, u32 bytes,
                               const Completion &by) {
  forCells(offset, bytes, [&](Cell &cell, u64 start, u32 cellBytes) {
    if (cell.writer != access.actor || !(cell.writeInfo & kPending))
      return;
    Stamp mine = stampOf(access, start - offset, cellBytes);
    if ((cell.writeInfo ^ mine.info) & (kLaneBits | kStrideBits))
      return;
    cell.writeInfo &= ~kPending;
    cell.writeTime = access.time;
    if (!by.actor)
      return;
    cell.writer = by.actor;
    cell.writeTime = by.time;
    cell.writeInfo =
        (cell.writeInfo & ~kLaneBits) | access.flags | by.lane << kLaneShift;
  });
}

void ShadowPage::completeRead(const Access &access, u64 offset, u32 bytes) {
  forCells(offset, bytes, [&](Cell &cell, u64, u32) {
    u32 count;
    Stamp *set = readers(cell, count);
    for (u32 i = 0; i < count; ++i)
      if (set[i].actor == access.actor && set[i].pending()) {
        set[i].info &= ~kPending;
        set[i].time = access.time;
      }
  });
}

void ShadowPage::forWriters(u64 offset, u32 bytes,
                            const std::function<void(const Stamp &)> &fn) {
  forCells(offset, bytes, [&](Cell &cell, u64, u32 cellBytes) {
    if (cell.writer)
      fn(cell.written(cellBytes));
  });
}

} // namespace moe::sim
