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

// One k of AVX-512 takes four lines, which need no asking, nor loops of blocks.

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

// Rows of 16 bits are widened once for all panels. A row would wait for the sums
// of a panel of 16 columns, two ks of which share a line: one or two rows
// take two panels at once, one in each half of a group, and ask for nothing.

// CHECK-LABEL: func @widened
// CHECK:         %[[ALL:.*]] = memref.alloca() {{.*}} : memref<5x1024xf32>
// CHECK:         vector.store {{.*}}, %[[ALL]]
// CHECK:         %[[ARE_FEW:.*]] = arith.cmpi sle, %{{.*}}, %c2
// CHECK:         %[[PAIRS:.*]] = arith.select %[[ARE_FEW]]
// CHECK:         scf.for %{{.*}} = %c0{{.*}} to %[[PAIRS]]
// CHECK:           scf.index_switch
// CHECK-NEXT:      case 1 {
// CHECK-NOT:         memref.prefetch
// CHECK-NOT:         vector.store
// CHECK:             scf.for {{.*}} iter_args({{.*}}, {{.*}}, {{.*}}, {{.*}}) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>)
// CHECK-NOT:           memref.prefetch
// CHECK:               memref.load %[[ALL]]
// CHECK:               math.fma
// CHECK:         scf.index_switch
// CHECK-NEXT:    case 1 {
// CHECK:           memref.prefetch
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

// Where ks lie side by side, several chains of 256 ks are formed at once:
// four of one row, two of each of up to five. The last ks are no whole chain.

// CHECK-LABEL: func @k_contiguous
// CHECK:         %[[COPY:.*]] = memref.alloca() {{.*}} : memref<6x1024xf32>
// CHECK:         arith.cmpi sle, %{{.*}}, %c5
// CHECK:         scf.if
// CHECK:           scf.index_switch
// CHECK-NEXT:      case 1 {
// CHECK:             scf.for {{.*}} = %c0{{.*}} to %c1024{{.*}} step %c1024
// CHECK:               scf.for {{.*}} = %c0{{.*}} to %c256{{.*}} step %c8{{.*}} -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>)
// CHECK:             scf.for {{.*}} = %c1024{{.*}} to %c1280{{.*}} step %c256
// CHECK:               scf.for {{.*}} = %c0{{.*}} to %c256{{.*}} step %c8{{.*}} -> (vector<8xf32>)
// CHECK:           case 2 {
// CHECK:             scf.for {{.*}} = %c0{{.*}} to %c1024{{.*}} step %c512
// CHECK:         %[[BEGIN:.*]] = arith.select %{{.*}}, %c1280, %c0
// CHECK:         scf.for {{.*}} = %[[BEGIN]] to %c1288

// WIDE-LABEL: func @k_contiguous
// WIDE-NOT:     to %c1280
func.func @k_contiguous(%x: memref<?x1288xbf16>, %w: memref<8x64x1288xbf16>,
                       %offsets: memref<9xi64>, %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x1288xbf16>, memref<8x64x1288xbf16>, memref<9xi64>)
      outs(%y : memref<?x64xbf16>)
  return
}
