// RUN: %moe-opt %s --moe-decompose-for-gpu --remarks-filter-missed='moe-.*' -o %t 2>&1 | FileCheck %s

// A form that the kernel of its op refuses is decomposed, and a remark says
// what the kernel wants.

// CHECK: remark: [Missed] DecomposeForGPU | Category:moe-decompose-for-gpu
// CHECK-SAME: Reason="its kernel expects a static number of columns of the values, in at most 16 equal groups of at most 256; else memory grows with the queries times the keys: pad the values with zeros"
// CHECK-SAME: moe.softmax_mix runs as separate steps, with buffers between them
func.func @a_prime_number_of_columns(
    %q: tensor<1x1x?x8xf32>, %v: tensor<1x?x257xf32>,
    %mixed: tensor<1x1x?x257xf32>, %lse: tensor<1x1x?xf32>)
    -> tensor<1x1x?x257xf32> {
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x1x?x8xf32>, tensor<1x1x?x8xf32>)
      values(%v : tensor<1x?x257xf32>)
      outs(%mixed, %lse : tensor<1x1x?x257xf32>, tensor<1x1x?xf32>)
      -> tensor<1x1x?x257xf32>, tensor<1x1x?xf32>
  return %r#0 : tensor<1x1x?x257xf32>
}

// CHECK-NOT: remark
func.func @equal_groups_of_columns(
    %q: tensor<1x1x?x8xf32>, %v: tensor<1x?x512xf32>,
    %mixed: tensor<1x1x?x512xf32>, %lse: tensor<1x1x?xf32>)
    -> tensor<1x1x?x512xf32> {
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x1x?x8xf32>, tensor<1x1x?x8xf32>)
      values(%v : tensor<1x?x512xf32>)
      outs(%mixed, %lse : tensor<1x1x?x512xf32>, tensor<1x1x?xf32>)
      -> tensor<1x1x?x512xf32>, tensor<1x1x?xf32>
  return %r#0 : tensor<1x1x?x512xf32>
}

// Rows by priority would need a sort of the tokens first.

// CHECK: remark: [Missed] DecomposeForGPU | Category:moe-decompose-for-gpu
// CHECK-SAME: Reason="its kernel expects a static number of experts whose counts fit into a block, and rows in the order of the assignments, not by priority or by gates"
// CHECK-SAME: moe.dispatch runs as separate steps, with buffers between them
func.func @by_priority(
    %ids: tensor<?x2xi32>, %priority: tensor<?xf32>, %slots: tensor<?x2xi32>,
    %offsets: tensor<9xi32>, %counts: tensor<8xi32>) -> tensor<?x2xi32> {
  %r:3 = moe.dispatch ins(%ids : tensor<?x2xi32>) priority(%priority : tensor<?xf32>)
      outs(%slots, %offsets, %counts : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {drop = #moe.drop<priority>}
      -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
  return %r#0 : tensor<?x2xi32>
}

// CHECK-NOT: remark
func.func @in_order(
    %ids: tensor<?x2xi32>, %gates: tensor<?x2xf32>, %slots: tensor<?x2xi32>,
    %offsets: tensor<9xi32>, %counts: tensor<8xi32>) -> tensor<?x2xi32> {
  %r:3 = moe.dispatch ins(%ids : tensor<?x2xi32>) gates(%gates : tensor<?x2xf32>)
      outs(%slots, %offsets, %counts : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {drop = #moe.drop<probs>}
      -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
  return %r#0 : tensor<?x2xi32>
}
