// RUN: %moe-opt %s --split-input-file --verify-diagnostics --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config

func.func @no_such_schedule(%q: tensor<1x2x?x64xf32>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  // expected-error @below {{has no such kernel on sm_80: expected a part of a configuration below, found #moe.kernel_config<schedule = wgmma>}}
  // expected-note @below {{possible: #moe.kernel_config<rows = 64, threads = 128, schedule = float, loop = own, shared_bytes = }}
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
      outs(%l0 : tensor<1x2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = wgmma>} -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// -----

// What a schedule needs is said where the op, or the chip, does not have it.

func.func @mix_of_another_type(%q: tensor<1x2x?x64xf32>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  // expected-error @below {{found #moe.kernel_config<schedule = mma>, whose kernel expects queries and keys of one 16-bit type, and a multiple of 8 features}}
  // expected-note @below {{possible: }}
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
      outs(%l0 : tensor<1x2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = mma>} -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// -----

func.func @logits_of_another_type(%h: tensor<?x64xf32>, %w: tensor<8x64xf32>, %z0: tensor<?x8xf32>) -> tensor<?x8xf32> {
  // expected-error @below {{found #moe.kernel_config<schedule = mma>, whose kernel expects tokens and weights of one 16-bit type}}
  // expected-note @below {{possible: #moe.kernel_config<schedule = float>}}
  %z = moe.router_logits ins(%h, %w : tensor<?x64xf32>, tensor<8x64xf32>)
      outs(%z0 : tensor<?x8xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = mma>} -> tensor<?x8xf32>
  return %z : tensor<?x8xf32>
}

// -----

func.func @rows_of_no_shape(%h: tensor<?x64xbf16>, %w: tensor<8x64xbf16>, %z0: tensor<?x8xf32>) -> tensor<?x8xf32> {
  // expected-error @below {{expected a part of a configuration below, found #moe.kernel_config<rows = 7, schedule = mma>}}
  // expected-note @below {{possible: #moe.kernel_config<rows = 64, threads = 128, schedule = mma>}}
  // expected-note @below {{possible: #moe.kernel_config<schedule = float>}}
  %z = moe.router_logits ins(%h, %w : tensor<?x64xbf16>, tensor<8x64xbf16>)
      outs(%z0 : tensor<?x8xf32>)
      {moe.kernel_config = #moe.kernel_config<rows = 7, schedule = mma>} -> tensor<?x8xf32>
  return %z : tensor<?x8xf32>
}

// -----

func.func @too_few_features_to_split(%h: tensor<?x960xbf16>, %w: tensor<32x960xbf16>, %z0: tensor<?x32xf32>) -> tensor<?x32xf32> {
  // expected-error @below {{found #moe.kernel_config<schedule = mma_split>, whose kernel expects what 'mma' does, an unknown number of tokens or at most 256, at least 1024 features}}
  // expected-note @below {{possible: #moe.kernel_config<rows = 64, threads = 128, schedule = mma>}}
  // expected-note @below {{possible: #moe.kernel_config<schedule = float>}}
  %z = moe.router_logits ins(%h, %w : tensor<?x960xbf16>, tensor<32x960xbf16>)
      outs(%z0 : tensor<?x32xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = mma_split>} -> tensor<?x32xf32>
  return %z : tensor<?x32xf32>
}

// -----

func.func @gradient_of_another_type(
    %q: tensor<1x1x?x64xf32>, %k: tensor<1x1x?x64xf32>, %lse: tensor<1x1x?xf32>,
    %delta: tensor<1x1x?xf32>, %dq0: tensor<1x1x?x64xf32>) -> tensor<1x1x?x64xf32> {
  // expected-error @below {{found #moe.kernel_config<schedule = mma>, whose kernel expects queries and keys of one 16-bit type}}
  // expected-note @below {{possible: #moe.kernel_config<schedule = float>}}
  %dq = moe.softmax_mix_backward_dq
      ins(%q, %k, %lse, %delta : tensor<1x1x?x64xf32>, tensor<1x1x?x64xf32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>)
      outs(%dq0 : tensor<1x1x?x64xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = mma>} -> tensor<1x1x?x64xf32>
  return %dq : tensor<1x1x?x64xf32>
}

// -----

func.func @no_choice(%z: tensor<2x3xf32>, %g0: tensor<2x3xf32>) -> tensor<2x3xf32> {
  // expected-error @below {{has no choice of kernels on sm_80: expected no configuration, found #moe.kernel_config<rows = 4>}}
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

// -----

func.func @rows_of_no_selection(%z: tensor<?x16xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  // expected-error @below {{has no such kernel on sm_80: expected a part of a configuration below, found #moe.kernel_config<rows = 7>}}
  // expected-note @below {{possible: #moe.kernel_config<rows = 128, loop = own>}}
  %r:2 = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {moe.kernel_config = #moe.kernel_config<rows = 7>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}

// -----

func.func @selection_without_kernel(%z: tensor<?x?xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  // expected-error @below {{expected no configuration, found #moe.kernel_config<rows = 64>, whose kernel expects static numbers of experts, at most 2048, and of choices}}
  %r:2 = moe.topk_renorm ins(%z : tensor<?x?xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {moe.kernel_config = #moe.kernel_config<rows = 64>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}

// -----

func.func @rows_of_a_combination(%y: tensor<?x64xf32>, %gates: tensor<?x2xf32>, %slots: tensor<?x2xi64>, %out: tensor<?x64xf32>) -> tensor<?x64xf32> {
  // expected-error @below {{has no such kernel on sm_80: expected a part of a configuration below, found #moe.kernel_config<rows = 16>}}
  // expected-note @below {{possible: #moe.kernel_config<loop = kernel>}}
  %r = moe.combine ins(%y, %gates, %slots : tensor<?x64xf32>, tensor<?x2xf32>, tensor<?x2xi64>)
      outs(%out : tensor<?x64xf32>)
      {moe.kernel_config = #moe.kernel_config<rows = 16>} -> tensor<?x64xf32>
  return %r : tensor<?x64xf32>
}

// -----

func.func @of_a_cpu(%q: tensor<1x2x?x64xf32>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  // expected-error @below {{found #moe.kernel_config<schedule = queries>, whose schedule is one of CPUs}}
  // expected-note @below {{possible: }}
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
      outs(%l0 : tensor<1x2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<schedule = queries>} -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// -----

// expected-error @below {{expected kernel configurations for ops of the moe dialect, such as softmax_mix, found one for 'softmax_mixed'}}
module attributes {moe.kernel_configs = {softmax_mixed = #moe.kernel_config<rows = 64>}} {}

// -----

// expected-error @below {{expected 'softmax_mix' to be a #moe.kernel_config, found 64 : i64}}
module attributes {moe.kernel_configs = {softmax_mix = 64}} {}

// -----

// expected-error @below {{expected 'moe.kernel_configs' to be a dictionary of names of ops and their #moe.kernel_config, found #moe.kernel_config<rows = 64>}}
module attributes {moe.kernel_configs = #moe.kernel_config<rows = 64>} {}
