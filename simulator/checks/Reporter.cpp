//===- Reporter.cpp - Collects findings -----------------------------------===//

#include "Reporter.h"
#include "execute/Machine.h"

namespace moe::sim {

const char *name(FindingKind kind) {
  static constexpr const char *names[] = {
      "race", "bounds", "uninit", "align", "deadlock", "trap", "equal-stores"};
  return names[static_cast<u8>(kind)];
}

std::string Reporter::sourceOf(u32 pc) const {
  if (pc >= kernel.sources.size())
    return {};
  SourceLine source = kernel.sources[pc];
  auto file = program.tree.files.find(source.file);
  if (source.line == 0 || file == program.tree.files.end())
    return {};
  return file->second + ":" + std::to_string(source.line);
}

std::string Reporter::describe(u32 pc) const {
  if (pc >= kernel.code.size() || kernel.code[pc].line == 0)
    return "the end of the kernel";
  u32 line = kernel.code[pc].line;
  std::string text = "line " + std::to_string(line);
  std::string source = sourceOf(pc);
  if (!source.empty())
    text += " (" + source + ")";
  if (line <= program.lines.size()) {
    const std::string &ptx = program.lines[line - 1];
    size_t begin = ptx.find_first_not_of(" \t");
    size_t end = ptx.find_last_not_of(" \t\r");
    if (begin != std::string::npos)
      text += " `" + ptx.substr(begin, std::min<size_t>(end - begin + 1, 120)) +
              "`";
  }
  return text;
}

bool Reporter::repeats(FindingKind kind, const Warp &warp, u32 pc,
                       u32 otherPc) {
  std::lock_guard<std::mutex> guard(mutex);
  auto it = kept.find({pc, kind, otherPc});
  if (it == kept.end() || warp.block->linear < it->second.block)
    return false;
  ++total;
  ++it->second.finding.count;
  return true;
}

void Reporter::add(FindingKind kind, const Warp &warp, u32 lane, u32 pc,
                   const std::string &what, u32 otherPc,
                   const std::string &other) {
  if (repeats(kind, warp, pc, otherPc))
    return;
  const Block &block = *warp.block;
  Finding finding;
  finding.kind = kind;
  finding.kernel = kernel.name;
  finding.line = pc < kernel.code.size() ? kernel.code[pc].line : 0;
  finding.source = sourceOf(pc);
  finding.block = {block.index[0], block.index[1], block.index[2]};
  finding.warp = warp.index;
  finding.lane = lane;
  finding.other = other;
  finding.message =
      "kernel " + kernel.name + ", block (" + std::to_string(block.index[0]) +
      "," + std::to_string(block.index[1]) + "," +
      std::to_string(block.index[2]) + ") warp " + std::to_string(warp.index) +
      " lane " + std::to_string(lane) + ", " + describe(pc) + ": " + what;
  std::lock_guard<std::mutex> guard(mutex);
  ++total;
  auto [it, isNew] =
      kept.try_emplace({pc, kind, otherPc}, Kept{block.linear, finding});
  if (isNew)
    return;
  // Another thread may have come first.
  finding.count = it->second.finding.count + 1;
  if (block.linear < it->second.block)
    it->second = {block.linear, std::move(finding)};
  else
    it->second.finding.count = finding.count;
}

std::vector<Finding> Reporter::take() {
  std::vector<Finding> findings;
  for (auto &[key, entry] : kept)
    if (findings.size() < kShown)
      findings.push_back(std::move(entry.finding));
  return findings;
}

} // namespace moe::sim
