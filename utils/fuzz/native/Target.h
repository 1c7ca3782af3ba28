//===- Target.h - What can be fuzzed in one process -------------*- C++ -*-===//

#ifndef MOE_UTILS_FUZZ_TARGET_H
#define MOE_UTILS_FUZZ_TARGET_H

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace moe::fuzz {

/// A reader of ours. Refuses an input with a std::exception that explains;
/// anything else that is not a plain return is a finding.
struct Target {
  std::string name, summary;
  /// Where seeds lie: every file of the folders, with `extension`.
  std::vector<std::filesystem::path> folders;
  std::string extension;
  /// What mutations put in besides the words of the seeds.
  std::vector<std::string> words;
  void (*run)(const std::string &input);
  /// Seeds that are no files.
  std::vector<std::string> (*makeSeeds)() = nullptr;
};

/// Sources of seeds, and a folder for what a target has to write.
struct Places {
  std::filesystem::path root, artifacts, scratch;
};
extern Places places;

std::vector<Target> makeTargets();

/// Ends the process as a finding.
[[noreturn]] void fail(const std::string &what);

std::string readFile(const std::filesystem::path &path);

// One each file of this folder.
std::vector<std::string> makeArtifactSeeds();
std::vector<std::string> makeCallSeeds();
void runArtifact(const std::string &input);
void runCall(const std::string &input);
void runJson(const std::string &input);
void runKernels(const std::string &input);
void runNpy(const std::string &input);
void runPtx(const std::string &input);
void runSizes(const std::string &input);
void runWeights(const std::string &input);

} // namespace moe::fuzz

#endif // MOE_UTILS_FUZZ_TARGET_H
