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
#include "Machine.h"

#include <cstring>
#include <mutex>
#include <string>

namespace moe::sim {
namespace {

u32 laneOf(u32 info) { return info >> kLaneShift & 31; }

/// All lanes of `access` come after the access with this stamp.
bool orderedSlow(const Access &access, u32 actor, u32 lanes, u32 time) {
  const Warp &warp = *access.warp;
  const Block &block = *warp.block;
  u32 local = actor - block.firstActor;
  bool own = local < block.actors();
  u32 ofBlock = block.linear;
  if (!own) {
    ofBlock = (actor - 1) / block.actors();
    local = (actor - 1) % block.actors();
  }
  bool sameWarp = own && local == warp.index;
  if (!sameWarp && !(warp.privateLanes & access.lanes))
    return warp.clock.knows(ofBlock, local, lanes, time);
  for (u32 lane : Lanes(access.lanes)) {
    // A lane's own accesses are in program order.
    u32 others = sameWarp ? lanes & ~(1u << lane) : lanes;
    if (others && !warp.clockOf(lane).knows(ofBlock, local, others, time))
      return false;
  }
  return true;
}

inline bool ordered(const Access &access, u32 actor, u32 lanes, u32 time) {
  const Warp &warp = *access.warp;
  u32 local = actor - warp.block->firstActor;
  if (warp.clock.own.knowsAll(local, time))
    return true;
  return orderedSlow(access, actor, lanes, time);
}

/// Both are strong, and each one's scope reaches the other.
inline bool bothStrong(const Access &access, u32 actor, u32 info) {
  if (!(access.flags & info & kStrong))
    return false;
  if (!((access.flags | info) & kCtaScope))
    return true;
  const Block &block = *access.warp->block;
  return actor - block.firstActor < block.actors();
}

/// By another block. What orders blocks is rare and slow to look up: reads are
/// kept without asking, and only writes ask.
inline bool isForeign(const Access &access, u32 actor) {
  const Block &block = *access.warp->block;
  return actor - block.firstActor >= block.actors();
}

/// A generic write needs a proxy fence before the asynchronous proxy sees it.
inline bool proxyFenced(const Access &access, const Cell &cell) {
  if (!(access.flags & kAsync) || (cell.writeInfo & kAsync))
    return true;
  const Warp &warp = *access.warp;
  u32 local = cell.writer - warp.block->firstActor;
  if (local >= warp.block->actors())
    return true;
  u32 lane = __builtin_ctz(access.lanes);
  return warp.clockOf(lane).proxy.knows(local, 1u << laneOf(cell.writeInfo),
                                        cell.writeTime);
}

std::string placeName(const Warp &warp, const char *name, u64 address) {
  if (std::strcmp(name, "shared memory") != 0)
    return std::string(name) + "+" + std::to_string(address);
  u64 offset = address - warp.block->launch->sharedBase;
  for (const auto &variable : warp.block->launch->kernel->sharedVariables)
    if (offset >= variable.offset && offset < variable.offset + variable.bytes)
      return "shared memory " + variable.name + "+" +
             std::to_string(offset - variable.offset);
  return "shared memory+" + std::to_string(offset);
}

std::string actorName(const Warp &warp, u32 actor, u32 lane) {
  const Block &block = *warp.block;
  u32 ofBlock = (actor - 1) / block.actors();
  u32 local = (actor - 1) % block.actors();
  std::string text;
  if (ofBlock != block.linear) {
    const u32 *grid = block.launch->grid;
    text = "block (" + std::to_string(ofBlock % grid[0]) + "," +
           std::to_string(ofBlock / grid[0] % grid[1]) + "," +
           std::to_string(ofBlock / grid[0] / grid[1]) + ") ";
  }
  if (local == block.asyncActor())
    return text + "an asynchronous copy";
  return text + "warp " + std::to_string(local) + " lane " +
         std::to_string(lane);
}

enum class RaceKind : u8 { ReadAfterWrite, WriteAfterWrite, WriteAfterRead };

void reportRace(const Access &access, RaceKind kind, const char *name,
                u64 address, u32 actor, u32 lane, u32 info, bool proxy) {
  Warp &warp = *access.warp;
  Reporter &reporter = *warp.block->launch->reporter;
  u32 otherPc = info & kPcMask;
  if (reporter.repeats(FindingKind::Race, access.pc, otherPc))
    return;
  static constexpr const char *kinds[] = {
      "read-after-write", "write-after-write", "write-after-read"};
  bool read = kind == RaceKind::ReadAfterWrite;
  std::string what = std::string(kinds[static_cast<u8>(kind)]) +
                     " race: " + (read ? "reads " : "writes ") +
                     placeName(warp, name, address);
  std::string who = actorName(warp, actor, lane);
  std::string other = who +
                      (kind == RaceKind::WriteAfterRead ? " read" : " wrote") +
                      " at " + reporter.describe(otherPc);
  what += ", which " + other;
  if (info & kPending)
    what += "; that access is asynchronous and not waited for";
  else if (proxy)
    what += " through the generic proxy: expected fence.proxy.async between "
            "that write and this asynchronous access";
  else
    what += "; nothing orders the two";
  reporter.add(FindingKind::Race, warp, __builtin_ctz(access.lanes), access.pc,
               what, otherPc, other);
}

} // namespace

//===----------------------------------------------------------------------===//
// ShadowPage
//===----------------------------------------------------------------------===//

void ShadowPage::reset(u32 words, u32 firstActor, u32 denseActors,
                       bool tracksInit, const char *what) {
  cells.assign(words, Cell());
  readerSets.clear();
  readerSets.resize(denseActors ? denseActors + 2 : kSparseReaders);
  subs.clear();
  subs.resize(1);
  first = firstActor;
  dense = denseActors;
  init = tracksInit;
  name = what;
}

Reader *ShadowPage::readers(Cell &cell, u32 &count) {
  if (cell.state & kMany) {
    count = readerSlots();
    return &readerSets[(cell.state >> kIndexShift) * readerSlots()];
  }
  count = cell.reader.actor ? 1 : 0;
  return &cell.reader;
}

void ShadowPage::clearReaders(Cell &cell) {
  cell.reader.actor = 0;
  if (!(cell.state & kMany))
    return;
  u32 count;
  Reader *set = readers(cell, count);
  std::fill(set, set + count, Reader());
  // The slot stays with the cell: it will have several readers again.
  cell.state &= ~kMany;
}

void ShadowPage::addReader(const Access &access, Cell &cell,
                           const Reader &reader) {
  u32 count;
  Reader *set = readers(cell, count);
  Reader *slot = nullptr;
  u32 local = reader.actor - first;
  if (dense && local < dense) {
    slot = &set[local];
  } else {
    for (u32 i = dense; i < count && !slot; ++i)
      if (set[i].actor == reader.actor)
        slot = &set[i];
    for (u32 i = dense; i < count && !slot; ++i)
      if (!set[i].actor ||
          (!isForeign(access, set[i].actor) &&
           ordered(access, set[i].actor, set[i].lanes, set[i].time)))
        slot = &set[i];
    if (!slot) {
      reservoir = reservoir * 1664525 + 1013904223;
      slot = &set[dense + (reservoir >> 16) % (count - dense)];
      slot->actor = 0;
    }
  }
  if (slot->actor == reader.actor &&
      !ordered(access, slot->actor, slot->lanes, slot->time)) {
    slot->lanes |= reader.lanes;
    slot->info = reader.info | (slot->info & kPending);
  } else {
    *slot = reader;
  }
}

void ShadowPage::recordRead(const Access &access, Cell &cell) {
  const Warp &warp = *access.warp;
  u32 actor = warp.block->firstActor + warp.index;
  u32 info =
      access.pc | __builtin_ctz(access.lanes) << kLaneShift | access.flags;
  Reader reader{actor, warp.time, access.lanes, info};
  if (cell.state & kMany) {
    addReader(access, cell, reader);
    return;
  }
  Reader &last = cell.reader;
  if (last.actor == actor && last.time == warp.time &&
      !((last.info ^ info) & kPending)) {
    last.lanes |= access.lanes;
    last.info = info;
    return;
  }
  if (!last.actor ||
      (!(last.info & kPending) && !isForeign(access, last.actor) &&
       ordered(access, last.actor, last.lanes, last.time))) {
    last = reader;
    return;
  }
  Reader before = last;
  if (!(cell.state >> kIndexShift)) {
    u32 index = static_cast<u32>(readerSets.size() / readerSlots());
    readerSets.resize(readerSets.size() + readerSlots());
    cell.state |= index << kIndexShift;
  }
  cell.state |= kMany;
  addReader(access, cell, before);
  addReader(access, cell, reader);
}

void ShadowPage::touchCell(const Access &access, Cell &cell, u32 initBits,
                           u64 address, u32 valueOffset, u32 valueBytes) {
  const LaunchState &launch = *access.warp->block->launch;
  if (access.read) {
    if (init && (cell.state & initBits) != initBits) {
      cell.state |= initBits;
      const Warp &warp = *access.warp;
      Reporter &reporter = *launch.reporter;
      if (launch.checks.uninit &&
          !reporter.repeats(FindingKind::Uninit, access.pc))
        reporter.add(FindingKind::Uninit, warp, __builtin_ctz(access.lanes),
                     access.pc,
                     "reads " + placeName(warp, name, address) +
                         ", which nothing has initialised");
    }
  }
  if (launch.checks.race) {
    if (cell.writer) {
      u32 lane = laneOf(cell.writeInfo);
      bool pending = cell.writeInfo & kPending;
      bool races =
          pending || !ordered(access, cell.writer, 1u << lane, cell.writeTime);
      bool proxy = !races && access.read && !proxyFenced(access, cell);
      if (races && !pending && bothStrong(access, cell.writer, cell.writeInfo))
        races = false;
      // Lanes that store one value through one instruction: benign, common.
      if (races && !pending && !access.read && access.value &&
          (cell.writeInfo & kPcMask) == access.pc &&
          std::memcmp(access.memory + valueOffset, access.value + valueOffset,
                      valueBytes) == 0)
        races = false;
      if (races || proxy)
        reportRace(access,
                   access.read ? RaceKind::ReadAfterWrite
                               : RaceKind::WriteAfterWrite,
                   name, address, cell.writer, lane, cell.writeInfo, proxy);
    }
    if (access.write) {
      u32 count;
      Reader *set = readers(cell, count);
      for (u32 i = 0; i < count; ++i) {
        const Reader &reader = set[i];
        if (!reader.actor)
          continue;
        if (!(reader.info & kPending) &&
            (ordered(access, reader.actor, reader.lanes, reader.time) ||
             bothStrong(access, reader.actor, reader.info)))
          continue;
        reportRace(access, RaceKind::WriteAfterRead, name, address,
                   reader.actor, laneOf(reader.info), reader.info, false);
        break;
      }
    }
  }
  if (access.write) {
    const Warp &warp = *access.warp;
    cell.writer = warp.block->firstActor + warp.index;
    cell.writeTime = warp.time;
    cell.writeInfo =
        access.pc | __builtin_ctz(access.lanes) << kLaneShift | access.flags;
    clearReaders(cell);
    cell.state =
        access.undefined ? cell.state & ~initBits : cell.state | initBits;
  } else {
    recordRead(access, cell);
  }
}

ShadowPage::Sub &ShadowPage::split(Cell &cell) {
  if (cell.state & kSplit)
    return subs[cell.state >> kIndexShift];
  Sub sub;
  for (u32 byte = 0; byte < 4; ++byte) {
    Cell &part = sub.bytes[byte] = cell;
    part.state = cell.state >> byte & 1;
    if (!(cell.state & kMany))
      continue;
    u32 slots = readerSlots();
    u32 from = (cell.state >> kIndexShift) * slots;
    u32 to = static_cast<u32>(readerSets.size());
    readerSets.resize(to + slots);
    std::copy_n(&readerSets[from], slots, &readerSets[to]);
    part.state |= kMany | (to / slots) << kIndexShift;
  }
  cell.state = kSplit | static_cast<u32>(subs.size()) << kIndexShift;
  subs.push_back(sub);
  return subs.back();
}

void ShadowPage::touch(const Access &access, u64 offset, u32 bytes,
                       u64 origin) {
  u64 end = offset + bytes;
  for (u64 word = offset / 4; word * 4 < end; ++word) {
    Cell &cell = cells[word];
    u64 from = std::max(offset, word * 4), to = std::min(end, word * 4 + 4);
    if (to - from == 4 && !(cell.state & kSplit)) {
      touchCell(access, cell, 0xf, origin + word * 4,
                static_cast<u32>(word * 4 - offset), 4);
      continue;
    }
    Sub &sub = split(cell);
    for (u64 byte = from; byte < to; ++byte)
      touchCell(access, sub.bytes[byte % 4], 1, origin + byte,
                static_cast<u32>(byte - offset), 1);
    if (to - from == 4 && access.write) {
      // The four bytes share their history again.
      Cell &part = sub.bytes[0];
      cell = part;
      cell.state = access.undefined ? 0 : 0xf;
    }
  }
}

template <typename Fn>
void ShadowPage::forCells(u64 offset, u32 bytes, Fn fn) {
  u64 end = offset + bytes;
  for (u64 word = offset / 4; word * 4 < end; ++word) {
    Cell &cell = cells[word];
    if (!(cell.state & kSplit)) {
      fn(cell);
      continue;
    }
    Sub &sub = subs[cell.state >> kIndexShift];
    for (u64 byte = std::max(offset, word * 4);
         byte < std::min(end, word * 4 + 4); ++byte)
      fn(sub.bytes[byte % 4]);
  }
}

void ShadowPage::completeWrite(const Access &access, u64 offset, u32 bytes) {
  const Warp &warp = *access.warp;
  u32 actor = warp.block->firstActor + warp.index;
  u32 lane = __builtin_ctz(access.lanes);
  forCells(offset, bytes, [&](Cell &cell) {
    if (cell.writer != actor || !(cell.writeInfo & kPending) ||
        laneOf(cell.writeInfo) != lane)
      return;
    cell.writeInfo &= ~kPending;
    cell.writeTime = warp.time;
    if (access.actor == ~0u)
      return;
    cell.writer = access.actor;
    cell.writeTime = access.time;
    cell.writeInfo = (cell.writeInfo & ~(31u << kLaneShift)) | access.flags |
                     access.actorLane << kLaneShift;
  });
}

void ShadowPage::completeRead(const Access &access, u64 offset, u32 bytes) {
  const Warp &warp = *access.warp;
  u32 actor = warp.block->firstActor + warp.index;
  forCells(offset, bytes, [&](Cell &cell) {
    u32 count;
    Reader *set = readers(cell, count);
    for (u32 i = 0; i < count; ++i)
      if (set[i].actor == actor && (set[i].info & kPending)) {
        set[i].info &= ~kPending;
        set[i].time = warp.time;
      }
  });
}

//===----------------------------------------------------------------------===//
// RegionShadow
//===----------------------------------------------------------------------===//

RegionShadow::~RegionShadow() {
  for (std::atomic<ShadowPage *> &page : pages)
    delete page.load();
}

ShadowPage &RegionShadow::page(u64 index, const char *what) {
  ShadowPage *page = pages[index].load(std::memory_order_acquire);
  if (page)
    return *page;
  auto fresh = std::make_unique<ShadowPage>();
  fresh->reset(kPageBytes / 4, 0, 0, false, what);
  if (pages[index].compare_exchange_strong(page, fresh.get(),
                                           std::memory_order_acq_rel))
    return *fresh.release();
  return *page;
}

void RegionShadow::touch(const Access &access, u64 offset, u64 bytes,
                         bool concurrent, const char *what) {
  Access part = access;
  while (bytes > 0) {
    u64 inPage = offset % kPageBytes;
    u32 now = static_cast<u32>(std::min(bytes, kPageBytes - inPage));
    ShadowPage &shadow = page(offset / kPageBytes, what);
    if (concurrent)
      shadow.lock();
    shadow.touch(part, inPage, now, offset - inPage);
    if (concurrent)
      shadow.unlock();
    if (part.value) {
      part.value += now;
      part.memory += now;
    }
    offset += now;
    bytes -= now;
  }
}

void RegionShadow::completeWrite(const Access &access, u64 offset, u64 bytes) {
  while (bytes > 0) {
    u64 inPage = offset % kPageBytes;
    u32 now = static_cast<u32>(std::min(bytes, kPageBytes - inPage));
    ShadowPage &shadow = page(offset / kPageBytes, "");
    shadow.lock();
    shadow.completeWrite(access, inPage, now);
    shadow.unlock();
    offset += now;
    bytes -= now;
  }
}

} // namespace moe::sim
