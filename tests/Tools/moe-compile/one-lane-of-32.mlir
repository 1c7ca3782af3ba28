// RUN: moe-compile %s --target=cpu --cpu=x86-64-v4 --emit=llvm -o %t && FileCheck %s < %t

// LLVM's masked store of one lane that is cut to 32 bits would write 64.

// CHECK-LABEL: define {{.*}}@{{.*}}f
// CHECK-NOT:     call void @llvm.masked.store
// CHECK:         extractelement <8 x i32>
// CHECK-NEXT:    store i32
// CHECK-NOT:     call void @llvm.masked.store
func.func @f(%x: tensor<8xi64>, %init: tensor<8xi32>) -> tensor<8xi32> {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0 : i64
  %mask = arith.constant dense<[true, false, false, false, false, false, false, false]> : vector<8xi1>
  %wide = vector.transfer_read %x[%c0], %pad {in_bounds = [true]} : tensor<8xi64>, vector<8xi64>
  %v = arith.trunci %wide : vector<8xi64> to vector<8xi32>
  %r = vector.transfer_write %v, %init[%c0], %mask {in_bounds = [true]} : vector<8xi32>, tensor<8xi32>
  return %r : tensor<8xi32>
}
