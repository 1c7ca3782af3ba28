//===- Program.h - Decoded kernels ------------------------------*- C++ -*-===//
//
// A kernel as the scheduler runs it. Every operand is an offset into the
// warp's register file, where a 32-lane array lies (one element a lane; a
// predicate is one 32-bit mask). Immediates, addresses of variables and
// special registers are arrays there too, filled before the first
// instruction, so no handler asks what kind of operand it has.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_PROGRAM_H
#define MOE_LIB_SIMULATOR_PROGRAM_H

#include "Types.h"
#include "parse/Syntax.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace moe::sim {

struct Warp;
struct Inst;
/// Runs one instruction for the lanes of `mask`.
using Handler = void (*)(Warp &, const Inst &, u32 mask);

/// "No register": an absent operand or the sink `_`.
constexpr u32 kNone = ~0u;

/// Stamps hold a pc in 20 bits (Shadow.h).
constexpr size_t kPcLimit = (1u << 20) - 1;

enum class Flow : u8 {
  Next,
  Branch,
  BranchIndex,
  Exit,
  /// bar/barrier: waits for warps of the block.
  Barrier,
  /// Lanes named by a membermask, or all live lanes, must come together.
  WarpSync,
  ClusterWait,
  /// setmaxnreg: the warp's share of the block's registers changes.
  Registers,
};

enum class Order : u8 { Weak, Volatile, Relaxed, Acquire, Release, AcqRel };
enum class Scope : u8 { Cta, Cluster, Gpu, System };

struct Inst {
  Handler run = nullptr;
  /// Destinations and sources: register file offsets.
  const u32 *d = nullptr;
  const u32 *s = nullptr;
  i64 imm = 0;
  i64 imm2 = 0;
  u32 guard = kNone;
  u32 target = 0;
  /// WarpSync: the constant membermask, unless `memberRegister` is given.
  u32 memberMask = kAllLanes;
  u32 memberRegister = kNone;
  u32 line = 0;
  u16 opcode = 0;
  u16 nd = 0;
  u16 ns = 0;
  Flow flow = Flow::Next;
  Space space = Space::Generic;
  /// Memory: bytes of one element and elements of one access.
  u8 bytes = 0;
  u8 vec = 1;
  u8 aux = 0;
  u8 aux2 = 0;
  Order order = Order::Weak;
  Scope scope = Scope::Cta;
  bool guardNegated = false;
  /// The address register (s[0]) is 64 bits wide.
  bool wideAddress = true;
  /// `.aligned`: every live lane of the warp takes part.
  bool aligned = false;
  /// Reads or writes a register whose definedness is tracked at run time.
  bool tracked = false;
  /// Writes a register that some wgmma takes: a wgmma.fence must follow.
  bool feedsWgmma = false;
  /// Has an effect beyond its destination registers.
  bool effect = false;
  /// s[0] is an address.
  bool addressed = false;
};

enum class SpecialRegister : u8 {
  TidX,
  TidY,
  TidZ,
  NtidX,
  NtidY,
  NtidZ,
  CtaidX,
  CtaidY,
  CtaidZ,
  NctaidX,
  NctaidY,
  NctaidZ,
  LaneId,
  WarpId,
  NWarpId,
  LaneMaskEq,
  LaneMaskLe,
  LaneMaskLt,
  LaneMaskGe,
  LaneMaskGt,
  DynamicSmemSize,
  TotalSmemSize,
  Clock,
  Clock64,
  GlobalTimer,
  GlobalTimerLo,
  SmId,
  NSmId,
  GridId,
  ClusterIdX,
  ClusterIdY,
  ClusterIdZ,
  NClusterIdX,
  NClusterIdY,
  NClusterIdZ,
  ClusterCtaidX,
  ClusterCtaidY,
  ClusterCtaidZ,
  ClusterNctaidX,
  ClusterNctaidY,
  ClusterNctaidZ,
  ClusterCtarank,
  ClusterNctarank,
  IsExplicitCluster,
};

/// A register-file array that is filled before a warp starts.
struct Preset {
  enum class Kind : u8 { Constant, SharedAddress, Special, Predicate };
  Kind kind;
  u32 offset;
  u32 bytes;
  u64 value;
  SpecialRegister special = SpecialRegister::TidX;
};

struct Param {
  std::string name;
  std::string type;
  u64 offset;
  u64 bytes;
  u64 count;
};

struct Kernel {
  std::string name;
  std::vector<Inst> code;
  std::vector<u32> operands;
  std::vector<SourceLine> sources;
  std::vector<std::vector<u32>> branchTables;
  std::vector<Preset> presets;
  std::vector<Param> params;
  u64 paramBytes = 0;
  u32 registerBytes = 0;
  u64 localBytes = 0;
  /// Static shared memory, relative to the window's base.
  u64 sharedBytes = 0;
  struct SharedVariable {
    std::string name;
    u64 offset;
    u64 bytes;
  };
  std::vector<SharedVariable> sharedVariables;
  u32 sharedAlignment = 1;
  bool usesDynamicShared = false;
  u32 dynamicAlignment = 1;
  /// Where dynamic shared memory starts, behind the static one.
  u64 dynamicStart = 0;

  u32 maxThreads = 0;
  u32 requiredBlock[3] = {0, 0, 0};
  u32 requiredCluster[3] = {0, 0, 0};
  u32 maxClusterRank = 0;
  /// Registers of a thread when the kernel starts, where the text tells ptxas;
  /// else 0, and ptxas ignores setmaxnreg.
  u32 launchRegisters = 0;

  /// Blocks may talk to each other: atomics or strong accesses to memory
  /// that is not shared. Such kernels run on one host thread, so that equal
  /// seeds give equal runs.
  bool blocksCommunicate = false;
  /// Has loops that wait for someone else's store.
  bool spins = false;
  bool usesAsyncProxy = false;
  /// reconvergenceOrder() (ControlFlow.h).
  std::vector<u32> order;

  /// Registers that may be read before they are written, in order of offset;
  /// `trackedIndex` gives the slot of a tracked offset.
  struct Tracked {
    u32 offset;
    u32 bytes;
    /// The register of the same shape that has its undefined bits.
    u32 shadow;
  };
  std::vector<Tracked> tracked;
  std::map<u32, u32> trackedIndex;
  /// pc -> tracked slots read and written.
  struct TrackedUse {
    std::vector<u32> reads;
    std::vector<u32> writes;
    /// The operands with shadows for what is tracked; for other sources that
    /// give bits, a register of zeros.
    std::vector<u32> shadowResults;
    std::vector<u32> shadowSources;
  };
  std::map<u32, TrackedUse> trackedUses;
};

/// A module-scope .global or .const variable in host memory.
struct GlobalVariable {
  std::string name;
  Space space = Space::Global;
  u64 bytes = 0;
  std::unique_ptr<u8[]> storage;
  u8 *data = nullptr;
};

/// A loaded module.
struct Program {
  SyntaxTree tree;
  std::vector<std::string> lines;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
  std::vector<GlobalVariable> globals;
  std::vector<std::string> opcodes;
};

/// Decodes every kernel. Throws std::invalid_argument that lists everything
/// that is wrong, unknown instructions above all.
std::unique_ptr<Program> decode(std::string_view text);

/// Finds registers that may be read before they are written on some path, and
/// marks the instructions that must keep track of them.
void analyzeDefinedness(Kernel &kernel,
                        const std::map<u32, u32> &registerBytes);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_PROGRAM_H
