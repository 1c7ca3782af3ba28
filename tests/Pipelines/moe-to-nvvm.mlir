// RUN: moe-compile %s -o - --target=sm_90 --emit=ptx | FileCheck %s

// One kernel for projection and selection. What must be in the PTX: the chip's
// PTX version, workgroup memory for the logits and memory for chunks of rows and
// weights, asynchronous copies, matrices, products on tensor cores, the hardware
// exponential; what must not: calls, local memory.

// CHECK:     .version 7.8
// CHECK:     .target sm_90
// CHECK:     .visible .entry route_kernel(
// CHECK-NOT: .visible .entry
// CHECK-NOT: .local
// CHECK-NOT: call
// CHECK:     cp.async.cg.shared.global [%{{.*}}], [%{{.*}}], 16, %{{.*}};
// CHECK:     cp.async.commit_group
// CHECK:     cp.async.wait_group 0
// CHECK:     ldmatrix.sync.aligned.m8n8.x4.shared.b16
// CHECK:     mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
// CHECK-NOT: fma.rn.f32
// CHECK:     st.shared.b32
// CHECK:     bar.sync
// CHECK:     max.u64
// CHECK:     ex2.approx.ftz.f32
// CHECK:     rcp.approx.ftz.f32
// CHECK:     st.global.b32
func.func @route(%h: tensor<?x352xbf16>, %w: tensor<16x352xbf16>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : tensor<?x352xbf16>
  %z0 = tensor.empty(%n) : tensor<?x16xf32>
  %z = moe.router_logits ins(%h, %w : tensor<?x352xbf16>, tensor<16x352xbf16>)
      outs(%z0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi32>
}
