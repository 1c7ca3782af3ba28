// RUN: moe-compile %s --target=cpu --cpu=skylake-avx512 --emit=asm -o %t && FileCheck %s < %t

// The last of 33 columns is stored as 16 bits: LLVM's masked store of one lane
// wrote 32, over the beginning of the next row, or behind the last.

// CHECK-LABEL: f_parallel:
// CHECK-NOT:     movl {{.*}}, (%r
// CHECK:         {{movw|vpextrw}} {{.*}}(%r
// CHECK-NOT:     movl {{.*}}, (%r
// CHECK:         .size f_parallel
func.func @f(%rows: tensor<?x33xbf16>, %gates: tensor<?x2xf32>, %slots: tensor<?x2xi32>) -> tensor<?x33xbf16> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %gates, %c0 : tensor<?x2xf32>
  %init = tensor.empty(%n) : tensor<?x33xbf16>
  %y = moe.combine ins(%rows, %gates, %slots : tensor<?x33xbf16>, tensor<?x2xf32>, tensor<?x2xi32>)
      outs(%init : tensor<?x33xbf16>) -> tensor<?x33xbf16>
  return %y : tensor<?x33xbf16>
}
