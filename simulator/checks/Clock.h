//===- Clock.h - Vector clocks for happens-before ---------------*- C++ -*-===//
//
// Who knows which accesses.
//
// An access carries a stamp (actor, lane, time). Actors are the warps of a
// block and one more for its asynchronous copies; `time` counts the releases
// of that actor, so all accesses between two releases share it. A clock
// answers one question: is the access with this stamp ordered before me?
//
// A clock for every thread would need 1024 x 1024 entries a block. Nearly all
// synchronisation moves whole warps, so a BlockClock holds
//
//   all[actor]   every lane's accesses with time < all[actor] are known
//   some         exceptions: (actor, lanes, time) for releases of a few lanes
//
// Example: warp 1 reaches a barrier at time 4 -> all[1] = 5 for everyone. Then
// its lane 0 alone arrives on an mbarrier at time 7 -> the mbarrier's clock
// gets the exception (1, 0x1, 8); the other lanes' accesses stay unknown to
// whoever waits there. The next barrier raises all[1] and drops the exception.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_CLOCK_H
#define MOE_LIB_SIMULATOR_CLOCK_H

#include "Types.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace moe::sim {

/// What is known of the actors of one block.
class BlockClock {
public:
  void reset(u32 actors) {
    all.assign(actors, 0);
    some.clear();
  }

  bool knowsAll(u32 actor, u32 time) const {
    return actor < all.size() && time < all[actor];
  }
  /// All of `lanes` of `actor` at `time` are known.
  bool knows(u32 actor, u32 lanes, u32 time) const {
    return knowsAll(actor, time) ||
           (!some.empty() && knowsLanes(actor, lanes, time));
  }

  void learnAll(u32 actor, u32 time);
  void learn(u32 actor, u32 lanes, u32 time);
  void join(const BlockClock &other);
  bool empty() const { return all.empty(); }
  /// The times of `all`, for the race detector's quick check.
  const u32 *data() const { return all.data(); }
  u32 size() const { return static_cast<u32>(all.size()); }
  /// `all` says everything: there are no exceptions.
  bool exact() const { return some.empty(); }

private:
  struct Exception {
    u32 actor;
    u32 lanes;
    u32 time;
  };

  bool knowsLanes(u32 actor, u32 lanes, u32 time) const;

  std::vector<u32> all;
  std::vector<Exception> some;
};

constexpr u32 kNoBlock = ~0u;

/// What a thread, a barrier or a memory location knows of the whole grid.
class Clock {
public:
  explicit Clock(u32 block = kNoBlock) : block(block) {}

  void reset(u32 newBlock, u32 actors) {
    block = newBlock;
    own.reset(actors);
    proxy.reset(actors);
    foreign.clear();
  }

  void join(const Clock &other);
  /// Joins what `lanes` of `actor` of `ofBlock` did before `time`.
  void learn(u32 ofBlock, u32 actor, u32 lanes, u32 time);
  bool knows(u32 ofBlock, u32 actor, u32 lanes, u32 time) const {
    if (ofBlock == block)
      return own.knows(actor, lanes, time);
    return knowsForeign(ofBlock, actor, lanes, time);
  }
  bool empty() const { return own.empty() && foreign.empty(); }

  u32 block;
  BlockClock own;
  /// The generic-proxy writes of `own` that a proxy fence has made visible to
  /// asynchronous copies and wgmma.
  BlockClock proxy;

private:
  struct Foreign {
    u32 block;
    std::shared_ptr<const BlockClock> clock;
  };

  bool knowsForeign(u32 ofBlock, u32 actor, u32 lanes, u32 time) const;
  std::shared_ptr<const BlockClock> &slot(u32 ofBlock);
  void joinForeign(u32 ofBlock, const std::shared_ptr<const BlockClock> &clock);

  /// Sorted by block. Snapshots are immutable and shared.
  std::vector<Foreign> foreign;
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_CLOCK_H
