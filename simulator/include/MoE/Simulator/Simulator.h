//===- Simulator.h - Execute and check PTX on the CPU -----------*- C++ -*-===//
//
// A GPU in software for the PTX that LLVM and nvcc emit:
//
//   auto module = moe::sim::Module::load(ptxText);
//   moe::sim::Launch launch;
//   launch.grid = {16, 1, 1};
//   launch.block = {128, 1, 1};
//   launch.params = ...;               // the kernel's parameter block
//   launch.buffers = {{data, bytes}};  // memory that the kernel may touch
//   moe::sim::Report report = module->launch("kernel", launch);
//
// Pointers in the parameter block are host pointers into the buffers.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_SIMULATOR_SIMULATOR_H
#define MOE_SIMULATOR_SIMULATOR_H

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moe::sim {

struct Program;

enum class FindingKind : uint8_t {
  Race,
  Bounds,
  Uninit,
  Align,
  Deadlock,
  Trap,
  /// A race by one instruction of two warps that store the same value: no run
  /// shows it, and the memory model leaves it undefined.
  EqualStores
};

/// "race", "bounds", "uninit", "align", "deadlock", "trap" or "equal-stores".
const char *name(FindingKind kind);

struct Finding {
  FindingKind kind;
  std::string message;
  std::string kernel;
  /// Line in the PTX text; 0 if the finding has no instruction.
  uint32_t line = 0;
  /// "file:line" of the source, where the PTX has `.loc`.
  std::string source;
  std::array<uint32_t, 3> block = {0, 0, 0};
  uint32_t warp = 0;
  uint32_t lane = 0;
  /// The other access of a race.
  std::string other;
  /// How often it was met.
  uint64_t count = 1;
};

/// All numbers are equal for equal seeds.
struct Counters {
  std::map<std::string, uint64_t> instructions;
  /// Warp instructions executed, by line of the PTX text.
  std::map<uint32_t, uint64_t> lines;
  uint64_t warpInstructions = 0;
  uint64_t laneInstructions = 0;
  uint64_t barriers = 0;
  uint64_t atomics = 0;
  uint64_t sharedRequests = 0;
  uint64_t sharedWavefronts = 0;
  uint64_t sharedBytesRead = 0;
  uint64_t sharedBytesWritten = 0;
  uint64_t globalRequests = 0;
  uint64_t globalSectors = 0;
  uint64_t globalBytesRead = 0;
  uint64_t globalBytesWritten = 0;
};

/// What one lane does to shared memory, or what a warp executes that orders
/// such accesses (shuffles are listed, too).
struct SharedEvent {
  enum Kind : uint8_t { Statement, Read, Write, ReadWrite };
  Kind kind;
  uint32_t block;
  uint32_t warp;
  /// kWholeWarp for what no single lane does: statements, and what matrix
  /// instructions and bulk copies touch.
  uint32_t lane;
  /// Line in the PTX text.
  uint32_t line;
  /// From the start of the block's shared memory; of a statement, the lanes
  /// that execute it.
  uint64_t offset;
  uint32_t bytes;

  static constexpr uint32_t kWholeWarp = 32;
};

struct Report {
  std::string kernel;
  std::vector<Finding> findings;
  Counters counters;
  /// With Launch::tracesShared; of each warp in the order of its program.
  std::vector<SharedEvent> sharedTrace;

  bool ok() const { return findings.empty(); }
  /// For people and for FileCheck.
  std::string text() const;
  std::string json() const;
};

struct Checks {
  bool race = true;
  bool bounds = true;
  bool uninit = true;
  bool align = true;
};

enum class Numerics : uint8_t {
  /// Products exact, sums in f32, one after the other.
  Exact,
  /// Addends of an instruction aligned and cut off, as an H100 has them.
  TensorCore,
  /// Approximate instructions off by up to two ulp; sums in random order.
  Perturbed,
};

/// What the race check lets pass: undefined by the memory model, and met in
/// code that runs as its author hopes.
struct Allowances {
  /// One instruction of two warps stores the same value to one place.
  bool equalStores = false;
  /// The same of shared memory alone: of two blocks it stays a finding.
  bool equalSharedStores = false;
  /// No proxy fence lies between the initialisation of an mbarrier and its use
  /// by an asynchronous copy.
  bool unfencedInit = false;
  /// The warps of a warpgroup do not meet between two setmaxnreg that ask for
  /// the same number of registers: the second one moves none.
  bool repeatedSetmaxnreg = false;
};

/// Where dynamic shared memory starts.
enum class SharedAlignment : uint8_t {
  /// At a multiple of 1024.
  Hardware,
  /// As the kernel declares, and no more: finds code that hopes for more.
  Declared,
};

struct Buffer {
  void *data = nullptr;
  uint64_t bytes = 0;
  std::string name;
  bool readOnly = false;
};

struct Launch {
  std::array<uint32_t, 3> grid = {1, 1, 1};
  std::array<uint32_t, 3> block = {1, 1, 1};
  /// {0, 0, 0}: what the kernel requires, else no cluster.
  std::array<uint32_t, 3> cluster = {0, 0, 0};
  uint64_t dynamicSmem = 0;
  /// Whether the host has allowed the kernel as much dynamic shared memory
  /// (MAX_DYNAMIC_SHARED_SIZE_BYTES). Else more than 48 KB, static memory
  /// counted, fail.
  bool optsIn = true;
  /// Whether the host has allowed clusters of more than 8 blocks
  /// (NON_PORTABLE_CLUSTER_SIZE_ALLOWED).
  bool nonportableCluster = false;
  SharedAlignment sharedAlignment = SharedAlignment::Hardware;
  Checks checks;
  Allowances allows;
  /// Lists every access to shared memory; one host thread runs all blocks.
  bool tracesShared = false;
  uint64_t seed = 0;
  /// 0 reconverges as early as possible, 1 as late as the ISA allows.
  uint32_t policy = 0;
  Numerics numerics = Numerics::Exact;
  /// 0: every core where blocks do not communicate, else one.
  uint32_t threads = 0;
  /// Warp instructions after which a host thread gives up with a finding,
  /// about; 0 for as many as the kernel wants.
  uint64_t maxInstructions = 0;
  std::vector<uint8_t> params;
  std::vector<Buffer> buffers;
};

struct ParamInfo {
  std::string name;
  std::string type;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t count = 1;
};

struct KernelInfo {
  std::string name;
  std::vector<ParamInfo> params;
  uint64_t paramBytes = 0;
  uint64_t sharedBytes = 0;
  uint64_t localBytes = 0;
  uint64_t instructions = 0;
  /// Bytes of one warp's register file in the simulator.
  uint64_t registerBytes = 0;
  uint32_t maxThreads = 0;
  /// Zeros where the kernel leaves the launch its choice.
  std::array<uint32_t, 3> requiredBlock = {0, 0, 0};
  std::array<uint32_t, 3> requiredCluster = {0, 0, 0};
  /// It uses what the launch sets as dynamic shared memory.
  bool usesDynamicShared = false;
};

class Module {
public:
  /// Throws std::invalid_argument that lists every unknown instruction.
  static std::unique_ptr<Module> load(std::string_view ptx);
  ~Module();

  std::vector<KernelInfo> kernels() const;

  /// Throws std::invalid_argument if the launch itself is wrong (no such
  /// kernel, block too large, ...); what the kernel does wrong is reported.
  Report launch(const std::string &kernel, const Launch &launch);

private:
  explicit Module(std::unique_ptr<Program> program);
  std::unique_ptr<Program> program;
};

} // namespace moe::sim

#endif // MOE_SIMULATOR_SIMULATOR_H
