// RUN: %moe-opt %s --canonicalize | FileCheck %s
// RUN: %moe-opt %s --canonicalize --canonicalize | FileCheck %s

// Groups that are all kept restrict nothing. They do order the choice by s
// instead of x, which is the same order wherever s does not saturate.

// CHECK-LABEL: func @forgets_groups_that_are_all_kept
// CHECK:         moe.topk_renorm
// CHECK-NOT:       group
func.func @forgets_groups_that_are_all_kept(
    %z: tensor<?x64xf32>, %gates: tensor<?x8xf32>, %indices: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%gates, %indices : tensor<?x8xf32>, tensor<?x8xi32>)
      {n_group = 4 : i64, topk_group = 4 : i64,
       group_score = #moe.group_score<max>}
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// CHECK-LABEL: func @keeps_groups_that_restrict
// CHECK:         moe.topk_renorm
// CHECK-SAME:      n_group = 4 : i64, topk_group = 3 : i64
func.func @keeps_groups_that_restrict(
    %z: tensor<?x64xf32>, %gates: tensor<?x8xf32>, %indices: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%gates, %indices : tensor<?x8xf32>, tensor<?x8xi32>)
      {n_group = 4 : i64, topk_group = 3 : i64}
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// On tensors an op has no effects, so one that nobody uses goes.

// CHECK-LABEL: func @drops_an_unused_op
// CHECK-NOT:     moe.
func.func @drops_an_unused_op(%a: tensor<4x4xf32>, %i: tensor<?x2xi32>) {
  %unused = moe.adjacency_update ins(%a, %i : tensor<4x4xf32>, tensor<?x2xi32>)
      outs(%a : tensor<4x4xf32>) -> tensor<4x4xf32>
  return
}

// On buffers it writes, so it stays.

// CHECK-LABEL: func @keeps_an_op_on_buffers
// CHECK:         moe.adjacency_update
func.func @keeps_an_op_on_buffers(%a: memref<4x4xf32>, %i: memref<?x2xi32>) {
  moe.adjacency_update ins(%a, %i : memref<4x4xf32>, memref<?x2xi32>)
      outs(%a : memref<4x4xf32>)
  return
}
