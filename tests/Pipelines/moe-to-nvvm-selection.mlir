// RUN: moe-compile %s -o - --target=sm_80 --emit=ptx | FileCheck %s

// A selection of 16-bit scores reads 16 bytes at a time, orders two scores an
// instruction, and sorts in registers: no branch, no loop, one reciprocal.

// CHECK:     .visible .entry select_kernel(
// CHECK-NOT: .local
// CHECK-NOT: .shared
// CHECK-COUNT-2: ld.global.v4.b32
// CHECK:     fma.rn.bf16x2
// CHECK:     max.NaN.bf16x2
// CHECK:     prmt.b32
// CHECK:     max.u32
// CHECK:     min.u32
// CHECK:     shfl.sync.bfly.b32
// CHECK:     ex2.approx.ftz.f32
// CHECK:     rcp.approx.ftz.f32
// CHECK:     st.global.v2.b32
// CHECK:     st.global.v2.b32
func.func @select(%z: tensor<?x64xbf16>) -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x64xbf16>
  %g0 = tensor.empty(%n) : tensor<?x8xf32>
  %i0 = tensor.empty(%n) : tensor<?x8xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x64xbf16>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %r#0, %r#1 : tensor<?x8xf32>, tensor<?x8xi32>
}

// f32 scores take keys of 64 bits, the score above the number of the expert:
// one comparison orders both, exactly.

// CHECK:     .visible .entry select_exactly_kernel(
// CHECK-NOT: .local
// CHECK-NOT: .shared
// CHECK-COUNT-4: ld.global.v4.b32
// CHECK:     xor.b32
// CHECK:     or.b64
// CHECK:     max.u64
// CHECK:     min.u64
// CHECK:     shfl.sync.bfly.b32
// CHECK:     ex2.approx.ftz.f32
// CHECK:     rcp.approx.ftz.f32
// CHECK:     st.global.v2.b32
func.func @select_exactly(%z: tensor<?x64xf32>) -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x64xf32>
  %g0 = tensor.empty(%n) : tensor<?x8xf32>
  %i0 = tensor.empty(%n) : tensor<?x8xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %r#0, %r#1 : tensor<?x8xf32>, tensor<?x8xi32>
}
