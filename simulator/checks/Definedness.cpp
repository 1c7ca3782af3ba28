//===- Definedness.cpp - Registers read before they are written -----------===//
//
// A forward data-flow analysis: a register is definitely written at a point if
// it is on every path there. Only registers that are read where that does not
// hold, and those computed from them, are tracked while the kernel runs; in
// most kernels there are none, and the check costs nothing.
//
//===----------------------------------------------------------------------===//

#include "DefinedBits.h"
#include "decode/ControlFlow.h"

#include <algorithm>
#include <set>

namespace moe::sim {
namespace {

using Bits = std::vector<u64>;

class Analysis {
public:
  Analysis(Kernel &kernel, const std::map<u32, u32> &registerBytes)
      : kernel(kernel), registerBytes(registerBytes) {
    u32 count = 0;
    for (auto [offset, bytes] : registerBytes)
      index[offset] = count++;
    words = (count + 63) / 64;
  }

  void run() {
    for (BasicBlock &block : findBasicBlocks(kernel))
      blocks.push_back({std::move(block), {}, false});
    solve();
    collectReads();
    if (!maybe.empty())
      propagate();
    record();
  }

private:
  /// A basic block, and what is defined where it begins.
  struct Node : BasicBlock {
    Bits in;
    bool reached = false;
  };

  void transfer(u32 pc, Bits &defined) const {
    const Inst &inst = kernel.code[pc];
    if (inst.guard != kNone)
      return;
    for (u32 i = 0; i < inst.nd; ++i)
      if (auto it = index.find(inst.d[i]); it != index.end())
        defined[it->second / 64] |= 1ull << (it->second % 64);
  }

  void solve() {
    if (blocks.empty())
      return;
    blocks[0].in.assign(words, 0);
    blocks[0].reached = true;
    std::set<u32> work = {0};
    while (!work.empty()) {
      u32 current = *work.begin();
      work.erase(work.begin());
      Bits out = blocks[current].in;
      for (u32 pc = blocks[current].begin; pc < blocks[current].end; ++pc)
        transfer(pc, out);
      for (u32 next : blocks[current].successors) {
        Node &successor = blocks[next];
        if (!successor.reached) {
          successor.reached = true;
          successor.in = out;
          work.insert(next);
          continue;
        }
        bool changed = false;
        for (u32 i = 0; i < words; ++i) {
          u64 met = successor.in[i] & out[i];
          changed |= met != successor.in[i];
          successor.in[i] = met;
        }
        if (changed)
          work.insert(next);
      }
    }
  }

  template <typename Fn>
  void forReads(const Inst &inst, Fn fn) const {
    for (u32 i = 0; i < inst.ns; ++i)
      fn(inst.s[i]);
    for (u32 offset : {inst.guard, inst.memberRegister})
      if (offset != kNone)
        fn(offset);
  }

  void collectReads() {
    for (const Node &block : blocks) {
      if (!block.reached)
        continue;
      Bits defined = block.in;
      for (u32 pc = block.begin; pc < block.end; ++pc) {
        forReads(kernel.code[pc], [&](u32 offset) {
          auto it = index.find(offset);
          if (it != index.end() &&
              !(defined[it->second / 64] >> (it->second % 64) & 1))
            maybe.insert(offset);
        });
        transfer(pc, defined);
      }
    }
  }

  /// What is computed from a tracked register is tracked too.
  void propagate() {
    for (bool changed = true; changed;) {
      changed = false;
      for (const Inst &inst : kernel.code) {
        bool reads = false;
        forReads(inst, [&](u32 offset) { reads |= maybe.count(offset) != 0; });
        if (!reads)
          continue;
        for (u32 i = 0; i < inst.nd; ++i)
          if (index.count(inst.d[i]))
            changed |= maybe.insert(inst.d[i]).second;
      }
    }
  }

  /// At the end of the register file; `bytes` is 0 for a predicate.
  u32 allocate(u32 bytes) {
    u32 place = kernel.registerBytes;
    kernel.registerBytes += std::max(64u, bytes * kWarpSize);
    return place;
  }

  void record() {
    if (maybe.empty())
      return;
    zeros = allocate(16);
    for (u32 offset : maybe) {
      u32 bytes = registerBytes.at(offset);
      kernel.trackedIndex[offset] = static_cast<u32>(kernel.tracked.size());
      kernel.tracked.push_back({offset, bytes, allocate(bytes)});
    }
    for (u32 pc = 0; pc < kernel.code.size(); ++pc) {
      Inst &inst = kernel.code[pc];
      Kernel::TrackedUse use;
      forReads(inst, [&](u32 offset) {
        if (auto it = kernel.trackedIndex.find(offset);
            it != kernel.trackedIndex.end())
          use.reads.push_back(it->second);
      });
      for (u32 i = 0; i < inst.nd; ++i)
        if (auto it = kernel.trackedIndex.find(inst.d[i]);
            it != kernel.trackedIndex.end())
          use.writes.push_back(it->second);
      if (use.reads.empty() && use.writes.empty())
        continue;
      shadowOperands(inst, use);
      inst.tracked = true;
      kernel.trackedUses[pc] = std::move(use);
    }
  }

  void shadowOperands(const Inst &inst, Kernel::TrackedUse &use) const {
    BitTransfer transfer = bitTransferOf(inst.run);
    bool moves = transfer.rule == BitRule::Moves;
    for (u32 i = 0; i < inst.nd; ++i) {
      auto it = kernel.trackedIndex.find(inst.d[i]);
      use.shadowResults.push_back(it == kernel.trackedIndex.end()
                                      ? kNone
                                      : kernel.tracked[it->second].shadow);
    }
    for (u32 i = 0; i < inst.ns; ++i) {
      auto it = kernel.trackedIndex.find(inst.s[i]);
      bool control = moves && i >= transfer.data;
      use.shadowSources.push_back(control ? inst.s[i]
                                  : it == kernel.trackedIndex.end()
                                      ? zeros
                                      : kernel.tracked[it->second].shadow);
    }
  }

  Kernel &kernel;
  const std::map<u32, u32> &registerBytes;
  std::map<u32, u32> index;
  u32 words = 0;
  std::vector<Node> blocks;
  std::set<u32> maybe;
  u32 zeros = 0;
};

} // namespace

void analyzeDefinedness(Kernel &kernel,
                        const std::map<u32, u32> &registerBytes) {
  Analysis(kernel, registerBytes).run();
}

} // namespace moe::sim
