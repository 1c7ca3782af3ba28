//===- RegionShadow.cpp - Last accesses to the bytes of a buffer ----------===//

#include "Machine.h"
#include "Shadow.h"

#include <algorithm>

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
    if (part.stride != kWhole && now < bytes)
      part.lanes &= ~0u << (__builtin_ctz(part.lanes) + (now >> part.stride));
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

void RegionShadow::forWriters(u64 offset, u64 bytes,
                              const std::function<void(const Stamp &)> &fn) {
  while (bytes > 0) {
    u64 inPage = offset % kPageBytes;
    u32 now = static_cast<u32>(std::min(bytes, kPageBytes - inPage));
    ShadowPage &shadow = page(offset / kPageBytes, "");
    shadow.lock();
    shadow.forWriters(inPage, now, fn);
    shadow.unlock();
    offset += now;
    bytes -= now;
  }
}

} // namespace moe::sim
