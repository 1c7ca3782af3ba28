// Calls one function of an artifact from several threads at once:
//
//   overlapping_calls ARTIFACT THREADS CALLS
//
// Sizes that are dynamic become 1024. Fails unless each call gives what a call
// alone gives, bit for bit.

#include "MoE/Runtime/Artifact.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

using namespace moe::runtime;

/// Memory for one argument in f32, filled with what differs from place to
/// place.
static Array makeArgument(const ValueType &type) {
  std::vector<int64_t> shape = type.shape;
  for (int64_t &size : shape)
    size = size < 0 ? 1024 : size;
  Array array(type.dtype, shape);
  auto *values = static_cast<float *>(array.tensor.data);
  for (int64_t i = 0; i < getNumElements(shape); ++i)
    values[i] = static_cast<float>(i * 37 % 101) / 101.0f - 0.5f;
  return array;
}

static bool areEqual(const std::vector<Array> &found,
                     const std::vector<Array> &expected) {
  for (size_t i = 0; i < expected.size(); ++i)
    if (std::memcmp(found[i].tensor.data, expected[i].tensor.data,
                    getByteSize(expected[i].tensor)))
      return false;
  return true;
}

int main(int argc, char **argv) {
  if (argc != 4)
    return 2;
  Artifact artifact(argv[1]);
  const Function &function = artifact.getFunction();
  std::vector<Array> memory;
  std::vector<Tensor> arguments;
  for (const ValueType &type : function.getArguments())
    arguments.push_back(memory.emplace_back(makeArgument(type)).tensor);
  const std::vector<Array> alone = function.run(arguments);

  std::atomic<int> failures{0};
  auto call = [&] {
    for (int count = std::atoi(argv[3]); count > 0; --count)
      try {
        failures += !areEqual(function.run(arguments), alone);
      } catch (const std::exception &error) {
        if (!failures++)
          std::fprintf(stderr, "error: %s\n", error.what());
      }
  };
  std::vector<std::thread> threads;
  for (int i = std::atoi(argv[2]); i > 0; --i)
    threads.emplace_back(call);
  for (std::thread &thread : threads)
    thread.join();
  std::printf("%d calls failed or gave other results\n", failures.load());
  return failures ? 1 : 0;
}
