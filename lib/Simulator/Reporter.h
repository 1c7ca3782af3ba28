//===- Reporter.h - Collects findings ---------------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_REPORTER_H
#define MOE_LIB_SIMULATOR_REPORTER_H

#include "Program.h"

#include "MoE/Simulator/Simulator.h"

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

namespace moe::sim {

struct Warp;

/// Keeps one finding for each (kind, instruction, other instruction) and
/// counts the rest.
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
  bool repeats(FindingKind kind, u32 pc, u32 otherPc = kNone);

  /// So many findings that going on tells nothing new.
  bool overflowed() const { return total > kEnough; }

  std::vector<Finding> take();

  /// "line 12 (scan.cu:40) `ld.shared.f32 %f1, [%rd2];`"
  std::string describe(u32 pc) const;
  std::string sourceOf(u32 pc) const;

private:
  static constexpr u64 kEnough = 100000;
  static constexpr size_t kKept = 64;

  using Key = std::tuple<FindingKind, u32, u32>;

  const Program &program;
  const Kernel &kernel;
  std::mutex mutex;
  std::map<Key, size_t> known;
  std::vector<Finding> findings;
  std::atomic<u64> total{0};
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_REPORTER_H
