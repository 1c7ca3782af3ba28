// RUN: %moe-opt %s --split-input-file --convert-moe-to-gpu --verify-diagnostics

func.func @dynamic_experts(%z: memref<4x?xf32>, %gates: memref<4x2xf32>,
                           %indices: memref<4x2xi32>) {
  scf.forall (%i) in (1) {
    // expected-error @below {{cannot run 'moe.topk_renorm' on the threads of a block: expected static numbers of experts and of selected experts}}
    moe.topk_renorm ins(%z : memref<4x?xf32>)
        outs(%gates, %indices : memref<4x2xf32>, memref<4x2xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

func.func @too_many_experts(%z: memref<4x4096xf32>, %gates: memref<4x2xf32>,
                            %indices: memref<4x2xi32>) {
  scf.forall (%i) in (1) {
    // expected-error @below {{expected at most 2048 experts, found 4096}}
    moe.topk_renorm ins(%z : memref<4x4096xf32>)
        outs(%gates, %indices : memref<4x2xf32>, memref<4x2xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

func.func @num_valid(%z: memref<4x16xf32>, %valid: i32, %gates: memref<4x2xf32>,
                     %indices: memref<4x2xi32>) {
  scf.forall (%i) in (1) {
    // expected-error @below {{expected no 'num_valid'}}
    moe.topk_renorm ins(%z : memref<4x16xf32>) num_valid(%valid : i32)
        outs(%gates, %indices : memref<4x2xf32>, memref<4x2xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

func.func @no_lowering(%h: memref<8x4xf32>, %assign: memref<8xi32>,
                       %s: memref<2x4xf32>, %mean: memref<2x4xf32>,
                       %count: memref<2xi32>) {
  scf.forall (%i) in (1) {
    // expected-error @below {{cannot run 'moe.mad_dispersion' on the threads of a block: no lowering of this op to GPU threads exists yet}}
    moe.mad_dispersion ins(%h, %assign : memref<8x4xf32>, memref<8xi32>)
        outs(%s, %mean, %count : memref<2x4xf32>, memref<2x4xf32>, memref<2xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

func.func @outside_of_a_block(%z: memref<4x16xf32>, %gates: memref<4x2xf32>,
                              %indices: memref<4x2xi32>) {
  // expected-error @below {{expected 'moe.topk_renorm' to be part of a loop over blocks}}
  moe.topk_renorm ins(%z : memref<4x16xf32>)
      outs(%gates, %indices : memref<4x2xf32>, memref<4x2xi32>)
  return
}

// -----

func.func @not_mapped(%a: memref<4xf32>, %b: memref<4xf32>) {
  // expected-error @below {{expected a loop that is mapped to the blocks of a grid}}
  scf.forall (%i) in (1) {
    memref.copy %a, %b : memref<4xf32> to memref<4xf32>
  }
  return
}

// -----

func.func @too_much_workgroup_memory(%a: memref<64x1024xf32>, %b: memref<64x1024xf32>) {
  // expected-error @below {{expected a block to need at most 49152 bytes of workgroup memory, found 262144; use smaller tiles}}
  scf.forall (%i) in (1) {
    %t = memref.alloc() : memref<64x1024xf32>
    memref.copy %a, %t : memref<64x1024xf32> to memref<64x1024xf32>
    memref.copy %t, %b : memref<64x1024xf32> to memref<64x1024xf32>
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// expected-error @below {{expected argument 0 to be a contiguous buffer or a scalar}}
func.func @strided_argument(
    %a: memref<4xf32, strided<[2]>>, %b: memref<4xf32>) {
  scf.forall (%i) in (1) {
    memref.copy %a, %b : memref<4xf32, strided<[2]>> to memref<4xf32>
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Nobody would run the fill.
func.func @work_beside_a_kernel(%a: memref<4xf32>, %b: memref<4xf32>, %c: memref<4xf32>) {
  %zero = arith.constant 0.0 : f32
  scf.forall (%i) in (1) {
    memref.copy %a, %b : memref<4xf32> to memref<4xf32>
  } {mapping = [#gpu.block<x>]}
  // expected-error @below {{expected 'linalg.fill' to be part of a loop over blocks}}
  linalg.fill ins(%zero : f32) outs(%c : memref<4xf32>)
  return
}

// -----

// expected-error @below {{expected a function whose results are destinations among its arguments, found 1 results}}
func.func @returns_a_buffer(%a: memref<4xf32>) -> memref<4xf32> {
  return %a : memref<4xf32>
}
