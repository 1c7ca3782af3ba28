//===- Passes.td - Passes that leave the moe dialect -------*- tablegen -*-===//
//
// Keep alphabetical.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_CONVERSION_PASSES_TD
#define MOE_CONVERSION_PASSES_TD

include "mlir/Pass/PassBase.td"

#endif // MOE_CONVERSION_PASSES_TD
