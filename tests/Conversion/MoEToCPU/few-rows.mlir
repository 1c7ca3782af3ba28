// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8 vector-registers=16" | FileCheck %s
// RUN: %moe-opt %s --convert-moe-to-cpu | FileCheck %s --check-prefix=WIDE

// Rows 4 KiB apart are copied where tiles of them follow each other. One tile
// reads them where they lie, and asks for its panel 64 places ahead, a line
// each, a block of 8 places at a time.

// CHECK-LABEL: func @few
// CHECK:         %[[COPY:.*]] = memref.alloca() {{.*}} : memref<6x256xf32>
// CHECK:         scf.index_switch
// CHECK:           vector.store {{.*}}, %[[COPY]]
// CHECK:         scf.index_switch
// CHECK-NEXT:    case 1 {
// CHECK-NOT:       %[[COPY]]
// CHECK:           scf.for %[[BLOCK:.*]] = %{{.*}} to %{{.*}} step %c8
// CHECK-COUNT-8:     memref.prefetch %arg1{{.*}}, read, locality<3>, data : memref<8x8x1024x16xf32>
// CHECK-NOT:         memref.prefetch
// CHECK:             scf.for
// CHECK:               memref.load %arg0
// CHECK:               math.fma

// A step of AVX-512 takes four lines, which need no asking, nor loops of blocks.

// WIDE-LABEL: func @few
// WIDE:         case 1 {
// WIDE-NOT:       memref.prefetch
// WIDE:           scf.for
// WIDE-NOT:       scf.for
// WIDE:             memref.load %arg0
// WIDE:             math.fma
func.func @few(%x: memref<?x1024xf32>, %w: memref<8x8x1024x16xf32>, %offsets: memref<9xi64>,
               %y: memref<?x128xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x1024xf32>, memref<8x8x1024x16xf32>, memref<9xi64>)
      outs(%y : memref<?x128xf32>) {packed = 16 : i64}
  return
}

// Rows of 16 bits are widened once for all panels.

// CHECK-LABEL: func @widened
// CHECK:         %[[ALL:.*]] = memref.alloca() {{.*}} : memref<5x1024xf32>
// CHECK:         vector.store {{.*}}, %[[ALL]]
// CHECK:         scf.index_switch
// CHECK-NEXT:    case 1 {
// CHECK-NOT:       vector.store
// CHECK:           memref.load %[[ALL]]
// CHECK:           math.fma
func.func @widened(%x: memref<?x1024xbf16>, %w: memref<8x8x512x16x2xbf16>, %offsets: memref<9xi64>,
                   %y: memref<?x128xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x1024xbf16>, memref<8x8x512x16x2xbf16>, memref<9xi64>)
      outs(%y : memref<?x128xbf16>) {packed = 16 : i64}
  return
}
