//===- Chains.cpp - The order in which products are added -----------------===//

#include "Chains.h"

using namespace mlir;
using namespace mlir::moe;

void Chains::forEach(Emitter &e, Value begin,
                     function_ref<void(Value)> body) const {
  e.loop(begin, numK, length, body);
}

Value Chains::getCount(Emitter &e, Value first) const {
  if (std::optional<int64_t> constant = getConstantIntValue(numK))
    if (*constant <= length || *constant % length == 0)
      return e.index(std::min(*constant, length));
  return e.minSigned(e.sub(numK, first), e.index(length));
}

Value Chains::getEnd(Emitter &e, Value first) const {
  return e.minSigned(e.add(first, e.index(length)), numK);
}

Values Chains::sum(Emitter &e, ValueRange zeros,
                   function_ref<Values(Value, Value)> sumChain) const {
  return e.loop(e.index(0), numK, length, zeros,
                [&](Value first, ValueRange totals) {
                  return addChain(e, totals, sumChain(first, getEnd(e, first)));
                });
}

Values mlir::moe::addChain(Emitter &e, ValueRange totals, ValueRange chain) {
  Values next;
  for (auto [total, sum] : llvm::zip_equal(totals, chain))
    next.push_back(e.add(total, sum));
  return next;
}
