// RUN: %moe-opt %s --convert-moe-to-gpu --canonicalize --cse --mlir-print-local-scope | FileCheck %s

// Producer and consumer share a kernel: the logits lie in aligned workgroup
// memory, and a barrier stands between the two.

// CHECK-LABEL: gpu.func @fuses_with_the_selection_kernel
// CHECK-SAME:    workgroup(%[[ARENA:.*]] : memref<1024xi8, #gpu.address_space<workgroup>> {llvm.align = 16 : i64})
// CHECK:         %[[VIEW:.*]] = memref.view %[[ARENA]]
// CHECK:         %[[Z:.*]] = memref.memory_space_cast %[[VIEW]]
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK-COUNT-16:    llvm.call_intrinsic "llvm.fma.f32"
// CHECK:           gpu.shuffle xor
// CHECK:           memref.store %{{.*}}, %[[Z]]
// CHECK:         gpu.barrier
// CHECK:         vector.load %[[Z]]
// CHECK-NOT:     gpu.barrier
// CHECK:         gpu.return
func.func @fuses_with_the_selection(
    %h: memref<?x352xbf16>, %w: memref<16x352xbf16>, %gates: memref<?x2xf32>,
    %indices: memref<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %h, %c0 : memref<?x352xbf16>
  scf.forall (%i) = (0) to (%n) step (16) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 16)>(%i)[%n]
    %h_tile = memref.subview %h[%i, 0] [%rows, 352] [1, 1]
        : memref<?x352xbf16> to memref<?x352xbf16, strided<[352, 1], offset: ?>>
    %z = memref.alloc(%rows) : memref<?x16xf32>
    moe.router_logits
        ins(%h_tile, %w : memref<?x352xbf16, strided<[352, 1], offset: ?>>,
            memref<16x352xbf16>)
        outs(%z : memref<?x16xf32>)
    %gates_tile = memref.subview %gates[%i, 0] [%rows, 2] [1, 1]
        : memref<?x2xf32> to memref<?x2xf32, strided<[2, 1], offset: ?>>
    %indices_tile = memref.subview %indices[%i, 0] [%rows, 2] [1, 1]
        : memref<?x2xi32> to memref<?x2xi32, strided<[2, 1], offset: ?>>
    moe.topk_renorm ins(%z : memref<?x16xf32>)
        outs(%gates_tile, %indices_tile
             : memref<?x2xf32, strided<[2, 1], offset: ?>>,
               memref<?x2xi32, strided<[2, 1], offset: ?>>)
    memref.dealloc %z : memref<?x16xf32>
  } {mapping = [#gpu.block<x>]}
  return
}
