//===- Functions.h - The kinds of functions ---------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_FUNCTIONS_H
#define MOE_LIB_RUNTIME_LOADER_FUNCTIONS_H

#include "Files.h"
#include "ObjectCode.h"

#include <memory>

namespace moe::runtime {

/// The functions of an object for this CPU.
std::vector<std::unique_ptr<Function>>
makeHostFunctions(const Json &manifest, std::shared_ptr<ObjectCode> code);

/// A torch program: `function` with its weights bound, which point into
/// `weights`.
std::unique_ptr<Function>
makeProgram(const Json &description,
            std::vector<std::unique_ptr<Function>> functions,
            std::string weights);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_FUNCTIONS_H
