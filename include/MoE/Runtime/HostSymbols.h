//===- HostSymbols.h - What compiled CPU code may call ----------*- C++ -*-===//

#ifndef MOE_RUNTIME_HOSTSYMBOLS_H
#define MOE_RUNTIME_HOSTSYMBOLS_H

#include "MoE/Runtime/Memory.h"
#include "MoE/Runtime/Parallel.h"

#include <string_view>

namespace moe::runtime {

/// The function of that name in HostSymbols.def, or null.
MOE_RUNTIME_EXPORT void *findHostSymbol(std::string_view name);

} // namespace moe::runtime

#endif // MOE_RUNTIME_HOSTSYMBOLS_H
