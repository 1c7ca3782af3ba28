// RUN: %moe-opt %s --split-input-file --verify-diagnostics --moe-select-kernel-config --moe-convert-to-softmax-mix --moe-select-kernel-config

// A CPU has none of a GPU's kernels, be they asked for by the op or its module.

module attributes {moe.kernel_configs = {softmax_mix = #moe.kernel_config<schedule = mma>}} {
  func.func @of_a_gpu(%q: tensor<1x2x?x64xf32>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
    // expected-error @below {{has no such kernel on the CPU: expected a part of a configuration below, found #moe.kernel_config<schedule = mma>, whose schedule is one of GPUs}}
    // expected-note @below {{possible: #moe.kernel_config<rows = 192, schedule = queries>}}
    %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
        outs(%l0 : tensor<1x2x?xf32>) -> tensor<1x2x?xf32>
    return %l : tensor<1x2x?xf32>
  }
}

// -----

// Under a causal mask no pair has two roles.

func.func @no_pairs_to_share(
    %u: tensor<2x?x64xf32>, %e: tensor<2x?x16xf32>, %p0: tensor<2x?x16xf32>,
    %l0: tensor<2x?xf32>) -> tensor<2x?x16xf32> {
  // expected-error @below {{has no choice of kernels on the CPU: expected no configuration, found #moe.kernel_config<schedule = pairs_once>}}
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x64xf32>, tensor<2x?x16xf32>)
      outs(%p0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = pairs_once>,
       visibility = #moe.visibility<causal>} -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %p#0 : tensor<2x?x16xf32>
}
