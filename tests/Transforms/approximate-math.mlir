// RUN: %moe-opt %s --moe-approximate-math --canonicalize | FileCheck %s --check-prefixes=CHECK,ADDED
// RUN: %moe-opt %s --moe-approximate-math=scalef --canonicalize | FileCheck %s --check-prefixes=CHECK,SCALED

// n is rounded by a float whose last bits are integers; the polynomial ends in
// 1 + r (1 + ..), so that exp(0) is 1.

// CHECK-LABEL: func @exp_of_a_register
// CHECK-DAG:     %[[ROUNDER:.*]] = arith.constant dense<0x4B400000> : vector<16xf32>
// CHECK-DAG:     %[[ONE:.*]] = arith.constant dense<1.000000e+00> : vector<16xf32>
// CHECK:         %[[T:.*]] = math.fma %[[X:.*]], %{{.*}}, %[[ROUNDER]]
// CHECK:         %[[N:.*]] = arith.subf %[[T]], %[[ROUNDER]]
// CHECK:         %[[HIGH:.*]] = math.fma %[[N]], %{{.*}}, %[[X]]
// CHECK:         %[[R:.*]] = math.fma %[[N]], %{{.*}}, %[[HIGH]]
// ADDED:         %[[POWER:.*]] = arith.shli
// CHECK:         %[[INNER:.*]] = math.fma %{{.*}}, %[[R]], %[[ONE]] :
// CHECK:         %[[POLYNOMIAL:.*]] = math.fma %[[INNER]], %[[R]], %[[ONE]] :

// Without the instruction, n is added to the exponent's bits: what is too small
// becomes 0, what is too large infinity, and NaN stays.

// ADDED-NOT:     llvm.call_intrinsic
// ADDED:         %[[BITS:.*]] = arith.bitcast %[[POLYNOMIAL]] : vector<16xf32> to vector<16xi32>
// ADDED:         arith.addi %[[BITS]], %[[POWER]]
// ADDED:         arith.cmpf olt
// ADDED:         arith.cmpf ugt

// SCALED:        llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"(%[[POLYNOMIAL]], %[[N]]
// CHECK:         return
func.func @exp_of_a_register(%x: vector<16xf32>) -> vector<16xf32> {
  %y = math.exp %x : vector<16xf32>
  return %y : vector<16xf32>
}

// The instruction is for 16 lanes.

// CHECK-LABEL: func @exp_of_others
// CHECK-NOT:     llvm.call_intrinsic
// CHECK-NOT:     math.exp
// CHECK:         return
func.func @exp_of_others(%x: vector<8xf32>, %y: f32, %z: vector<4x16xf32>)
    -> (vector<8xf32>, f32, vector<4x16xf32>) {
  %0 = math.exp %x : vector<8xf32>
  %1 = math.exp %y : f32
  %2 = math.exp %z : vector<4x16xf32>
  return %0, %1, %2 : vector<8xf32>, f32, vector<4x16xf32>
}

// In f32, whatever the type.

// CHECK-LABEL: func @exp_of_16_bit
// CHECK:         arith.extf
// CHECK-NOT:     math.exp
// CHECK:         arith.truncf
func.func @exp_of_16_bit(%x: bf16) -> bf16 {
  %y = math.exp %x : bf16
  return %y : bf16
}
