//===- moe-run.cpp - Run an artifact on .npy files ------------------------===//

#include "MoE/Runtime/Artifact.h"
#include "MoE/Runtime/DeviceMemory.h"
#include "MoE/Runtime/Parallel.h"
#include "MoE/Support/Npy.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>

using namespace moe;
using moe::runtime::Array;
using moe::runtime::Artifact;
using moe::runtime::DeviceFunction;
using moe::runtime::Function;
using moe::runtime::GpuDevice;
using moe::runtime::StagedTensors;
using moe::runtime::Tensor;
using moe::runtime::ValueType;

namespace {

constexpr const char kHelp[] = R"(moe-run ARTIFACT [options]
Runs a function of an artifact that moe-compile wrote. Needs no compiler.

  --list                what the artifact holds: functions, arguments, results
  --function NAME       which function; not needed if there is only one
  --input FILE.npy      one for each argument, in order
  --output FILE.npy     where to write a result, in order; the others are dropped
  --device DEVICE       cpu, cuda, or sim: the simulator runs and checks kernels
                        (default: what the artifact is for)
  --verify              check the values of weights of any size against their
                        checksum, which reads them all (default: up to 64 MiB)
  --threads N           threads to use at most (default: all cores)
  --repeat N            run N times and print the shortest and the median time;
                        for a GPU without the copies to it and back; state goes
                        on from run to run

bf16 arrays are written as numpy's 2-byte void type (ml_dtypes writes the same).

Exit status: 0 done, 1 bad input, 2 the simulator found faults in the kernels.
)";

struct Options {
  std::string artifact, function, device;
  std::vector<std::string> inputs, outputs;
  int threads = 0;
  int repeat = 0;
  bool list = false;
  runtime::Verification verification = runtime::Verification::Quick;
};

[[noreturn]] void refuse(const std::string &what) {
  throw std::runtime_error(what);
}

int parseCount(const std::string &option, const std::string &text) {
  char *end;
  long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || value < 1 || value > 1'000'000)
    refuse("expected a number in [1, 1000000] after " + option + ", found '" +
           text + "'");
  return static_cast<int>(value);
}

/// Nullopt where only help was asked for.
std::optional<Options> parseOptions(int argc, char **argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i], value;
    if (argument == "--help" || argument == "-h")
      return std::nullopt;
    if (argument == "--list") {
      options.list = true;
      continue;
    }
    if (argument == "--verify") {
      options.verification = runtime::Verification::All;
      continue;
    }
    if (argument.rfind("--", 0) != 0) {
      if (!options.artifact.empty())
        refuse("expected one artifact, found '" + options.artifact + "' and '" +
               argument + "'");
      options.artifact = argument;
      continue;
    }
    if (size_t equals = argument.find('='); equals != argument.npos) {
      value = argument.substr(equals + 1);
      argument.resize(equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    } else {
      refuse("expected a value after " + argument + "; see moe-run --help");
    }
    if (argument == "--function")
      options.function = value;
    else if (argument == "--input")
      options.inputs.push_back(value);
    else if (argument == "--output")
      options.outputs.push_back(value);
    else if (argument == "--device")
      options.device = value;
    else if (argument == "--threads")
      options.threads = parseCount(argument, value);
    else if (argument == "--repeat")
      options.repeat = parseCount(argument, value);
    else
      refuse("unknown option " + argument + "; see moe-run --help");
  }
  if (options.artifact.empty())
    refuse("expected the folder of an artifact, found none; see moe-run "
           "--help");
  return options;
}

//===----------------------------------------------------------------------===//
// Files
//===----------------------------------------------------------------------===//

struct ElementName {
  const char *dtype, *npy;
};
/// The first entry of a dtype is how it is written.
constexpr ElementName kElementNames[] = {
    {"f32", "<f4"},  {"f64", "<f8"}, {"f16", "<f2"},   {"bf16", "|V2"},
    {"bf16", "<V2"}, {"i1", "|b1"},  {"i8", "|i1"},    {"i16", "<i2"},
    {"i32", "<i4"},  {"i64", "<i8"}, {"index", "<i8"},
};

/// The array as an argument of type `type`; i64 and index look the same.
Tensor toTensor(const std::string &path, NpyArray &array,
                const ValueType *type) {
  Tensor tensor;
  for (const ElementName &name : kElementNames)
    if (array.type == name.npy &&
        (tensor.dtype.empty() || (type && type->dtype == name.dtype)))
      tensor.dtype = name.dtype;
  if (tensor.dtype.empty())
    refuse(path +
           ": expected booleans, integers or floats in this machine's "
           "byte order, found elements of type '" +
           array.type + "'");
  tensor.shape.assign(array.shape.begin(), array.shape.end());
  uint64_t bytes = runtime::getByteSize(tensor);
  if (array.data.size() != bytes)
    refuse(path + ": expected " + std::to_string(bytes) +
           " bytes after the header, found " +
           std::to_string(array.data.size()));
  tensor.data = array.data.data();
  return tensor;
}

void write(const std::string &path, const Tensor &tensor) {
  NpyArray array;
  for (const ElementName &name : kElementNames)
    if (array.type.empty() && tensor.dtype == name.dtype)
      array.type = name.npy;
  array.shape.assign(tensor.shape.begin(), tensor.shape.end());
  auto data = static_cast<const uint8_t *>(tensor.data);
  array.data.assign(data, data + runtime::getByteSize(tensor));
  writeNpy(path, array);
}

//===----------------------------------------------------------------------===//
// Actions
//===----------------------------------------------------------------------===//

void list(const Artifact &artifact) {
  std::printf("target: %s\n", artifact.getTarget().c_str());
  for (const auto &function : artifact.getFunctions()) {
    std::printf("function: %s\n", function->getName().c_str());
    const std::vector<std::string> &names = function->getArgumentNames();
    for (size_t i = 0; i < function->getArguments().size(); ++i)
      std::printf("  argument %zu%s%s: %s%s\n", i, i < names.size() ? " " : "",
                  i < names.size() ? names[i].c_str() : "",
                  function->getArguments()[i].toString().c_str(),
                  function->getArguments()[i].isUpdated ? ", updated" : "");
    for (size_t i = 0; i < function->getResults().size(); ++i)
      std::printf("  result %zu: %s\n", i,
                  function->getResults()[i].toString().c_str());
    if (function->hasState())
      std::printf("  keeps state from call to call\n");
  }
}

template <typename Call>
void printTimes(const Options &options, Call call) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < options.repeat; ++i) {
    Clock::time_point start = Clock::now();
    call();
    times.push_back(
        std::chrono::duration<double, std::micro>(Clock::now() - start)
            .count());
  }
  std::sort(times.begin(), times.end());
  std::printf("%d runs, shortest %.1f us, median %.1f us\n", options.repeat,
              times.front(), times[times.size() / 2]);
}

void printTimes(const Options &options, const Function &function,
                std::span<const Tensor> arguments,
                std::span<const Tensor> results, GpuDevice *device) {
  std::printf("%s: ", function.getName().c_str());
  if (!device)
    return printTimes(options, [&] { function.run(arguments, results); });
  StagedTensors in(*device, arguments, function.getArguments(), "argument",
                   function.getName(), /*copied=*/true);
  StagedTensors out(*device, results, function.getResults(), "result",
                    function.getName(), /*copied=*/false);
  auto *kernels = dynamic_cast<const DeviceFunction *>(&function);
  // A torch program with its weights has no form without copies.
  if (!kernels)
    return printTimes(options, [&] { function.run(in.get(), out.get()); });
  runtime::DeviceMemory workspace(
      *device,
      static_cast<uint64_t>(kernels->getWorkspaceSize(in.get(), out.get())),
      "workspace of " + function.getName());
  printTimes(options, [&] {
    kernels->launch(in.get(), out.get(), workspace.get(), nullptr);
    device->synchronizeStream(nullptr);
  });
}

void run(const Options &options, const Artifact &artifact) {
  const Function &function = artifact.getFunction(options.function);
  if (options.outputs.size() > function.getResults().size())
    refuse("expected at most " + std::to_string(function.getResults().size()) +
           " --output for '" + function.getName() + "', found " +
           std::to_string(options.outputs.size()));
  std::vector<NpyArray> arrays;
  arrays.reserve(options.inputs.size());
  std::vector<Tensor> arguments;
  for (size_t i = 0; i < options.inputs.size(); ++i) {
    arrays.push_back(readNpy(options.inputs[i]));
    arguments.push_back(toTensor(options.inputs[i], arrays.back(),
                                 i < function.getArguments().size()
                                     ? &function.getArguments()[i]
                                     : nullptr));
  }
  std::vector<Array> results = function.run(arguments);
  std::vector<Tensor> tensors;
  tensors.reserve(results.size());
  for (const Array &result : results)
    tensors.push_back(result.tensor);
  for (size_t i = 0; i < options.outputs.size(); ++i)
    write(options.outputs[i], tensors[i]);
  if (options.repeat)
    printTimes(options, function, arguments, tensors, artifact.getDevice());
}

/// Zero, or 2 with the number of faults that the simulator has printed.
int judge(const Artifact &artifact) {
  uint64_t findings =
      artifact.getDevice() ? artifact.getDevice()->numFindings() : 0;
  if (!findings)
    return 0;
  std::fprintf(stderr,
               "moe-run: error: expected kernels without faults, found %llu; "
               "the lines above say where\n",
               static_cast<unsigned long long>(findings));
  return 2;
}

} // namespace

int main(int argc, char **argv) {
  try {
    std::optional<Options> options = parseOptions(argc, argv);
    if (!options) {
      std::fputs(kHelp, stdout);
      return 0;
    }
    if (options->threads)
      moe_set_num_threads(options->threads);
    Artifact artifact(options->artifact,
                      options->list ? "none" : options->device,
                      options->verification);
    if (options->list)
      list(artifact);
    else
      run(*options, artifact);
    return judge(artifact);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "moe-run: error: %s\n", error.what());
    return 1;
  }
}
