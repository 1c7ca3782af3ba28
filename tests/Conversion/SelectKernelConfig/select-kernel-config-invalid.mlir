// RUN: %moe-opt %s --split-input-file --verify-diagnostics --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config

func.func @no_such_schedule(%q: tensor<1x2x?x64xf32>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  // expected-error @below {{expected 'moe.kernel_config' to be a part of #moe.kernel_config<rows = 64, threads = 128, schedule = float, loop = own, shared_bytes = }}
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
      outs(%l0 : tensor<1x2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = wgmma>} -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// -----

func.func @no_choice(%z: tensor<2x3xf32>, %g0: tensor<2x3xf32>) -> tensor<2x3xf32> {
  // expected-error @below {{to be a part of no configuration, as this op has no kernel with a choice on the target, found #moe.kernel_config<rows = 4>}}
  %g = linalg.exp {moe.kernel_config = #moe.kernel_config<rows = 4>} ins(%z : tensor<2x3xf32>)
      outs(%g0 : tensor<2x3xf32>) -> tensor<2x3xf32>
  return %g : tensor<2x3xf32>
}

// -----

func.func @no_config(%z: tensor<2x3xf32>, %g0: tensor<2x3xf32>) -> tensor<2x3xf32> {
  // expected-error @below {{expected 'moe.kernel_config' to be a #moe.kernel_config, found 4 : i64}}
  %g = linalg.exp {moe.kernel_config = 4} ins(%z : tensor<2x3xf32>)
      outs(%g0 : tensor<2x3xf32>) -> tensor<2x3xf32>
  return %g : tensor<2x3xf32>
}
