//===- HostCpu.cpp - What this CPU can execute ----------------------------===//

#include "HostCpu.h"

namespace moe::runtime {

/// The extensions that LLVM's code generator uses for our kernels. The names
/// are LLVM's; GCC's differ from them in the punctuation.
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
  CHECK("popcnt", "popcnt")
  CHECK("avx", "avx")
  CHECK("avx2", "avx2")
  CHECK("fma", "fma")
  CHECK("f16c", "f16c")
  CHECK("bmi", "bmi")
  CHECK("bmi2", "bmi2")
  CHECK("lzcnt", "lzcnt")
  CHECK("movbe", "movbe")
  CHECK("gfni", "gfni")
  CHECK("vaes", "vaes")
  CHECK("vpclmulqdq", "vpclmulqdq")
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
  CHECK("avx512bf16", "avx512bf16")
  CHECK("avxvnni", "avxvnni")
#undef CHECK
#endif
  // Not an extension that vector code uses.
  return true;
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

} // namespace moe::runtime
