// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config | FileCheck %s --check-prefixes=CHECK,SM80
// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90a --moe-select-kernel-config | FileCheck %s --check-prefixes=CHECK,SM90A
// RUN: %moe-opt %s --split-input-file --moe-select-kernel-config=tile-rows=48 | FileCheck %s --check-prefix=CPU

// The best kernel of the chip.

// SM80:  moe.kernel_config = #moe.kernel_config<rows = 128, threads = 128, schedule = mma, loop = own, shared_bytes = {{[0-9]+}}>
// SM90A: moe.kernel_config = #moe.kernel_config<rows = 128, threads = 384, schedule = wgmma, loop = own, shared_bytes = {{[0-9]+}}>
// CPU:   moe.kernel_config = #moe.kernel_config<rows = 96, schedule = queries>
func.func @best(%q: tensor<1x2x?x64xbf16>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xbf16>, tensor<1x2x?x64xbf16>)
      outs(%l0 : tensor<1x2x?xf32>) -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// -----

// A selection that reads what a mix makes runs in the mix's loop where a block
// has the memory, and the threads.

// CHECK-LABEL: func.func @shared
// SM80:        moe.softmax_mix {{.*}}schedule = mma, shared_bytes
// SM80:        moe.topk_renorm
// SM80-NOT:    kernel_config
// SM90A:       moe.softmax_mix {{.*}}schedule = wgmma, loop = own
// SM90A:       moe.topk_renorm {{.*}}#moe.kernel_config<rows = 128, loop = own>
// CHECK:       return
func.func @shared(
    %u: tensor<1x1x?x64xbf16>, %e: tensor<1x?x16xf32>, %p0: tensor<1x1x?x16xf32>,
    %l0: tensor<1x1x?xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %p:2 = moe.softmax_mix ins(%u, %u : tensor<1x1x?x64xbf16>, tensor<1x1x?x64xbf16>)
      values(%e : tensor<1x?x16xf32>)
      outs(%p0, %l0 : tensor<1x1x?x16xf32>, tensor<1x1x?xf32>) -> tensor<1x1x?x16xf32>, tensor<1x1x?xf32>
  %rows = tensor.collapse_shape %p#0 [[0, 1, 2], [3]] : tensor<1x1x?x16xf32> into tensor<?x16xf32>
  %r:2 = moe.topk_renorm ins(%rows : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}
