//===- Files.cpp - NumPy's arrays and safetensors' weights ----------------===//

#include "Target.h"

#include "Loader/Weights.h"
#include "MoE/Support/Npy.h"

using namespace moe;

void fuzz::runNpy(const std::string &input) {
  NpyArray array = parseNpy(input, "input.npy");
  runtime::Tensor tensor;
  tensor.dtype = array.type == "<f4" ? "f32" : "f64";
  tensor.shape.assign(array.shape.begin(), array.shape.end());
  runtime::getByteSize(tensor);
}

void fuzz::runWeights(const std::string &input) {
  uint64_t sum = 0;
  for (const auto &[name, tensor] : runtime::readWeights(input))
    for (uint64_t i = 0; i < runtime::getByteSize(tensor); ++i)
      sum += static_cast<const uint8_t *>(tensor.data)[i];
  // Read them all, so that a sanitizer sees where they lie.
  volatile uint64_t sink = sum;
  (void)sink;
}
