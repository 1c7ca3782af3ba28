// RUN: %moe-opt %s --moe-erase-host-asserts --remarks-filter-missed='moe-erase-host-asserts' -o %t 2>&1 | FileCheck %s --check-prefix=REMARK
// RUN: FileCheck %s < %t

// REMARK: remark: [Missed] Assert | Category:moe-erase-host-asserts
// REMARK-SAME: not checked on a GPU: expected positive numbers

// CHECK-LABEL: func @program
// CHECK-NOT:     moe.assert <value>
// CHECK:         linalg.generic
// CHECK:           moe.assert <index>
func.func @program(%x: tensor<4xi64>, %positive: i1) -> tensor<4xi64> {
  %c0 = arith.constant 0 : i64
  %init = tensor.empty() : tensor<4xi64>
  moe.assert <value> %positive, "expected positive numbers"
  %y = linalg.generic
      {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>],
       iterator_types = ["parallel"]}
      ins(%x : tensor<4xi64>) outs(%init : tensor<4xi64>) {
  ^bb0(%in: i64, %out: i64):
    %inside = arith.cmpi sge, %in, %c0 : i64
    moe.assert <index> %inside, "expected {0} to be an index"(%in : i64)
    linalg.yield %in : i64
  } -> tensor<4xi64>
  return %y : tensor<4xi64>
}
