//===- HostCpu.h - What this CPU can execute --------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_HOSTCPU_H
#define MOE_LIB_RUNTIME_LOADER_HOSTCPU_H

#include <string>
#include <string_view>

namespace moe::runtime {

/// Those of LLVM's `features` ("+avx2,-amx-tile,..") that code needs and this
/// CPU lacks, joined by commas.
std::string findMissingFeatures(std::string_view features);

/// The largest level of x86-64 that this CPU has, as LLVM names it.
std::string recommendCpu();

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_HOSTCPU_H
