// RUN: %moe-opt %s --convert-moe-assert-to-cf | FileCheck %s

// CHECK-LABEL: func @message_without_values
// CHECK-SAME:    %[[INSIDE:.*]]: i1,
// CHECK-NEXT:    cf.assert %[[INSIDE]], "row {0}"
// CHECK-NEXT:    return
func.func @message_without_values(%inside: i1, %row: i64) {
  moe.assert <index> %inside, "row {0}" (%row : i64)
  return
}
