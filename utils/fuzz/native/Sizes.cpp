//===- Sizes.cpp - Sizes of results, as JSON and as text ------------------===//

#include "Target.h"

#include "Loader/Sizes.h"

using namespace moe::runtime;

void moe::fuzz::runSizes(const std::string &input) {
  if (!input.starts_with("[")) {
    evaluateSizeText(input, {{"s0", 7}, {"s1", -3}, {"s77", int64_t(1) << 62}});
    return;
  }
  int64_t scalar = int64_t(1) << 61;
  std::vector<ValueType> types = {{"f32", true, {-1, 4}},
                                  {"index", false, {}},
                                  {"f32", false, {}},
                                  {"i64", true, {-1}}};
  // The last one is a result, which has no value yet.
  std::vector<Tensor> tensors = {{"f32", {3, 4}, nullptr, false},
                                 {"index", {}, &scalar, false},
                                 {"f32", {}, &scalar, false}};
  Json size = Json::parse(input, "input");
  verifySize(size, types);
  evaluateSize(size, tensors);
}
