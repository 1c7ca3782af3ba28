// RUN: %moe-opt %s --moe-privatize-destinations --moe-tile-and-fuse --canonicalize --cse --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-privatize-destinations --moe-tile-and-fuse --moe-fuse-reductions --canonicalize --cse --canonicalize --split-input-file | FileCheck %s --check-prefix=COUNTED
// RUN: %moe-opt %s --moe-to-cpu --split-input-file | FileCheck %s --check-prefix=CPU

// A Symphony step (SymphonySMoE Algorithm 1): logits, softmax, mix over the
// expert graph, the selection from the mixed scores and the base selection that
// the graph learns from are one loop over tokens (docs/Spec.md 3.11 (c)). The
// co-selections are counted in it as well: what is left behind it is the graph
// itself, E x E. The base selection is never stored.

#row = affine_map<(d0, d1) -> (d0)>
#all = affine_map<(d0, d1) -> (d0, d1)>

// CHECK-LABEL: func @symphony_is_one_loop
// CHECK-NOT:     moe.
// CHECK-NOT:     linalg.generic
// CHECK:         %[[LOOP:.*]]:3 = scf.forall
// CHECK:           %[[Z:.*]] = moe.router_logits
// CHECK-NOT:       moe.router_logits
// CHECK-COUNT-4:   linalg.generic
// CHECK-NOT:       linalg.generic
// CHECK:           %[[G:.*]] = moe.adjacency_gate
// CHECK-DAG:       moe.topk_renorm ins(%[[G]]
// CHECK-DAG:       moe.topk_renorm ins(%[[Z]]
// CHECK:           scf.forall.in_parallel
// CHECK-NOT:     scf.forall
// CHECK:         moe.adjacency_update ins(%{{.*}}, %[[LOOP]]#{{[0-2]}} :

// COUNTED-LABEL: func @symphony_is_one_loop
// COUNTED-NOT:     moe.
// COUNTED:         %[[LOOP:.*]]:3 = scf.forall (%{{.*}}) = (0) to (%{{.*}}) step (%{{.*}}) shared_outs(%{{.*}}, %{{.*}}, %[[TABLES:.*]] = %{{.*}}) -> (tensor<?x2xf32>, tensor<?x2xi64>, tensor<?x16x16xi32>)
// COUNTED:           scf.for {{.*}} step %c64
// COUNTED:             %[[Z:.*]] = moe.router_logits
// COUNTED-COUNT-4:     linalg.generic
// COUNTED-DAG:         %[[G:.*]] = moe.adjacency_gate
// COUNTED-DAG:         moe.topk_renorm ins(%[[G]]
// COUNTED-DAG:         %[[BASE:.*]]:2 = moe.topk_renorm ins(%[[Z]]
// COUNTED:             moe.co_selections ins(%[[BASE]]#1
// COUNTED:           scf.forall.in_parallel
// COUNTED-NOT:     moe.
// COUNTED-NOT:     scf.forall
// COUNTED:         linalg.generic {{.*}} ins(%[[LOOP]]#2 : tensor<?x16x16xi32>)

// CPU-LABEL: llvm.func @symphony_is_one_loop(
// CPU:         llvm.call @moe_parallel_for
// CPU-NOT:     llvm.call @moe_parallel_for
// CPU:         llvm.return
func.func @symphony_is_one_loop(
    %h: tensor<?x352xf32>, %w: tensor<16x352xf32>, %a: tensor<16x16xf32>, %n: index)
    -> (tensor<?x2xf32>, tensor<?x2xi64>, tensor<16x16xf32>) {
  %lowest = arith.constant 0xFF800000 : f32
  %zero = arith.constant 0.0 : f32
  %e0 = tensor.empty(%n) : tensor<?x16xf32>
  %r0 = tensor.empty(%n) : tensor<?xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi64>
  %a0 = tensor.empty() : tensor<16x16xf32>
  %z = moe.router_logits ins(%h, %w : tensor<?x352xf32>, tensor<16x352xf32>)
      outs(%e0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %m0 = linalg.fill ins(%lowest : f32) outs(%r0 : tensor<?xf32>) -> tensor<?xf32>
  %m = linalg.generic {indexing_maps = [#all, #row], iterator_types = ["parallel", "reduction"]}
      ins(%z : tensor<?x16xf32>) outs(%m0 : tensor<?xf32>) {
  ^bb0(%x: f32, %acc: f32):
    %y = arith.maximumf %x, %acc : f32
    linalg.yield %y : f32
  } -> tensor<?xf32>
  %x = linalg.generic {indexing_maps = [#all, #row, #all], iterator_types = ["parallel", "parallel"]}
      ins(%z, %m : tensor<?x16xf32>, tensor<?xf32>) outs(%e0 : tensor<?x16xf32>) {
  ^bb0(%v: f32, %max: f32, %out: f32):
    %d = arith.subf %v, %max : f32
    %y = math.exp %d : f32
    linalg.yield %y : f32
  } -> tensor<?x16xf32>
  %s0 = linalg.fill ins(%zero : f32) outs(%r0 : tensor<?xf32>) -> tensor<?xf32>
  %s = linalg.generic {indexing_maps = [#all, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<?x16xf32>) outs(%s0 : tensor<?xf32>) {
  ^bb0(%v: f32, %acc: f32):
    %y = arith.addf %v, %acc : f32
    linalg.yield %y : f32
  } -> tensor<?xf32>
  %p = linalg.generic {indexing_maps = [#all, #row, #all], iterator_types = ["parallel", "parallel"]}
      ins(%x, %s : tensor<?x16xf32>, tensor<?xf32>) outs(%e0 : tensor<?x16xf32>) {
  ^bb0(%v: f32, %sum: f32, %out: f32):
    %y = arith.divf %v, %sum : f32
    linalg.yield %y : f32
  } -> tensor<?x16xf32>
  %g = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
      outs(%e0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %gates, %idx = moe.topk_renorm ins(%g : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi64>)
      {kind = #moe.score_kind<probs>, renorm = false} -> tensor<?x2xf32>, tensor<?x2xi64>
  %bg, %bi = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi64>) -> tensor<?x2xf32>, tensor<?x2xi64>
  %new = moe.adjacency_update ins(%a, %bi : tensor<16x16xf32>, tensor<?x2xi64>)
      outs(%a0 : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %gates, %idx, %new : tensor<?x2xf32>, tensor<?x2xi64>, tensor<16x16xf32>
}

// -----

// Logits that are returned as well are computed once and stored on the way.

// CHECK-LABEL: func @stores_logits_on_the_way
// CHECK:         scf.forall
// CHECK-COUNT-1:   moe.router_logits
// CHECK-NOT:       moe.router_logits
// CHECK:           moe.topk_renorm
// CHECK:           scf.forall.in_parallel
// CHECK-COUNT-3:     tensor.parallel_insert_slice
// CHECK-NOT:     scf.forall
func.func @stores_logits_on_the_way(
    %h: tensor<256x32xf32>, %w: tensor<64x32xf32>, %z0: tensor<256x64xf32>,
    %g0: tensor<256x8xf32>, %i0: tensor<256x8xi32>)
    -> (tensor<256x64xf32>, tensor<256x8xf32>, tensor<256x8xi32>) {
  %z = moe.router_logits ins(%h, %w : tensor<256x32xf32>, tensor<64x32xf32>)
      outs(%z0 : tensor<256x64xf32>) -> tensor<256x64xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<256x64xf32>)
      outs(%g0, %i0 : tensor<256x8xf32>, tensor<256x8xi32>)
      -> tensor<256x8xf32>, tensor<256x8xi32>
  return %z, %g, %i : tensor<256x64xf32>, tensor<256x8xf32>, tensor<256x8xi32>
}
