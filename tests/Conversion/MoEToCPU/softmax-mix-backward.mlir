// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

// Keys are packed for blocks of queries; products of features and of values
// are register tiles, and no buffer has queries times keys elements.

// CHECK-LABEL: func @queries_meet_blocks_of_keys
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<40x64xf32>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<64x48xf32>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<96x48xf32>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<6x64xf32>
// CHECK-NOT:     memref.alloc(
// CHECK-COUNT-24: math.fma
// CHECK:         math.exp
// CHECK-COUNT-24: math.fma
// CHECK-NOT:     moe.
func.func @queries_meet_blocks_of_keys(%q: memref<1x1x?x40xf32>, %k: memref<1x1x?x40xf32>,
    %l: memref<1x1x?xf32>, %v: memref<1x?x5xf32>, %dm: memref<1x1x?x5xf32>,
    %dq: memref<1x1x?x40xf32>) {
  moe.softmax_mix_backward_dq
      ins(%q, %k, %l, %l : memref<1x1x?x40xf32>, memref<1x1x?x40xf32>,
          memref<1x1x?xf32>, memref<1x1x?xf32>)
      values(%v, %dm : memref<1x?x5xf32>, memref<1x1x?x5xf32>)
      outs(%dq : memref<1x1x?x40xf32>)
  return
}

// -----

// Under a causal mask the last queries of a block must reach the group of keys,
// where the other sweep asks whether its last query reaches the block.

// CHECK-LABEL: func @keys_skip_earlier_queries
// CHECK:         arith.cmpi sge
// CHECK-NEXT:    scf.if
// CHECK:         math.fma
// CHECK-LABEL: func @queries_skip_later_keys
// CHECK:         arith.cmpi sle
// CHECK-NEXT:    scf.if
// CHECK:         math.fma
func.func @keys_skip_earlier_queries(%q: memref<1x1x?x16xf32>, %k: memref<1x1x?x16xf32>,
    %l: memref<1x1x?xf32>, %dk: memref<1x1x?x16xf32>) {
  moe.softmax_mix_backward_dkv
      ins(%q, %k, %l, %l : memref<1x1x?x16xf32>, memref<1x1x?x16xf32>,
          memref<1x1x?xf32>, memref<1x1x?xf32>)
      outs(%dk : memref<1x1x?x16xf32>) {visibility = #moe.visibility<causal>}
  return
}
func.func @queries_skip_later_keys(%q: memref<1x1x?x16xf32>, %k: memref<1x1x?x16xf32>,
    %l: memref<1x1x?xf32>, %dq: memref<1x1x?x16xf32>) {
  moe.softmax_mix_backward_dq
      ins(%q, %k, %l, %l : memref<1x1x?x16xf32>, memref<1x1x?x16xf32>,
          memref<1x1x?xf32>, memref<1x1x?xf32>)
      outs(%dq : memref<1x1x?x16xf32>) {visibility = #moe.visibility<causal>}
  return
}

// -----

// Tokens that mix with themselves: splits of rows run in parallel, and one
// product of features serves both roles, each with its own weights. Their
// gradients go to the rows, and to the columns of rows before them.

// CHECK-LABEL: func @tokens_meet_in_both_roles
// CHECK:         %[[SUMS:.*]] = memref.alloc(%{{.*}}) {alignment = 64 : i64} : memref<?x48xf32>
// CHECK:         scf.forall
// CHECK-COUNT-24: math.fma
// CHECK:         scf.if
// CHECK-COUNT-24: math.exp
// CHECK:         scf.if
// CHECK-COUNT-24: math.exp
// CHECK-NOT:     math.exp
// CHECK:         scf.forall
// CHECK:         memref.dealloc %[[SUMS]]
func.func @tokens_meet_in_both_roles(%u: memref<1x1x?x40xf32>, %l: memref<1x1x?xf32>,
    %v: memref<1x?x5xf32>, %dm: memref<1x1x?x5xf32>, %du: memref<1x1x?x40xf32>,
    %dv: memref<1x1x?x5xf32>) {
  moe.softmax_mix_backward_self
      ins(%u, %l, %l, %v, %dm : memref<1x1x?x40xf32>, memref<1x1x?xf32>,
          memref<1x1x?xf32>, memref<1x?x5xf32>, memref<1x1x?x5xf32>)
      outs(%du, %dv : memref<1x1x?x40xf32>, memref<1x1x?x5xf32>) {visibility = #moe.visibility<causal>}
  return
}

// -----

// Where all see all, lse near to each other are one: a pair has one weight, and
// else one in each role. Whole vectors of f32 are summed where they lie, into
// the gradient itself where its blocks are whole.

// CHECK-LABEL: func @near_lse_share_exponentials
// CHECK-NOT:     memref<192x48xf32>
// CHECK:         scf.forall
// CHECK:           arith.select %{{.*}} : memref<?x48xf32, strided<[48, 1], offset: ?>>
// CHECK:           scf.for
// CHECK:           %[[FACTOR:.*]] = math.exp
// CHECK:           arith.select %[[NEAR:.*]], %[[FACTOR]],
// CHECK-COUNT-24:  math.fma
// CHECK:           scf.if %[[NEAR]]
// CHECK-COUNT-24:  math.exp
// CHECK-NOT:       math.exp
// CHECK:           } else {
// CHECK-COUNT-48:  math.exp
// CHECK-NOT:       math.exp
// CHECK:         scf.forall
func.func @near_lse_share_exponentials(%u: memref<1x1x?x48xf32>, %l: memref<1x1x?xf32>,
    %v: memref<1x?x5xf32>, %dm: memref<1x1x?x5xf32>, %du: memref<1x1x?x48xf32>,
    %dv: memref<1x1x?x5xf32>) {
  moe.softmax_mix_backward_self
      ins(%u, %l, %l, %v, %dm : memref<1x1x?x48xf32>, memref<1x1x?xf32>,
          memref<1x1x?xf32>, memref<1x?x5xf32>, memref<1x1x?x5xf32>)
      outs(%du, %dv : memref<1x1x?x48xf32>, memref<1x1x?x5xf32>)
  return
}

// -----

// Sizes that are known only at run time, and large ones, stay off the stack.

// CHECK-LABEL: func @large_buffers_are_freed
// CHECK:         %[[BUFFER:.*]] = memref.alloc(%{{.*}}) {alignment = 64 : i64} : memref<?x64xf32>
// CHECK:         math.fma
// CHECK:         memref.dealloc %[[BUFFER]]
func.func @large_buffers_are_freed(%q: memref<1x1x?x?xf32>, %k: memref<1x1x?x?xf32>,
    %l: memref<1x1x?xf32>, %dq: memref<1x1x?x?xf32>) {
  moe.softmax_mix_backward_dq
      ins(%q, %k, %l, %l : memref<1x1x?x?xf32>, memref<1x1x?x?xf32>,
          memref<1x1x?xf32>, memref<1x1x?xf32>)
      outs(%dq : memref<1x1x?x?xf32>)
  return
}

// -----

// CHECK-LABEL: func @a_selection_adds_to_its_experts
// CHECK:         scf.for
// CHECK-NOT:     moe.
// CHECK:           memref.store
func.func @a_selection_adds_to_its_experts(%g: memref<?x2xf32>, %i: memref<?x2xi32>,
    %x: memref<?x8xf32>, %dx: memref<?x8xf32>) {
  moe.topk_renorm_backward ins(%g, %g, %i : memref<?x2xf32>, memref<?x2xf32>, memref<?x2xi32>)
      scores(%x : memref<?x8xf32>) outs(%dx : memref<?x8xf32>) {renorm = false}
  return
}
