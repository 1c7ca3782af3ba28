// RUN: %moe-opt %s --pass-pipeline='builtin.module(func.func(moe-fuse-elementwise{max-inputs=3}))' | FileCheck %s

// A fused op has no more inputs than LLVM compares with its result.

// CHECK-LABEL: func @keeps_many_inputs_apart
// CHECK:         linalg.generic {{.*}} ins(%{{.*}}, %{{.*}} : tensor<8xf32>, tensor<8xf32>)
// CHECK:         linalg.generic {{.*}} ins(%{{.*}}, %{{.*}}, %{{.*}} : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>)
#id = affine_map<(d0) -> (d0)>
func.func @keeps_many_inputs_apart(%x: tensor<8xf32>, %y: tensor<8xf32>, %u: tensor<8xf32>,
    %v: tensor<8xf32>, %e: tensor<8xf32>) -> tensor<8xf32> {
  %a = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%x, %y : tensor<8xf32>, tensor<8xf32>) outs(%e : tensor<8xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %0 = arith.addf %i, %j : f32
    linalg.yield %0 : f32
  } -> tensor<8xf32>
  %b = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel"]}
      ins(%a, %u, %v : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) outs(%e : tensor<8xf32>) {
  ^bb0(%i: f32, %j: f32, %k: f32, %o: f32):
    %0 = arith.mulf %i, %j : f32
    %1 = arith.mulf %0, %k : f32
    linalg.yield %1 : f32
  } -> tensor<8xf32>
  return %b : tensor<8xf32>
}
