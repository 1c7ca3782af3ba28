// Generates text from C++: a language model's artifact, whose cache of keys and
// values is state of the loaded function.
//
//   moe-compile decoder.pt2 -o decoder.artifact --target=cpu
//   g++ -std=c++20 generate.cpp -I include -L build/python/moe_mlir
//   -lmoe_runtime -o generate
//   ./generate decoder.artifact 8 5 17 3 -- 9 2
//
// The function takes ids [1, n] and their positions [n], and gives the logits
// [1, words] of the token after them: a prompt as a whole, then token by token.
// On standard error it says how long each sequence took.

#include "MoE/Runtime/Artifact.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <numeric>
#include <string>
#include <unistd.h>

using namespace moe::runtime;

/// Seconds since it was made: of the wall clock, and of this thread on a CPU,
/// which do not count what other programs take from it.
class Stopwatch {
public:
  double getSeconds() const {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  double getCpuSeconds() const { return readThreadClock() - cpuStart; }

private:
  using Clock = std::chrono::steady_clock;
  static double readThreadClock() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
  }
  Clock::time_point start = Clock::now();
  double cpuStart = readThreadClock();
};

/// The most likely token after `ids`, which start at `position`.
static int64_t next(const Function &model, std::vector<int64_t> ids,
                    int64_t position) {
  auto count = static_cast<int64_t>(ids.size());
  std::vector<int64_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), position);
  const Tensor arguments[] = {{"i64", {1, count}, ids.data()},
                              {"i64", {count}, positions.data()}};
  std::vector<Array> results = model.run(arguments);
  const Tensor &logits = results.at(0).tensor;
  if (logits.dtype != "f32" || logits.shape.size() != 2)
    throw std::runtime_error("expected logits f32[1, words]");
  auto first = static_cast<const float *>(logits.data);
  return std::max_element(first, first + logits.shape[1]) - first;
}

/// Returns when the first token was there, by the clock of the program.
static double generate(const Function &model,
                       const std::vector<int64_t> &prompt, int count,
                       const Stopwatch &program) {
  model.reset(); // Of the sequence before nothing is left.
  auto position = static_cast<int64_t>(prompt.size());
  Stopwatch first;
  int64_t token = next(model, prompt, 0);
  double firstToken = program.getSeconds();
  std::fprintf(stderr, "prompt: %zu tokens in %.6f s (CPU %.6f s)",
               prompt.size(), first.getSeconds(), first.getCpuSeconds());
  std::printf("%lld", static_cast<long long>(token));
  Stopwatch steps;
  for (int i = 1; i < count; ++i) {
    token = next(model, {token}, position++);
    std::printf(" %lld", static_cast<long long>(token));
  }
  std::printf("\n");
  if (double seconds = steps.getSeconds(); count > 1)
    std::fprintf(
        stderr, "; steps: %d tokens in %.6f s (CPU %.6f s), %.0f tokens/s",
        count - 1, seconds, steps.getCpuSeconds(), (count - 1) / seconds);
  std::fprintf(stderr, "\n");
  return firstToken;
}

/// Bytes of this process in memory; 0 where the system does not say.
static int64_t getResidentBytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int main(int argc, char **argv) {
  if (argc < 4) {
    std::fprintf(stderr, "expected: generate ARTIFACT COUNT ID.. [-- ID..]\n");
    return 1;
  }
  Stopwatch program;
  double firstToken = 0;
  try {
    Artifact artifact(argv[1]);
    const Function &model = artifact.getFunction();
    std::vector<int64_t> prompt;
    for (int i = 3; i <= argc; ++i) {
      bool isLast = i == argc || std::string(argv[i]) == "--";
      if (!isLast) {
        prompt.push_back(std::atoll(argv[i]));
        continue;
      }
      double seconds = generate(model, prompt, std::atoi(argv[2]), program);
      firstToken = firstToken == 0 ? seconds : firstToken;
      prompt.clear();
    }
    std::fprintf(stderr, "first token after %.3f s, %lld MB resident\n",
                 firstToken, static_cast<long long>(getResidentBytes() >> 20));
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "generate: error: %s\n", error.what());
    return 1;
  }
}
