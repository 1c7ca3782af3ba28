//===- HostCpu.cpp - What this CPU can execute ----------------------------===//

#include "HostCpu.h"

#include "MoE/Runtime/TileState.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moe::runtime {

#if defined(__x86_64__)
/// Whether the operating system keeps the state of those components.
static bool keepsState(uint32_t components) {
  uint32_t eax, ebx, ecx, edx;
  constexpr uint32_t osxsave = 1u << 27;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & osxsave))
    return false;
  __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & components) == components;
}

/// AMX, whose tiles are state that a process asks for.
static bool hasTiles(std::string_view feature) {
  constexpr uint32_t tiles = 0x60000;
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !keepsState(tiles))
    return false;
  int bit = feature == "amx-bf16" ? 22 : feature == "amx-tile" ? 24 : -1;
  return bit > 0 && ((edx >> bit) & 1) && requestTileState();
}

/// What is newer than the oldest compiler that builds this: bits of leaf 7,
/// subleaf 1, and the state that they need.
static bool hasNewFeature(std::string_view feature) {
  constexpr uint32_t vectors = 0x6, generalRegisters = 1u << 19;
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx))
    return false;
  if (feature.starts_with("amx-"))
    return hasTiles(feature);
  auto isSet = [](uint32_t word, int bit) { return (word >> bit) & 1; };
  if (feature == "avxifma")
    return isSet(eax, 23) && keepsState(vectors);
  if (feature == "avxvnniint8")
    return isSet(edx, 4) && keepsState(vectors);
  if (feature == "avxneconvert")
    return isSet(edx, 5) && keepsState(vectors);
  if (feature == "avxvnniint16")
    return isSet(edx, 10) && keepsState(vectors);
  if (feature == "avx10.2")
    return isSet(edx, 19) && keepsState(vectors) &&
           __get_cpuid_count(0x24, 0, &eax, &ebx, &ecx, &edx) &&
           (ebx & 0xff) >= 2;
  // The parts of APX, of which all CPUs have all.
  for (const char *part :
       {"ccmp", "cf", "egpr", "ndd", "nf", "ppx", "push2pop2", "zu"})
    if (feature == part)
      return isSet(edx, 21) && keepsState(generalRegisters);
  return false;
}
#endif

/// The extensions that LLVM's code generator uses for our kernels. The names
/// are LLVM's; GCC's differ from them in the punctuation. What is not known
/// here may end the process by an illegal instruction, so no CPU has it.
static bool hasFeature(std::string_view feature) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define CHECK(NAME, GCC_NAME)                                                  \
  if (feature == NAME)                                                         \
    return __builtin_cpu_supports(GCC_NAME);
  CHECK("sse3", "sse3")
  CHECK("ssse3", "ssse3")
  CHECK("sse4.1", "sse4.1")
  CHECK("sse4.2", "sse4.2")
  CHECK("sse4a", "sse4a")
  CHECK("popcnt", "popcnt")
  CHECK("avx", "avx")
  CHECK("avx2", "avx2")
  CHECK("fma", "fma")
  CHECK("fma4", "fma4")
  CHECK("xop", "xop")
  CHECK("f16c", "f16c")
  CHECK("bmi", "bmi")
  CHECK("bmi2", "bmi2")
  CHECK("tbm", "tbm")
  CHECK("lzcnt", "lzcnt")
  CHECK("movbe", "movbe")
  CHECK("gfni", "gfni")
  CHECK("avx512f", "avx512f")
  CHECK("avx512bw", "avx512bw")
  CHECK("avx512cd", "avx512cd")
  CHECK("avx512dq", "avx512dq")
  CHECK("avx512vl", "avx512vl")
  CHECK("avx512ifma", "avx512ifma")
  CHECK("avx512vbmi", "avx512vbmi")
  CHECK("avx512vbmi2", "avx512vbmi2")
  CHECK("avx512vnni", "avx512vnni")
  CHECK("avx512bitalg", "avx512bitalg")
  CHECK("avx512vpopcntdq", "avx512vpopcntdq")
  CHECK("avx512vp2intersect", "avx512vp2intersect")
  CHECK("avx512bf16", "avx512bf16")
  CHECK("avx512fp16", "avx512fp16")
  CHECK("avxvnni", "avxvnni")
#undef CHECK
  return hasNewFeature(feature);
#else
  return false;
#endif
}

std::string findMissingFeatures(std::string_view features) {
  std::string missing;
  while (!features.empty()) {
    size_t comma = features.find(',');
    std::string_view feature = features.substr(0, comma);
    features.remove_prefix(comma == features.npos ? features.size()
                                                  : comma + 1);
    if (feature.starts_with('+') && !hasFeature(feature.substr(1)))
      missing += (missing.empty() ? "" : ", ") + std::string(feature.substr(1));
  }
  return missing;
}

std::string recommendCpu() {
  static constexpr struct {
    const char *name, *features;
  } levels[] = {
      {"x86-64-v4", "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"},
      {"x86-64-v3", "+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe"},
      {"x86-64-v2", "+popcnt,+sse4.2"}};
  for (const auto &level : levels)
    if (findMissingFeatures(level.features).empty())
      return level.name;
  return "x86-64";
}

} // namespace moe::runtime
