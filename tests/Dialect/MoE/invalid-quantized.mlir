// RUN: %moe-opt %s --split-input-file --verify-diagnostics

// The rules of weights that are codes: docs/Spec.md 3.12.

func.func @grouped_linear_c6_no_format(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected a format with a weight of i8, and only then, found 'tensor<3x4x4xi8>' without one}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c6_floats(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected a format with a weight of i8, and only then, found 'tensor<3x4x8xf32>' with one}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c6_group_of_floats(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected scales, zeros, group and activations only with a format, found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {group = 32 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c6_scales_of_floats(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected scales, zeros, group and activations only with a format, found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c6_activations_of_floats(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected scales, zeros, group and activations only with a format, found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {activations = #moe.activation_format<int8>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c6_no_scales(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected scales with a format, found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c7_zeros(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %z: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected no zeros with format = fp4_e2m1, whose codes have a sign; found zeros}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) zeros(%z : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<fp4_e2m1>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c7_zeros_of_float8(%x: tensor<5x8xf32>, %w: tensor<3x4x8xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %z: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected no zeros with format = fp8_e4m3, whose codes have a sign; found zeros}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) zeros(%z : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<fp8_e4m3>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c7_transposed(%x: tensor<5x8xf32>, %w: tensor<3x8x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected a weight with a format not to be transposed, found transposed}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x8x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int8>, transposed} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_group(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to be 8, 16 or a multiple of 32, found 12}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 12 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_no_group(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to be 8, 16 or a multiple of 32, found 0}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 0 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_bytes(%x: tensor<5x8xf32>, %w: tensor<3x4x8xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the bytes of a feature in 'w' to be 4, found 8}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_bytes_of_float8(%x: tensor<5x7xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the bytes of a feature in 'w' to be 7, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x7xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<fp8_e4m3>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_scales(%x: tensor<5x33xf32>, %w: tensor<3x4x17xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the scales of a feature to be 2, found 1}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x33xf32>, tensor<3x4x17xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 32 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_scales_of_a_row(%x: tensor<5x64xf32>, %w: tensor<3x4x32xi8>, %o: tensor<4xi32>, %s: tensor<3x4x2xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the scales of a feature to be 1, found 2}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x64xf32>, tensor<3x4x32xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x2xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_steps(%x: tensor<5x33xf32>, %w: tensor<3x1x4x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x1x4xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the codes of a feature in 'w' to be 8, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x33xf32>, tensor<3x1x4x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x1x4xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_step(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x2xi8>, %o: tensor<4xi32>, %s: tensor<3x1x1x4xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the bytes of a step in 'w' to be 4, found 2}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x2xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x1x4xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_packed_scales(%x: tensor<5x33xf32>, %w: tensor<3x1x8x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x1x4xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the scales of a feature to be 2, found 1}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x33xf32>, tensor<3x1x8x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x1x4xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64, group = 32 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c6_zeros_of_floats(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %z: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected scales, zeros, group and activations only with a format, found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      zeros(%z : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_negative_group(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to be 8, 16 or a multiple of 32, found -32}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = -32 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_group_behind_a_block(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to be 8, 16 or a multiple of 32, found 48}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 48 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_group_of_int6(%x: tensor<5x16xf32>, %w: tensor<3x4x12xi8>, %o: tensor<4xi32>, %s: tensor<3x4x2xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to be 16 or a multiple of 32 with format = int6, found 8}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x16xf32>, tensor<3x4x12xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x2xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int6>, group = 8 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_two_levels_of_rows(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x3xi8>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to divide 256 with scales of i8, which have two levels; found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x3xi8>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_two_levels_of_96(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x3xi8>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected group to divide 256 with scales of i8, which have two levels; found 96}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x3xi8>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 96 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c8_one_of_two_levels(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x10xi8>, %z: tensor<3x4x10xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected both of scales and zeros to be i8, or neither, found 'tensor<3x4x10xi8>' and 'tensor<3x4x10xf32>'}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x10xi8>) zeros(%z : tensor<3x4x10xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 32 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_two_levels(%x: tensor<5x300xf32>, %w: tensor<3x1x60x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x19x4xi8>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the scales of a feature to be 36, found 19}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x300xf32>, tensor<3x1x60x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x19x4xi8>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int6>, packed = 4 : i64, group = 16 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_bytes_of_int6(%x: tensor<5x17xf32>, %w: tensor<3x4x13xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the bytes of a feature in 'w' to be 24, found 13}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x17xf32>, tensor<3x4x13xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int6>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_bytes_of_an_odd_width(%x: tensor<5x9xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the bytes of a feature in 'w' to be 5, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x9xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_bytes_of_int8(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the bytes of a feature in 'w' to be 8, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int8>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_steps_of_int8(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x1x4xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the codes of a feature in 'w' to be 8, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x1x4xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int8>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c9_scales_of_8(%x: tensor<5x40xf32>, %w: tensor<3x1x8x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x4x4xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the scales of a feature to be 5, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x40xf32>, tensor<3x1x8x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x4x4xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<fp4_e2m1>, packed = 4 : i64, group = 8 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_zeros(%x: tensor<5x64xf32>, %w: tensor<3x4x32xi8>, %o: tensor<4xi32>, %s: tensor<3x4x2xf32>, %z: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected dim 2 of 'zeros' (1) to match dim 2 of 'scales' (2)}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x64xf32>, tensor<3x4x32xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x2xf32>) zeros(%z : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, group = 32 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_scales_rank(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected 'scales' to have rank 4 (e, p, u, q), found rank 3}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_scales_of_a_panel(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x1x8xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected dim 3 of 'scales' (8) to match dim 3 of 'w' (4)}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x1x8xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_codes_rank(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected 'w' to have rank 3 (e, f, c), found rank 5}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_codes_rank_packed(%x: tensor<5x8xf32>, %w: tensor<3x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected 'w' to have rank 5 (e, p, t, q, s), found rank 3}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_panels_of_codes(%x: tensor<5x8xf32>, %w: tensor<3x2x4x4x4xi8>, %o: tensor<4xi32>, %s: tensor<3x2x1x4xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the panels in 'w' to be 1, found 2}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x2x4x4x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x2x1x4xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_width_of_codes(%x: tensor<5x8xf32>, %w: tensor<3x1x4x8x4xi8>, %o: tensor<4xi32>, %s: tensor<3x1x1x8xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the output features of a panel in 'w' to be 4, found 8}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x8x4xi8>, tensor<4xi32>)
      scales(%s : tensor<3x1x1x8xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>, packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_weight_element(%x: tensor<5x8xf32>, %w: tensor<3x4x4xui8>, %o: tensor<4xi32>, %s: tensor<3x4x1xf32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{must be Tensor or MemRef of 32-bit float or bfloat16 type or 16-bit float or 8-bit signless integer values, but got 'tensor<3x4x4xui8>'}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x4xui8>, tensor<4xi32>)
      scales(%s : tensor<3x4x1xf32>) outs(%y : tensor<5x4xf32>) {format = #moe.weight_format<int4>} -> tensor<5x4xf32>
  return
}
