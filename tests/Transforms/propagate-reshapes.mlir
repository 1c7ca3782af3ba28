// RUN: %moe-opt %s --moe-propagate-reshapes --canonicalize --cse --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-propagate-reshapes --moe-propagate-reshapes --canonicalize --cse --split-input-file | FileCheck %s

// The selection works on the rows of the mix; its results are joined instead.

// CHECK-LABEL: func @selects_before_rows_are_joined
// CHECK-SAME:    %{{[^:]*}}: tensor<2x1x?x8xf32>, %{{[^:]*}}: tensor<2x?x16xf32>, %[[MASK:[^:]*]]: tensor<2x?xi1>
// CHECK:         %[[P:.*]]:2 = moe.softmax_mix
// CHECK-NOT:     tensor.collapse_shape
// CHECK:         %[[REAL:.*]] = tensor.expand_shape %[[MASK]] {{\[}}[0], [1, 2]]
// CHECK:         %[[TOP:.*]]:2 = moe.topk_renorm ins(%[[P]]#0 : tensor<2x1x?x16xf32>) mask(%[[REAL]] : tensor<2x1x?xi1>)
// CHECK-SAME:      -> tensor<2x1x?x2xf32>, tensor<2x1x?x2xi32>
// CHECK:         %[[GATES:.*]] = tensor.collapse_shape %[[TOP]]#0 {{\[}}[0], [1, 2], [3]]
// CHECK:         return %[[GATES]]
func.func @selects_before_rows_are_joined(
    %q: tensor<2x1x?x8xf32>, %v: tensor<2x?x16xf32>, %mask: tensor<2x?xi1>,
    %o: tensor<2x1x?x16xf32>, %l: tensor<2x1x?xf32>, %g0: tensor<2x?x2xf32>,
    %i0: tensor<2x?x2xi32>) -> (tensor<2x?x2xf32>, tensor<2x?x2xi32>) {
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<2x1x?x8xf32>, tensor<2x1x?x8xf32>)
      values(%v : tensor<2x?x16xf32>)
      outs(%o, %l : tensor<2x1x?x16xf32>, tensor<2x1x?xf32>)
      -> tensor<2x1x?x16xf32>, tensor<2x1x?xf32>
  %p = tensor.collapse_shape %r#0 [[0], [1, 2], [3]]
      : tensor<2x1x?x16xf32> into tensor<2x?x16xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<2x?x16xf32>) mask(%mask : tensor<2x?xi1>)
      outs(%g0, %i0 : tensor<2x?x2xf32>, tensor<2x?x2xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<2x?x2xf32>, tensor<2x?x2xi32>
  return %g, %i : tensor<2x?x2xf32>, tensor<2x?x2xi32>
}

// -----

// Through a chain: the graph of experts is no row and stays as it is.

// CHECK-LABEL: func @goes_on_through_a_chain
// CHECK:         %[[Z:.*]] = moe.router_logits {{.*}} -> tensor<2x?x16xf32>
// CHECK:         %[[G:.*]] = moe.adjacency_gate ins(%[[Z]], %{{.*}} : tensor<2x?x16xf32>, tensor<16x16xf32>)
// CHECK:         moe.topk_renorm ins(%[[G]] : tensor<2x?x16xf32>)
func.func @goes_on_through_a_chain(
    %h: tensor<2x?x8xf32>, %w: tensor<16x8xf32>, %a: tensor<16x16xf32>,
    %z0: tensor<2x?x16xf32>, %s0: tensor<?x16xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> tensor<?x2xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<2x?x8xf32>, tensor<16x8xf32>)
      outs(%z0 : tensor<2x?x16xf32>) -> tensor<2x?x16xf32>
  %p = tensor.collapse_shape %z [[0, 1], [2]] : tensor<2x?x16xf32> into tensor<?x16xf32>
  %s = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
      outs(%s0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %g, %i = moe.topk_renorm ins(%s : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g : tensor<?x2xf32>
}

// -----

// Experts are not rows: joining them changes what is selected.

// CHECK-LABEL: func @keeps_joined_experts
// CHECK:         %[[P:.*]] = tensor.collapse_shape
// CHECK:         moe.topk_renorm ins(%[[P]] : tensor<?x16xf32>)
func.func @keeps_joined_experts(
    %x: tensor<?x4x4xf32>, %x0: tensor<?x4x4xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> tensor<?x2xf32> {
  %y = linalg.exp ins(%x : tensor<?x4x4xf32>) outs(%x0 : tensor<?x4x4xf32>) -> tensor<?x4x4xf32>
  %p = tensor.collapse_shape %y [[0], [1, 2]] : tensor<?x4x4xf32> into tensor<?x16xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g : tensor<?x2xf32>
}

// -----

// Nothing is gained where the reshape is of an argument.

// CHECK-LABEL: func @keeps_reshapes_of_arguments
// CHECK:         %[[Z:.*]] = tensor.collapse_shape
// CHECK:         moe.topk_renorm ins(%[[Z]]
func.func @keeps_reshapes_of_arguments(
    %x: tensor<2x?x16xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %z = tensor.collapse_shape %x [[0, 1], [2]] : tensor<2x?x16xf32> into tensor<?x16xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g : tensor<?x2xf32>
}
