// RUN: moe-compile %s -o - --target=sm_90 --emit=ptx | FileCheck %s --implicit-check-not="{{(atom|red)[^;]*[.]f(16|32|64)}}" --implicit-check-not=call
// RUN: moe-compile %s -o - --target=sm_80 --emit=ptx | FileCheck %s --check-prefix=BLOCKS --implicit-check-not=cluster --implicit-check-not="{{(atom|red)[^;]*[.]f(16|32|64)}}"

// Statistics never add floats atomically. From sm_90 on the blocks of a cluster
// combine their tables in each other's memory, between two barriers of the
// cluster: the last keeps a block's memory alive until the others have read it.
// Other chips leave a table a block in global memory.

// CHECK:     .visible .entry disperse_kernel(
// CHECK:     .reqnctapercluster 8, 1, 1
// CHECK:     barrier.cluster.arrive.aligned
// CHECK:     barrier.cluster.wait.aligned
// CHECK:     mapa.shared::cluster.u64
// CHECK:     ld.shared::cluster.b32
// CHECK:     barrier.cluster.wait.aligned
// BLOCKS:    .visible .entry disperse_kernel(
// BLOCKS:    st.global
func.func @disperse(%h: tensor<?x256xbf16>, %assign: tensor<?xi32>)
    -> (tensor<64x256xf32>, tensor<64x256xf32>, tensor<64xi32>) {
  %s = tensor.empty() : tensor<64x256xf32>
  %m = tensor.empty() : tensor<64x256xf32>
  %c = tensor.empty() : tensor<64xi32>
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x256xbf16>, tensor<?xi32>)
      outs(%s, %m, %c : tensor<64x256xf32>, tensor<64x256xf32>, tensor<64xi32>)
      -> tensor<64x256xf32>, tensor<64x256xf32>, tensor<64xi32>
  return %r#0, %r#1, %r#2 : tensor<64x256xf32>, tensor<64x256xf32>, tensor<64xi32>
}

// Counts are integers, whose order does not matter.

// CHECK:     .visible .entry count_kernel(
// CHECK:     .reqnctapercluster 4, 1, 1
// CHECK:     atom{{.*}}.or.b32
// CHECK:     ld.shared.v4.b32
// CHECK:     popc.b32
// CHECK:     barrier.cluster.wait.aligned
// CHECK:     mapa.shared::cluster.u64
// CHECK:     ld.shared::cluster.b32
// CHECK:     barrier.cluster.wait.aligned
// BLOCKS:    .visible .entry count_kernel(
// BLOCKS:    atom{{.*}}.or.b32
func.func @count(%a: tensor<64x64xf32>, %indices: tensor<?x8xi32>) -> tensor<64x64xf32> {
  %b = tensor.empty() : tensor<64x64xf32>
  %r = moe.adjacency_update ins(%a, %indices : tensor<64x64xf32>, tensor<?x8xi32>)
      outs(%b : tensor<64x64xf32>) -> tensor<64x64xf32>
  return %r : tensor<64x64xf32>
}
