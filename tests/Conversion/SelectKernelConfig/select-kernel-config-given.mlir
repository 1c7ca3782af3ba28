// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90a --moe-convert-to-softmax-mix --moe-select-kernel-config | FileCheck %s

// What an op asks for is completed.

// CHECK-LABEL: func.func @asks_for_mma
// CHECK:         #moe.kernel_config<rows = 128, threads = 128, schedule = mma, loop = own, shared_bytes = {{[0-9]+}}>
func.func @asks_for_mma(%q: tensor<1x2x?x64xbf16>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xbf16>, tensor<1x2x?x64xbf16>)
      outs(%l0 : tensor<1x2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = mma>} -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// -----

// An op that becomes another one hands on what it asks for.

// CHECK-LABEL: func.func @hands_it_on
// CHECK:         moe.softmax_mix {{.*}}#moe.kernel_config<rows = 64, threads = 256, schedule = wgmma
func.func @hands_it_on(
    %u: tensor<2x?x64xbf16>, %e: tensor<2x?x16xf32>, %p0: tensor<2x?x16xf32>,
    %l0: tensor<2x?xf32>) -> tensor<2x?x16xf32> {
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x64xbf16>, tensor<2x?x16xf32>)
      outs(%p0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<rows = 64>} -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %p#0 : tensor<2x?x16xf32>
}
