//===- DeviceFunction.cpp - Functions of kernels --------------------------===//
//
// A kernel takes, in this order: every argument and result of its function
// (pointers of tensors, values of scalars), a pointer to the workspace if there
// is one, every dynamic size of the tensors, and the size of the workspace.
//
//===----------------------------------------------------------------------===//

#include "Functions.h"
#include "Sizes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>

namespace moe::runtime {
namespace {

/// Kernels loaded on a device, unloaded with this.
class KernelModule {
public:
  KernelModule(GpuDevice &device, const std::string &ptx)
      : device(device), module(device.loadModule(ptx.c_str(), /*isText=*/true,
                                                 GpuDevice::kMaxOptLevel)) {}
  KernelModule(const KernelModule &) = delete;
  KernelModule &operator=(const KernelModule &) = delete;
  ~KernelModule() {
    try {
      device.unloadModule(module);
    } catch (const std::exception &) {
      // The device is lost. What lost it has been thrown where it happened.
    }
  }

  void *find(const std::string &name) const {
    return device.getFunction(module, name.c_str());
  }

  GpuDevice &device;

private:
  void *module;
};

// What every chip takes at most; one beyond is a damaged manifest. The device
// judges grids: they follow from the sizes of a call.
constexpr size_t kGridDims = 3;
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxSharedBytes = 228 * 1024;

uint32_t readNumber(const Json &kernel, const char *key, int64_t smallest,
                    int64_t largest) {
  int64_t value = kernel.at(key).integer();
  if (value < smallest || value > largest)
    throw std::runtime_error(std::string("manifest.json: expected ") + key +
                             " of a kernel in [" + std::to_string(smallest) +
                             ", " + std::to_string(largest) + "], found " +
                             std::to_string(value));
  return static_cast<uint32_t>(value);
}

struct Kernel {
  std::string name;
  void *function;
  Json::Array grid;
  uint32_t blockSize, dynamicSmem;
  /// Which of the parameters of the function it takes; all of them if nothing
  /// is said.
  std::optional<std::vector<uint32_t>> parameters;
};

class KernelFunction final : public ManifestFunction<DeviceFunction> {
public:
  KernelFunction(const Json &json, std::shared_ptr<KernelModule> loaded)
      : ManifestFunction(json), module(std::move(loaded)) {
    std::vector<ValueType> values = this->getSignature().join();
    for (const Json &kernel : json.at("kernels").array()) {
      const Json::Array &grid = kernel.at("grid").array();
      if (grid.empty() || grid.size() > kGridDims)
        throw std::runtime_error("manifest.json: expected a grid of one to "
                                 "three sizes, found " +
                                 std::to_string(grid.size()));
      for (const Json &size : grid)
        verifySize(size, values);
      const std::string &symbol = kernel.at("name").string();
      kernels.push_back({symbol, module->find(symbol), grid,
                         readNumber(kernel, "block_size", 1, kMaxThreads),
                         readNumber(kernel, "dynamic_smem", 0, kMaxSharedBytes),
                         std::nullopt});
    }
    if (const Json *size = json.find("workspace"))
      verifySize(workspaceSize.emplace(*size), values);
    readParameters(json.at("kernels").array(), values);
  }

  GpuDevice &getDevice() const override { return module->device; }

  int64_t getWorkspaceSize(std::span<const Tensor> inputs,
                           std::span<const Tensor> outputs) const override {
    this->verifyCall(inputs, outputs);
    return workspaceSize ? evaluate(*workspaceSize, join(inputs, outputs)) : 0;
  }

  void launch(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
              void *workspace, void *stream) const override {
    this->verifyCall(inputs, outputs);
    std::vector<Tensor> buffers = join(inputs, outputs);
    Parameters parameters = pack(buffers, workspace);
    std::vector<void *> all, pointers;
    for (uint64_t &value : parameters)
      all.push_back(&value);
    for (const Kernel &kernel : kernels) {
      pointers = all;
      if (kernel.parameters) {
        pointers.clear();
        for (uint32_t number : *kernel.parameters)
          pointers.push_back(all[number]);
      }
      GpuLaunch launch = {{1, 1, 1},
                          {kernel.blockSize, 1, 1},
                          {0, 0, 0},
                          kernel.dynamicSmem,
                          stream,
                          pointers.data(),
                          static_cast<int32_t>(pointers.size())};
      for (size_t dim = 0; dim < kernel.grid.size(); ++dim)
        launch.grid[dim] = countBlocks(kernel, dim, buffers);
      if (launch.grid[0] && launch.grid[1] && launch.grid[2])
        module->device.launch(kernel.function, launch);
    }
  }

private:
  /// Which parameters each kernel takes, where the manifest says so.
  void readParameters(const Json::Array &described,
                      std::span<const ValueType> values) {
    size_t count = values.size() + (workspaceSize ? 2 : 0);
    for (const ValueType &value : values)
      if (value.isTensor)
        count += std::ranges::count_if(value.shape,
                                       [](int64_t size) { return size < 0; });
    for (size_t i = 0; i < described.size(); ++i) {
      const Json *numbers = described[i].find("parameters");
      if (!numbers)
        continue;
      std::vector<uint32_t> &taken = kernels[i].parameters.emplace();
      for (const Json &number : numbers->array()) {
        int64_t value = number.integer();
        if (value < 0 || static_cast<size_t>(value) >= count)
          throw std::runtime_error(
              "manifest.json: expected parameters of kernel '" +
              kernels[i].name + "' below " + std::to_string(count) +
              ", found " + std::to_string(value));
        taken.push_back(static_cast<uint32_t>(value));
      }
    }
  }

  /// Each widened to eight bytes; a kernel reads the first ones of each.
  using Parameters = std::vector<uint64_t>;

  static std::vector<Tensor> join(std::span<const Tensor> inputs,
                                  std::span<const Tensor> outputs) {
    std::vector<Tensor> buffers(inputs.begin(), inputs.end());
    buffers.insert(buffers.end(), outputs.begin(), outputs.end());
    return buffers;
  }

  int64_t evaluate(const Json &size, std::span<const Tensor> buffers) const {
    std::optional<int64_t> value = evaluateSize(size, buffers);
    if (!value || *value < 0)
      throw std::runtime_error(
          "manifest.json: expected sizes of grids and of the workspace of '" +
          name + "' that the buffers determine, of at least 0, found " +
          (value ? std::to_string(*value) : "one that they do not"));
    return *value;
  }

  uint64_t countBlocks(const Kernel &kernel, size_t dim,
                       std::span<const Tensor> buffers) const {
    auto count = static_cast<uint64_t>(evaluate(kernel.grid[dim], buffers));
    if (count > GpuDevice::kMaxBlocks[dim]) {
      std::string sources = describeSources(kernel.grid[dim], arguments.size());
      throw std::invalid_argument(
          "'" + name + "': expected at most " +
          std::to_string(GpuDevice::kMaxBlocks[dim]) + " blocks along " +
          "xyz"[dim] + " of kernel '" + kernel.name + "', found " +
          std::to_string(count) + ", by " +
          (sources.empty() ? "static sizes" : sources) + ": split the batch");
    }
    return count;
  }

  /// Kernels read 16 bytes at once from where a buffer begins, and count rows
  /// and columns in 32 bits.
  void checkBuffer(size_t i, const Tensor &buffer) const {
    constexpr uint64_t alignment = 16;
    constexpr int64_t mostRows = std::numeric_limits<int32_t>::max();
    bool isArgument = i < arguments.size();
    std::string what = "'" + name + "': expected " +
                       (isArgument ? "argument " : "result ") +
                       std::to_string(isArgument ? i : i - arguments.size());
    if (uint64_t past = reinterpret_cast<uint64_t>(buffer.data) % alignment)
      throw std::invalid_argument(what +
                                  " at a multiple of 16 bytes, found an "
                                  "address that is " +
                                  std::to_string(past) +
                                  " past one: copy it to memory of its own");
    for (int64_t size : buffer.shape)
      if (size > mostRows)
        throw std::invalid_argument(what + " to have sizes of at most " +
                                    std::to_string(mostRows) + ", found " +
                                    std::to_string(size));
  }

  Parameters pack(std::span<const Tensor> buffers, void *workspace) const {
    Parameters parameters, sizes;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const ValueType &type =
          i < arguments.size() ? arguments[i] : results[i - arguments.size()];
      uint64_t &value = parameters.emplace_back();
      if (!type.isTensor) {
        std::memcpy(&value, buffers[i].data, getElementSize(type.dtype));
        continue;
      }
      value = reinterpret_cast<uint64_t>(buffers[i].data);
      checkBuffer(i, buffers[i]);
      for (size_t dim = 0; dim < type.shape.size(); ++dim)
        if (type.shape[dim] < 0)
          sizes.push_back(static_cast<uint64_t>(buffers[i].shape[dim]));
    }
    if (workspaceSize) {
      parameters.push_back(reinterpret_cast<uint64_t>(workspace));
      sizes.push_back(static_cast<uint64_t>(evaluate(*workspaceSize, buffers)));
    }
    parameters.insert(parameters.end(), sizes.begin(), sizes.end());
    return parameters;
  }

  void execute(std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) const override {
    GpuDevice &device = module->device;
    StagedTensors in(device, inputs, arguments, "argument", name,
                     /*copied=*/true);
    StagedTensors out(device, outputs, results, "result", name,
                      /*copied=*/false);
    DeviceMemory workspace(
        device, static_cast<uint64_t>(getWorkspaceSize(inputs, outputs)),
        "workspace of " + name);
    launch(in.get(), out.get(), workspace.get(), /*stream=*/nullptr);
    device.synchronizeStream(nullptr);
    out.copyTo(outputs);
    in.copyUpdatesTo(inputs, arguments);
  }

  std::shared_ptr<KernelModule> module;
  std::vector<Kernel> kernels;
  std::optional<Json> workspaceSize;
};

} // namespace

std::vector<std::unique_ptr<Function>>
makeDeviceFunctions(const Json &manifest, const std::string &ptx,
                    GpuDevice &device) {
  return makeFunctions<KernelFunction>(
      manifest, std::make_shared<KernelModule>(device, ptx));
}

} // namespace moe::runtime
