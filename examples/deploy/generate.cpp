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

#include "MoE/Runtime/Artifact.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <string>

using namespace moe::runtime;

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

static void generate(const Function &model, const std::vector<int64_t> &prompt,
                     int count) {
  model.reset(); // Of the sequence before nothing is left.
  auto position = static_cast<int64_t>(prompt.size());
  int64_t token = next(model, prompt, 0);
  std::printf("%lld", static_cast<long long>(token));
  auto start = std::chrono::steady_clock::now();
  for (int i = 1; i < count; ++i) {
    token = next(model, {token}, position++);
    std::printf(" %lld", static_cast<long long>(token));
  }
  std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  std::printf("\n");
  std::fprintf(stderr, "%.0f tokens/s\n", (count - 1) / time.count());
}

int main(int argc, char **argv) {
  if (argc < 4) {
    std::fprintf(stderr, "expected: generate ARTIFACT COUNT ID.. [-- ID..]\n");
    return 1;
  }
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
      generate(model, prompt, std::atoi(argv[2]));
      prompt.clear();
    }
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "generate: error: %s\n", error.what());
    return 1;
  }
}
