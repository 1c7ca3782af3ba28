//===- CPUModels.cpp - The numbers of kernels for a CPU -------------------===//
//
// LLVM knows a CPU's name and vectors; its caches are in the table below. What
// kernels make of both says MoE/Conversion/CPUTarget.h.
//
//===----------------------------------------------------------------------===//

#include "MoE/Target/CPUModels.h"

#include "MoE/Conversion/CPUTarget.h"
#include "MoE/Target/HostCode.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/JSON.h"

#include <unistd.h>

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Models
//===----------------------------------------------------------------------===//

/// The bytes of a core's second cache; 0 for a model that is not listed.
static int64_t lookUpSecondCache(StringRef name) {
  return 1024 *
         llvm::StringSwitch<int64_t>(name)
             // AMD.
             .Cases({"znver1", "znver2", "znver3"}, 512)
             .Cases({"znver4", "znver5"}, 1024)
             // Intel's servers.
             .Cases({"skylake-avx512", "cascadelake", "cooperlake"}, 1024)
             .Cases({"icelake-server", "icelake_server"}, 1280)
             .Cases({"sapphirerapids", "emeraldrapids", "graniterapids"}, 2048)
             // Intel's other cores.
             .Cases({"haswell", "broadwell", "skylake"}, 256)
             .Cases({"icelake-client", "icelake_client"}, 512)
             .Cases({"tigerlake", "alderlake", "raptorlake"}, 1280)
             .Default(0);
}

/// What the system says of this machine; 0 where it does not.
static int64_t readSecondCache() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  return std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 0);
#else
  return 0;
#endif
}

/// A table is worth more than a virtual machine's word. A level of x86-64, or
/// what nothing is known of, gets what a core has that is not a server's.
static int64_t getSecondCache(StringRef cpu, StringRef name) {
  constexpr int64_t kUnknown = 512 * 1024;
  if (int64_t bytes = lookUpSecondCache(name))
    return bytes;
  int64_t bytes = cpu == "native" ? readSecondCache() : 0;
  return bytes ? bytes : kUnknown;
}

namespace {
struct CPUModel {
  explicit CPUModel(StringRef cpu);
  std::string describe() const;

  std::string name;
  CPUTarget target;
  bool scalef;
};
} // namespace

CPUModel::CPUModel(StringRef cpu)
    : name(cpu == "native" ? hostCPUName() : cpu.str()) {
  std::string features = codeFeatures(cpu);
  SmallVector<StringRef> list;
  StringRef(features).split(list, ',');
  auto has = [&](StringRef feature) {
    return llvm::is_contained(list, feature);
  };
  // Every machine has some vectors of 128 bits.
  target.vectorWidth = has("+avx512f") ? 16 : has("+avx2") ? 8 : 4;
  target.vectorRegisters = has("+avx512f") || has("+neon") ? 32 : 16;
  target.bf16Dot = has("+avx512bf16");
  target.bf16Tiles = target.bf16Dot && has("+amx-bf16");
  target.int8Dot = target.vectorWidth == 16
                       ? has("+avx512vnni")
                       : target.vectorWidth == 8 && has("+avxvnni");
  target.bytePairs =
      target.vectorWidth == 16 ? has("+avx512bw") : target.vectorWidth == 8;
  target.byteTable = has("+avx512vbmi");
  target.streamPrefetcher = name == "znver4" || name == "znver5";
  target.l2Bytes = getSecondCache(cpu, name);
  scalef = has("+avx512f");
}

std::string CPUModel::describe() const {
  return llvm::formatv("vector-width={0} vector-registers={1} bf16-dot={2} "
                       "bf16-tiles={3} int8-dot={4} byte-pairs={5} "
                       "byte-table={6} stream-prefetcher={7} scalef={8} "
                       "l2-bytes={9}",
                       target.vectorWidth, target.vectorRegisters,
                       target.bf16Dot, target.bf16Tiles, target.int8Dot,
                       target.bytePairs, target.byteTable,
                       target.streamPrefetcher, scalef, target.l2Bytes);
}

std::string mlir::moe::describeCPU(StringRef cpu) {
  if (!isKnownCPU(cpu))
    return "";
  CPUModel model(cpu);
  return model.name + " " + model.describe();
}

//===----------------------------------------------------------------------===//
// Measured numbers
//===----------------------------------------------------------------------===//

template <typename... Values>
static llvm::Error makeError(const char *format, Values &&...values) {
  return llvm::createStringError(
      "tuning table: " +
      llvm::formatv(format, std::forward<Values>(values)...).str());
}

/// The numbers of a CPU in a table; none where it has no entry.
static llvm::Expected<llvm::json::Object> readNumbers(StringRef table,
                                                      StringRef cpu) {
  llvm::Expected<llvm::json::Value> parsed = llvm::json::parse(table);
  if (!parsed)
    return makeError("expected JSON, found: {0}",
                     llvm::toString(parsed.takeError()));
  llvm::json::Object *root = parsed->getAsObject();
  if (!root || root->getInteger("moe_mlir_tuning") != 1)
    return makeError("expected an object with \"moe_mlir_tuning\": 1, found "
                     "another file; moe tune writes one");
  llvm::json::Object *cpus = root->getObject("cpus");
  if (!cpus)
    return makeError("expected an object \"cpus\", found none");
  llvm::json::Value *entry = cpus->get(cpu);
  if (!entry)
    return llvm::json::Object();
  llvm::json::Object *numbers = entry->getAsObject();
  if (!numbers)
    return makeError("expected an object of numbers for '{0}', found {1}", cpu,
                     *entry);
  return std::move(*numbers);
}

/// Puts the measured numbers of a CPU in the place of those of the model.
static llvm::Error applyTuning(CPUModel &model, int64_t &tileSize,
                               StringRef table) {
  llvm::Expected<llvm::json::Object> numbers =
      readNumbers(table, model.name + " " + model.describe());
  if (!numbers)
    return numbers.takeError();
  for (auto [name, number] :
       {std::pair<StringRef, int64_t &>{"tile-size", tileSize},
        {"product-vectors", model.target.productVectors},
        {"product-rows", model.target.productRows},
        {"product-panels", model.target.productPanels},
        {"expert-rows", model.target.expertRows},
        {"mix-queries", model.target.mixQueries},
        {"fetch-bytes", model.target.fetchBytes}}) {
    llvm::json::Value *given = numbers->get(name);
    if (!given)
      continue;
    std::optional<int64_t> integer = given->getAsInteger();
    if (!integer || *integer < 1 || *integer > CPUTarget::kMostNumber)
      return makeError("expected '{0}' to be an integer of 1 to {1}, found {2}",
                       name, CPUTarget::kMostNumber, *given);
    number = *integer;
    numbers->erase(name);
  }
  if (!numbers->empty())
    return makeError("expected names of numbers of kernels, found '{0}'; "
                     "moe tune writes a new table",
                     numbers->begin()->first.str());
  if (llvm::Error error = model.target.verify())
    return makeError("{0}", llvm::toString(std::move(error)));
  return llvm::Error::success();
}

llvm::Expected<std::string> mlir::moe::getCPUPipeline(StringRef cpu,
                                                      StringRef tuning) {
  if (!isKnownCPU(cpu))
    return "moe-to-cpu";
  CPUModel model(cpu);
  int64_t tileSize = CPUTarget::kTileSize;
  if (!tuning.empty())
    if (llvm::Error error = applyTuning(model, tileSize, tuning))
      return error;
  const CPUTarget &target = model.target;
  return llvm::formatv("moe-to-cpu{{{0} tile-size={1} product-vectors={2} "
                       "product-rows={3} product-panels={4} expert-rows={5} "
                       "mix-queries={6} fetch-bytes={7}}",
                       model.describe(), tileSize, target.getProductVectors(),
                       target.getProductRows(), target.getProductPanels(),
                       target.getExpertRows(), target.getMixQueries(),
                       target.getFetchBytes())
      .str();
}
