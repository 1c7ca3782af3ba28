//===- StepLoop.cpp - Loops of multiply-adds ------------------------------===//

#include "StepLoop.h"

using namespace mlir;
using namespace mlir::moe;

Values mlir::moe::loopOverSteps(Emitter &e, const StepBlocks &blocks,
                                ValueRange carried,
                                function_ref<void(Value)> fetch,
                                function_ref<Values(Value, ValueRange)> body) {
  if (!fetch)
    return e.loop(blocks.first, blocks.end, 1, carried, body);
  return e.loop(blocks.first, blocks.end, blocks.size, carried,
                [&](Value first, ValueRange carried) -> Values {
                  fetch(first);
                  Value end = e.add(first, e.index(blocks.size));
                  if (!blocks.areWhole)
                    end = e.minSigned(end, blocks.end);
                  return e.loop(first, end, 1, carried, body);
                });
}

void mlir::moe::prefetchLine(Emitter &e, Value memref, ValueRange indices,
                             unsigned locality) {
  memref::PrefetchOp::create(e, memref, indices, /*isWrite=*/false, locality,
                             /*isDataCache=*/true);
}
