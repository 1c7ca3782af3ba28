// RUN: %moe-opt %s --split-input-file --pass-pipeline='builtin.module(moe-attach-nvvm-target{chip=sm_90a},func.func(moe-linear-to-grouped-linear),canonicalize,cse)' --mlir-print-local-scope | FileCheck %s
// RUN: %moe-opt %s --split-input-file --pass-pipeline='builtin.module(moe-attach-nvvm-target{chip=sm_90},func.func(moe-linear-to-grouped-linear))' | FileCheck %s --check-prefix=SM90

// Chips without wgmma have no kernel for many rows.

// SM90-NOT: moe.grouped_linear

#rows = affine_map<(a, b, n, d) -> (a, b, d)>
#weight = affine_map<(a, b, n, d) -> (n, d)>
#out = affine_map<(a, b, n, d) -> (a, b, n)>
#columns = affine_map<(a, b, n) -> (n)>
#all = affine_map<(a, b, n) -> (a, b, n)>

// The bias and the conversion are part of the layer. All rows are those of its
// only expert, of which one kernel writes the offsets.

// CHECK-LABEL: func.func @bias_and_conversion
// CHECK:         %[[OFFSETS:.*]] = tensor.generate
// CHECK:           %[[I:.*]] = arith.index_cast %{{.*}} : index to i32
// CHECK:           %[[OFFSET:.*]] = arith.muli %[[I]], %c2147483647_i32
// CHECK:           tensor.yield %[[OFFSET]]
// CHECK:         %[[X:.*]] = tensor.collapse_shape %arg0 {{\[\[}}0, 1], [2]] : tensor<?x?x256xbf16> into tensor<?x256xbf16>
// CHECK:         %[[BIAS:.*]] = tensor.expand_shape %arg2 {{\[\[}}0, 1]] output_shape [1, 512]
// CHECK:         %[[W:.*]] = tensor.expand_shape %arg1 {{\[\[}}0, 1], [2]] output_shape [1, 512, 256]
// CHECK:         %[[Y:.*]] = moe.grouped_linear ins(%[[X]], %[[W]], %[[OFFSETS]] : {{.*}}) bias(%[[BIAS]] : tensor<1x512xbf16>) outs(%{{.*}} : tensor<?x512xbf16>)
// CHECK:         %[[R:.*]] = tensor.expand_shape %[[Y]] {{\[\[}}0, 1], [2]] output_shape [%{{.*}}, %{{.*}}, 512] : tensor<?x512xbf16> into tensor<?x?x512xbf16>
// CHECK:         return %[[R]]
func.func @bias_and_conversion(%x: tensor<?x?x256xbf16>, %w: tensor<512x256xbf16>,
                               %bias: tensor<512xbf16>) -> tensor<?x?x512xbf16> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %x, %c0 : tensor<?x?x256xbf16>
  %t = tensor.dim %x, %c1 : tensor<?x?x256xbf16>
  %e = tensor.empty(%b, %t) : tensor<?x?x512xf32>
  %start = linalg.generic {indexing_maps = [#columns, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%bias : tensor<512xbf16>) outs(%e : tensor<?x?x512xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<?x?x512xf32>
  %z = linalg.generic {indexing_maps = [#rows, #weight, #out], iterator_types = ["parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<?x?x256xbf16>, tensor<512x256xbf16>) outs(%start : tensor<?x?x512xf32>) {
  ^bb0(%left: bf16, %right: bf16, %sum: f32):
    %0 = arith.extf %left : bf16 to f32
    %1 = arith.extf %right : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %sum, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?x?x512xf32>
  %y0 = tensor.empty(%b, %t) : tensor<?x?x512xbf16>
  %y = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%z : tensor<?x?x512xf32>) outs(%y0 : tensor<?x?x512xbf16>) {
  ^bb0(%in: f32, %out: bf16):
    %0 = arith.truncf %in : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<?x?x512xbf16>
  return %y : tensor<?x?x512xbf16>
}

// -----

#rows = affine_map<(m, n, d) -> (m, d)>
#weight = affine_map<(m, n, d) -> (d, n)>
#out = affine_map<(m, n, d) -> (m, n)>

// Two readers of the sums: they stay f32.

// CHECK-LABEL: func.func @transposed_in_f32
// CHECK:         %[[Y:.*]] = moe.grouped_linear {{.*}} outs(%{{.*}} : tensor<?x512xf32>) {transposed} -> tensor<?x512xf32>
// CHECK:         return %[[Y]], %[[Y]]
func.func @transposed_in_f32(%x: tensor<?x256xf16>, %w: tensor<256x512xf16>)
    -> (tensor<?x512xf32>, tensor<?x512xf32>) {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %n = tensor.dim %x, %c0 : tensor<?x256xf16>
  %e = tensor.empty(%n) : tensor<?x512xf32>
  %start = linalg.fill ins(%zero : f32) outs(%e : tensor<?x512xf32>) -> tensor<?x512xf32>
  %z = linalg.generic {indexing_maps = [#rows, #weight, #out], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<?x256xf16>, tensor<256x512xf16>) outs(%start : tensor<?x512xf32>) {
  ^bb0(%left: f16, %right: f16, %sum: f32):
    %0 = arith.extf %left : f16 to f32
    %1 = arith.extf %right : f16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %sum, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?x512xf32>
  return %z, %z : tensor<?x512xf32>, tensor<?x512xf32>
}

// -----

#rows = affine_map<(m, n, d) -> (m, d)>
#weight = affine_map<(m, n, d) -> (n, d)>
#out = affine_map<(m, n, d) -> (m, n)>

// A small weight, one whose rows are no whole units, and sums that start from
// anything else.

// CHECK-LABEL: func.func @others
// CHECK-NOT:     moe.grouped_linear
func.func @others(%x: tensor<?x128xbf16>, %small: tensor<64x128xbf16>, %u: tensor<?x300xbf16>,
                  %odd: tensor<512x300xbf16>, %w: tensor<512x128xbf16>, %a: tensor<?x64xf32>,
                  %b: tensor<?x512xf32>, %c: tensor<?x512xf32>)
    -> (tensor<?x64xf32>, tensor<?x512xf32>, tensor<?x512xf32>) {
  %zero = arith.constant 0.0 : f32
  %a0 = linalg.fill ins(%zero : f32) outs(%a : tensor<?x64xf32>) -> tensor<?x64xf32>
  %b0 = linalg.fill ins(%zero : f32) outs(%b : tensor<?x512xf32>) -> tensor<?x512xf32>
  %0 = linalg.generic {indexing_maps = [#rows, #weight, #out], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %small : tensor<?x128xbf16>, tensor<64x128xbf16>) outs(%a0 : tensor<?x64xf32>) {
  ^bb0(%left: bf16, %right: bf16, %sum: f32):
    %3 = arith.extf %left : bf16 to f32
    %4 = arith.extf %right : bf16 to f32
    %5 = arith.mulf %3, %4 : f32
    %6 = arith.addf %sum, %5 : f32
    linalg.yield %6 : f32
  } -> tensor<?x64xf32>
  %1 = linalg.generic {indexing_maps = [#rows, #weight, #out], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%u, %odd : tensor<?x300xbf16>, tensor<512x300xbf16>) outs(%b0 : tensor<?x512xf32>) {
  ^bb0(%left: bf16, %right: bf16, %sum: f32):
    %3 = arith.extf %left : bf16 to f32
    %4 = arith.extf %right : bf16 to f32
    %5 = arith.mulf %3, %4 : f32
    %6 = arith.addf %sum, %5 : f32
    linalg.yield %6 : f32
  } -> tensor<?x512xf32>
  %2 = linalg.generic {indexing_maps = [#rows, #weight, #out], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<?x128xbf16>, tensor<512x128xbf16>) outs(%c : tensor<?x512xf32>) {
  ^bb0(%left: bf16, %right: bf16, %sum: f32):
    %3 = arith.extf %left : bf16 to f32
    %4 = arith.extf %right : bf16 to f32
    %5 = arith.mulf %3, %4 : f32
    %6 = arith.addf %sum, %5 : f32
    linalg.yield %6 : f32
  } -> tensor<?x512xf32>
  return %0, %1, %2 : tensor<?x64xf32>, tensor<?x512xf32>, tensor<?x512xf32>
}
