//===- InitAll.h - Registration of everything moe ---------------*- C++ -*-===//

#ifndef MOE_INITALL_H
#define MOE_INITALL_H

namespace mlir {
class DialectRegistry;

namespace moe {

/// The dialect with all its interface models.
void registerDialect(DialectRegistry &registry);

/// The passes and pipelines, in the process-wide pass registry.
void registerPassesAndPipelines();

/// What every tool calls: the dialect, the upstream dialects and extensions
/// that its lowerings use, and all passes and pipelines, upstream's included.
/// Passes are registered once a process, however often this is called.
void registerEverything(DialectRegistry &registry);

} // namespace moe
} // namespace mlir

#endif // MOE_INITALL_H
