// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s
// RUN: %moe-opt %s --convert-moe-to-cpu=bf16-dot --split-input-file \
// RUN:   | FileCheck %s --check-prefix=PAIRS

// A block of 64 keys is packed transposed; 6 queries x 4 vectors are
// accumulated in registers. No buffer has queries times keys elements.

// CHECK-LABEL: func @mixes_with_a_register_tile
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<40x64xf32>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<6x64xf32>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<192x16xf32>
// CHECK-NOT:     memref.alloc(
// CHECK:         scf.for {{.*}} -> ({{(vector<16xf32>(, )?)+}})
// CHECK-COUNT-24: math.fma
// CHECK:         math.exp
// CHECK-NOT:     moe.
func.func @mixes_with_a_register_tile(%q: memref<1x1x?x40xf32>, %k: memref<1x1x?x40xf32>,
    %v: memref<1x?x5xf32>, %o: memref<1x1x?x5xf32>, %l: memref<1x1x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<1x1x?x40xf32>, memref<1x1x?x40xf32>)
      values(%v : memref<1x?x5xf32>) outs(%o, %l : memref<1x1x?x5xf32>, memref<1x1x?xf32>)
  return
}

// -----

// Wide features are taken in pieces. The rows of the next group and its share of
// the next columns, six and two, are asked for a line of features at a time, beside
// the loop of multiply-adds and not in it.

// CHECK-LABEL: func @asks_ahead_beside_the_loop
// CHECK:         scf.for {{.*}} -> ({{(vector<16xf32>(, )?)+}})
// CHECK-COUNT-8:   memref.prefetch {{.*}}, read, locality<3>, data : memref<?x160xf32
// CHECK-NOT:       memref.prefetch
// CHECK:           scf.for {{.*}} -> ({{(vector<16xf32>(, )?)+}})
// CHECK-NOT:         memref.prefetch
// CHECK-COUNT-24:    math.fma
// CHECK-NOT:         memref.prefetch
// CHECK:             scf.yield
func.func @asks_ahead_beside_the_loop(%q: memref<1x1x?x160xf32>, %k: memref<1x1x?x160xf32>,
    %l: memref<1x1x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<1x1x?x160xf32>, memref<1x1x?x160xf32>)
      outs(%l : memref<1x1x?xf32>)
  return
}

// -----

// Groups of queries that see no key of a block skip it.

// CHECK-LABEL: func @skips_invisible_blocks
// CHECK:         arith.cmpi sle
// CHECK-NEXT:    scf.if
// CHECK:         math.fma
func.func @skips_invisible_blocks(%q: memref<1x1x?x16xf32>, %k: memref<1x1x?x16xf32>,
    %l: memref<1x1x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<1x1x?x16xf32>, memref<1x1x?x16xf32>)
      outs(%l : memref<1x1x?xf32>) {visibility = #moe.visibility<causal>}
  return
}

// -----

// So do those from which a bias hides all of it; a block that no group sees is
// not even packed.

// CHECK-LABEL: func @skips_blocks_that_a_bias_hides
// CHECK:         memref.alloca() {{.*}} : memref<192xi1>
// CHECK-COUNT-24: arith.cmpf une
// CHECK:         %[[SEEN:.*]] = vector.reduction <or>
// CHECK:         memref.store %[[SEEN]]
// CHECK:         scf.if
// CHECK:           memref.load {{.*}} : memref<192xi1>
// CHECK-NEXT:      scf.if
// CHECK:             math.fma
func.func @skips_blocks_that_a_bias_hides(%q: memref<1x1x?x16xf32>, %k: memref<1x1x?x16xf32>,
    %b: memref<1x1x?x?xf32>, %l: memref<1x1x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<1x1x?x16xf32>, memref<1x1x?x16xf32>)
      bias(%b : memref<1x1x?x?xf32>) outs(%l : memref<1x1x?xf32>)
  return
}

// -----

// Values of bf16 lie in pairs of keys where the target multiplies these, and so
// do weights. Other targets take both in f32.

// PAIRS-LABEL: func @pairs_of_values
// PAIRS-DAG:     memref.alloca() {{.*}} : memref<8x64xi32>
// PAIRS-DAG:     memref.alloca() {{.*}} : memref<32x16xi32>
// PAIRS-DAG:     %[[WEIGHTS:.*]] = memref.alloca() {{.*}} : memref<6x64xbf16>
// PAIRS-COUNT-24: avx512bf16.dpbf16ps
// PAIRS-COUNT-24: arith.truncf {{.*}} : vector<16xf32> to vector<16xbf16>
// PAIRS:         vector.load %[[WEIGHTS]][{{.*}}] : memref<6x64xbf16>, vector<2xbf16>
// PAIRS:         avx512bf16.dpbf16ps

// CHECK-LABEL: func @pairs_of_values
// CHECK:         memref.alloca() {{.*}} : memref<6x64xf32>
func.func @pairs_of_values(%q: memref<1x1x?x16xbf16>, %k: memref<1x1x?x16xbf16>,
    %v: memref<1x1x?x16xbf16>, %o: memref<1x1x?x16xf32>, %l: memref<1x1x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<1x1x?x16xbf16>, memref<1x1x?x16xbf16>)
      values(%v : memref<1x1x?x16xbf16>)
      outs(%o, %l : memref<1x1x?x16xf32>, memref<1x1x?xf32>)
  return
}

// -----

// Sizes that are known only at run time come from the stack of one call.

// CHECK-LABEL: func @scopes_dynamic_buffers
// CHECK:         memref.alloca_scope
// CHECK:           memref.alloca(%{{.*}}) {alignment = 64 : i64} : memref<?x64xf32>
func.func @scopes_dynamic_buffers(%q: memref<1x1x?x?xf32>, %k: memref<1x1x?x?xf32>,
    %l: memref<1x1x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<1x1x?x?xf32>, memref<1x1x?x?xf32>)
      outs(%l : memref<1x1x?xf32>)
  return
}

// -----

// Tokens that mix with themselves: a tile's logits go to its six rows (with one
// exponential for what all six held before), and, kept for a block of rows, to
// its columns at once; then splits are merged.

// CHECK-LABEL: func @each_pair_meets_once
// CHECK:         memref.alloc(%{{.*}}) {alignment = 64 : i64} : memref<?x16x64xf32>
// CHECK:         scf.forall
// CHECK:           memref.alloca() {alignment = 64 : i64} : memref<96x64xf32>
// CHECK-COUNT-24:  math.fma
// CHECK-COUNT-25:  math.exp
// CHECK-COUNT-8:   math.exp
// CHECK-NOT:       math.exp
// CHECK:         scf.forall
// CHECK-NEXT:      memref.alloca() {alignment = 64 : i64} : memref<8x16xf32>
// CHECK:           math.log
func.func @each_pair_meets_once(%u: memref<1x1x?x16xf32>, %v: memref<1x?x5xf32>,
    %p: memref<1x1x?x5xf32>, %l: memref<1x1x?xf32>) {
  moe.softmax_mix_self ins(%u, %v : memref<1x1x?x16xf32>, memref<1x?x5xf32>)
      outs(%p, %l : memref<1x1x?x5xf32>, memref<1x1x?xf32>)
  return
}
