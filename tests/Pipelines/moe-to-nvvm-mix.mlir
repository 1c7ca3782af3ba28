// RUN: moe-compile %s -o - --target=sm_90 --emit=ptx | FileCheck %s

// One kernel for the mixture. What must be in the PTX: asynchronous copies with
// a size, so that masked keys become zeros; matrices from shared memory, those of
// the values transposed; products on tensor cores; the hardware exponential.
// What must not: calls, local memory.

// CHECK:     .extern .shared .align 128 .b8 inform_kernel_shared[]
// CHECK:     .visible .entry inform_kernel(
// CHECK-NOT: .visible .entry
// CHECK-NOT: .local
// CHECK-NOT: call
// CHECK-DAG: cp.async.cg.shared.global [%{{.*}}], [%{{.*}}], 16, %{{.*}};
// CHECK-DAG: cp.async.commit_group
// CHECK-DAG: cp.async.wait_group 0
// CHECK-DAG: bar.sync
// CHECK-DAG: ldmatrix.sync.aligned.m8n8.x4.shared.b16
// CHECK-DAG: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
// CHECK-DAG: shfl.sync.bfly.b32
// CHECK-DAG: ex2.approx.ftz.f32
// CHECK-DAG: cvt.rn.bf16x2.f32
// CHECK-DAG: ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
// CHECK-DAG: div.rn.f32
func.func @inform(%u: tensor<?x?x352xbf16>, %e: tensor<?x?x16xbf16>,
                  %mask: tensor<?x?xi1>)
    -> (tensor<?x?x16xf32>, tensor<?x?xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %u, %c0 : tensor<?x?x352xbf16>
  %n = tensor.dim %u, %c1 : tensor<?x?x352xbf16>
  %p0 = tensor.empty(%b, %n) : tensor<?x?x16xf32>
  %l0 = tensor.empty(%b, %n) : tensor<?x?xf32>
  %p, %l = moe.similarity_inform
      ins(%u, %e : tensor<?x?x352xbf16>, tensor<?x?x16xbf16>)
      mask(%mask : tensor<?x?xi1>)
      outs(%p0, %l0 : tensor<?x?x16xf32>, tensor<?x?xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<?x?x16xf32>, tensor<?x?xf32>
  return %p, %l : tensor<?x?x16xf32>, tensor<?x?xf32>
}
