//===- Targets.cpp - The list of targets ----------------------------------===//

#include "Target.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace moe::fuzz {

Places places;

std::string readFile(const std::filesystem::path &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void fail(const std::string &what) {
  std::fprintf(stderr, "moe-fuzz: finding: %s\n", what.c_str());
  std::abort();
}

static const std::vector<std::string> kJsonWords = {
    "null",        "true",   "[]",      "{}",        "\"\"",
    ":",           ",",      "\\u0000", "\\ud800",   "\"arg\"",
    "\"ceildiv\"", "\"//\"", "\"f32\"", "\"index\"", "\"sizes\""};
static const std::vector<std::string> kPtxWords = {
    ".f32", ".f64",    ".b128",  ".u64",    ".s8",      ".pred",   ".v4",
    ".v2",  ".shared", ".local", ".const",  ".param",   ".align",  ".loc",
    ".reg", ".func",   ".entry", "bra.uni", "bar.sync", "ret",     "exit",
    "@%p1", "%tid.x",  "{",      "}",       "[",        "];",      "<33>",
    ".rz",  ".ftz",    ".sat",   ".wide",   "call.uni", "brx.idx", "trap"};

std::vector<Target> makeTargets() {
  std::filesystem::path corpus = places.root / "utils/fuzz/corpus",
                        ptx = places.root / "tests/Simulator";
  std::vector<std::filesystem::path> kernels = {corpus / "ptx", ptx,
                                                ptx / "corpus/ptx"};
  return {
      {"json",
       "the JSON reader of the runtime, beside LLVM's",
       {corpus / "json"},
       ".json",
       kJsonWords,
       runJson},
      {"sizes",
       "sizes of results, as JSON and as text",
       {corpus / "sizes"},
       ".txt",
       kJsonWords,
       runSizes},
      {"npy",
       "NumPy's files",
       {corpus / "npy"},
       ".npy",
       {"'<f4'", "True"},
       runNpy},
      {"weights",
       "safetensors' files",
       {corpus / "weights"},
       ".safetensors",
       kJsonWords,
       runWeights},
      {"artifact",
       "artifacts: loaded, linked and run",
       {},
       "",
       kJsonWords,
       runArtifact,
       makeArtifactSeeds},
      {"calls",
       "calls of artifacts' functions, with any arguments and results",
       {},
       "",
       {"in", "out", "f32", "f64", "bf16", "i1", "i32", "i64", "index",
        "scalar", "0", "1x", "-1", "normal", "nan", "extreme", "front", "null"},
       runCall,
       makeCallSeeds},
      {"ptx", "PTX, read and decoded", kernels, ".ptx", kPtxWords, runPtx},
      {"kernels", "PTX, run on small grids", kernels, ".ptx", kPtxWords,
       runKernels},
  };
}

} // namespace moe::fuzz
