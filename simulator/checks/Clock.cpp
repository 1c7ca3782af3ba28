//===- Clock.cpp - Vector clocks for happens-before -----------------------===//

#include "Clock.h"

namespace moe::sim {

//===----------------------------------------------------------------------===//
// BlockClock
//===----------------------------------------------------------------------===//

bool BlockClock::knowsLanes(u32 actor, u32 lanes, u32 time) const {
  for (const Exception &e : some)
    if (e.actor == actor && time < e.time)
      lanes &= ~e.lanes;
  return lanes == 0;
}

void BlockClock::learnAll(u32 actor, u32 time) {
  if (actor >= all.size())
    all.resize(actor + 1, 0);
  all[actor] = std::max(all[actor], time);
  if (some.empty())
    return;
  std::erase_if(some, [&](const Exception &e) {
    return e.actor == actor && e.time <= all[actor];
  });
}

void BlockClock::learn(u32 actor, u32 lanes, u32 time) {
  if (lanes == kAllLanes) {
    learnAll(actor, time);
    return;
  }
  if (actor >= all.size())
    all.resize(actor + 1, 0);
  if (time <= all[actor])
    return;
  for (Exception &e : some) {
    if (e.actor != actor)
      continue;
    if (e.time >= time)
      lanes &= ~e.lanes;
    else
      e.lanes &= ~lanes;
  }
  std::erase_if(some, [](const Exception &e) { return e.lanes == 0; });
  if (lanes == 0)
    return;
  for (Exception &e : some)
    if (e.actor == actor && e.time == time) {
      e.lanes |= lanes;
      return;
    }
  some.push_back({actor, lanes, time});
}

void BlockClock::join(const BlockClock &other) {
  if (all.size() < other.all.size())
    all.resize(other.all.size(), 0);
  for (size_t i = 0; i < other.all.size(); ++i)
    all[i] = std::max(all[i], other.all[i]);
  if (!some.empty())
    std::erase_if(some,
                  [&](const Exception &e) { return e.time <= all[e.actor]; });
  for (const Exception &e : other.some)
    learn(e.actor, e.lanes, e.time);
}

//===----------------------------------------------------------------------===//
// Clock
//===----------------------------------------------------------------------===//

std::shared_ptr<const BlockClock> &Clock::slot(u32 ofBlock) {
  auto it = std::lower_bound(
      foreign.begin(), foreign.end(), ofBlock,
      [](const Foreign &f, u32 value) { return f.block < value; });
  if (it == foreign.end() || it->block != ofBlock)
    it = foreign.insert(it, {ofBlock, nullptr});
  return it->clock;
}

void Clock::joinForeign(u32 ofBlock,
                        const std::shared_ptr<const BlockClock> &clock) {
  if (!clock)
    return;
  if (ofBlock == block) {
    own.join(*clock);
    return;
  }
  std::shared_ptr<const BlockClock> &mine = slot(ofBlock);
  if (!mine) {
    mine = clock;
  } else if (mine != clock) {
    auto joined = std::make_shared<BlockClock>(*mine);
    joined->join(*clock);
    mine = std::move(joined);
  }
}

void Clock::join(const Clock &other) {
  if (other.block == block) {
    own.join(other.own);
    proxy.join(other.proxy);
  } else if (!other.own.empty()) {
    joinForeign(other.block, std::make_shared<BlockClock>(other.own));
  }
  for (const Foreign &f : other.foreign)
    joinForeign(f.block, f.clock);
}

void Clock::learn(u32 ofBlock, u32 actor, u32 lanes, u32 time) {
  if (ofBlock == block) {
    own.learn(actor, lanes, time);
    return;
  }
  std::shared_ptr<const BlockClock> &mine = slot(ofBlock);
  auto joined = mine ? std::make_shared<BlockClock>(*mine)
                     : std::make_shared<BlockClock>();
  joined->learn(actor, lanes, time);
  mine = std::move(joined);
}

bool Clock::knowsForeign(u32 ofBlock, u32 actor, u32 lanes, u32 time) const {
  auto it = std::lower_bound(
      foreign.begin(), foreign.end(), ofBlock,
      [](const Foreign &f, u32 value) { return f.block < value; });
  return it != foreign.end() && it->block == ofBlock && it->clock &&
         it->clock->knows(actor, lanes, time);
}

} // namespace moe::sim
