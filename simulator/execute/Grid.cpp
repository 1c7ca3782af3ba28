//===- Grid.cpp - Starts blocks and shares them among host threads --------===//

#include "Machine.h"
#include "Scheduler.h"
#include "checks/Shadow.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace moe::sim {

Block::Block() : shadow(std::make_unique<ShadowPage>()) {}
Block::~Block() = default;

namespace {

//===----------------------------------------------------------------------===//
// Starting a block
//===----------------------------------------------------------------------===//

constexpr u64 kSharedMargin = 128;
constexpr u64 kSharedHostAlignment = 1024;
/// NaN in every floating-point format.
constexpr u8 kSharedFill = 0xff;

u32 specialValue(const Block &block, const Warp &warp, SpecialRegister which,
                 u32 lane) {
  using S = SpecialRegister;
  const LaunchState &launch = *block.launch;
  const u32 *extent = launch.block, *grid = launch.grid;
  const u32 *cluster = launch.cluster;
  u32 thread = warp.index * kWarpSize + lane;
  switch (which) {
  case S::TidX:
    return thread % extent[0];
  case S::TidY:
    return thread / extent[0] % extent[1];
  case S::TidZ:
    return thread / extent[0] / extent[1];
  case S::NtidX:
  case S::NtidY:
  case S::NtidZ:
    return extent[static_cast<u8>(which) - static_cast<u8>(S::NtidX)];
  case S::CtaidX:
  case S::CtaidY:
  case S::CtaidZ:
    return block.index[static_cast<u8>(which) - static_cast<u8>(S::CtaidX)];
  case S::NctaidX:
  case S::NctaidY:
  case S::NctaidZ:
    return grid[static_cast<u8>(which) - static_cast<u8>(S::NctaidX)];
  case S::LaneId:
    return lane;
  case S::WarpId:
    return warp.index;
  case S::NWarpId:
    return launch.warpsPerBlock;
  case S::LaneMaskEq:
    return 1u << lane;
  case S::LaneMaskLt:
    return (1u << lane) - 1;
  case S::LaneMaskLe:
    return (2u << lane) - 1;
  case S::LaneMaskGe:
    return ~((1u << lane) - 1);
  case S::LaneMaskGt:
    return ~((2u << lane) - 1);
  case S::DynamicSmemSize:
    return static_cast<u32>(launch.config->dynamicSmem);
  case S::TotalSmemSize:
    return static_cast<u32>(launch.sharedSize);
  case S::ClusterIdX:
  case S::ClusterIdY:
  case S::ClusterIdZ: {
    u8 i = static_cast<u8>(which) - static_cast<u8>(S::ClusterIdX);
    return block.index[i] / cluster[i];
  }
  case S::NClusterIdX:
  case S::NClusterIdY:
  case S::NClusterIdZ: {
    u8 i = static_cast<u8>(which) - static_cast<u8>(S::NClusterIdX);
    return grid[i] / cluster[i];
  }
  case S::ClusterCtaidX:
  case S::ClusterCtaidY:
  case S::ClusterCtaidZ: {
    u8 i = static_cast<u8>(which) - static_cast<u8>(S::ClusterCtaidX);
    return block.index[i] % cluster[i];
  }
  case S::ClusterNctaidX:
  case S::ClusterNctaidY:
  case S::ClusterNctaidZ:
    return cluster[static_cast<u8>(which) - static_cast<u8>(S::ClusterNctaidX)];
  case S::ClusterCtarank:
    return block.rank;
  case S::ClusterNctarank:
    return cluster[0] * cluster[1] * cluster[2];
  case S::IsExplicitCluster:
    return cluster[0] * cluster[1] * cluster[2] > 1;
  case S::NSmId:
    return 1;
  // One SM, and a clock that stands still: equal seeds, equal runs.
  case S::SmId:
  case S::GridId:
  case S::Clock:
  case S::Clock64:
  case S::GlobalTimer:
  case S::GlobalTimerLo:
    return 0;
  }
  return 0;
}

bool dependsOnBlock(const Preset &preset) {
  using S = SpecialRegister;
  if (preset.kind != Preset::Kind::Special)
    return false;
  return (preset.special >= S::CtaidX && preset.special <= S::CtaidZ) ||
         preset.special >= S::ClusterIdX;
}

/// Handlers never write presets, so a register file that has been used in this
/// launch only needs those that differ between blocks.
void fillPresets(Block &block, Warp &warp, bool fresh) {
  for (const Preset &preset : block.launch->kernel->presets) {
    if (!fresh && !dependsOnBlock(preset))
      continue;
    u8 *at = warp.registers + preset.offset;
    if (preset.kind == Preset::Kind::Predicate) {
      std::memcpy(at, &preset.value, 4);
      continue;
    }
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
      u64 value = preset.value;
      if (preset.kind == Preset::Kind::SharedAddress)
        value += block.launch->sharedBase;
      else if (preset.kind == Preset::Kind::Special)
        value = specialValue(block, warp, preset.special, lane);
      u8 bytes[16] = {};
      std::memcpy(bytes, &value, sizeof value);
      std::memcpy(at + lane * preset.bytes, bytes, preset.bytes);
    }
  }
}

void startWarp(Block &block, u32 index, bool fresh) {
  LaunchState &launch = *block.launch;
  const Kernel &kernel = *launch.kernel;
  Warp &warp = block.warps[index];
  warp.block = &block;
  warp.index = index;
  u32 threads = std::min(kWarpSize, launch.threadsPerBlock - index * kWarpSize);
  warp.initial = threads == kWarpSize ? kAllLanes : (1u << threads) - 1;
  warp.live = warp.initial;
  u64 base = reinterpret_cast<u64>(block.registerFile.data());
  warp.registers = block.registerFile.data() + ((64 - base % 64) % 64) +
                   static_cast<u64>(index) * kernel.registerBytes;
  warp.local = block.localMemory.data() +
               static_cast<u64>(index) * kWarpSize * kernel.localBytes;
  warp.groups.assign(1, {0, warp.live, Wait::None});
  warp.time = 1;
  warp.clock.reset(block.linear, block.actors());
  warp.privateLanes = 0;
  warp.fences.clear();
  warp.observed.clear();
  warp.copies.clear();
  std::fill_n(warp.copyGroup, kWarpSize, 0);
  warp.wgmmas.clear();
  warp.wgmmaGroup = 0;
  warp.wgmmaFenced = false;
  warp.numWgmmas = 0;
  warp.bulkStores.clear();
  std::fill_n(warp.bulkGroup, kWarpSize, 0);
  warp.clusterPhase = 0;
  warp.maxRegisters = kernel.launchRegisters;
  warp.registerChanges.clear();
  warp.clusterArrived = 0;
  warp.defined.assign(kernel.tracked.size(), 0);
  for (const Kernel::Tracked &tracked : kernel.tracked) {
    u32 bytes = tracked.bytes ? tracked.bytes * kWarpSize : 4;
    std::memset(warp.registers + tracked.offset, 0xCD, bytes);
    std::memset(warp.registers + tracked.shadow, 0xff, bytes);
  }
  fillPresets(block, warp, fresh);
}

void startShared(Block &block) {
  LaunchState &launch = *block.launch;
  block.memory.resize(launch.sharedSize + 2 * kSharedMargin +
                      2 * kSharedHostAlignment);
  // Host addresses have the window's alignment, so that generic addresses
  // show the same misalignment.
  u64 base = reinterpret_cast<u64>(block.memory.data()) + kSharedMargin;
  base += (kSharedHostAlignment - base % kSharedHostAlignment) %
          kSharedHostAlignment;
  block.shared =
      reinterpret_cast<u8 *>(base) + launch.sharedBase % kSharedHostAlignment;
  std::memset(block.shared, kSharedFill, launch.sharedSize);
  block.shadow->reset(launch.sharedSize, block.firstActor, block.actors(),
                      /*tracksInit=*/true, "shared memory");
}

void startBlock(Block &block, LaunchState &launch, Executor &executor,
                u32 linear) {
  const Kernel &kernel = *launch.kernel;
  bool fresh = block.registerFile.empty();
  block.launch = &launch;
  block.executor = &executor;
  block.linear = linear;
  block.random = Random(launch.config->seed * 0x9e3779b97f4a7c15 + linear);
  if (fresh) {
    block.warps = std::vector<Warp>(launch.warpsPerBlock);
    block.registerFile.resize(
        static_cast<u64>(launch.warpsPerBlock) * kernel.registerBytes + 128);
    block.localMemory.resize(static_cast<u64>(launch.warpsPerBlock) *
                                 kWarpSize * kernel.localBytes +
                             16);
    block.order.resize(launch.warpsPerBlock);
  }
  block.firstActor = linear * block.actors() + 1;
  for (u32 i = 0; i < launch.warpsPerBlock; ++i)
    block.order[i] = i;
  std::fill(block.localMemory.begin(), block.localMemory.end(), kSharedFill);
  startShared(block);
  for (u32 i = 0; i < launch.warpsPerBlock; ++i)
    startWarp(block, i, fresh);
  for (BarrierState &barrier : block.barriers)
    barrier = BarrierState();
  block.mbarriers.clear();
  block.numMbarriers = 0;
  block.warpgroups.assign((launch.warpsPerBlock + 3) / 4, {});
  block.freeRegisters = 0;
  block.events.clear();
  block.now = 0;
  block.asyncTime = 1;
  block.liveThreads = launch.threadsPerBlock;
}

} // namespace

void startCluster(Cluster &cluster, LaunchState &launch, Executor &executor,
                  u32 index) {
  const u32 *extent = launch.cluster;
  u32 clusters[3];
  for (u32 i = 0; i < 3; ++i)
    clusters[i] = launch.grid[i] / extent[i];
  u32 origin[3] = {index % clusters[0] * extent[0],
                   index / clusters[0] % clusters[1] * extent[1],
                   index / clusters[0] / clusters[1] * extent[2]};
  u32 ranks = extent[0] * extent[1] * extent[2];
  cluster.blocks.resize(ranks);
  for (u32 rank = 0; rank < ranks; ++rank) {
    if (!cluster.blocks[rank])
      cluster.blocks[rank] = std::make_unique<Block>();
    Block &block = *cluster.blocks[rank];
    block.cluster = &cluster;
    block.rank = rank;
    block.index[0] = origin[0] + rank % extent[0];
    block.index[1] = origin[1] + rank / extent[0] % extent[1];
    block.index[2] = origin[2] + rank / extent[0] / extent[1];
    u32 linear =
        block.index[0] +
        launch.grid[0] * (block.index[1] + launch.grid[1] * block.index[2]);
    startBlock(block, launch, executor, linear);
  }
  cluster.arriving = Clock();
  cluster.completed = Clock();
  cluster.barrierPhase = 0;
  cluster.barrierArrived = 0;
  cluster.executed = 0;
}

//===----------------------------------------------------------------------===//
// The grid
//===----------------------------------------------------------------------===//

namespace {

/// Instructions of one cluster before another one gets its turn.
constexpr u64 kTurn = 50000;
/// Instructions without any change that somebody could wait for: a livelock
/// if the kernel has waiting loops, an endless loop if not.
constexpr u64 kIdleLimitSpinning = 3'000'000;
constexpr u64 kIdleLimit = 60'000'000;

class Worker {
public:
  Worker(LaunchState &launch, Executor &executor)
      : launch(launch), executor(executor) {}

  void run() {
    while (!launch.stop) {
      admit();
      if (resident.empty())
        return;
      size_t index = executor.random.below(static_cast<u32>(resident.size()));
      turn(index);
    }
  }

private:
  void admit() {
    while (resident.size() < limit) {
      u32 next = launch.nextCluster++;
      if (next >= launch.clusterOrder.size())
        return;
      std::unique_ptr<Cluster> cluster;
      if (executor.pool.empty()) {
        cluster = std::make_unique<Cluster>();
      } else {
        cluster = std::move(executor.pool.back());
        executor.pool.pop_back();
      }
      startCluster(*cluster, launch, executor, launch.clusterOrder[next]);
      resident.push_back(std::move(cluster));
    }
  }

  void turn(size_t index) {
    Cluster &cluster = *resident[index];
    u64 before = cluster.executed;
    executor.progressed = false;
    executor.endsTurn = false;
    u64 most = launch.config->maxInstructions;
    switch (runCluster(cluster, most ? std::min(kTurn, most) : kTurn)) {
    case ClusterStatus::Done:
      executor.pool.push_back(std::move(resident[index]));
      resident.erase(resident.begin() + static_cast<i64>(index));
      unfinishedTurns = 0;
      executor.idleInstructions = 0;
      return;
    case ClusterStatus::Stuck:
      reportStuck(cluster, "deadlock: no warp of the block can go on");
      return;
    case ClusterStatus::Running:
      break;
    }
    executed += cluster.executed - before;
    if (most && executed >= most) {
      reportStuck(cluster, "gave up after " + std::to_string(executed) +
                               " instructions");
      return;
    }
    // Blocks may wait for blocks that have not started.
    if (++unfinishedTurns >= resident.size()) {
      unfinishedTurns = 0;
      ++limit;
    }
    executor.idleInstructions =
        executor.progressed ? 0
                            : executor.idleInstructions +
                                  std::max<u64>(cluster.executed - before, 1);
    u64 enough = launch.kernel->spins ? kIdleLimitSpinning : kIdleLimit;
    // Blocks that do not communicate wait for none that has not started.
    bool all = launch.nextCluster >= launch.clusterOrder.size() ||
               !launch.kernel->blocksCommunicate;
    if (executor.idleInstructions > enough * (all ? 1 : 4))
      reportStuck(cluster,
                  "livelock: loops run on and nothing changes any more");
  }

  void reportStuck(Cluster &cluster, const std::string &what) {
    launch.stop = true;
    for (auto &block : cluster.blocks)
      for (Warp &warp : block->warps)
        if (!warp.groups.empty()) {
          const Group &group = warp.groups[0];
          launch.reporter->add(FindingKind::Deadlock, warp,
                               __builtin_ctz(group.mask), group.pc,
                               what + ": " + describeWaiting(cluster));
          return;
        }
  }

  LaunchState &launch;
  Executor &executor;
  std::vector<std::unique_ptr<Cluster>> resident;
  size_t limit = 1;
  size_t unfinishedTurns = 0;
  /// In turns that did not finish their cluster.
  u64 executed = 0;
};

} // namespace

void runGrid(LaunchState &launch, std::vector<ThreadCounters> &counters) {
  std::vector<Executor> executors(launch.threads);
  for (u32 i = 0; i < launch.threads; ++i) {
    executors[i].launch = &launch;
    executors[i].random = Random(launch.config->seed + 0x51ed270b * (i + 1));
    executors[i].counters.executed.assign(launch.kernel->code.size(), 0);
  }
  std::vector<std::thread> threads;
  for (u32 i = 1; i < launch.threads; ++i)
    threads.emplace_back(
        [&launch, &executors, i] { Worker(launch, executors[i]).run(); });
  Worker(launch, executors[0]).run();
  for (std::thread &thread : threads)
    thread.join();
  for (Executor &executor : executors)
    counters.push_back(std::move(executor.counters));
}

} // namespace moe::sim
