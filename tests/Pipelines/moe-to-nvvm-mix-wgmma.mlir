// RUN: moe-compile %s -o - --target=sm_90a --emit=ptx | FileCheck %s
// RUN: moe-compile %s -o - --target=sm_90 --emit=ptx | FileCheck %s --check-prefix=OTHER

// On sm_90a the mixture runs on three warpgroups. One gives registers away and
// copies. Two take them and multiply: queries and keys from shared memory, with
// sums from 0, then the next ones while those are added; weights from registers.
// Barriers in shared memory lie between them.

// CHECK:      .extern .shared .align 1024 .b8 mix_kernel_shared[]
// CHECK:      .visible .entry mix_kernel(
// CHECK:      .maxntid 384
// CHECK-NOT:  .local
// CHECK-NOT:  call
// CHECK-NOT:  mma.sync.aligned
// CHECK-COUNT-22: mbarrier.init.shared::cta.b64
// CHECK:      setmaxnreg.dec.sync.aligned.u32 88
// CHECK:      mbarrier.try_wait.parity.shared::cta.b64
// CHECK:      cp.async.cg.shared.global
// CHECK:      cp.async.mbarrier.arrive.noinc.shared::cta.b64
// CHECK:      setmaxnreg.inc.sync.aligned.u32 208
// CHECK:      mbarrier.try_wait.parity.shared::cta.b64
// CHECK:      fence.proxy.async.shared::cta
// CHECK:      wgmma.fence.sync.aligned
// CHECK:      wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{[^}]*}}}, left, right, 0, 1, 1, 0, 0;
// CHECK:      wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{[^}]*}}}, left, right, 1, 1, 1, 0, 0;
// CHECK:      wgmma.commit_group.sync.aligned
// CHECK:      wgmma.mma_async
// CHECK:      wgmma.commit_group.sync.aligned
// CHECK:      wgmma.wait_group.sync.aligned 1;
// CHECK:      mbarrier.arrive.shared::cta.b64
// CHECK:      wgmma.wait_group.sync.aligned 0;
// CHECK:      ex2.approx.ftz.f32
// CHECK:      wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{[^}]*}}}, {{{[^}]*}}}, right, 1, 1, 1, 1;
// CHECK:      wgmma.wait_group.sync.aligned 0;

// All warps meet before the registers are divided evenly again.
// CHECK-NOT:  setmaxnreg
// CHECK:      bar{{(rier)?}}.sync
// CHECK-NOT:  {{bar(rier)?}}.sync
// CHECK-DAG:  setmaxnreg.inc.sync.aligned.u32 168
// CHECK-DAG:  setmaxnreg.dec.sync.aligned.u32 168

// OTHER-NOT:  wgmma
// OTHER:      mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
// OTHER-NOT:  wgmma
func.func @mix(%u: tensor<1x1x?x128xbf16>, %v: tensor<1x?x16xbf16>)
    -> (tensor<1x1x?x16xf32>, tensor<1x1x?xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %u, %c2 : tensor<1x1x?x128xbf16>
  %o0 = tensor.empty(%n) : tensor<1x1x?x16xf32>
  %o1 = tensor.empty(%n) : tensor<1x1x?xf32>
  %r:2 = moe.softmax_mix
      ins(%u, %u : tensor<1x1x?x128xbf16>, tensor<1x1x?x128xbf16>)
      values(%v : tensor<1x?x16xbf16>)
      outs(%o0, %o1 : tensor<1x1x?x16xf32>, tensor<1x1x?xf32>)
      -> tensor<1x1x?x16xf32>, tensor<1x1x?xf32>
  return %r#0, %r#1 : tensor<1x1x?x16xf32>, tensor<1x1x?xf32>
}
