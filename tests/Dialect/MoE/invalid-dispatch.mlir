// RUN: %moe-opt %s --verify-diagnostics --split-input-file

// Cases are named after the constraint of docs/Spec.md that they break.

func.func @threshold_renorm_c1(%p: tensor<5x0xf32>, %c: tensor<5xi32>) {
  // expected-error @below {{expected at least one expert, found none}}
  %r:2 = moe.threshold_renorm ins(%p : tensor<5x0xf32>)
      outs(%p, %c : tensor<5x0xf32>, tensor<5xi32>) -> tensor<5x0xf32>, tensor<5xi32>
  return
}

// -----

func.func @threshold_renorm_c2(%p: tensor<5x4xf32>, %c: tensor<5xi32>) {
  // expected-error @below {{expected theta to be finite, found INF}}
  %r:2 = moe.threshold_renorm ins(%p : tensor<5x4xf32>)
      outs(%p, %c : tensor<5x4xf32>, tensor<5xi32>) {theta = 0x7FF0000000000000 : f64}
      -> tensor<5x4xf32>, tensor<5xi32>
  return
}

// -----

func.func @threshold_renorm_scalar(%p: tensor<f32>, %c: tensor<i32>) {
  // expected-error @below {{expected 'p' to have at least one dim, found a scalar}}
  %r:2 = moe.threshold_renorm ins(%p : tensor<f32>)
      outs(%p, %c : tensor<f32>, tensor<i32>) -> tensor<f32>, tensor<i32>
  return
}

// -----

func.func @densify_more_choices_than_experts(%g: tensor<5x4xf32>, %i: tensor<5x4xi32>,
                                             %d: tensor<5x3xf32>) {
  // expected-error @below {{expected k (4) to be at most e (3)}}
  %r = moe.densify ins(%g, %i : tensor<5x4xf32>, tensor<5x4xi32>)
      outs(%d : tensor<5x3xf32>) -> tensor<5x3xf32>
  return
}

// -----

func.func @make_finite_shape(%z: tensor<5x4xf32>, %y: tensor<5x3xf32>) {
  // expected-error @below {{expected dim 1 of 'finite' (3) to match dim 1 of 'scores' (4)}}
  %r = moe.make_finite ins(%z : tensor<5x4xf32>) outs(%y : tensor<5x3xf32>) -> tensor<5x3xf32>
  return
}

// -----

func.func @dispatch_c1(%i: tensor<5x2xi32>, %n: i32, %o: tensor<9xi32>, %c: tensor<8xi32>) {
  // expected-error @below {{expected at most one of 'capacity' and capacity_factor, found both}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>) capacity(%n : i32)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {capacity_factor = 1.0 : f64} -> tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>
  return
}

// -----

func.func @dispatch_c2(%i: tensor<5x2xi32>, %o: tensor<9xi32>, %c: tensor<8xi32>) {
  // expected-error @below {{expected operand 'priority' with drop = priority, found none}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {drop = #moe.drop<priority>} -> tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>
  return
}

// -----

func.func @dispatch_c3(%i: tensor<5x2xi32>, %g: tensor<5x2xf32>, %o: tensor<9xi32>,
                       %c: tensor<8xi32>) {
  // expected-error @below {{expected operand 'gates' only with drop = probs, found drop = position}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>) gates(%g : tensor<5x2xf32>)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>
  return
}

// -----

func.func @dispatch_c4(%i: tensor<5x2xi32>, %o: tensor<9xi32>, %c: tensor<8xi32>) {
  // expected-error @below {{expected capacity_factor to be positive and finite, found 0}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {capacity_factor = 0.0 : f64} -> tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>
  return
}

// -----

func.func @dispatch_c5(%i: tensor<5x2xi32>, %o: tensor<8xi32>, %c: tensor<8xi32>) {
  // expected-error @below {{expected the size of 'offsets' (8) to be one more than that of 'counts' (8)}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<8xi32>, tensor<8xi32>)
      -> tensor<5x2xi32>, tensor<8xi32>, tensor<8xi32>
  return
}

// -----

func.func @dispatch_c6(%i: tensor<5x2xi32>, %o: tensor<9xi32>, %c: tensor<8xi32>) {
  // expected-error @below {{expected alignment to be at least 1, found 0}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {alignment = 0 : i64} -> tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>
  return
}

// -----

func.func @dispatch_c6_of_all(%i: tensor<5x2xi32>, %o: tensor<9xi32>, %c: tensor<8xi32>) {
  // expected-error @below {{expected alignment to leave all rows of 8 experts below 2**31, found 268435457}}
  %r:3 = moe.dispatch ins(%i : tensor<5x2xi32>)
      outs(%i, %o, %c : tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {alignment = 268435457 : i64} -> tensor<5x2xi32>, tensor<9xi32>, tensor<8xi32>
  return
}

// -----

func.func @combine_width(%x: tensor<9x8xf32>, %g: tensor<5x2xf32>, %s: tensor<5x2xi32>,
                         %y: tensor<5x7xf32>) {
  // expected-error @below {{expected dim 1 of 'y' (7) to match dim 1 of 'expert_out' (8)}}
  %r = moe.combine ins(%x, %g, %s : tensor<9x8xf32>, tensor<5x2xf32>, tensor<5x2xi32>)
      outs(%y : tensor<5x7xf32>) -> tensor<5x7xf32>
  return
}

// -----

func.func @soft_dispatch_c1(%x: tensor<5x8xf32>, %phi: tensor<8x4x1xf32>, %w: tensor<5x4x1xf32>) {
  // expected-error @below {{expected eps to be positive and finite, found 0}}
  %r:2 = moe.soft_dispatch ins(%x, %phi : tensor<5x8xf32>, tensor<8x4x1xf32>)
      outs(%w, %w : tensor<5x4x1xf32>, tensor<5x4x1xf32>) {eps = 0.0 : f64}
      -> tensor<5x4x1xf32>, tensor<5x4x1xf32>
  return
}

// -----

func.func @soft_dispatch_rank(%x: tensor<8xf32>, %phi: tensor<8x4x1xf32>, %w: tensor<4x1xf32>) {
  // expected-error @below {{expected 'x' to have at least two dims (n, d), found rank 1}}
  %r:2 = moe.soft_dispatch ins(%x, %phi : tensor<8xf32>, tensor<8x4x1xf32>)
      outs(%w, %w : tensor<4x1xf32>, tensor<4x1xf32>) -> tensor<4x1xf32>, tensor<4x1xf32>
  return
}

// -----

func.func @balance_loss_load(%p: tensor<5x8xf32>, %i: tensor<5x2xi32>, %l: tensor<f32>,
                             %load: tensor<7xi32>) {
  // expected-error @below {{expected dim 0 of 'load' (7) to match dim 1 of 'p' (8)}}
  %r:2 = moe.balance_loss ins(%p, %i : tensor<5x8xf32>, tensor<5x2xi32>)
      outs(%l, %load : tensor<f32>, tensor<7xi32>) -> tensor<f32>, tensor<7xi32>
  return
}

// -----

func.func @z_loss_element(%z: tensor<5x8xf32>, %l: tensor<f32>, %lse: tensor<4xf32>) {
  // expected-error @below {{expected dim 0 of 'lse' (4) to match dim 0 of 'z' (5)}}
  %r:2 = moe.z_loss ins(%z : tensor<5x8xf32>) outs(%l, %lse : tensor<f32>, tensor<4xf32>)
      -> tensor<f32>, tensor<4xf32>
  return
}

// -----

func.func @bias_update_c1(%b: tensor<4xf32>, %c: tensor<4xi32>) {
  // expected-error @below {{expected gamma to be finite, found nan}}
  %r = moe.bias_update ins(%b, %c : tensor<4xf32>, tensor<4xi32>) outs(%b : tensor<4xf32>)
      {gamma = 0x7FF8000000000000 : f64} -> tensor<4xf32>
  return
}
