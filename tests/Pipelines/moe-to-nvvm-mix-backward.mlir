// RUN: moe-compile %s -o - --target=sm_90 --emit=ptx | FileCheck %s --implicit-check-not=.local --implicit-check-not=call

// The gradient of the mixture on tensor cores, in the order of its two stages:
// asynchronous copies of rows; products of the features; the hardware
// exponential; the weights of the pairs as three bf16 each into shared memory
// and from there back as matrices, the other side's rows transposed.

// CHECK:     .visible .entry by_queries_kernel(
// CHECK:     cp.async.cg.shared.global [%{{.*}}], [%{{.*}}], 16, %{{.*}};
// CHECK:     cp.async.wait_group 0
// CHECK:     bar.sync
// CHECK:     ldmatrix.sync.aligned.m8n8.x4.shared.b16
// CHECK:     mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
// CHECK:     ex2.approx.ftz.f32
// CHECK-COUNT-3: cvt.rn.bf16x2.f32
// CHECK:     bar.sync
// CHECK-COUNT-3: ldmatrix.sync.aligned.m8n8.x4.shared.b16
// CHECK:     ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
// CHECK-COUNT-3: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
// CHECK:     st.global
func.func @by_queries(
    %q: tensor<1x2x?x64xbf16>, %k: tensor<1x2x?x64xbf16>, %lse: tensor<1x2x?xf32>,
    %delta: tensor<1x2x?xf32>, %v: tensor<1x?x16xbf16>, %dmixed: tensor<1x2x?x16xf32>)
    -> tensor<1x2x?x64xf32> {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x2x?x64xbf16>
  %dq = tensor.empty(%n) : tensor<1x2x?x64xf32>
  %r = moe.softmax_mix_backward_dq
      ins(%q, %k, %lse, %delta : tensor<1x2x?x64xbf16>, tensor<1x2x?x64xbf16>,
          tensor<1x2x?xf32>, tensor<1x2x?xf32>)
      values(%v, %dmixed : tensor<1x?x16xbf16>, tensor<1x2x?x16xf32>)
      outs(%dq : tensor<1x2x?x64xf32>) {visibility = #moe.visibility<causal>} -> tensor<1x2x?x64xf32>
  return %r : tensor<1x2x?x64xf32>
}

// Features of f16 are multiplied as such. For the gradient, whose other factor
// may lie outside of their range, each is the sum of two bf16.

// CHECK:     .visible .entry by_keys_kernel(
// CHECK:     cp.async.cg.shared.global [%{{.*}}], [%{{.*}}], 16, %{{.*}};
// CHECK:     mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
// CHECK:     ex2.approx.ftz.f32
// CHECK:     ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
// CHECK:     cvt.f32.f16
// CHECK-COUNT-2: cvt.rn.bf16x2.f32
// CHECK-NOT: .f16.f16.f32
// CHECK:     mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
func.func @by_keys(
    %q: tensor<1x2x?x64xf16>, %k: tensor<1x2x?x64xf16>, %lse: tensor<1x2x?xf32>,
    %delta: tensor<1x2x?xf32>, %v: tensor<1x?x16xf16>, %dmixed: tensor<1x2x?x16xf32>)
    -> (tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %k, %c2 : tensor<1x2x?x64xf16>
  %dk = tensor.empty(%n) : tensor<1x2x?x64xf32>
  %dv = tensor.empty(%n) : tensor<1x2x?x16xf32>
  %r:2 = moe.softmax_mix_backward_dkv
      ins(%q, %k, %lse, %delta : tensor<1x2x?x64xf16>, tensor<1x2x?x64xf16>,
          tensor<1x2x?xf32>, tensor<1x2x?xf32>)
      values(%v, %dmixed : tensor<1x?x16xf16>, tensor<1x2x?x16xf32>)
      outs(%dk, %dv : tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>
  return %r#0, %r#1 : tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>
}
