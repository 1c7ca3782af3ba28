//===- Simulator.cpp - Modules and launches -------------------------------===//

#include "MoE/Simulator/Simulator.h"
#include "Machine.h"
#include "MoE/Support/Chips.h"
#include "checks/Shadow.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <thread>

namespace moe::sim {

Region::Region() = default;
Region::Region(Region &&) noexcept = default;
Region &Region::operator=(Region &&) noexcept = default;
Region::~Region() = default;
namespace {

constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxBlockDepth = 64;
constexpr u32 kMaxGridX = 0x7fffffff, kMaxGridYZ = 0xffff;
/// Without the host's opting in.
constexpr u64 kDefaultShared = 48 * 1024;

[[noreturn]] void refuse(const std::string &what) {
  throw std::invalid_argument(what);
}

std::string extents(const u32 *e) {
  return std::to_string(e[0]) + "," + std::to_string(e[1]) + "," +
         std::to_string(e[2]);
}

void copyExtents(const std::array<u32, 3> &from, u32 *to, const char *what) {
  for (u32 i = 0; i < 3; ++i) {
    to[i] = from[i];
    if (to[i] == 0)
      refuse(std::string("expected a ") + what +
             " of at least 1 in every dimension, found " +
             extents(from.data()));
  }
}

void checkCluster(const Kernel &kernel, const Launch &launch,
                  const LaunchState &state) {
  const u32 *cluster = state.cluster;
  const std::string &target = state.program->tree.target;
  const Chip &chip = getNewestChipUpTo(target);
  u64 blocks = static_cast<u64>(cluster[0]) * cluster[1] * cluster[2];
  if (blocks > 1 && chip.mostClusterBlocks == 1)
    refuse("expected no cluster on " + target + ", found one of " +
           extents(cluster) + " blocks: clusters begin with sm_90");
  if (kernel.requiredCluster[0] &&
      !std::equal(cluster, cluster + 3, kernel.requiredCluster))
    refuse("expected clusters of " + extents(kernel.requiredCluster) +
           " as kernel " + kernel.name + " requires, found " +
           extents(cluster));
  bool large =
      launch.nonportableCluster && chip.mostClusterBlocks > chip.clusterBlocks;
  int64_t limit = large ? chip.mostClusterBlocks : chip.clusterBlocks;
  if (blocks > static_cast<u64>(limit))
    refuse("expected at most " + std::to_string(limit) + " blocks a cluster" +
           (large ? ""
                  : ", or NON_PORTABLE_CLUSTER_SIZE_ALLOWED set on a chip "
                    "that has them") +
           ", found " + std::to_string(blocks));
  if (kernel.maxClusterRank && blocks > kernel.maxClusterRank)
    refuse("expected at most " + std::to_string(kernel.maxClusterRank) +
           " blocks a cluster as kernel " + kernel.name + " declares, found " +
           std::to_string(blocks));
}

void checkExtents(const Kernel &kernel, LaunchState &state) {
  const u32 *grid = state.grid;
  if (grid[0] > kMaxGridX || grid[1] > kMaxGridYZ || grid[2] > kMaxGridYZ)
    refuse("expected a grid of at most " + std::to_string(kMaxGridX) + "," +
           std::to_string(kMaxGridYZ) + "," + std::to_string(kMaxGridYZ) +
           " blocks, found " + extents(grid));
  const u32 *block = state.block;
  if (block[2] > kMaxBlockDepth)
    refuse("expected blocks of at most " + std::to_string(kMaxBlockDepth) +
           " threads along z, found " + extents(block));
  u64 threads = static_cast<u64>(block[0]) * block[1] * block[2];
  u32 limit = kernel.maxThreads ? std::min(kernel.maxThreads, kMaxThreads)
                                : kMaxThreads;
  if (threads > limit)
    refuse("expected at most " + std::to_string(limit) +
           " threads a block for kernel " + kernel.name + ", found " +
           std::to_string(threads));
  if (kernel.requiredBlock[0] &&
      !std::equal(block, block + 3, kernel.requiredBlock))
    refuse("expected blocks of " + extents(kernel.requiredBlock) +
           " as kernel " + kernel.name + " requires, found " + extents(block));
  const u32 *cluster = state.cluster;
  for (u32 i = 0; i < 3; ++i)
    if (state.grid[i] % cluster[i])
      refuse("expected a grid that is a multiple of the cluster " +
             extents(cluster) + ", found " + extents(state.grid));
  u64 total = static_cast<u64>(state.grid[0]) * state.grid[1] * state.grid[2];
  // Actors are numbered through the grid in 32 bits (Shadow.h).
  if (total * ((threads + 31) / 32 + 1) >= 1ull << 32)
    refuse("expected fewer blocks, found " + std::to_string(total));
  state.numBlocks = static_cast<u32>(total);
  state.threadsPerBlock = static_cast<u32>(threads);
  state.warpsPerBlock = static_cast<u32>((threads + 31) / 32);
}

void placeShared(const Kernel &kernel, const Launch &launch,
                 LaunchState &state) {
  if (kernel.sharedBytes > kDefaultShared)
    refuse("expected at most " + std::to_string(kDefaultShared) +
           " bytes of static shared memory in kernel " + kernel.name +
           ", found " + std::to_string(kernel.sharedBytes) +
           ": more must be dynamic");
  const Chip &chip = getNewestChipUpTo(state.program->tree.target);
  u64 limit = static_cast<u64>(chip.sharedBytes);
  if (launch.dynamicSmem > limit - kernel.sharedBytes)
    refuse("expected at most " + std::to_string(limit) +
           " bytes of shared memory on " + state.program->tree.target +
           ", found " + std::to_string(kernel.sharedBytes) + " static and " +
           std::to_string(launch.dynamicSmem) + " dynamic ones");
  if (!launch.optsIn && launch.dynamicSmem &&
      kernel.sharedBytes + launch.dynamicSmem > kDefaultShared)
    refuse("expected at most " + std::to_string(kDefaultShared) +
           " bytes of shared memory, or MAX_DYNAMIC_SHARED_SIZE_BYTES set "
           "before the launch of kernel " +
           kernel.name + ", found " + std::to_string(kernel.sharedBytes) +
           " static and " + std::to_string(launch.dynamicSmem) +
           " dynamic ones");
  u64 start = launch.dynamicSmem ? kernel.dynamicStart : kernel.sharedBytes;
  state.sharedSize = start + launch.dynamicSmem;
  if (start > kernel.sharedBytes) {
    state.gapBegin = kernel.sharedBytes;
    state.gapEnd = start;
  }
  state.sharedBase = 1024;
  if (launch.sharedAlignment == SharedAlignment::Declared &&
      kernel.sharedAlignment < 1024)
    state.sharedBase += kernel.sharedAlignment;
}

void collectRegions(const Program &program, const Launch &launch,
                    LaunchState &state) {
  auto add = [&](u8 *data, u64 bytes, std::string name, bool readOnly) {
    Region region;
    region.data = data;
    region.bytes = bytes;
    region.name = std::move(name);
    region.readOnly = readOnly;
    region.shadow = std::make_unique<RegionShadow>(bytes);
    state.regions.push_back(std::move(region));
  };
  for (size_t i = 0; i < launch.buffers.size(); ++i) {
    const Buffer &buffer = launch.buffers[i];
    if (buffer.bytes)
      add(static_cast<u8 *>(buffer.data), buffer.bytes,
          buffer.name.empty() ? "buffer " + std::to_string(i) : buffer.name,
          buffer.readOnly);
  }
  for (const GlobalVariable &global : program.globals)
    if (global.bytes)
      add(global.data, global.bytes, "variable " + global.name,
          global.space == Space::Const);
  std::sort(state.regions.begin(), state.regions.end(),
            [](const Region &a, const Region &b) { return a.data < b.data; });
}

u32 chooseThreads(const Kernel &kernel, const Launch &launch, u32 clusters) {
  u32 threads = launch.tracesShared ? 1 : launch.threads;
  if (threads == 0)
    threads = kernel.blocksCommunicate
                  ? 1
                  : std::max(1u, std::thread::hardware_concurrency());
  return std::min({threads, clusters, 64u});
}

/// Which instructions order accesses to shared memory, by their opcodes.
std::vector<bool> statementsToTrace(const Program &program,
                                    const Kernel &kernel) {
  std::vector<bool> traced;
  for (const Inst &inst : kernel.code) {
    std::string_view opcode = program.opcodes[inst.opcode];
    auto is = [&](std::string_view start) { return opcode.starts_with(start); };
    traced.push_back(is("bar") || is("cp.") || is("fence") || is("mbarrier") ||
                     is("membar") || is("shfl") || is("wgmma"));
  }
  return traced;
}

Counters sumCounters(const Program &program, const Kernel &kernel,
                     const std::vector<ThreadCounters> &all) {
  Counters sum;
  for (const ThreadCounters &thread : all) {
    const Counters &c = thread.totals;
    sum.laneInstructions += c.laneInstructions;
    sum.barriers += c.barriers;
    sum.atomics += c.atomics;
    sum.sharedRequests += c.sharedRequests;
    sum.sharedWavefronts += c.sharedWavefronts;
    sum.sharedBytesRead += c.sharedBytesRead;
    sum.sharedBytesWritten += c.sharedBytesWritten;
    sum.globalRequests += c.globalRequests;
    sum.globalSectors += c.globalSectors;
    sum.globalBytesRead += c.globalBytesRead;
    sum.globalBytesWritten += c.globalBytesWritten;
    for (size_t pc = 0; pc < thread.executed.size(); ++pc) {
      const std::string &opcode = program.opcodes[kernel.code[pc].opcode];
      // Helpers of the decoder have no opcode and are not the kernel's.
      if (opcode.empty() || !thread.executed[pc])
        continue;
      sum.instructions[opcode] += thread.executed[pc];
      sum.lines[kernel.code[pc].line] += thread.executed[pc];
      sum.warpInstructions += thread.executed[pc];
    }
  }
  return sum;
}

} // namespace

Module::Module(std::unique_ptr<Program> program)
    : program(std::move(program)) {}
Module::~Module() = default;

std::unique_ptr<Module> Module::load(std::string_view ptx) {
  return std::unique_ptr<Module>(new Module(decode(ptx)));
}

std::vector<KernelInfo> Module::kernels() const {
  std::vector<KernelInfo> infos;
  for (const auto &[name, kernel] : program->kernels) {
    KernelInfo info;
    info.name = name;
    for (const Param &param : kernel->params)
      info.params.push_back(
          {param.name, param.type, param.offset, param.bytes, param.count});
    info.paramBytes = kernel->paramBytes;
    info.sharedBytes = kernel->sharedBytes;
    info.localBytes = kernel->localBytes;
    info.instructions = kernel->code.size();
    info.registerBytes = kernel->registerBytes;
    info.maxThreads = kernel->maxThreads;
    std::copy_n(kernel->requiredBlock, 3, info.requiredBlock.begin());
    std::copy_n(kernel->requiredCluster, 3, info.requiredCluster.begin());
    info.usesDynamicShared = kernel->usesDynamicShared;
    infos.push_back(std::move(info));
  }
  return infos;
}

Report Module::launch(const std::string &name, const Launch &launch) {
  auto it = program->kernels.find(name);
  if (it == program->kernels.end())
    refuse("expected a kernel of the module, found '" + name + "'");
  const Kernel &kernel = *it->second;
  if (launch.params.size() < kernel.paramBytes)
    refuse("expected " + std::to_string(kernel.paramBytes) +
           " bytes of parameters for kernel " + name + ", found " +
           std::to_string(launch.params.size()));
  LaunchState state;
  state.program = program.get();
  state.kernel = &kernel;
  state.config = &launch;
  state.checks = launch.checks;
  state.policy = launch.policy;
  state.numerics = launch.numerics;
  copyExtents(launch.grid, state.grid, "grid");
  copyExtents(launch.block, state.block, "block");
  for (u32 i = 0; i < 3; ++i) {
    u32 extent =
        launch.cluster[i] ? launch.cluster[i] : kernel.requiredCluster[i];
    state.cluster[i] = std::max(1u, extent);
  }
  checkCluster(kernel, launch, state);
  checkExtents(kernel, state);
  placeShared(kernel, launch, state);
  state.params = launch.params;
  collectRegions(*program, launch, state);
  u32 clusters = state.numBlocks /
                 (state.cluster[0] * state.cluster[1] * state.cluster[2]);
  state.threads = chooseThreads(kernel, launch, clusters);
  state.clusterOrder.resize(clusters);
  for (u32 i = 0; i < clusters; ++i)
    state.clusterOrder[i] = i;
  // Policy 0 with seed 0 starts blocks in order, as hardware mostly does.
  if (launch.seed || launch.policy)
    Random(launch.seed).shuffle(state.clusterOrder.data(), clusters);
  Reporter reporter(*program, kernel);
  state.reporter = &reporter;
  Report report;
  if (launch.tracesShared) {
    state.sharedTrace = &report.sharedTrace;
    state.tracedStatements = statementsToTrace(*program, kernel);
  }
  std::vector<ThreadCounters> counters;
  runGrid(state, counters);
  report.kernel = name;
  report.findings = reporter.take();
  report.counters = sumCounters(*program, kernel, counters);
  return report;
}

} // namespace moe::sim
