// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --convert-moe-to-gpu --canonicalize --cse --mlir-print-local-scope | FileCheck %s

// Logits on tensor cores: chunks of rows and weights are on their way while one
// is multiplied. Beside the logits of 18 KiB they do not fit into static memory.

// CHECK-LABEL: gpu.func @router_kernel
// CHECK-SAME:    workgroup(%[[ARENA:.*]] : memref<18432xi8, #gpu.address_space<workgroup>> {llvm.align = 16 : i64})
// CHECK-SAME:    moe.dynamic_smem = 40960 : i64
// CHECK:         scf.for
// CHECK:           gpu.barrier
// CHECK:           nvvm.cp.async.shared.global
// CHECK:           nvvm.cp.async.commit.group
// CHECK:           scf.for
// CHECK:             nvvm.cp.async.wait.group 0
// CHECK:             gpu.barrier
// CHECK:             scf.if
// CHECK:               nvvm.cp.async.shared.global
// CHECK:             nvvm.cp.async.commit.group
// CHECK:             nvvm.ldmatrix
// CHECK:             nvvm.mma.sync {{.*}} multiplicandAPtxType = #nvvm.mma_type<bf16>
// CHECK-NOT:         llvm.fma.f32
// CHECK:             memref.store
// CHECK:         gpu.barrier
// CHECK:         gpu.return
func.func @router(%h: memref<?x352xbf16>, %w: memref<96x352xbf16>,
                  %gates: memref<?x2xf32>, %indices: memref<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %h, %c0 : memref<?x352xbf16>
  scf.forall (%i) = (0) to (%n) step (48) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 48)>(%i)[%n]
    %h_tile = memref.subview %h[%i, 0] [%rows, 352] [1, 1]
        : memref<?x352xbf16> to memref<?x352xbf16, strided<[352, 1], offset: ?>>
    %z = memref.alloc(%rows) : memref<?x96xf32>
    moe.router_logits
        ins(%h_tile, %w : memref<?x352xbf16, strided<[352, 1], offset: ?>>,
            memref<96x352xbf16>)
        outs(%z : memref<?x96xf32>)
    %gates_tile = memref.subview %gates[%i, 0] [%rows, 2] [1, 1]
        : memref<?x2xf32> to memref<?x2xf32, strided<[2, 1], offset: ?>>
    %indices_tile = memref.subview %indices[%i, 0] [%rows, 2] [1, 1]
        : memref<?x2xi32> to memref<?x2xi32, strided<[2, 1], offset: ?>>
    moe.topk_renorm ins(%z : memref<?x96xf32>)
        outs(%gates_tile, %indices_tile
             : memref<?x2xf32, strided<[2, 1], offset: ?>>,
               memref<?x2xi32, strided<[2, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Rows that another op of the block leaves in workgroup memory are not copied.

// CHECK-LABEL: gpu.func @produced_kernel
// CHECK-NOT:     nvvm.mma.sync
// CHECK:         llvm.call_intrinsic "llvm.fma.f32"
func.func @produced(%x: memref<?x64xbf16>, %w: memref<8x64xbf16>, %z: memref<?x8xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %x, %c0 : memref<?x64xbf16>
  scf.forall (%i) = (0) to (%n) step (16) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 16)>(%i)[%n]
    %x_tile = memref.subview %x[%i, 0] [%rows, 64] [1, 1]
        : memref<?x64xbf16> to memref<?x64xbf16, strided<[64, 1], offset: ?>>
    %h = memref.alloc(%rows) : memref<?x64xbf16>
    linalg.abs ins(%x_tile : memref<?x64xbf16, strided<[64, 1], offset: ?>>)
        outs(%h : memref<?x64xbf16>)
    %z_tile = memref.subview %z[%i, 0] [%rows, 8] [1, 1]
        : memref<?x8xf32> to memref<?x8xf32, strided<[8, 1], offset: ?>>
    moe.router_logits ins(%h, %w : memref<?x64xbf16>, memref<8x64xbf16>)
        outs(%z_tile : memref<?x8xf32, strided<[8, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Rows that begin between two units are not copied 16 bytes at a time.

// CHECK-LABEL: gpu.func @misaligned_kernel
// CHECK-NOT:     nvvm.mma.sync
// CHECK:         llvm.call_intrinsic "llvm.fma.f32"
func.func @misaligned(%x: memref<?x64xbf16>, %flat: memref<516xbf16>, %z: memref<?x8xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %x, %c0 : memref<?x64xbf16>
  scf.forall (%i) = (0) to (%n) step (16) {
    %part = memref.subview %flat[4] [512] [1]
        : memref<516xbf16> to memref<512xbf16, strided<[1], offset: 4>>
    %w = memref.expand_shape %part [[0, 1]] output_shape [8, 64]
        : memref<512xbf16, strided<[1], offset: 4>>
        into memref<8x64xbf16, strided<[64, 1], offset: 4>>
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 16)>(%i)[%n]
    %x_tile = memref.subview %x[%i, 0] [%rows, 64] [1, 1]
        : memref<?x64xbf16> to memref<?x64xbf16, strided<[64, 1], offset: ?>>
    %z_tile = memref.subview %z[%i, 0] [%rows, 8] [1, 1]
        : memref<?x8xf32> to memref<?x8xf32, strided<[8, 1], offset: ?>>
    moe.router_logits
        ins(%x_tile, %w : memref<?x64xbf16, strided<[64, 1], offset: ?>>,
            memref<8x64xbf16, strided<[64, 1], offset: 4>>)
        outs(%z_tile : memref<?x8xf32, strided<[8, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// A product of rows in linalg, as the layers of experts have them, adds to what
// its output holds. Another function of the same operands is no product.

// CHECK-LABEL: gpu.func @linalg_kernel
// CHECK:         nvvm.mma.sync
// CHECK:         %[[OLD:.*]] = memref.load
// CHECK:         %[[NEW:.*]] = arith.addf %[[OLD]]
// CHECK:         memref.store %[[NEW]]
// CHECK:         gpu.return
// CHECK-LABEL: gpu.func @linalg_kernel_1
// CHECK-NOT:     nvvm.mma.sync
// CHECK:         gpu.return
#left = affine_map<(r, n, d) -> (r, d)>
#right = affine_map<(r, n, d) -> (n, d)>
#out = affine_map<(r, n, d) -> (r, n)>
func.func @linalg(%x: memref<64x64xbf16>, %w: memref<40x64xbf16>, %y: memref<64x40xf32>) {
  scf.forall (%i) in (1) {
    linalg.generic {indexing_maps = [#left, #right, #out],
                    iterator_types = ["parallel", "parallel", "reduction"]}
        ins(%x, %w : memref<64x64xbf16>, memref<40x64xbf16>) outs(%y : memref<64x40xf32>) {
    ^bb0(%a: bf16, %b: bf16, %sum: f32):
      %0 = arith.extf %a : bf16 to f32
      %1 = arith.extf %b : bf16 to f32
      %2 = arith.mulf %0, %1 : f32
      %3 = arith.addf %sum, %2 : f32
      linalg.yield %3 : f32
    }
  } {mapping = [#gpu.block<x>]}
  scf.forall (%i) in (1) {
    linalg.generic {indexing_maps = [#left, #right, #out],
                    iterator_types = ["parallel", "parallel", "reduction"]}
        ins(%x, %w : memref<64x64xbf16>, memref<40x64xbf16>) outs(%y : memref<64x40xf32>) {
    ^bb0(%a: bf16, %b: bf16, %sum: f32):
      %0 = arith.extf %a : bf16 to f32
      %1 = arith.extf %b : bf16 to f32
      %2 = math.absf %0 : f32
      %3 = arith.mulf %2, %1 : f32
      %4 = arith.addf %sum, %3 : f32
      linalg.yield %4 : f32
    }
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// The float units take what they are chosen for.

// CHECK-LABEL: gpu.func @chosen_float_kernel
// CHECK-NOT:     nvvm.mma.sync
// CHECK:         llvm.call_intrinsic "llvm.fma.f32"
func.func @chosen_float(%x: memref<?x64xbf16>, %w: memref<8x64xbf16>, %z: memref<?x8xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %x, %c0 : memref<?x64xbf16>
  scf.forall (%i) = (0) to (%n) step (16) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 16)>(%i)[%n]
    %x_tile = memref.subview %x[%i, 0] [%rows, 64] [1, 1]
        : memref<?x64xbf16> to memref<?x64xbf16, strided<[64, 1], offset: ?>>
    %z_tile = memref.subview %z[%i, 0] [%rows, 8] [1, 1]
        : memref<?x8xf32> to memref<?x8xf32, strided<[8, 1], offset: ?>>
    moe.router_logits
        ins(%x_tile, %w : memref<?x64xbf16, strided<[64, 1], offset: ?>>, memref<8x64xbf16>)
        outs(%z_tile : memref<?x8xf32, strided<[8, 1], offset: ?>>)
        {moe.kernel_config = #moe.kernel_config<schedule = float>}
  } {mapping = [#gpu.block<x>]}
  return
}
