//===- KernelConfig.cpp - How a kernel runs an op -------------------------===//

#include "MoE/Dialect/MoE/IR/KernelConfig.h"

using namespace mlir;
using namespace mlir::moe;

LogicalResult
KernelConfigAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                         int64_t rows, int64_t threads, KernelSchedule,
                         KernelLoop, int64_t sharedBytes) {
  for (auto [name, value] :
       {std::pair("rows", rows), std::pair("threads", threads),
        std::pair("shared_bytes", sharedBytes)})
    if (value < 0)
      return emitError() << "expected " << name
                         << " of a kernel configuration to be positive, or "
                            "left out, found "
                         << value;
  return success();
}
