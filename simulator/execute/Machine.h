//===- Machine.h - State of a running launch --------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_MACHINE_H
#define MOE_LIB_SIMULATOR_MACHINE_H

#include "Types.h"
#include "checks/Clock.h"
#include "checks/Reporter.h"
#include "decode/Program.h"

#include "MoE/Simulator/Simulator.h"

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace moe::sim {

class RegionShadow;
class ShadowPage;
struct Block;
struct Executor;
struct Cluster;
struct LaunchState;

/// SplitMix64: small, quick, and the same everywhere.
class Random {
public:
  explicit Random(u64 seed = 0) : state(seed) {}
  u64 next() {
    u64 z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  u32 below(u32 bound) { return static_cast<u32>(next() % bound); }
  bool oneIn(u32 n) { return below(n) == 0; }
  template <typename T>
  void shuffle(T *items, u32 count) {
    for (u32 i = count; i > 1; --i)
      std::swap(items[i - 1], items[below(i)]);
  }

private:
  u64 state;
};

//===----------------------------------------------------------------------===//
// Warps
//===----------------------------------------------------------------------===//

enum class Wait : u8 {
  None,
  /// For the other lanes of a membermask.
  Lanes,
  /// For the rest of the warp, in front of an aligned barrier.
  Converge,
  /// Has arrived at a barrier of the block.
  Barrier,
  Cluster,
  /// For other warps to give registers back.
  Registers,
};

/// Lanes at the same pc. A converged warp is one group.
struct Group {
  u32 pc = 0;
  u32 mask = 0;
  Wait wait = Wait::None;
};

/// A cp.async of lanes that are in one group of copies.
struct AsyncCopy {
  /// Those that have not waited for it.
  u32 lanes;
  u32 group;
  u32 pc;
  u32 bytes;
  bool landed;
  u64 offsets[kWarpSize];
  const u8 *sources[kWarpSize];
  u8 sourceBytes[kWarpSize];
};

struct SharedRange {
  u64 offset;
  u32 bytes;
};

/// A wgmma.mma_async that no wait_group has covered.
struct WgmmaInFlight {
  u32 group;
  u32 pc;
  const u32 *accumulators;
  u32 numAccumulators;
  /// A's registers, if it has no descriptor.
  const u32 *registersA;
  u32 numRegistersA;
  std::vector<SharedRange> reads;
};

/// A bulk copy out of shared memory that no wait_group has covered.
struct BulkStore {
  u32 group;
  u32 pc;
  u8 lane;
  bool sourceRead;
  bool landed;
  std::vector<SharedRange> reads;
  std::vector<std::pair<u64, u64>> writes;
  std::function<void()> land;
};

/// A setmaxnreg that the warp has executed.
struct RegisterChange {
  u32 pc;
  u32 time;
};

/// What a lane's last fence covers: later strong stores publish it, and what
/// strong loads saw before the fence becomes known by it.
struct FenceRecord {
  u32 lanes;
  u32 time;
  Scope scope;
  Clock clock;
};

struct Warp {
  Block *block = nullptr;
  u32 index = 0;
  /// Lanes that exist, and those that have not exited.
  u32 initial = 0;
  u32 live = 0;
  u8 *registers = nullptr;
  u8 *local = nullptr;
  std::vector<Group> groups;
  /// Set by instructions that wait for others: the warp gives up its turn.
  bool yields = false;

  //===--- Happens-before ---===//
  u32 time = 1;
  Clock clock;
  /// Lanes that know more than the warp, until the next warp-wide meeting.
  u32 privateLanes = 0;
  std::unique_ptr<Clock> laneClocks[kWarpSize];
  std::vector<FenceRecord> fences;
  std::vector<FenceRecord> observed;

  //===--- Asynchronous work ---===//
  std::vector<AsyncCopy> copies;
  u32 copyGroup[kWarpSize] = {};
  std::vector<WgmmaInFlight> wgmmas;
  u32 wgmmaGroup = 0;
  bool wgmmaFenced = false;
  /// Of all its wgmmas.
  u64 numWgmmas = 0;
  std::vector<BulkStore> bulkStores;
  u32 bulkGroup[kWarpSize] = {};

  /// Lanes in which each tracked register is wholly defined: its shadow is
  /// zero there.
  std::vector<u32> defined;
  u64 clusterPhase = 0;
  /// Of a thread; 0 if ptxas would not know either.
  u32 maxRegisters = 0;
  std::vector<RegisterChange> registerChanges;
  /// Lanes that have arrived at the cluster's barrier and not waited since.
  u32 clusterArrived = 0;

  const Clock &clockOf(u32 lane) const {
    return privateLanes >> lane & 1 ? *laneClocks[lane] : clock;
  }
};

template <typename T>
inline T *lanesOf(Warp &warp, u32 offset) {
  return reinterpret_cast<T *>(warp.registers + offset);
}
inline u32 &predicateOf(Warp &warp, u32 offset) {
  return *reinterpret_cast<u32 *>(warp.registers + offset);
}
inline void setPredicate(Warp &warp, u32 offset, u32 mask, u32 value) {
  if (offset == kNone)
    return;
  u32 &predicate = predicateOf(warp, offset);
  predicate = (predicate & ~mask) | (value & mask);
}

//===----------------------------------------------------------------------===//
// Blocks
//===----------------------------------------------------------------------===//

struct BarrierState {
  struct Arrival {
    u32 warp;
    u32 lanes;
    u32 pc;
    bool waits;
  };
  std::vector<Arrival> arrivals;
  u32 arrived = 0;
  /// Threads it waits for; 0: all that have not exited.
  u32 expected = 0;
  Clock clock;
  u32 popc = 0;
  u32 participants = 0;
};

struct Mbarrier {
  u32 count = 0;
  i64 pending = 0;
  i64 transactions = 0;
  u64 phase = 0;
  /// Releases of the running phase and of all completed ones.
  Clock arriving;
  Clock completed;
  /// When the last copy that completed bytes here landed, if one did.
  u32 lastLanding = 0;
  /// Which of the block's mbarriers it is: places are used again.
  u32 serial = 0;
  /// Who initialised it.
  u32 initBlock = 0, initActor = 0, initLane = 0, initTime = 0, initPc = 0;
  /// Lane of the asynchronous actor that stands for this barrier's copies.
  u32 asyncLane = 0;
};

/// A wgmma that some warps of a warpgroup have executed, and with what.
struct GroupWgmma {
  u32 pc;
  /// Descriptors of A, if it has one, and of B, and scale-d.
  std::array<u64, 3> operands;
  u32 warp;
  u32 executed = 1;
};

/// The wgmmas of four warps that not all of them have executed.
struct WarpgroupLog {
  u64 first = 0;
  std::vector<GroupWgmma> wgmmas;
};

/// Something that happens by itself, at a random time.
struct Event {
  u64 due;
  std::function<void()> run;
  /// The instruction that started it.
  Warp *warp;
  u32 lane;
  u32 pc;
};

struct Block {
  Block();
  ~Block();

  LaunchState *launch = nullptr;
  Executor *executor = nullptr;
  Cluster *cluster = nullptr;
  u32 linear = 0;
  /// Number of the block's first actor in the grid; 0 is nobody.
  u32 firstActor = 1;
  u32 index[3] = {0, 0, 0};
  u32 rank = 0;
  std::vector<u8> memory;
  u8 *shared = nullptr;
  std::unique_ptr<ShadowPage> shadow;
  std::vector<Warp> warps;
  std::vector<u8> registerFile;
  std::vector<u8> localMemory;
  std::array<BarrierState, 16> barriers;
  std::unordered_map<u64, Mbarrier> mbarriers;
  u32 numMbarriers = 0;
  std::vector<WarpgroupLog> warpgroups;
  /// Registers that setmaxnreg.dec has given back.
  u64 freeRegisters = 0;
  std::vector<Event> events;
  std::vector<u32> order;
  Random random;
  u64 now = 0;
  u32 asyncTime = 1;
  u32 liveThreads = 0;

  u32 asyncActor() const { return static_cast<u32>(warps.size()); }
  u32 actors() const { return static_cast<u32>(warps.size()) + 1; }
};

/// Blocks that run at the same time and share a barrier; usually one.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  /// Releases of the running phase of barrier.cluster and of the last one.
  Clock arriving;
  Clock completed;
  u64 barrierPhase = 0;
  u32 barrierArrived = 0;
  u64 executed = 0;
};

//===----------------------------------------------------------------------===//
// The launch
//===----------------------------------------------------------------------===//

/// Memory that kernels may touch by global addresses.
struct Region {
  Region();
  Region(Region &&) noexcept;
  Region &operator=(Region &&) noexcept;
  ~Region();

  u8 *data = nullptr;
  u64 bytes = 0;
  std::string name;
  bool readOnly = false;
  std::unique_ptr<RegionShadow> shadow;

  bool holds(u64 address, u64 size) const {
    u64 offset = address - reinterpret_cast<u64>(data);
    return offset < bytes && size <= bytes - offset;
  }
};

/// Releases to one address, by the widest scope and by the block's.
struct SyncLocation {
  Clock wide;
  Clock cta;
  u32 ctaBlock = kNoBlock;
};

/// A proxy fence for tensor maps, and what its lanes knew and had done.
struct TensorMapFence {
  u32 block;
  u32 actor;
  u32 lanes;
  u32 time;
  Clock clock;
  /// Of an acquire: the map.
  u64 address;

  bool covers(u32 ofBlock, u32 ofActor, u32 ofLanes, u32 atTime) const {
    bool own = ofBlock == block && ofActor == actor && !(ofLanes & ~lanes) &&
               atTime <= time;
    return own || clock.knows(ofBlock, ofActor, ofLanes, atTime);
  }
};

/// Counters of one host thread.
struct ThreadCounters {
  std::vector<u64> executed;
  Counters totals;
};

struct LaunchState {
  const Program *program = nullptr;
  const Kernel *kernel = nullptr;
  const Launch *config = nullptr;
  Checks checks;
  u32 policy = 0;
  Numerics numerics = Numerics::Exact;
  u32 grid[3], block[3], cluster[3];
  u32 numBlocks = 0;
  u32 threadsPerBlock = 0;
  u32 warpsPerBlock = 0;
  u32 threads = 1;
  /// The window of shared addresses: from sharedBase on, sharedSize bytes.
  /// Those from gapBegin to gapEnd, between static and dynamic memory, are
  /// nobody's.
  u64 sharedBase = 0;
  u64 sharedSize = 0;
  u64 gapBegin = 0;
  u64 gapEnd = 0;

  /// Whether a block has `bytes` bytes of shared memory at an address.
  bool holdsShared(u64 address, u64 bytes) const {
    u64 offset = address - sharedBase;
    return offset < sharedSize && bytes <= sharedSize - offset &&
           !(offset < gapEnd && offset + bytes > gapBegin);
  }
  std::vector<u8> params;
  /// Sorted by address.
  std::vector<Region> regions;
  Reporter *reporter = nullptr;
  /// Null unless the launch asks for it.
  std::vector<SharedEvent> *sharedTrace = nullptr;
  /// Of each instruction, whether a trace has it as a statement.
  std::vector<bool> tracedStatements;
  std::mutex syncMutex;
  std::unordered_map<u64, SyncLocation> syncLocations;
  /// Under syncMutex.
  std::vector<TensorMapFence> tensorMapReleases;
  std::vector<TensorMapFence> tensorMapAcquires;
  std::atomic<bool> stop{false};
  std::atomic<u32> nextCluster{0};
  std::vector<u32> clusterOrder;
};

/// One host thread.
struct Executor {
  LaunchState *launch = nullptr;
  ThreadCounters counters;
  /// Something changed that another warp could wait for.
  bool progressed = false;
  u64 idleInstructions = 0;
  /// The cluster gives its turn to another one.
  bool endsTurn = false;
  Random random;
  /// Finished clusters, kept for their memory.
  std::vector<std::unique_ptr<Cluster>> pool;
};

inline u32 blockOf(const Warp &warp) { return warp.block->linear; }

/// Rank bits of shared::cluster addresses; 0 is the block's own window.
constexpr u32 kClusterRankShift = 24;

//===----------------------------------------------------------------------===//
// Synchronisation (Synchronization.cpp)
//===----------------------------------------------------------------------===//

/// Adds all that `lanes` have done and know to `clock`; the caller ticks.
void publish(Warp &warp, u32 lanes, Clock &clock);
/// Makes `clock` known to `lanes`.
void acquire(Warp &warp, u32 lanes, const Clock &clock);
/// Starts a new time: later accesses are not covered by releases so far.
inline void tick(Warp &warp) { ++warp.time; }
/// All of `lanes` learn of each other.
void meet(Warp &warp, u32 lanes);

void fence(Warp &warp, u32 lanes, Scope scope, bool acquires, bool releases);
void proxyFence(Warp &warp, u32 lanes);
/// A strong load or the load half of an atomic saw `address`.
void observe(Warp &warp, u32 lane, u64 address, Order order, Scope scope);
/// A strong store to `address`; an atomic continues the release sequence.
void announce(Warp &warp, u32 lane, u64 address, Order order, Scope scope,
              bool isAtomic);

//===----------------------------------------------------------------------===//
// Scheduling (Scheduler.cpp, Barriers.cpp)
//===----------------------------------------------------------------------===//

void runGrid(LaunchState &launch, std::vector<ThreadCounters> &counters);

enum class ClusterStatus : u8 { Done, Running, Stuck };
ClusterStatus runCluster(Cluster &cluster, u64 budget);
/// Prepares the blocks of cluster `index` of the grid; `cluster` may have run
/// before in the same launch.
void startCluster(Cluster &cluster, LaunchState &launch, Executor &executor,
                  u32 index);

/// A group of the warp has come together at a barrier instruction.
void arriveAtBarrier(Warp &warp, size_t group);
/// Opens barriers that only waited for threads that have exited since.
bool checkBarriers(Block &block);
void arriveAtCluster(Warp &warp, u32 lanes, u32 pc);
/// Reports lanes that wait for the cluster and have not arrived.
void checkClusterWait(Warp &warp, u32 lanes, u32 pc);
/// Lets groups go whose cluster barrier has completed.
bool checkClusterBarrier(Cluster &cluster);
/// A warp has come together at a setmaxnreg: it goes on, or waits.
void requestRegisters(Warp &warp, size_t group);
/// Reports warpgroups whose warps have not all executed the same instructions.
void checkWarpgroups(Block &block);
/// Reports asynchronous work of these lanes that nobody has waited for.
void checkUnwaited(Warp &warp, u32 lanes);
/// The same for copies of the block, when its last thread ends.
void checkUnwaited(Block &block);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_MACHINE_H
