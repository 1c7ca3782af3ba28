//===- RegionShadow.cpp - Last accesses to the bytes of a buffer ----------===//

#include "Shadow.h"
#include "execute/Machine.h"

#include <algorithm>
#include <mutex>

namespace moe::sim {

RegionShadow::~RegionShadow() {
  for (std::atomic<ShadowPage *> &page : pages)
    delete page.load();
}

ShadowPage &RegionShadow::page(u64 index, const char *what) {
  ShadowPage *page = pages[index].load(std::memory_order_acquire);
  if (page)
    return *page;
  auto fresh = std::make_unique<ShadowPage>();
  fresh->reset(kPageBytes, 0, 0, false, what);
  if (pages[index].compare_exchange_strong(page, fresh.get(),
                                           std::memory_order_acq_rel))
    return *fresh.release();
  return *page;
}

/// Calls fn(shadow, its first byte, byte of the page, bytes) for each page that
/// the bytes at `offset` lie in.
template <typename Fn>
void RegionShadow::forPages(u64 offset, u64 bytes, const char *what, Fn fn) {
  while (bytes > 0) {
    u64 inPage = offset % kPageBytes;
    u32 now = static_cast<u32>(std::min(bytes, kPageBytes - inPage));
    fn(page(offset / kPageBytes, what), offset - inPage, inPage, now);
    offset += now;
    bytes -= now;
  }
}

void RegionShadow::touch(const Access &access, u64 offset, u64 bytes,
                         bool concurrent, const char *what) {
  Access part = access;
  u64 left = bytes;
  forPages(offset, bytes, what,
           [&](ShadowPage &shadow, u64 origin, u64 inPage, u32 now) {
             if (concurrent)
               shadow.lock();
             shadow.touch(part, inPage, now, origin);
             if (concurrent)
               shadow.unlock();
             if (part.value) {
               part.value += now;
               part.memory += now;
             }
             left -= now;
             if (part.stride != kWhole && left > 0)
               part.lanes &=
                   ~0u << (__builtin_ctz(part.lanes) + (now >> part.stride));
           });
}

void RegionShadow::completeWrite(const Access &access, u64 offset, u64 bytes) {
  forPages(offset, bytes, "",
           [&](ShadowPage &shadow, u64, u64 inPage, u32 now) {
             std::lock_guard lock(shadow);
             shadow.completeWrite(access, inPage, now);
           });
}

void RegionShadow::forWriters(u64 offset, u64 bytes,
                              const std::function<void(const Stamp &)> &fn) {
  forPages(offset, bytes, "",
           [&](ShadowPage &shadow, u64, u64 inPage, u32 now) {
             std::lock_guard lock(shadow);
             shadow.forWriters(inPage, now, fn);
           });
}

} // namespace moe::sim
