// D (32 x 32) = A (32 x 64) x B (64 x 32): cp.async in two buffers, ldmatrix
// (transposed for B) and mma.sync, as MLIR's nvgpu dialect lowers them. Four
// warps, a 16 x 16 quarter each, 16 of K a step.
!smem = memref<2x32x16xf16, #gpu.address_space<workgroup>>
!smemB = memref<2x16x32xf16, #gpu.address_space<workgroup>>
module attributes {gpu.container_module} {
  gpu.module @tile_gemm {
    gpu.func @mlir_tile_gemm(%a: memref<32x64xf16>, %b: memref<64x32xf16>, %d: memref<32x32xf32>)
        workgroup(%sa: !smem {llvm.align = 16 : i64}, %sb: !smemB {llvm.align = 16 : i64})
        kernel attributes {known_block_size = array<i32: 128, 1, 1>} {
      %t = gpu.thread_id x
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c2 = arith.constant 2 : index
      %c4 = arith.constant 4 : index
      %c8 = arith.constant 8 : index
      %c16 = arith.constant 16 : index
      %c32 = arith.constant 32 : index
      %c64 = arith.constant 64 : index
      %zero = arith.constant dense<0.0> : vector<2x2xf32>
      %lane = arith.remui %t, %c32 : index
      %warp = arith.divui %t, %c32 : index
      %warpRow = arith.divui %warp, %c2 : index
      %warpCol = arith.remui %warp, %c2 : index
      %rowW = arith.muli %warpRow, %c16 : index
      %colW = arith.muli %warpCol, %c16 : index

      // Threads 0..63 copy A (32 rows x 2 chunks), 64..127 B (16 rows x 4).
      %u = arith.remui %t, %c64 : index
      %aRow = arith.divui %u, %c2 : index
      %aChunk = arith.remui %u, %c2 : index
      %aCol = arith.muli %aChunk, %c8 : index
      %bRow = arith.divui %u, %c4 : index
      %bChunk = arith.remui %u, %c4 : index
      %bCol = arith.muli %bChunk, %c8 : index
      %copiesA = arith.cmpi ult, %t, %c64 : index
      scf.if %copiesA {
        %x = nvgpu.device_async_copy %a[%aRow, %aCol], %sa[%c0, %aRow, %aCol], 8 {bypassL1} : memref<32x64xf16> to !smem
      } else {
        %x = nvgpu.device_async_copy %b[%bRow, %bCol], %sb[%c0, %bRow, %bCol], 8 {bypassL1} : memref<64x32xf16> to !smemB
      }
      %g0 = "nvgpu.device_async_create_group"() : () -> !nvgpu.device.async.token

      %acc:2 = scf.for %k = %c0 to %c64 step %c16 iter_args(%acc0 = %zero, %acc1 = %zero) -> (vector<2x2xf32>, vector<2x2xf32>) {
        nvgpu.device_async_wait %g0 {numGroups = 0 : i32}
        gpu.barrier
        %step = arith.divui %k, %c16 : index
        %now = arith.remui %step, %c2 : index
        %next = arith.subi %c1, %now : index
        %kNext = arith.addi %k, %c16 : index
        %more = arith.cmpi ult, %kNext, %c64 : index
        scf.if %more {
          scf.if %copiesA {
            %from = arith.addi %kNext, %aCol : index
            %x = nvgpu.device_async_copy %a[%aRow, %from], %sa[%next, %aRow, %aCol], 8 {bypassL1} : memref<32x64xf16> to !smem
          } else {
            %from = arith.addi %kNext, %bRow : index
            %x = nvgpu.device_async_copy %b[%from, %bCol], %sb[%next, %bRow, %bCol], 8 {bypassL1} : memref<64x32xf16> to !smemB
          }
          %g = "nvgpu.device_async_create_group"() : () -> !nvgpu.device.async.token
        }
        %lane16 = arith.remui %lane, %c16 : index
        %laneHigh = arith.divui %lane, %c16 : index
        %ldRow = arith.addi %rowW, %lane16 : index
        %ldCol = arith.muli %laneHigh, %c8 : index
        %fragA = nvgpu.ldmatrix %sa[%now, %ldRow, %ldCol] {numTiles = 4 : i32, transpose = false} : !smem -> vector<4x2xf16>
        %colW8 = arith.addi %colW, %c8 : index
        %fragB0 = nvgpu.ldmatrix %sb[%now, %lane16, %colW] {numTiles = 2 : i32, transpose = true} : !smemB -> vector<2x2xf16>
        %fragB1 = nvgpu.ldmatrix %sb[%now, %lane16, %colW8] {numTiles = 2 : i32, transpose = true} : !smemB -> vector<2x2xf16>
        %d0 = nvgpu.mma.sync (%fragA, %fragB0, %acc0) {mmaShape = [16, 8, 16]} : (vector<4x2xf16>, vector<2x2xf16>, vector<2x2xf32>) -> vector<2x2xf32>
        %d1 = nvgpu.mma.sync (%fragA, %fragB1, %acc1) {mmaShape = [16, 8, 16]} : (vector<4x2xf16>, vector<2x2xf16>, vector<2x2xf32>) -> vector<2x2xf32>
        scf.yield %d0, %d1 : vector<2x2xf32>, vector<2x2xf32>
      }

      %group = arith.divui %lane, %c4 : index
      %inGroup = arith.remui %lane, %c4 : index
      %pair = arith.muli %inGroup, %c2 : index
      %row0 = arith.addi %rowW, %group : index
      %row1 = arith.addi %row0, %c8 : index
      %col0 = arith.addi %colW, %pair : index
      %col1 = arith.addi %col0, %c1 : index
      %col8 = arith.addi %col0, %c8 : index
      %col9 = arith.addi %col8, %c1 : index
      %v00 = vector.extract %acc#0[0, 0] : f32 from vector<2x2xf32>
      %v01 = vector.extract %acc#0[0, 1] : f32 from vector<2x2xf32>
      %v02 = vector.extract %acc#0[1, 0] : f32 from vector<2x2xf32>
      %v03 = vector.extract %acc#0[1, 1] : f32 from vector<2x2xf32>
      %v10 = vector.extract %acc#1[0, 0] : f32 from vector<2x2xf32>
      %v11 = vector.extract %acc#1[0, 1] : f32 from vector<2x2xf32>
      %v12 = vector.extract %acc#1[1, 0] : f32 from vector<2x2xf32>
      %v13 = vector.extract %acc#1[1, 1] : f32 from vector<2x2xf32>
      memref.store %v00, %d[%row0, %col0] : memref<32x32xf32>
      memref.store %v01, %d[%row0, %col1] : memref<32x32xf32>
      memref.store %v02, %d[%row1, %col0] : memref<32x32xf32>
      memref.store %v03, %d[%row1, %col1] : memref<32x32xf32>
      memref.store %v10, %d[%row0, %col8] : memref<32x32xf32>
      memref.store %v11, %d[%row0, %col9] : memref<32x32xf32>
      memref.store %v12, %d[%row1, %col8] : memref<32x32xf32>
      memref.store %v13, %d[%row1, %col9] : memref<32x32xf32>
      gpu.return
    }
  }
}
