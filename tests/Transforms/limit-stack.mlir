// RUN: %moe-opt %s --allow-unregistered-dialect --pass-pipeline='builtin.module(func.func(moe-limit-stack{max-bytes=4096}))' | FileCheck %s

// The two smaller static buffers stay; a vector counts with all its lanes.
// CHECK-LABEL: func @keeps_what_fits
// CHECK-DAG:     memref.alloca() : memref<512xf32>
// CHECK-DAG:     memref.alloca() : memref<32xvector<16xf32>>
// CHECK:         %[[A:.*]] = memref.alloc() {alignment = 64 : i64} : memref<2x512xf32>
// CHECK:         "test.use"(%[[A]]
// CHECK-NEXT:    memref.dealloc %[[A]]
// CHECK-NEXT:    return
func.func @keeps_what_fits() {
  %a = memref.alloca() : memref<512xf32>
  %b = memref.alloca() : memref<32xvector<16xf32>>
  %c = memref.alloca() {alignment = 64 : i64} : memref<2x512xf32>
  "test.use"(%c, %a, %b) : (memref<2x512xf32>, memref<512xf32>, memref<32xvector<16xf32>>) -> ()
  return
}

// CHECK-LABEL: func @moves_dynamic_sizes
// CHECK:         scf.for
// CHECK:           %[[A:.*]] = memref.alloc(%{{.*}}) : memref<?xf32>
// CHECK-NEXT:      "test.use"(%[[A]])
// CHECK-NEXT:      memref.dealloc %[[A]]
func.func @moves_dynamic_sizes(%n: index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.for %i = %c0 to %n step %c1 {
    %a = memref.alloca(%n) : memref<?xf32>
    "test.use"(%a) : (memref<?xf32>) -> ()
  }
  return
}

// CHECK-LABEL: func @keeps_what_a_block_gives_away
// CHECK-NOT:     memref.alloc(
func.func @keeps_what_a_block_gives_away(%n: index, %flag: i1) {
  %a = scf.if %flag -> memref<?xf32> {
    %b = memref.alloca(%n) : memref<?xf32>
    scf.yield %b : memref<?xf32>
  } else {
    %b = memref.alloca(%n) : memref<?xf32>
    scf.yield %b : memref<?xf32>
  }
  "test.use"(%a) : (memref<?xf32>) -> ()
  return
}
