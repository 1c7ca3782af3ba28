// RUN: %moe-opt %s --one-shot-bufferize="bufferize-function-boundaries function-boundary-type-conversion=identity-layout-map" | FileCheck %s

// Results live in the buffers of their destinations; nothing is copied.

// CHECK-LABEL: func @writes_into_the_destinations
// CHECK-SAME:    %[[Z:[^:]*]]: memref<?x64xf32>, %[[MASK:[^:]*]]: memref<?xi1>, %[[G:[^:]*]]: memref<?x8xf32>, %[[I:[^:]*]]: memref<?x8xi32>
// CHECK-NOT:     memref.copy
// CHECK-NOT:     memref.alloc
// CHECK:         moe.topk_renorm ins(%[[Z]] : memref<?x64xf32>) mask(%[[MASK]] : memref<?xi1>) outs(%[[G]], %[[I]] : memref<?x8xf32>, memref<?x8xi32>)
// CHECK:         return %[[G]], %[[I]]
func.func @writes_into_the_destinations(
    %z: tensor<?x64xf32>, %mask: tensor<?xi1>, %g0: tensor<?x8xf32>,
    %i0: tensor<?x8xi32>) -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>) mask(%mask : tensor<?xi1>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// What a destination held does not matter, so a destination that is still read
// elsewhere costs a buffer but no copy.

// CHECK-LABEL: func @does_not_copy_what_it_overwrites
// CHECK-SAME:    %[[H:[^:]*]]: memref<5x8xf32>, %[[W:[^:]*]]: memref<4x8xf32>, %[[INIT:[^:]*]]: memref<5x4xf32>
// CHECK:         %[[NEW:.*]] = memref.alloc
// CHECK-NOT:     memref.copy
// CHECK:         moe.router_logits ins(%[[H]], %[[W]] : {{.*}}) outs(%[[NEW]] :
// CHECK:         return %[[NEW]], %[[INIT]]
func.func @does_not_copy_what_it_overwrites(
    %h: tensor<5x8xf32>, %w: tensor<4x8xf32>, %init: tensor<5x4xf32>)
    -> (tensor<5x4xf32>, tensor<5x4xf32>) {
  %z = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%init : tensor<5x4xf32>) -> tensor<5x4xf32>
  return %z, %init : tensor<5x4xf32>, tensor<5x4xf32>
}

// The update reads all of `a` for each element that it writes: not in place.

// CHECK-LABEL: func @does_not_update_the_operand_it_reads
// CHECK-SAME:    %[[A:[^:]*]]: memref<16x16xf32>
// CHECK:         %[[NEW:.*]] = memref.alloc
// CHECK:         moe.adjacency_update ins(%[[A]], %{{.*}} : {{.*}}) outs(%[[NEW]] :
// CHECK:         return %[[NEW]]
func.func @does_not_update_the_operand_it_reads(
    %a: tensor<16x16xf32>, %i: tensor<?x2xi32>) -> tensor<16x16xf32> {
  %new = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<?x2xi32>)
      outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %new : tensor<16x16xf32>
}

// CHECK-LABEL: func @bufferizes_every_destination
// CHECK:         moe.attention_posterior ins(%{{.*}} : memref<1x4x?x16xf32>, memref<1x4x?x16xf32>, memref<1x?x64xf32>, memref<1x?x8xf32>)
// CHECK-SAME:      means(%{{.*}} : memref<1x4x?x64xf32>)
// CHECK-SAME:      outs(%{{.*}} : memref<1x?x8xf32>, memref<1xi32>, memref<1x1x?xf32>, memref<1x1x?xf32>)
// CHECK:         moe.similarity_inform ins(%{{.*}} : memref<1x?x64xf32>, memref<1x?x8xf32>)
// CHECK:         moe.softmax_mix ins(%{{.*}} : memref<1x4x?x16xf32>, memref<1x4x?x16xf32>)
// CHECK:         moe.mad_dispersion
// CHECK:         moe.adjacency_gate
// CHECK-NOT:     tensor<
func.func @bufferizes_every_destination(
    %q: tensor<1x4x?x16xf32>, %u: tensor<1x?x64xf32>, %e: tensor<1x?x8xf32>,
    %vp: tensor<1x4x?x64xf32>, %h: tensor<?x8xf32>, %assign: tensor<?xi32>,
    %a: tensor<8x8xf32>, %p0: tensor<1x?x8xf32>, %head: tensor<1xi32>,
    %l1: tensor<1x1x?xf32>, %l2: tensor<1x1x?xf32>, %p1: tensor<1x?x8xf32>,
    %l3: tensor<1x?xf32>, %l4: tensor<1x4x?xf32>, %s0: tensor<8x8xf32>,
    %m0: tensor<8x8xf32>, %c0: tensor<8xi32>, %g0: tensor<1x?x8xf32>)
    -> (tensor<1x?x8xf32>, tensor<1x4x?xf32>, tensor<8x8xf32>) {
  %p:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>,
          tensor<1x?x64xf32>, tensor<1x?x8xf32>)
      means(%vp : tensor<1x4x?x64xf32>)
      outs(%p0, %head, %l1, %l2 : tensor<1x?x8xf32>, tensor<1xi32>,
           tensor<1x1x?xf32>, tensor<1x1x?xf32>)
      -> tensor<1x?x8xf32>, tensor<1xi32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>
  %m:2 = moe.similarity_inform
      ins(%u, %p#0 : tensor<1x?x64xf32>, tensor<1x?x8xf32>)
      outs(%p1, %l3 : tensor<1x?x8xf32>, tensor<1x?xf32>)
      -> tensor<1x?x8xf32>, tensor<1x?xf32>
  %l = moe.softmax_mix ins(%q, %q : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>)
      outs(%l4 : tensor<1x4x?xf32>) -> tensor<1x4x?xf32>
  %s:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x8xf32>, tensor<?xi32>)
      outs(%s0, %m0, %c0 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xi32>)
      -> tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xi32>
  %g = moe.adjacency_gate ins(%m#0, %a : tensor<1x?x8xf32>, tensor<8x8xf32>)
      outs(%g0 : tensor<1x?x8xf32>) -> tensor<1x?x8xf32>
  return %g, %l, %s#0 : tensor<1x?x8xf32>, tensor<1x4x?xf32>, tensor<8x8xf32>
}

// CHECK-LABEL: func @bufferizes_every_kind_of_logits
// CHECK:         moe.dispersion_weights ins(%{{.*}} : memref<4x8xf32>, memref<4xi32>) outs(%{{.*}} : memref<4x8xf32>)
// CHECK:         moe.ac_logits ins(%{{.*}} : memref<?x8xf32>, memref<4x8xf32>, memref<?x2xi32>, memref<4x8xf32>)
// CHECK-SAME:      gates(%{{.*}} : memref<?x2xf32>) outs(%{{.*}} : memref<?x4xf32>)
// CHECK:         moe.cosine_logits ins(%{{.*}} : memref<?x8xf32>, memref<4x8xf32>)
// CHECK:         moe.hyper_router ins(%{{.*}} : memref<8xf32>,
// CHECK-SAME:      outs(%{{.*}} : memref<4x8xf32>, memref<4xf32>)
// CHECK:         moe.attention_entropy ins(%{{.*}} : memref<1x4x?x16xf32>, memref<1x4x?x16xf32>)
// CHECK-SAME:      outs(%{{.*}} : memref<1x4xf32>, memref<1x4x?xf32>)
// CHECK-NOT:     tensor<
func.func @bufferizes_every_kind_of_logits(
    %h: tensor<?x8xf32>, %emb: tensor<4x8xf32>, %count: tensor<4xi32>,
    %idx: tensor<?x2xi32>, %gates: tensor<?x2xf32>, %e: tensor<8xf32>,
    %w1: tensor<5x8xf32>, %b1: tensor<5xf32>, %w2: tensor<36x5xf32>,
    %b2: tensor<36xf32>, %q: tensor<1x4x?x16xf32>, %m0: tensor<4x8xf32>,
    %z0: tensor<?x4xf32>, %z1: tensor<?x4xf32>, %w0: tensor<4x8xf32>,
    %b0: tensor<4xf32>, %mean: tensor<1x4xf32>, %rows: tensor<1x4x?xf32>)
    -> (tensor<?x4xf32>, tensor<?x4xf32>, tensor<4x8xf32>, tensor<1x4xf32>) {
  %m = moe.dispersion_weights ins(%emb, %count : tensor<4x8xf32>, tensor<4xi32>)
      outs(%m0 : tensor<4x8xf32>) -> tensor<4x8xf32>
  %z = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<?x8xf32>, tensor<4x8xf32>,
          tensor<?x2xi32>, tensor<4x8xf32>)
      gates(%gates : tensor<?x2xf32>) outs(%z0 : tensor<?x4xf32>)
      -> tensor<?x4xf32>
  %c = moe.cosine_logits ins(%h, %emb : tensor<?x8xf32>, tensor<4x8xf32>)
      outs(%z1 : tensor<?x4xf32>) -> tensor<?x4xf32>
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<8xf32>, tensor<5x8xf32>,
          tensor<5xf32>, tensor<36x5xf32>, tensor<36xf32>)
      outs(%w0, %b0 : tensor<4x8xf32>, tensor<4xf32>)
      -> tensor<4x8xf32>, tensor<4xf32>
  %a, %r = moe.attention_entropy
      ins(%q, %q : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>)
      outs(%mean, %rows : tensor<1x4xf32>, tensor<1x4x?xf32>)
      -> tensor<1x4xf32>, tensor<1x4x?xf32>
  return %z, %c, %w, %a
      : tensor<?x4xf32>, tensor<?x4xf32>, tensor<4x8xf32>, tensor<1x4xf32>
}
