//===- moe-sim.cpp - Run a PTX kernel on the CPU, with checks -------------===//

#include "Arguments.h"

#include "MoE/Simulator/Simulator.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>

using namespace moe::sim;

namespace {

constexpr const char kHelp[] = R"(moe-sim KERNEL.ptx [options]
Runs a PTX kernel on the CPU and checks it.

  --list                  print the module's kernels and their parameters
  --kernel NAME           the kernel; not needed if there is only one
  --grid X[,Y[,Z]]        blocks (default 1)
  --block X[,Y[,Z]]       threads of a block (default 1)
  --cluster X[,Y[,Z]]     blocks of a cluster
  --dynamic-smem BYTES    dynamic shared memory of a block
  --arg ARGUMENT          one for each parameter, in order:
                            i32:5  f32:0.5               a scalar
                            buf:f32:1024:iota            a buffer of 1024; also
                                                         zeros, ones, random
                            buf:f32::@file.npy           a buffer from a file
  --print N               print buffer argument N (from 0) afterwards
  --output N=FILE.npy     write buffer argument N to a file afterwards
  --check LIST            race,bounds,uninit,align or none (default all)
  --allow LIST            what the race check lets pass: equal-stores,
                          equal-shared-stores, unfenced-init,
                          repeated-setmaxnreg
  --smem-alignment WHAT   hardware (default): dynamic shared memory starts at a
                          multiple of 1024; declared: as the kernel declares
  --no-smem-opt-in        the host has not allowed more than 48 KB of shared
                          memory
  --nonportable-cluster   the host has allowed clusters of more than 8 blocks
  --seed S                order of blocks, warps and copies (default 0)
  --policy 0|1            reconverge early (0) or late (1)
  --numerics MODE         exact, tensor_core or perturbed
  --threads N             host threads (default 0: chosen by the kernel)
  --counters text|json    print the counters; json prints the whole report

Exit status: 0 no findings, 1 bad input, 2 findings.
)";

struct Options {
  std::string path;
  std::string kernel;
  bool list = false;
  std::string counters;
  std::vector<std::string> arguments;
  std::vector<size_t> prints;
  std::vector<std::pair<size_t, std::string>> outputs;
  Launch launch;
};

[[noreturn]] void refuse(const std::string &what) {
  throw std::invalid_argument(what);
}

uint64_t parseNumber(const std::string &option, const std::string &text) {
  char *end;
  uint64_t value = std::strtoull(text.c_str(), &end, 0);
  if (text.empty() || *end)
    refuse("expected a number after " + option + ", found '" + text + "'");
  return value;
}

std::vector<std::string> splitCommas(const std::string &text) {
  std::vector<std::string> parts(1);
  for (char c : text)
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

std::array<uint32_t, 3> parseExtents(const std::string &option,
                                     const std::string &text) {
  std::array<uint32_t, 3> extents = {1, 1, 1};
  std::vector<std::string> parts = splitCommas(text);
  if (parts.size() > 3)
    refuse("expected one to three numbers after " + option + ", found '" +
           text + "'");
  for (size_t i = 0; i < parts.size(); ++i)
    extents[i] = static_cast<uint32_t>(parseNumber(option, parts[i]));
  return extents;
}

Checks parseChecks(const std::string &text) {
  Checks checks{false, false, false, false};
  for (const std::string &name : splitCommas(text)) {
    if (name == "race")
      checks.race = true;
    else if (name == "bounds")
      checks.bounds = true;
    else if (name == "uninit")
      checks.uninit = true;
    else if (name == "align")
      checks.align = true;
    else if (name != "none")
      refuse("expected --check race,bounds,uninit,align or none, found '" +
             name + "'");
  }
  return checks;
}

Allowances parseAllowances(const std::string &text) {
  Allowances allows;
  for (const std::string &name : splitCommas(text)) {
    if (name == "equal-stores")
      allows.equalStores = true;
    else if (name == "equal-shared-stores")
      allows.equalSharedStores = true;
    else if (name == "unfenced-init")
      allows.unfencedInit = true;
    else if (name == "repeated-setmaxnreg")
      allows.repeatedSetmaxnreg = true;
    else
      refuse("expected --allow equal-stores,equal-shared-stores,"
             "unfenced-init,repeated-setmaxnreg, found '" +
             name + "'");
  }
  return allows;
}

SharedAlignment parseSharedAlignment(const std::string &text) {
  if (text == "hardware")
    return SharedAlignment::Hardware;
  if (text == "declared")
    return SharedAlignment::Declared;
  refuse("expected --smem-alignment hardware or declared, found '" + text +
         "'");
}

Numerics parseNumerics(const std::string &text) {
  if (text == "exact")
    return Numerics::Exact;
  if (text == "tensor_core")
    return Numerics::TensorCore;
  if (text == "perturbed")
    return Numerics::Perturbed;
  refuse("expected --numerics exact, tensor_core or perturbed, found '" + text +
         "'");
}

void setOption(Options &options, const std::string &name,
               const std::string &value) {
  Launch &launch = options.launch;
  if (name == "--kernel") {
    options.kernel = value;
  } else if (name == "--grid") {
    launch.grid = parseExtents(name, value);
  } else if (name == "--block") {
    launch.block = parseExtents(name, value);
  } else if (name == "--cluster") {
    launch.cluster = parseExtents(name, value);
  } else if (name == "--dynamic-smem") {
    launch.dynamicSmem = parseNumber(name, value);
  } else if (name == "--arg") {
    options.arguments.push_back(value);
  } else if (name == "--print") {
    options.prints.push_back(parseNumber(name, value));
  } else if (name == "--output") {
    size_t equals = value.find('=');
    if (equals == std::string::npos)
      refuse("expected --output N=FILE.npy, found '" + value + "'");
    options.outputs.emplace_back(parseNumber(name, value.substr(0, equals)),
                                 value.substr(equals + 1));
  } else if (name == "--check") {
    launch.checks = parseChecks(value);
  } else if (name == "--allow") {
    launch.allows = parseAllowances(value);
  } else if (name == "--smem-alignment") {
    launch.sharedAlignment = parseSharedAlignment(value);
  } else if (name == "--seed") {
    launch.seed = parseNumber(name, value);
  } else if (name == "--policy") {
    launch.policy = static_cast<uint32_t>(parseNumber(name, value));
    if (launch.policy > 1)
      refuse("expected --policy 0 or 1, found '" + value + "'");
  } else if (name == "--numerics") {
    launch.numerics = parseNumerics(value);
  } else if (name == "--threads") {
    launch.threads = static_cast<uint32_t>(parseNumber(name, value));
  } else if (name == "--counters") {
    if (value != "text" && value != "json")
      refuse("expected --counters text or json, found '" + value + "'");
    options.counters = value;
  } else {
    refuse("unknown option " + name + "; moe-sim --help lists them");
  }
}

Options parseOptions(int argc, char **argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      if (!options.path.empty())
        refuse("expected one PTX file, found '" + options.path + "' and '" +
               name + "'");
      options.path = name;
      continue;
    }
    if (name == "--list") {
      options.list = true;
      continue;
    }
    if (name == "--no-smem-opt-in") {
      options.launch.optsIn = false;
      continue;
    }
    if (name == "--nonportable-cluster") {
      options.launch.nonportableCluster = true;
      continue;
    }
    size_t equals = name.find('=');
    if (equals != std::string::npos) {
      setOption(options, name.substr(0, equals), name.substr(equals + 1));
      continue;
    }
    if (i + 1 >= argc)
      refuse("expected a value after " + name);
    setOption(options, name, argv[++i]);
  }
  if (options.path.empty())
    refuse("expected a PTX file; moe-sim --help explains");
  return options;
}

std::string readFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    refuse(path + ": cannot be opened");
  return {std::istreambuf_iterator<char>(file),
          std::istreambuf_iterator<char>()};
}

std::string joinExtents(const std::array<uint32_t, 3> &extents) {
  return std::to_string(extents[0]) + "," + std::to_string(extents[1]) + "," +
         std::to_string(extents[2]);
}

void listKernels(const Module &module) {
  for (const KernelInfo &kernel : module.kernels()) {
    std::printf("%s: %llu instructions, %llu bytes of shared memory, %llu of "
                "local memory, %llu of registers a warp\n",
                kernel.name.c_str(),
                static_cast<unsigned long long>(kernel.instructions),
                static_cast<unsigned long long>(kernel.sharedBytes),
                static_cast<unsigned long long>(kernel.localBytes),
                static_cast<unsigned long long>(kernel.registerBytes));
    if (kernel.requiredBlock[0])
      std::printf("  requires --block %s\n",
                  joinExtents(kernel.requiredBlock).c_str());
    if (kernel.requiredCluster[0])
      std::printf("  requires --cluster %s\n",
                  joinExtents(kernel.requiredCluster).c_str());
    if (kernel.usesDynamicShared)
      std::printf("  uses dynamic shared memory (--dynamic-smem)\n");
    for (const ParamInfo &param : kernel.params)
      std::printf("  .%s %s: %llu bytes at %llu\n", param.type.c_str(),
                  param.name.c_str(),
                  static_cast<unsigned long long>(param.bytes),
                  static_cast<unsigned long long>(param.offset));
  }
}

const KernelInfo &chooseKernel(const std::vector<KernelInfo> &kernels,
                               const std::string &name) {
  std::string names;
  for (const KernelInfo &kernel : kernels) {
    if (kernel.name == name || (name.empty() && kernels.size() == 1))
      return kernel;
    names += (names.empty() ? "" : ", ") + kernel.name;
  }
  refuse(name.empty()
             ? "expected --kernel, one of " + names
             : "expected a kernel out of " + names + ", found '" + name + "'");
}

void bindArguments(Launch &launch, const KernelInfo &kernel,
                   std::vector<Argument> &arguments) {
  if (arguments.size() != kernel.params.size())
    refuse("expected " + std::to_string(kernel.params.size()) +
           " --arg for kernel " + kernel.name + ", found " +
           std::to_string(arguments.size()));
  launch.params.resize(kernel.paramBytes);
  for (size_t i = 0; i < arguments.size(); ++i) {
    Argument &argument = arguments[i];
    const ParamInfo &param = kernel.params[i];
    uint64_t bytes = argument.isBuffer ? sizeof(void *) : argument.bytes;
    if (bytes != param.bytes)
      refuse("expected argument " + std::to_string(i) + " to have " +
             std::to_string(param.bytes) + " bytes (." + param.type +
             "), found " + std::to_string(bytes));
    uint8_t *to = launch.params.data() + param.offset;
    if (!argument.isBuffer) {
      std::memcpy(to, argument.data, bytes);
      continue;
    }
    std::memcpy(to, &argument.data, sizeof argument.data);
    launch.buffers.push_back({argument.data, argument.bytes,
                              "argument " + std::to_string(i), false});
  }
}

Argument &bufferArgument(std::vector<Argument> &arguments, size_t index) {
  if (index >= arguments.size() || !arguments[index].isBuffer)
    refuse("expected the number of a buffer argument, found " +
           std::to_string(index));
  return arguments[index];
}

void printReport(const Report &report, const std::string &counters) {
  if (counters == "json") {
    std::printf("%s\n", report.json().c_str());
    return;
  }
  if (counters == "text") {
    std::fputs(report.text().c_str(), stdout);
    return;
  }
  for (const Finding &finding : report.findings)
    std::printf("%s: %s%s\n", name(finding.kind), finding.message.c_str(),
                finding.count > 1
                    ? (" (" + std::to_string(finding.count) + " times)").c_str()
                    : "");
}

int run(Options options) {
  std::unique_ptr<Module> module = Module::load(readFile(options.path));
  if (options.list) {
    listKernels(*module);
    return 0;
  }
  std::vector<KernelInfo> kernels = module->kernels();
  const KernelInfo &kernel = chooseKernel(kernels, options.kernel);
  std::vector<Argument> arguments;
  for (const std::string &text : options.arguments)
    arguments.push_back(
        Argument::parse(text, options.launch.seed + arguments.size()));
  for (size_t index : options.prints)
    bufferArgument(arguments, index);
  for (const auto &[index, path] : options.outputs)
    bufferArgument(arguments, index);
  bindArguments(options.launch, kernel, arguments);
  Report report = module->launch(kernel.name, options.launch);
  printReport(report, options.counters);
  for (size_t index : options.prints)
    std::printf("argument %zu: %s\n", index,
                bufferArgument(arguments, index).print().c_str());
  for (const auto &[index, path] : options.outputs)
    writeNpy(path, bufferArgument(arguments, index).toNpy());
  return report.ok() ? 0 : 2;
}

} // namespace

int main(int argc, char **argv) {
  for (int i = 1; i < argc; ++i)
    if (!std::strcmp(argv[i], "--help") || !std::strcmp(argv[i], "-h")) {
      std::fputs(kHelp, stdout);
      return 0;
    }
  try {
    return run(parseOptions(argc, argv));
  } catch (const std::exception &e) {
    std::fprintf(stderr, "moe-sim: %s\n", e.what());
    return 1;
  }
}
