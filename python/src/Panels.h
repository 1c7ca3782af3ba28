//===- Panels.h - Weights in the order of the kernels -----------*- C++ -*-===//

#ifndef MOE_PYTHON_PANELS_H
#define MOE_PYTHON_PANELS_H

#include <nanobind/nanobind.h>

namespace moe {

/// Adds `pack_panels` to the module.
void bindPanels(nanobind::module_ &m);

} // namespace moe

#endif // MOE_PYTHON_PANELS_H
