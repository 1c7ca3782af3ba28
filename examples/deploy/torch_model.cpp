// Runs an AOTInductor package whose routers are our ops: no Python.
//
//   program = torch.export.export(model, (x,), dynamic_shapes=...)
//   moe_mlir.frontends.aot.package(program, "model.pt2")
//
//   ./torch_model model.pt2 model.kernels
//
// The model takes tokens [n, 16]; printed is the sum of every output.

#include "MoE/Torch/Kernels.h"

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

int main(int argc, char **argv) {
  if (argc != 3) {
    std::fprintf(stderr, "expected: torch_model PACKAGE KERNELS\n");
    return 1;
  }
  try {
    moe::torch_ops::loadKernels(argv[2]);
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    c10::InferenceMode guard;
    for (int64_t tokens : {5, 12}) {
      torch::Tensor x =
          torch::arange(tokens * 16, torch::kFloat).sin().view({tokens, 16});
      for (const torch::Tensor &output : model.run({x}))
        std::printf("%.6f ", output.sum().item<double>());
      std::printf("\n");
    }
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "torch_model: error: %s\n", error.what());
    return 1;
  }
}
