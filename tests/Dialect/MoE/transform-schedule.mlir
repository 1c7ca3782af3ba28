// RUN: %moe-opt %s --transform-interpreter --moe-attach-nvvm-target=chip=sm_90a --moe-select-kernel-config | FileCheck %s

// A script requests the kernel of one op and rewrites another by a pass, as
// docs/ReadingIR.md says; the pass that selects kernels completes the request.

// CHECK-LABEL: func @requests_a_kernel_of_one_op
// CHECK:         moe.softmax_mix
// CHECK-SAME:      moe.kernel_config = #moe.kernel_config<rows = 128, threads = 128, schedule = mma
// CHECK:         moe.softmax_mix
// CHECK-SAME:      moe.kernel_config = #moe.kernel_config<{{.*}}schedule = wgmma
func.func @requests_a_kernel_of_one_op(
    %u: tensor<2x?x64xbf16>, %p: tensor<2x?x16xf32>, %n: index)
    -> (tensor<2x?x16xf32>, tensor<2x?x16xf32>) {
  %m0 = tensor.empty(%n) : tensor<2x?x16xf32>
  %l0 = tensor.empty(%n) : tensor<2x?xf32>
  %first, %l1 = moe.similarity_inform ins(%u, %p : tensor<2x?x64xbf16>, tensor<2x?x16xf32>)
      outs(%m0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<2x?x16xf32>, tensor<2x?xf32>
  %second, %l2 = moe.similarity_inform ins(%u, %first : tensor<2x?x64xbf16>, tensor<2x?x16xf32>)
      outs(%m0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %first, %second : tensor<2x?x16xf32>, tensor<2x?x16xf32>
}

module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %function = transform.structured.match ops{["func.func"]} in %root
        : (!transform.any_op) -> !transform.any_op
    %mixed = transform.apply_registered_pass "moe-convert-to-softmax-mix" to %function
        : (!transform.any_op) -> !transform.any_op
    %both = transform.structured.match ops{["moe.softmax_mix"]} in %mixed
        : (!transform.any_op) -> !transform.any_op
    %first, %second = transform.split_handle %both
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %config = transform.param.constant #moe.kernel_config<schedule = mma> -> !transform.any_param
    transform.annotate %first "moe.kernel_config" = %config
        : !transform.any_op, !transform.any_param
    transform.yield
  }
}
