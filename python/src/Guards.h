//===- Guards.h - The guards of compiled models in Python -------*- C++ -*-===//

#ifndef MOE_PYTHON_GUARDS_H
#define MOE_PYTHON_GUARDS_H

#include <nanobind/nanobind.h>

namespace moe {

/// Adds ModelGuard, OperandConditions and GuardedCalls to the module.
void bindGuards(nanobind::module_ &m);

} // namespace moe

#endif // MOE_PYTHON_GUARDS_H
