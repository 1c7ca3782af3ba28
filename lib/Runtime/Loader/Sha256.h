//===- Sha256.h - FIPS 180-4 ------------------------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_SHA256_H
#define MOE_LIB_RUNTIME_LOADER_SHA256_H

#include <string>
#include <string_view>

namespace moe::runtime {

/// The digest in lower-case hexadecimal digits.
std::string sha256(std::string_view bytes);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_SHA256_H
