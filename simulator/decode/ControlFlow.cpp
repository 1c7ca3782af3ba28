//===- ControlFlow.cpp - Basic blocks of a kernel -------------------------===//

#include "ControlFlow.h"

#include <algorithm>
#include <set>

namespace moe::sim {
namespace {

bool leaves(const Inst &inst) {
  return inst.flow == Flow::Branch || inst.flow == Flow::BranchIndex ||
         inst.flow == Flow::Exit;
}

/// Depth-first numbering that visits what a loop exits to before the loop's
/// body, so that reverse post-order has the body first.
class Ordering {
public:
  explicit Ordering(const std::vector<BasicBlock> &blocks)
      : blocks(blocks), predecessors(blocks.size()), depth(blocks.size()) {
    for (u32 block = 0; block < blocks.size(); ++block)
      for (u32 next : blocks[block].successors)
        predecessors[next].push_back(block);
  }

  /// Blocks in the order in which lanes should run them.
  std::vector<u32> run() {
    traverse([](u32, u32) { return false; });
    for (auto [latch, header] : backEdges)
      deepen(header, latch);
    traverse([&](u32 a, u32 b) { return depth[a] < depth[b]; });
    std::vector<u32> order(postOrder.rbegin(), postOrder.rend());
    for (u32 block = 0; block < blocks.size(); ++block)
      if (state[block] == State::New)
        order.push_back(block);
    return order;
  }

private:
  enum class State : u8 { New, Open, Done };
  struct Visit {
    u32 block;
    std::vector<u32> successors;
    size_t next = 0;
  };

  /// `before(a, b)`: successor a is to be visited before b.
  template <typename Before>
  void traverse(Before before) {
    state.assign(blocks.size(), State::New);
    postOrder.clear();
    backEdges.clear();
    std::vector<Visit> stack;
    auto open = [&](u32 block) {
      state[block] = State::Open;
      stack.push_back({block, blocks[block].successors});
      auto &successors = stack.back().successors;
      std::stable_sort(successors.begin(), successors.end(), before);
    };
    if (!blocks.empty())
      open(0);
    while (!stack.empty()) {
      Visit &visit = stack.back();
      if (visit.next == visit.successors.size()) {
        state[visit.block] = State::Done;
        postOrder.push_back(visit.block);
        stack.pop_back();
        continue;
      }
      u32 next = visit.successors[visit.next++];
      if (state[next] == State::Open)
        backEdges.insert({visit.block, next});
      else if (state[next] == State::New)
        open(next);
    }
  }

  /// The natural loop of a back edge: what reaches the latch without passing
  /// the header.
  void deepen(u32 header, u32 latch) {
    std::set<u32> loop = {header};
    std::vector<u32> work = {latch};
    while (!work.empty()) {
      u32 block = work.back();
      work.pop_back();
      if (!loop.insert(block).second)
        continue;
      work.insert(work.end(), predecessors[block].begin(),
                  predecessors[block].end());
    }
    for (u32 block : loop)
      ++depth[block];
  }

  const std::vector<BasicBlock> &blocks;
  std::vector<std::vector<u32>> predecessors;
  /// Back edges around the block: more of them, further in.
  std::vector<u32> depth;
  std::vector<State> state;
  std::vector<u32> postOrder;
  std::set<std::pair<u32, u32>> backEdges;
};

} // namespace

std::vector<BasicBlock> findBasicBlocks(const Kernel &kernel) {
  const auto &code = kernel.code;
  u32 size = static_cast<u32>(code.size());
  std::set<u32> leaders = {0};
  for (u32 pc = 0; pc < size; ++pc) {
    if (code[pc].flow == Flow::Branch)
      leaders.insert(code[pc].target);
    if (code[pc].flow == Flow::BranchIndex)
      for (u32 target : kernel.branchTables[code[pc].target])
        leaders.insert(target);
    if (leaves(code[pc]))
      leaders.insert(pc + 1);
  }
  std::vector<BasicBlock> blocks;
  std::map<u32, u32> blockAt;
  for (auto it = leaders.begin(); it != leaders.end() && *it < size; ++it) {
    auto next = std::next(it);
    blockAt[*it] = static_cast<u32>(blocks.size());
    blocks.push_back(
        {*it, next == leaders.end() ? size : std::min(*next, size), {}});
  }
  for (BasicBlock &block : blocks) {
    const Inst &last = code[block.end - 1];
    auto add = [&](u32 pc) {
      if (auto it = blockAt.find(pc); it != blockAt.end())
        block.successors.push_back(it->second);
    };
    if (last.flow == Flow::Branch)
      add(last.target);
    if (last.flow == Flow::BranchIndex)
      for (u32 target : kernel.branchTables[last.target])
        add(target);
    if (!leaves(last) || last.guard != kNone)
      add(block.end);
  }
  return blocks;
}

std::vector<u32> reconvergenceOrder(const Kernel &kernel) {
  std::vector<BasicBlock> blocks = findBasicBlocks(kernel);
  std::vector<u32> order(kernel.code.size());
  u32 number = 0;
  for (u32 block : Ordering(blocks).run())
    for (u32 pc = blocks[block].begin; pc < blocks[block].end; ++pc)
      order[pc] = number++;
  return order;
}

} // namespace moe::sim
