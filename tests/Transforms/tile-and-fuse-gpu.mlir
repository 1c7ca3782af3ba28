// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90 --moe-tile-and-fuse --remarks-filter-missed='moe-.*' -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// Which sums are the least: each is compared with all. One that is computed in
// the tile and for all others apart could round in two orders, and come before
// itself.

// CHECK: Reason="it is compared with itself, and two tiles of it could round in two orders", Remark="{{.*}} not fused into linalg.generic"

// IR-LABEL: func @keeps_sums_that_are_compared_with_each_other
// IR:         scf.forall
// IR:           arith.addf
// IR:         scf.forall
// IR-NOT:       arith.addf
// IR:           arith.cmpf
func.func @keeps_sums_that_are_compared_with_each_other(
    %x: tensor<256x32xf32>, %s0: tensor<256xf32>, %b0: tensor<256xi1>) -> tensor<256xi1> {
  %sums = linalg.generic {
      indexing_maps = [affine_map<(h, n) -> (h, n)>, affine_map<(h, n) -> (h)>],
      iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<256x32xf32>) outs(%s0 : tensor<256xf32>) {
  ^bb0(%in: f32, %acc: f32):
    %sum = arith.addf %acc, %in : f32
    linalg.yield %sum : f32
  } -> tensor<256xf32>
  %before = linalg.generic {
      indexing_maps = [affine_map<(h, g) -> (h)>, affine_map<(h, g) -> (g)>,
                       affine_map<(h, g) -> (h)>],
      iterator_types = ["parallel", "reduction"]}
      ins(%sums, %sums : tensor<256xf32>, tensor<256xf32>) outs(%b0 : tensor<256xi1>) {
  ^bb0(%own: f32, %other: f32, %acc: i1):
    %less = arith.cmpf olt, %other, %own : f32
    %any = arith.ori %acc, %less : i1
    linalg.yield %any : i1
  } -> tensor<256xi1>
  return %before : tensor<256xi1>
}
