// RUN: %moe-opt %s --canonicalize | %moe-opt | FileCheck %s

// CHECK-LABEL: func @stays
// CHECK:         moe.assert <index> %{{.*}}, "row {0} of {1}"(%{{.*}}, %{{.*}} : i64, index)
// CHECK:         moe.assert <value> %{{.*}}, "expected an even number of tokens"
func.func @stays(%inside: i1, %row: i64, %rows: index) {
  moe.assert <index> %inside, "row {0} of {1}" (%row, %rows : i64, index)
  moe.assert <value> %inside, "expected an even number of tokens"
  return
}


// CHECK-LABEL: func @of_what_holds
// CHECK-NOT:     moe.assert
func.func @of_what_holds() {
  %true = arith.constant true
  moe.assert <zero_division> %true, "expected divisors other than 0"
  return
}
