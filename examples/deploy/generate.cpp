// Generates text from C++: a language model in an artifact of
// moe_mlir.save_decoder, which keeps its cache from call to call.
//
//   g++ -std=c++20 generate.cpp -I include -L build/python/moe_mlir
//   -lmoe_runtime -o generate
//   ./generate decoder.artifact 8 5 17 3 -- 9 2
//
// Each call takes ids and gives the logits of the token after them: a prompt as
// a whole, then token by token. On standard error it says how long each
// sequence took.

#include "MoE/Runtime/Decoder.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

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

/// The most likely token after `ids`, which come after those of earlier calls.
static int64_t next(Decoder &decoder, const std::vector<int64_t> &ids) {
  Array logits = decoder.run(ids);
  auto first = static_cast<const float *>(logits.tensor.data);
  return std::max_element(first, first + logits.tensor.shape[1]) - first;
}

/// Returns when the first token was there, by the clock of the program.
static double generate(Decoder &decoder, const std::vector<int64_t> &prompt,
                       int count, const Stopwatch &program) {
  decoder.reset(); // Of the sequence before nothing is left.
  Stopwatch first;
  int64_t token = next(decoder, prompt);
  double firstToken = program.getSeconds();
  std::fprintf(stderr, "prompt: %zu tokens in %.6f s (CPU %.6f s)",
               prompt.size(), first.getSeconds(), first.getCpuSeconds());
  std::printf("%lld", static_cast<long long>(token));
  Stopwatch steps;
  for (int i = 1; i < count; ++i) {
    token = next(decoder, {token});
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
    Decoder decoder(argv[1]);
    std::vector<int64_t> prompt;
    for (int i = 3; i <= argc; ++i) {
      bool isLast = i == argc || std::string(argv[i]) == "--";
      if (!isLast) {
        prompt.push_back(std::atoll(argv[i]));
        continue;
      }
      double seconds = generate(decoder, prompt, std::atoi(argv[2]), program);
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
