// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8 vector-registers=16 byte-pairs" --split-input-file | FileCheck %s
// RUN: %moe-opt %s --convert-moe-to-cpu="byte-pairs" --split-input-file | FileCheck %s --check-prefix=WIDE
// RUN: %moe-opt %s --convert-moe-to-cpu="int8-dot byte-pairs" --split-input-file | FileCheck %s --check-prefix=DOT

// CPUs without vpdpbusd multiply bytes in pairs, whose sums have 16 bits: those
// of a block of 32 codes of 4 bits fit, two products of 8 bits do not, and are
// those of integers of 16 bits. Of many rows the codes of some blocks are expanded once, and the
// totals lie in memory.

// CHECK-LABEL: func @int4
// Of one row and two vectors of columns:
// CHECK-COUNT-16: llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"
// CHECK-NOT:     "llvm.x86.avx2.pmadd.ub.sw"
// CHECK:         arith.addi {{.*}} : vector<16xi16>
// CHECK-NOT:     "llvm.x86.avx2.pmadd.ub.sw"
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%{{.*}}, %{{.*}}) : (vector<16xi16>
// CHECK-NOT:     moe.
// WIDE-LABEL: func @int4
// WIDE:         llvm.call_intrinsic "llvm.x86.avx512.pmaddubs.w.512"
// WIDE:         arith.addi {{.*}} : vector<32xi16>
// WIDE:         llvm.call_intrinsic "llvm.x86.avx512.pmaddw.d.512"
// WIDE-NOT:     moe.
// DOT-LABEL: func @int4
// DOT-NOT:     pmadd
// DOT:         llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
// DOT-NOT:     pmadd
func.func @int4(%x: memref<?x64xf32>, %w: memref<8x2x8x32x4xi8>, %offsets: memref<9xi32>,
                %scales: memref<8x2x2x32xf32>, %y: memref<?x64xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x64xf32>, memref<8x2x8x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x2x32xf32>) outs(%y : memref<?x64xf32>)
      {format = #moe.weight_format<int4>, group = 32 : i64, packed = 32 : i64,
       activations = #moe.activation_format<int8>}
  return
}

// -----

// CHECK-LABEL: func @int8
// CHECK-NOT:     "llvm.x86.avx2.pmadd.ub.sw"
// CHECK:         arith.trunci {{.*}} : vector<8xi32> to vector<8xi16>
// CHECK:         %[[EVEN:.*]] = arith.andi {{.*}} : vector<8xi32>
// CHECK:         %[[WORDS:.*]] = vector.bitcast %[[EVEN]] : vector<8xi32> to vector<16xi16>
// CHECK:         llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%[[WORDS]], %{{.*}})
// CHECK-NOT:     "llvm.x86.avx2.pmadd.ub.sw"
// WIDE-LABEL: func @int8
// WIDE-NOT:     "llvm.x86.avx512.pmaddubs.w.512"
// WIDE:         llvm.call_intrinsic "llvm.x86.avx512.pmaddw.d.512"
// DOT-LABEL: func @int8
// DOT:         llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
func.func @int8(%x: memref<?x64xf32>, %w: memref<8x2x16x32x4xi8>, %offsets: memref<9xi32>,
                %scales: memref<8x2x2x32xf32>, %y: memref<?x64xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x64xf32>, memref<8x2x16x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x2x32xf32>) outs(%y : memref<?x64xf32>)
      {format = #moe.weight_format<int8>, group = 32 : i64, packed = 32 : i64,
       activations = #moe.activation_format<int8>}
  return
}
