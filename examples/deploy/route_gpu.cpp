// Runs a compiled router on a GPU from C++, or without one in the simulator.
//
//   moe-compile router.mlir -o router.gpu --target=sm_90a
//   ./route_gpu router.gpu --device=sim        (or --device=cuda)
//
// The same code serves both: libmoe_runtime opens the device's library by its
// name. The weights go to the device once; each batch is copied there, launched
// on a stream, and its results are copied back. `Function::run` does all of
// that in one call, where copies each time do not matter.

#include "MoE/Runtime/DeviceMemory.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using namespace moe::runtime;

namespace {

constexpr int64_t kBatches = 2, kTokens = 3, kWidth = 64, kExperts = 16;

/// A stream that is destroyed with this. The device outlives it.
class Stream {
public:
  explicit Stream(GpuDevice &device)
      : device(device), handle(device.createStream()) {}
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;
  ~Stream() { device.destroyStream(handle); }
  void *get() const { return handle; }

private:
  GpuDevice &device;
  void *handle;
};

/// sin(start), sin(start + 1), ..
Array makeWave(const std::vector<int64_t> &shape, int64_t start) {
  Array array("f32", shape);
  auto values = static_cast<float *>(array.tensor.data);
  for (int64_t i = 0; i < getNumElements(shape); ++i)
    values[i] = static_cast<float>(std::sin(static_cast<double>(start + i)));
  return array;
}

/// A function of an artifact for GPUs launches; others only run.
const DeviceFunction &getKernels(const Artifact &artifact) {
  auto kernels = dynamic_cast<const DeviceFunction *>(&artifact.getFunction());
  if (!kernels)
    throw std::runtime_error("expected an artifact for a GPU, found one for " +
                             artifact.getTarget() +
                             ": compile it with --target=sm_90a");
  return *kernels;
}

void print(int64_t batch, const Array &gates, const Array &indices) {
  auto gate = static_cast<const float *>(gates.tensor.data);
  auto index = static_cast<const int32_t *>(indices.tensor.data);
  for (int64_t n = 0; n < kTokens; ++n)
    std::printf("batch %d, token %d: expert %d with gate %.6f, expert %d with "
                "%.6f\n",
                int(batch), int(n), index[2 * n], gate[2 * n], index[2 * n + 1],
                gate[2 * n + 1]);
}

void route(const std::string &folder, const std::string &kind) {
  Artifact artifact(folder, kind);
  const DeviceFunction &kernels = getKernels(artifact);
  GpuDevice &device = kernels.getDevice();
  Stream stream(device);

  // What stays on the device. StagedTensors owns the memory of what it holds.
  Array weight = makeWave({kExperts, kWidth}, /*start=*/1000);
  StagedTensors weights(device);
  weights.add(weight.tensor, "weight", /*copied=*/true);
  std::unique_ptr<DeviceMemory> workspace;

  for (int64_t batch = 0; batch < kBatches; ++batch) {
    Array tokens = makeWave({kTokens, kWidth}, batch * kTokens * kWidth);
    Array gates("f32", {kTokens, 2}), indices("i32", {kTokens, 2});
    const Tensor results[] = {gates.tensor, indices.tensor};

    StagedTensors in(device), out(device);
    in.add(tokens.tensor, "tokens", /*copied=*/true);
    in.add(weights.get()[0], "weight", /*copied=*/false); // is there already
    for (const Tensor &result : results)
      out.add(result, "result", /*copied=*/false);
    if (!workspace) // Batches of one size need no other.
      workspace = std::make_unique<DeviceMemory>(
          device, kernels.getWorkspaceSize(in.get(), out.get()), "workspace");

    kernels.launch(in.get(), out.get(), workspace->get(), stream.get());
    device.synchronizeStream(stream.get());
    out.copyTo(results);
    print(batch, gates, indices);
  }
  // The simulator checks kernels for races and accesses out of bounds.
  if (device.numFindings())
    throw std::runtime_error(device.report());
}

} // namespace

int main(int argc, char **argv) {
  const char *option = "--device=";
  if (argc != 3 || std::strncmp(argv[2], option, std::strlen(option)) != 0) {
    std::fprintf(stderr, "expected: route_gpu ARTIFACT --device=sim|cuda\n");
    return 1;
  }
  try {
    route(argv[1], argv[2] + std::strlen(option));
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "route_gpu: error: %s\n", error.what());
    return 1;
  }
}
