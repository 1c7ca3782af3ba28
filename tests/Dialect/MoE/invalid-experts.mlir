// RUN: %moe-opt %s --verify-diagnostics --split-input-file

// Cases are named after the constraint of docs/Spec.md that they break.

func.func @grouped_linear_c1(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<3xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the size of 'offsets' (3) to be one more than the number of experts (3)}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<3xi32>)
      outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c2(%x: tensor<5x8xf32>, %w: tensor<3x6x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the features of 'w' (6) to be twice those of 'y' (4), of which each has a gate and a factor}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x6x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {gate = #moe.gate<concatenated>} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c3_limit(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x2xf32>) {
  // expected-error @below {{expected limit to be positive and finite, found 0}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x2xf32>) {gate = #moe.gate<concatenated>, limit = 0.0 : f64} -> tensor<5x2xf32>
  return
}

// -----

func.func @grouped_linear_c3_up_limit(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x2xf32>) {
  // expected-error @below {{expected up_limit to be positive and finite, found nan}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x2xf32>) {gate = #moe.gate<concatenated>, up_limit = 0x7FF8000000000000 : f64} -> tensor<5x2xf32>
  return
}

// -----

func.func @grouped_linear_c3_alpha(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected alpha to be positive and finite, found -1}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {activation = #moe.activation<silu>, alpha = -1.0 : f64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c3_up_offset(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x2xf32>) {
  // expected-error @below {{expected up_offset to be finite, found INF}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x2xf32>) {gate = #moe.gate<concatenated>, up_offset = 0x7FF0000000000000 : f64} -> tensor<5x2xf32>
  return
}

// -----

func.func @grouped_linear_c4_no_gate(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected limit, up_limit, bound and up_offset only with a gate, found gate = none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {limit = 1.0 : f64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c4_alpha(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected alpha only with activation = silu, found gelu}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {activation = #moe.activation<gelu>, alpha = 2.0 : f64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c4_softcap(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x2xf32>) {
  // expected-error @below {{expected bound = softcap only with activation = silu, found relu}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x2xf32>) {activation = #moe.activation<relu>, gate = #moe.gate<concatenated>, bound = #moe.bound<softcap>, limit = 1.0 : f64} -> tensor<5x2xf32>
  return
}

// -----

func.func @grouped_linear_c4_bound(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x2xf32>) {
  // expected-error @below {{expected limit with bound = clamp_activated, found none}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x2xf32>) {gate = #moe.gate<concatenated>, bound = #moe.bound<clamp_activated>} -> tensor<5x2xf32>
  return
}

// -----

func.func @grouped_linear_c5_both(%x: tensor<5x8xf32>, %w: tensor<3x1x8x4xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected at most one of transposed and packed, found both}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x8x4xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 4 : i64, transposed} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_none(%x: tensor<5x8xf32>, %w: tensor<3x1x8x4xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected packed to be at least 1, found 0}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x8x4xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 0 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_width(%x: tensor<5x8xf32>, %w: tensor<3x1x8x4xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the output features of a panel in 'w' to be 8, found 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x8x4xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 8 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_panels(%x: tensor<5x8xf32>, %w: tensor<3x1x8x4xf32>, %o: tensor<4xi32>, %y: tensor<5x7xf32>) {
  // expected-error @below {{expected the panels in 'w' to be 2, found 1}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x8x4xf32>, tensor<4xi32>)
      outs(%y : tensor<5x7xf32>) {packed = 4 : i64} -> tensor<5x7xf32>
  return
}

// -----

func.func @grouped_linear_c5_panels_of_gates(%x: tensor<5x8xf32>, %w: tensor<3x2x8x4xf32>, %o: tensor<4xi32>, %y: tensor<5x5xf32>) {
  // expected-error @below {{expected the panels in 'w' to be 3, found 2}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x2x8x4xf32>, tensor<4xi32>)
      outs(%y : tensor<5x5xf32>) {packed = 4 : i64, gate = #moe.gate<concatenated>} -> tensor<5x5xf32>
  return
}

// -----

func.func @grouped_linear_c5_pairs(%x: tensor<5x7xf32>, %w: tensor<3x1x3x4x2xbf16>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the pairs of features of 'x' in 'w' to be 4, found 3}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x7xf32>, tensor<3x1x3x4x2xbf16>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_pair(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x3xbf16>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected the features of a pair in 'w' to be 2, found 3}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x3xbf16>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_no_pairs(%x: tensor<5x8xf32>, %w: tensor<3x1x8x4xbf16>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected a packed weight in pairs with bf16, and only then, found a rank of 4 with 'bf16'}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x8x4xbf16>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_c5_odd_halves(%x: tensor<5x8xf32>, %w: tensor<3x2x8x5xf32>, %o: tensor<4xi32>, %y: tensor<5x5xf32>) {
  // expected-error @below {{expected packed to be even with a concatenated gate, found 5}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x2x8x5xf32>, tensor<4xi32>)
      outs(%y : tensor<5x5xf32>) {packed = 5 : i64, gate = #moe.gate<concatenated>} -> tensor<5x5xf32>
  return
}

// -----

func.func @grouped_linear_c5_element(%x: tensor<5x8xf32>, %w: tensor<3x1x4x4x2xf16>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected a packed weight in pairs with bf16, and only then, found a rank of 5 with 'f16'}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x4x4x2xf16>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {packed = 4 : i64} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_rank(%x: tensor<5x8xf32>, %w: tensor<3x1x8x4xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected 'w' to have rank 3 (e, f, d), found rank 4}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x1x8x4xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_transposed(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>) {
  // expected-error @below {{expected dim 1 of 'w' (4) to match dim 1 of 'x' (8)}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      outs(%y : tensor<5x4xf32>) {transposed} -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_rows(%x: tensor<9x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>, %c: tensor<6xi64>) {
  // expected-error @below {{expected dim 0 of 'y' (5) to match dim 0 of 'rows' (6)}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<9x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      rows(%c : tensor<6xi64>)
      outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_linear_bias(%x: tensor<5x8xf32>, %w: tensor<3x4x8xf32>, %o: tensor<4xi32>, %y: tensor<5x4xf32>, %c: tensor<3x8xf32>) {
  // expected-error @below {{expected dim 1 of 'bias' (8) to match dim 1 of 'w' (4)}}
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<5x8xf32>, tensor<3x4x8xf32>, tensor<4xi32>)
      bias(%c : tensor<3x8xf32>)
      outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @grouped_outer_c1(%dy: tensor<5x4xf32>, %x: tensor<5x8xf32>, %o: tensor<5xi32>,
                            %dw: tensor<3x4x8xf32>) {
  // expected-error @below {{expected the size of 'offsets' (5) to be one more than the number of experts (3)}}
  %r = moe.grouped_outer ins(%dy, %x, %o : tensor<5x4xf32>, tensor<5x8xf32>, tensor<5xi32>)
      outs(%dw : tensor<3x4x8xf32>) -> tensor<3x4x8xf32>
  return
}

// -----

func.func @grouped_outer_rows(%dy: tensor<5x4xf32>, %x: tensor<6x8xf32>, %o: tensor<4xi32>,
                              %dw: tensor<3x4x8xf32>) {
  // expected-error @below {{expected dim 0 of 'x' (6) to match dim 0 of 'dy' (5)}}
  %r = moe.grouped_outer ins(%dy, %x, %o : tensor<5x4xf32>, tensor<6x8xf32>, tensor<4xi32>)
      outs(%dw : tensor<3x4x8xf32>) -> tensor<3x4x8xf32>
  return
}

// -----

func.func @token_rows_rank(%s: tensor<5xi32>, %rows: tensor<5xi64>) {
  // expected-error @below {{expected 'slots' to have rank 2 (n, k), found rank 1}}
  %r = moe.token_rows ins(%s : tensor<5xi32>) outs(%rows : tensor<5xi64>) -> tensor<5xi64>
  return
}
