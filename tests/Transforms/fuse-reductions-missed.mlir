// RUN: %moe-opt %s --moe-tile-and-fuse --moe-fuse-reductions --remarks-filter-missed='moe-fuse-.*' --split-input-file -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// 256 x 256 counts for each of 16 threads are more than a cache holds.

// CHECK: remark: [Missed] FuseReductions | Category:moe-fuse-reductions
// CHECK-SAME: Reason="its tables would take more than 2097152 bytes", Remark="moe.adjacency_update not fused into the loop over its rows"

// IR-LABEL: func @keeps_large_tables
// IR:         scf.forall
// IR-NOT:       moe.co_selections
// IR:         moe.adjacency_update
func.func @keeps_large_tables(
    %z: tensor<?x256xf32>, %a: tensor<256x256xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> tensor<256x256xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x256xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %new = moe.adjacency_update ins(%a, %i : tensor<256x256xf32>, tensor<?x2xi32>)
      outs(%a : tensor<256x256xf32>) -> tensor<256x256xf32>
  return %new : tensor<256x256xf32>
}

// -----

// CHECK: Reason="its tables have no bounded size", Remark="moe.adjacency_update not fused

// IR-LABEL: func @keeps_tables_of_unknown_size
// IR:         scf.forall
// IR:         moe.adjacency_update
func.func @keeps_tables_of_unknown_size(
    %z: tensor<?x?xf32>, %a: tensor<?x?xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> tensor<?x?xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x?xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %new = moe.adjacency_update ins(%a, %i : tensor<?x?xf32>, tensor<?x2xi32>)
      outs(%a : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %new : tensor<?x?xf32>
}

// -----

// A mask that is made of what the loop computes is there too late.

// CHECK: Reason="a tile needs what is computed behind the loop", Remark="moe.adjacency_update not fused

// IR-LABEL: func @keeps_counts_with_a_late_mask
// IR:         scf.forall
// IR:         moe.adjacency_update
func.func @keeps_counts_with_a_late_mask(
    %z: tensor<256x16xf32>, %a: tensor<16x16xf32>, %g0: tensor<256x2xf32>, %i0: tensor<256x2xi32>)
    -> tensor<16x16xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<256x16xf32>)
      outs(%g0, %i0 : tensor<256x2xf32>, tensor<256x2xi32>)
      -> tensor<256x2xf32>, tensor<256x2xi32>
  %mask = tensor.generate {
  ^bb0(%n: index):
    %c0 = arith.constant 0 : index
    %half = arith.constant 0.5 : f32
    %first = tensor.extract %g[%n, %c0] : tensor<256x2xf32>
    %sure = arith.cmpf ogt, %first, %half : f32
    tensor.yield %sure : i1
  } : tensor<256xi1>
  %new = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<256x2xi32>)
      mask(%mask : tensor<256xi1>) outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %new : tensor<16x16xf32>
}
