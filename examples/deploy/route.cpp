// Runs a compiled router from C++: no Python, no torch, no compiler.
//
//   moe-compile router.mlir -o router.artifact --target=cpu
//   g++ -std=c++20 route.cpp -I include -L build/python/moe_mlir -lmoe_runtime
//   -o route
//   ./route router.artifact
//
// The router takes tokens [n, 64] and weights [16, 64].

#include "MoE/Runtime/Artifact.h"

#include <cstdio>
#include <exception>

int main(int argc, char **argv) {
  using namespace moe::runtime;
  if (argc != 2) {
    std::fprintf(stderr, "expected: route ARTIFACT\n");
    return 1;
  }
  try {
    Artifact artifact(argv[1]);
    const Function &route = artifact.getFunction("route");

    Array tokens("f32", {4, 64}), weight("f32", {16, 64});
    auto h = static_cast<float *>(tokens.tensor.data);
    auto w = static_cast<float *>(weight.tensor.data);
    for (int n = 0; n < 4; ++n)
      h[n * 64 + n] = 1.0f; // token n looks at feature n only,
    for (int e = 0; e < 16; ++e)
      for (int d = 0; d < 64; ++d)
        w[e * 64 + d] = e == d ? 3.0f : 0.0f; // which is expert n's.

    const Tensor arguments[] = {tokens.tensor, weight.tensor};
    std::vector<Array> results = route.run(arguments);
    auto gates = static_cast<const float *>(results[0].tensor.data);
    auto indices = static_cast<const int32_t *>(results[1].tensor.data);
    for (int n = 0; n < 4; ++n)
      std::printf("token %d: expert %d with gate %.3f, expert %d with %.3f\n",
                  n, indices[2 * n], gates[2 * n], indices[2 * n + 1],
                  gates[2 * n + 1]);
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "route: error: %s\n", error.what());
    return 1;
  }
}
