//===- Ptx.cpp - The simulator: reading PTX, and running it ---------------===//

#include "Mutator.h"
#include "Target.h"

#include "MoE/Simulator/Simulator.h"

#include <cstring>
#include <functional>

using namespace moe;

namespace {

/// Loops of changed kernels seldom end.
constexpr uint64_t kMaxInstructions = 5'000;
constexpr uint64_t kMaxRegisterBytes = 1 << 20;
constexpr size_t kBufferBytes = 1 << 14;

/// Pointers to a few buffers, small numbers for the rest.
void bindArguments(sim::Launch &launch, const sim::KernelInfo &kernel,
                   std::vector<std::vector<uint8_t>> &buffers,
                   fuzz::Random &random) {
  launch.params.assign(kernel.paramBytes, 0);
  for (const sim::ParamInfo &param : kernel.params) {
    uint8_t *to = launch.params.data() + param.offset;
    if (param.bytes == 8 && random.below(8)) {
      const uint8_t *pointer = random.pick(buffers).data();
      std::memcpy(to, &pointer, sizeof pointer);
    } else if (param.bytes == 4 || param.bytes == 8) {
      uint32_t small = random.below(4) ? random.below(70) : random.next();
      std::memcpy(to, &small, sizeof small);
    } else {
      for (uint64_t i = 0; i < param.bytes; ++i)
        to[i] = static_cast<uint8_t>(random.next());
    }
  }
}

void run(sim::Module &module, const sim::KernelInfo &kernel,
         fuzz::Random &random) {
  std::vector<std::vector<uint8_t>> buffers(3);
  sim::Launch launch;
  for (std::vector<uint8_t> &buffer : buffers) {
    for (size_t i = 0; i < kBufferBytes; i += 8) {
      uint64_t word = random.next();
      buffer.insert(buffer.end(), reinterpret_cast<uint8_t *>(&word),
                    reinterpret_cast<uint8_t *>(&word + 1));
    }
    launch.buffers.push_back({buffer.data(), buffer.size(), "", false});
  }
  static const uint32_t blocks[] = {1, 32, 33, 64, 128};
  launch.grid[0] = 1 + static_cast<uint32_t>(random.below(3));
  launch.block[0] = blocks[random.below(5)];
  launch.dynamicSmem = random.below(2) * 4096;
  launch.seed = random.below(4);
  launch.policy = static_cast<uint32_t>(random.below(2));
  launch.numerics = static_cast<sim::Numerics>(random.below(3));
  launch.threads = 1;
  launch.maxInstructions = kMaxInstructions;
  bindArguments(launch, kernel, buffers, random);
  sim::Report report = module.launch(kernel.name, launch);
  if (report.json().empty())
    fuzz::fail("a report without text");
}

} // namespace

void fuzz::runPtx(const std::string &input) {
  for (const sim::KernelInfo &kernel : sim::Module::load(input)->kernels())
    if (kernel.name.empty())
      fail("a kernel without a name");
}

void fuzz::runKernels(const std::string &input) {
  std::unique_ptr<sim::Module> module = sim::Module::load(input);
  Random random(std::hash<std::string>()(input));
  int launched = 0;
  for (const sim::KernelInfo &kernel : module->kernels())
    if (launched < 2 && kernel.registerBytes < kMaxRegisterBytes &&
        kernel.localBytes < kMaxRegisterBytes / 1024) {
      ++launched;
      try {
        run(*module, kernel, random);
      } catch (const std::invalid_argument &) {
        // A launch that does not fit the kernel: another block, a cluster.
      }
    }
}
