// Row sums of squares: shuffles, workgroup memory and a barrier, as MLIR's
// gpu dialect lowers them.
module attributes {gpu.container_module} {
  gpu.module @row_sum {
    gpu.func @mlir_row_sum(%x: memref<5x256xf32>, %out: memref<5xf32>)
        workgroup(%partial: memref<2xf32, #gpu.address_space<workgroup>> {llvm.align = 16 : i64})
        kernel attributes {known_block_size = array<i32: 64, 1, 1>} {
      %row = gpu.block_id x
      %t = gpu.thread_id x
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c32 = arith.constant 32 : index
      %c64 = arith.constant 64 : index
      %c256 = arith.constant 256 : index
      %zero = arith.constant 0.0 : f32
      %mine = scf.for %col = %t to %c256 step %c64 iter_args(%acc = %zero) -> f32 {
        %v = memref.load %x[%row, %col] : memref<5x256xf32>
        %square = arith.mulf %v, %v : f32
        %next = arith.addf %acc, %square : f32
        scf.yield %next : f32
      }
      %width = arith.constant 32 : i32
      %o16 = arith.constant 16 : i32
      %o8 = arith.constant 8 : i32
      %o4 = arith.constant 4 : i32
      %o2 = arith.constant 2 : i32
      %o1 = arith.constant 1 : i32
      %a16, %p16 = gpu.shuffle xor %mine, %o16, %width : f32
      %s16 = arith.addf %mine, %a16 : f32
      %a8, %p8 = gpu.shuffle xor %s16, %o8, %width : f32
      %s8 = arith.addf %s16, %a8 : f32
      %a4, %p4 = gpu.shuffle xor %s8, %o4, %width : f32
      %s4 = arith.addf %s8, %a4 : f32
      %a2, %p2 = gpu.shuffle xor %s4, %o2, %width : f32
      %s2 = arith.addf %s4, %a2 : f32
      %a1, %p1 = gpu.shuffle xor %s2, %o1, %width : f32
      %sum = arith.addf %s2, %a1 : f32
      %warp = arith.divui %t, %c32 : index
      %lane = arith.remui %t, %c32 : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      scf.if %leads {
        memref.store %sum, %partial[%warp] : memref<2xf32, #gpu.address_space<workgroup>>
      }
      gpu.barrier
      %first = arith.cmpi eq, %t, %c0 : index
      scf.if %first {
        %p = memref.load %partial[%c0] : memref<2xf32, #gpu.address_space<workgroup>>
        %q = memref.load %partial[%c1] : memref<2xf32, #gpu.address_space<workgroup>>
        %total = arith.addf %p, %q : f32
        memref.store %total, %out[%row] : memref<5xf32>
      }
      gpu.return
    }
  }
}
