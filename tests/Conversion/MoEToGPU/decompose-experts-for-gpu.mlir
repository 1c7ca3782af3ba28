// RUN: %moe-opt %s --split-input-file --pass-pipeline='builtin.module(func.func(moe-decompose-experts-for-gpu),cse)' --mlir-print-local-scope | FileCheck %s
// RUN: %moe-opt %s --split-input-file --pass-pipeline='builtin.module(moe-attach-nvvm-target{chip=sm_90a},func.func(moe-decompose-experts-for-gpu),cse)' --mlir-print-local-scope | FileCheck %s --check-prefix=SM90A

// Which part has the rows follows from their number: 1 stands for more than 16
// an expert, of which there are 8.

// CHECK-LABEL: func.func @rows_of_unknown_number
// CHECK:         %[[ROWS:.*]] = tensor.dim %arg4, %c0
// CHECK:         %[[ISMANY:.*]] = affine.apply affine_map<(d0, d1) -> ((d0 - d1 * 16 + 2147483647) floordiv 2147483648)>(%[[ROWS]], %{{.*}})
// CHECK:         %[[MANY:.*]] = arith.muli %[[ROWS]], %[[ISMANY]]
// CHECK:         tensor.extract_slice %arg4[0, 0] [%[[MANY]], 32]
// CHECK:         scf.forall
// CHECK:         %[[Y:.*]] = tensor.insert_slice %{{.*}} into %arg4[0, 0] [%[[MANY]], 32]
// CHECK:         %[[ISFEW:.*]] = affine.apply affine_map<(d0, d1) -> (-((d0 - d1 * 16 + 2147483647) floordiv 2147483648) + 1)>
// CHECK:         %[[FEW:.*]] = arith.muli %[[ROWS]], %[[ISFEW]]
// CHECK:         %[[OUT:.*]] = tensor.extract_slice %[[Y]][0, 0] [%[[FEW]], 32]
// CHECK:         %[[TOKENS:.*]] = tensor.extract_slice %arg3[0] [%[[FEW]]]
// CHECK:         %[[PART:.*]] = moe.grouped_linear {{.*}} rows(%[[TOKENS]] {{.*}} outs(%[[OUT]]
// CHECK:         tensor.insert_slice %[[PART]] into %[[Y]][0, 0] [%[[FEW]], 32]

// With wgmma both parts have a kernel.

// SM90A-LABEL: func.func @rows_of_unknown_number
// SM90A-NOT:     scf.forall
// SM90A:         moe.grouped_linear {{.*}}moe.kernel_config = #moe.kernel_config<schedule = wgmma>
// SM90A:         moe.grouped_linear {{.*}}moe.kernel_config = #moe.kernel_config<schedule = mma>
func.func @rows_of_unknown_number(
    %x: tensor<?x128xbf16>, %w: tensor<8x64x128xbf16>, %offsets: tensor<9xi32>,
    %rows: tensor<?xi32>, %y0: tensor<?x32xbf16>) -> tensor<?x32xbf16> {
  %y = moe.grouped_linear ins(%x, %w, %offsets : tensor<?x128xbf16>, tensor<8x64x128xbf16>, tensor<9xi32>)
      rows(%rows : tensor<?xi32>) outs(%y0 : tensor<?x32xbf16>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>} -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}

// -----

// CHECK-LABEL: func.func @few_rows
// CHECK-NOT:     scf.forall
// CHECK:         moe.grouped_linear
// SM90A-LABEL: func.func @few_rows
// SM90A:         moe.grouped_linear {{.*}}moe.kernel_config = #moe.kernel_config<schedule = mma>
func.func @few_rows(%x: tensor<128x64xf16>, %w: tensor<8x24x64xf16>, %offsets: tensor<9xi64>,
                    %y0: tensor<128x24xf16>) -> tensor<128x24xf16> {
  %y = moe.grouped_linear ins(%x, %w, %offsets : tensor<128x64xf16>, tensor<8x24x64xf16>, tensor<9xi64>)
      outs(%y0 : tensor<128x24xf16>) -> tensor<128x24xf16>
  return %y : tensor<128x24xf16>
}

// -----

// CHECK-LABEL: func.func @many_rows
// CHECK-NOT:     moe.grouped_linear
// CHECK:         scf.forall
// SM90A-LABEL: func.func @many_rows
// SM90A:         moe.grouped_linear {{.*}}moe.kernel_config = #moe.kernel_config<schedule = wgmma>
func.func @many_rows(%x: tensor<129x64xf16>, %w: tensor<8x24x64xf16>, %offsets: tensor<9xi64>,
                     %y0: tensor<129x24xf16>) -> tensor<129x24xf16> {
  %y = moe.grouped_linear ins(%x, %w, %offsets : tensor<129x64xf16>, tensor<8x24x64xf16>, tensor<9xi64>)
      outs(%y0 : tensor<129x24xf16>) -> tensor<129x24xf16>
  return %y : tensor<129x24xf16>
}

// -----

// Forms that the kernel for few rows does not know: f32, features that are no
// multiple of 64, and weights [experts, in, out]. The one for many rows takes the
// last two, of any number of rows.

// CHECK-LABEL: func.func @other_forms
// CHECK-NOT:     moe.grouped_linear
// SM90A-LABEL: func.func @other_forms
// SM90A-NOT:     moe.grouped_linear
// SM90A:         moe.grouped_linear ins({{.*}}tensor<8x24x72xbf16>{{.*}}schedule = wgmma
// SM90A:         moe.grouped_linear ins({{.*}}tensor<8x64x24xbf16>{{.*}}schedule = wgmma
func.func @other_forms(
    %x: tensor<3x64xf32>, %w: tensor<8x24x64xf32>, %narrow: tensor<3x72xbf16>,
    %v: tensor<8x24x72xbf16>, %z: tensor<3x64xbf16>, %t: tensor<8x64x24xbf16>,
    %offsets: tensor<9xi32>, %a: tensor<3x24xf32>, %b: tensor<3x24xbf16>)
    -> (tensor<3x24xf32>, tensor<3x24xbf16>, tensor<3x24xbf16>) {
  %0 = moe.grouped_linear ins(%x, %w, %offsets : tensor<3x64xf32>, tensor<8x24x64xf32>, tensor<9xi32>)
      outs(%a : tensor<3x24xf32>) -> tensor<3x24xf32>
  %1 = moe.grouped_linear ins(%narrow, %v, %offsets : tensor<3x72xbf16>, tensor<8x24x72xbf16>, tensor<9xi32>)
      outs(%b : tensor<3x24xbf16>) -> tensor<3x24xbf16>
  %2 = moe.grouped_linear ins(%z, %t, %offsets : tensor<3x64xbf16>, tensor<8x64x24xbf16>, tensor<9xi32>)
      outs(%b : tensor<3x24xbf16>) {transposed} -> tensor<3x24xbf16>
  return %0, %1, %2 : tensor<3x24xf32>, tensor<3x24xbf16>, tensor<3x24xbf16>
}

// -----

// What the user asks for is for all rows.

// CHECK-LABEL: func.func @asked_for
// SM90A-LABEL: func.func @asked_for
// SM90A-NOT:     tensor.extract_slice
// SM90A:         moe.grouped_linear {{.*}}moe.kernel_config = #moe.kernel_config<schedule = mma>
func.func @asked_for(%x: tensor<?x64xf16>, %w: tensor<8x24x64xf16>, %offsets: tensor<9xi64>,
                     %y0: tensor<?x24xf16>) -> tensor<?x24xf16> {
  %y = moe.grouped_linear ins(%x, %w, %offsets : tensor<?x64xf16>, tensor<8x24x64xf16>, tensor<9xi64>)
      outs(%y0 : tensor<?x24xf16>) {moe.kernel_config = #moe.kernel_config<schedule = mma>} -> tensor<?x24xf16>
  return %y : tensor<?x24xf16>
}
