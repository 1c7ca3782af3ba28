//===- HostSymbols.cpp - What compiled CPU code may call ------------------===//

#include "MoE/Runtime/HostSymbols.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>

namespace moe::runtime {

void *findHostSymbol(std::string_view name) {
  // The type chooses among the overloads that C++ adds.
#define MOE_HOST_SYMBOL(NAME, ...)                                             \
  if (name == #NAME)                                                           \
    return reinterpret_cast<void *>(                                           \
        static_cast<std::add_pointer_t<__VA_ARGS__>>(&::NAME));
#include "MoE/Runtime/HostSymbols.def"
  return nullptr;
}

} // namespace moe::runtime
