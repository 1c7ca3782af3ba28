//===- Main.cpp - moe-fuzz: runs a target on changed inputs ---------------===//
//
// With clang's libFuzzer (MOE_FUZZ_COVERAGE) inputs that reach new code become
// seeds. Without it every input is a changed seed.
//
//===----------------------------------------------------------------------===//

#include "Mutator.h"
#include "Target.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <memory>
#include <new>
#include <stdexcept>
#include <sys/time.h>
#include <unistd.h>

using namespace moe::fuzz;
namespace fs = std::filesystem;

namespace {

constexpr const char kHelp[] = R"(moe-fuzz TARGET [options]
moe-fuzz --list
  --runs N       inputs to run (default 1000)
  --seed S       of the changes (default 1)
  --seconds T    stop after this time
  --out DIR      where an input that ends the process is written (default .)
  --artifacts DIR  what moe-compile made, for the target `artifact`
  --input FILE   run this file alone
)";

/// A hang: seconds of the processor, which other work on the machine does not
/// count for, or many of the clock, for what waits forever.
constexpr unsigned kSecondsPerInput = 10;
constexpr unsigned kPatience = 120;

struct Options {
  std::string target, input;
  uint64_t runs = 1000, seed = 1, seconds = 0;
  fs::path out = ".";
};

const Target *target;
std::unique_ptr<Mutator> mutator;
uint64_t executed, accepted;

/// What the standard library says when it was asked for what is not there. A
/// refusal must say what is wrong with the input.
bool saysNothing(const std::string &message) {
  for (const char *raw :
       {"basic_string", "vector::", "map::at", "sto", "bad ", "std::"})
    if (message.starts_with(raw))
      return true;
  return message.empty();
}

void onTimeout(int) { fail("no end within ten seconds"); }

void limitTime() {
  std::signal(SIGPROF, onTimeout);
  itimerval limit = {};
  limit.it_value.tv_sec = kSecondsPerInput;
  setitimer(ITIMER_PROF, &limit, nullptr);
}

void runOne(const std::string &input) {
  ++executed;
  limitTime();
  try {
    target->run(input);
    ++accepted;
  } catch (const std::bad_alloc &) {
    // Sizes of the input, asked of the allocator, which refused.
  } catch (const std::exception &error) {
    if (saysNothing(error.what()))
      fail(std::string("a refusal that does not explain: ") + error.what());
  }
}

void report() {
  std::printf("moe-fuzz %s: %llu inputs, %llu accepted\n", target->name.c_str(),
              static_cast<unsigned long long>(executed),
              static_cast<unsigned long long>(accepted));
  std::fflush(stdout);
}

std::vector<std::string> readSeeds() {
  std::vector<std::string> seeds;
  for (const fs::path &folder : target->folders)
    if (fs::is_directory(folder))
      for (const auto &file : fs::directory_iterator(folder))
        if (file.path().extension() == target->extension)
          seeds.push_back(readFile(file.path()));
  if (target->makeSeeds)
    for (std::string &seed : target->makeSeeds())
      seeds.push_back(std::move(seed));
  // As folders list them in any order.
  std::sort(seeds.begin(), seeds.end());
  if (seeds.empty())
    throw std::runtime_error("expected seeds for " + target->name +
                             ", found none");
  return seeds;
}

#ifdef MOE_FUZZ_COVERAGE
extern "C" int LLVMFuzzerRunDriver(int *argc, char ***argv,
                                   int (*run)(const uint8_t *, size_t));
extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t maxSize);

int runBytes(const uint8_t *data, size_t size) {
  runOne(std::string(reinterpret_cast<const char *>(data), size));
  return 0;
}

int runAll(const Options &options, const std::vector<std::string> &seeds) {
  fs::path corpus = places.scratch / "corpus";
  fs::create_directories(corpus);
  for (size_t i = 0; i < seeds.size(); ++i)
    std::ofstream(corpus / std::to_string(i), std::ios::binary) << seeds[i];
  std::vector<std::string> arguments = {
      "moe-fuzz",
      "-runs=" + std::to_string(options.runs),
      "-seed=" + std::to_string(options.seed),
      "-timeout=" + std::to_string(kPatience),
      "-max_len=131072",
      "-rss_limit_mb=4096",
      "-malloc_limit_mb=3000",
      "-print_final_stats=1",
      "-verbosity=0",
      "-artifact_prefix=" + (options.out / (target->name + "-")).string(),
      corpus.string()};
  if (options.seconds)
    arguments.push_back("-max_total_time=" + std::to_string(options.seconds));
  std::vector<char *> pointers;
  for (std::string &argument : arguments)
    pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  int argc = static_cast<int>(arguments.size());
  char **argv = pointers.data();
  std::atexit(report);
  return LLVMFuzzerRunDriver(&argc, &argv, runBytes);
}
#else
std::string current, findingPath;

/// Writes the input; only what a signal handler may call.
void writeFinding() {
  int file = open(findingPath.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file >= 0 && write(file, current.data(), current.size()) >= 0)
    close(file);
}

void onSignal(int signal) {
  writeFinding();
  std::signal(signal, SIG_DFL);
  raise(signal);
}

int runAll(const Options &options, const std::vector<std::string> &) {
  findingPath = (options.out / (target->name + "-finding")).string();
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM})
    std::signal(signal, onSignal);
  auto start = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < options.runs; ++i) {
    // Of its own number alone, so that one input can be drawn again.
    Random random(options.seed * 0x2545f4914f6cdd1d + i);
    current = mutator->pickSeed(random);
    mutator->mutate(current, random);
    alarm(kPatience);
    runOne(current);
    if (options.seconds && std::chrono::steady_clock::now() - start >
                               std::chrono::seconds(options.seconds))
      break;
  }
  alarm(0);
  report();
  return 0;
}
#endif

Options parseOptions(int argc, char **argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (!name.starts_with("--")) {
      options.target = name;
      continue;
    }
    if (i + 1 == argc)
      throw std::runtime_error("expected a value after " + name);
    std::string value = argv[++i];
    if (name == "--runs")
      options.runs = std::stoull(value);
    else if (name == "--seed")
      options.seed = std::stoull(value);
    else if (name == "--seconds")
      options.seconds = std::stoull(value);
    else if (name == "--out")
      options.out = value;
    else if (name == "--artifacts")
      places.artifacts = value;
    else if (name == "--input")
      options.input = value;
    else
      throw std::runtime_error("unknown option " + name + "\n" + kHelp);
  }
  return options;
}

int run(const Options &options) {
  std::vector<Target> targets = makeTargets();
  for (const Target &candidate : targets)
    if (candidate.name == options.target)
      target = &candidate;
  if (!target)
    throw std::runtime_error("expected a target of moe-fuzz --list, found '" +
                             options.target + "'");
  if (!options.input.empty()) {
    runOne(readFile(options.input));
    report();
    return 0;
  }
  std::vector<std::string> seeds = readSeeds();
  mutator = std::make_unique<Mutator>(seeds, target->words);
  return runAll(options, seeds);
}

} // namespace

#ifdef MOE_FUZZ_COVERAGE
/// Half of the changes are ours, half libFuzzer's, which learn from
/// comparisons.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size,
                                          size_t maxSize, unsigned seed) {
  Random random(seed);
  if (random.below(2))
    return LLVMFuzzerMutate(data, size, maxSize);
  std::string text(reinterpret_cast<const char *>(data), size);
  mutator->mutate(text, random);
  size = std::min(text.size(), maxSize);
  std::memcpy(data, text.data(), size);
  return size;
}
#endif

int main(int argc, char **argv) {
  if (argc < 2 || !std::strcmp(argv[1], "--help")) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  places.root = MOE_FUZZ_ROOT;
  if (!std::strcmp(argv[1], "--list")) {
    for (const Target &listed : makeTargets())
      std::printf("%-10s %s\n", listed.name.c_str(), listed.summary.c_str());
    return 0;
  }
  std::string scratch =
      (fs::temp_directory_path() / "moe-fuzz-XXXXXX").string();
  int status = 1;
  try {
    if (!mkdtemp(scratch.data()))
      throw std::runtime_error("cannot create " + scratch);
    places.scratch = scratch;
    status = run(parseOptions(argc, argv));
  } catch (const std::exception &error) {
    std::fprintf(stderr, "moe-fuzz: error: %s\n", error.what());
  }
  std::error_code ignored;
  fs::remove_all(scratch, ignored);
  return status;
}
