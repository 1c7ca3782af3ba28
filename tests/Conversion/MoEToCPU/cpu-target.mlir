// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=16" | FileCheck %s --check-prefixes=CHECK,WIDE
// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8 vector-registers=16 l2-bytes=524288" | FileCheck %s --check-prefixes=CHECK,NARROW
// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=16 l2-bytes=2097152" | FileCheck %s --check-prefixes=CHECK,LARGE
// RUN: %moe-opt %s --convert-moe-to-cpu="product-vectors=2 product-rows=4 product-panels=3" | FileCheck %s --check-prefixes=CHECK,TUNED

// What is packed of 256 ks is a quarter of the second cache: panels, ks,
// columns. A copy of rows has as many as a register tile.

// CHECK-LABEL: func @tiles_follow_registers_and_cache
// WIDE-DAG:      memref<4x256x64xf32>
// WIDE-DAG:      memref<6x256xf32>
// NARROW-DAG:    memref<8x256x16xf32>
// NARROW-DAG:    memref<6x256xf32>
// LARGE-DAG:     memref<8x256x64xf32>
// LARGE-DAG:     memref<6x256xf32>
// TUNED-DAG:     memref<3x256x32xf32>
// TUNED-DAG:     memref<4x256xf32>
func.func @tiles_follow_registers_and_cache(%a: memref<?x1024xf32>, %b: memref<1024x1024xf32>,
                                            %c: memref<?x1024xf32>) {
  linalg.matmul ins(%a, %b : memref<?x1024xf32>, memref<1024x1024xf32>)
      outs(%c : memref<?x1024xf32>)
  return
}

// Rows 2 KiB apart share half of the places of the first cache. They are copied
// where a panel of 256 ks by 16 columns stays there beside them. What is
// packed next is asked for until there is none of it left.

// CHECK-LABEL: func @copies_rows_that_crowd_out_a_panel
// WIDE-NOT:      memref<6x256xf32>
// NARROW:        memref<6x256xf32>
// LARGE-NOT:     memref<6x256xf32>
// CHECK:         arith.divui
// CHECK:         scf.if
// CHECK-NOT:       scf.for
// CHECK:           memref.prefetch {{.*}}, read, locality<2>, data : memref<512x512xf32>
func.func @copies_rows_that_crowd_out_a_panel(%a: memref<?x512xf32>, %b: memref<512x512xf32>,
                                              %c: memref<?x512xf32>) {
  linalg.matmul ins(%a, %b : memref<?x512xf32>, memref<512x512xf32>)
      outs(%c : memref<?x512xf32>)
  return
}
