//===- Sizes.h - The sizes of results ---------------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_SIZES_H
#define MOE_LIB_RUNTIME_LOADER_SIZES_H

#include "Json.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <optional>
#include <span>

namespace moe::runtime {

/// A size of the manifest for these arguments: an integer, `["arg", i, dim]`,
/// or `[operation, a, b]`. Nullopt for a size that depends on data.
std::optional<int64_t> evaluateSize(const Json &size,
                                    std::span<const Tensor> arguments);

/// What `size` reads, such as "size 0 of argument 2". The numbers from
/// `numArguments` on are those of results.
std::string describeSources(const Json &size, size_t numArguments);

/// Throws where `size` is none of these forms, or names an argument, a
/// dimension or a value that `arguments` have not.
void verifySize(const Json &size, std::span<const ValueType> arguments);

/// A size of program.json, such as `s0*8//2`, for the values of its names:
/// integers, names, + - * // % **, max and min, with Python's rounding. Throws
/// where a step leaves the range of 64 bits.
int64_t evaluateSizeText(std::string_view text,
                         const std::map<std::string, int64_t> &symbols);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_SIZES_H
