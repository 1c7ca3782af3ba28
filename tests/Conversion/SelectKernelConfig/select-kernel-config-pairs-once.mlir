// RUN: %moe-opt %s --verify-diagnostics --moe-attach-nvvm-target=chip=sm_80 --moe-convert-to-softmax-mix --moe-select-kernel-config

// What a kernel of a CPU alone can do is refused on a GPU, not left aside.

func.func @pairs_once(
    %u: tensor<2x?x64xf32>, %e: tensor<2x?x16xf32>, %p0: tensor<2x?x16xf32>,
    %l0: tensor<2x?xf32>) -> tensor<2x?x16xf32> {
  // expected-error @below {{'moe.softmax_mix' op has no such kernel on sm_80: expected a part of a configuration below, found #moe.kernel_config<schedule = pairs_once>, whose schedule is one of CPUs}}
  // expected-note @below {{possible: }}
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x64xf32>, tensor<2x?x16xf32>)
      outs(%p0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = pairs_once>} -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %p#0 : tensor<2x?x16xf32>
}
