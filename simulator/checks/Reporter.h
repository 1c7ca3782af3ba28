//===- Reporter.h - Collects findings ---------------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_REPORTER_H
#define MOE_LIB_SIMULATOR_REPORTER_H

#include "decode/Program.h"

#include "MoE/Simulator/Simulator.h"

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

namespace moe::sim {

struct Warp;

/// Keeps one finding for each (kind, instruction, other instruction), the first
/// one of the first block that has it, and counts the rest: the same whatever
/// host thread runs which block.
class Reporter {
public:
  Reporter(const Program &program, const Kernel &kernel)
      : program(program), kernel(kernel) {}

  /// `what` continues the sentence "kernel k, block ..., line ...: ".
  /// `otherPc` and `other` describe the second access of a race.
  void add(FindingKind kind, const Warp &warp, u32 lane, u32 pc,
           const std::string &what, u32 otherPc = kNone,
           const std::string &other = {});

  /// Has a finding of this kind at these instructions been kept already?
  /// Counts it if so: lets callers skip building the message.
  bool repeats(FindingKind kind, const Warp &warp, u32 pc, u32 otherPc = kNone);

  /// So many findings that going on tells nothing new.
  bool overflowed() const { return total > kEnough; }

  std::vector<Finding> take();

  /// "line 12 (scan.cu:40) `ld.shared.f32 %f1, [%rd2];`"
  std::string describe(u32 pc) const;
  std::string sourceOf(u32 pc) const;

private:
  static constexpr u64 kEnough = 100000;
  static constexpr size_t kShown = 64;

  using Key = std::tuple<u32, FindingKind, u32>;
  struct Kept {
    u32 block;
    Finding finding;
  };

  const Program &program;
  const Kernel &kernel;
  std::mutex mutex;
  /// In the order of the instructions.
  std::map<Key, Kept> kept;
  std::atomic<u64> total{0};
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_REPORTER_H
