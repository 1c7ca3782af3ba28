// RUN: moe-opt %s --moe-attach-nvvm-target --moe-tile-to-blocks | FileCheck %s

// A loop over experts, each of which has its run of rows: a block a chunk of a
// run, with the bounds of the chunk in place of the run's.

// CHECK-LABEL: func.func @runs
// CHECK:         scf.forall (%[[EXPERT:.*]], %[[CHUNK:.*]]) in (4, %{{.*}})
// CHECK:           arith.minsi
// CHECK:           %[[BEGIN:.*]] = arith.addi
// CHECK:           %[[ROWS:.*]] = affine.min
// CHECK:           tensor.extract_slice %{{.*}}[%[[BEGIN]], 0] [%[[ROWS]], 16]
// CHECK:           tensor.parallel_insert_slice %{{.*}} into %{{.*}}[%[[BEGIN]], 0] [%[[ROWS]], 16]
// CHECK:         mapping = [#gpu.block<y>, #gpu.block<x>]
func.func @runs(%x: tensor<?x16xf32>, %offsets: tensor<5xindex>, %init: tensor<?x16xf32>)
    -> tensor<?x16xf32> {
  %c1 = arith.constant 1 : index
  %y = scf.forall (%e) in (4) shared_outs(%out = %init) -> (tensor<?x16xf32>) {
    %next = arith.addi %e, %c1 : index
    %begin = tensor.extract %offsets[%e] : tensor<5xindex>
    %end = tensor.extract %offsets[%next] : tensor<5xindex>
    %rows = arith.subi %end, %begin : index
    %run = tensor.extract_slice %x[%begin, 0] [%rows, 16] [1, 1]
        : tensor<?x16xf32> to tensor<?x16xf32>
    %place = tensor.extract_slice %out[%begin, 0] [%rows, 16] [1, 1]
        : tensor<?x16xf32> to tensor<?x16xf32>
    %abs = linalg.abs ins(%run : tensor<?x16xf32>) outs(%place : tensor<?x16xf32>)
        -> tensor<?x16xf32>
    scf.forall.in_parallel {
      tensor.parallel_insert_slice %abs into %out[%begin, 0] [%rows, 16] [1, 1]
          : tensor<?x16xf32> into tensor<?x16xf32>
    }
  }
  return %y : tensor<?x16xf32>
}

// Sums over the rows of a run: its rows stay together.

// CHECK-LABEL: func.func @sums
// CHECK:         scf.forall (%{{.*}}) in (4)
// CHECK-NOT:       affine.min
// CHECK:         mapping = [#gpu.block<x>]
func.func @sums(%x: tensor<?x16xf32>, %offsets: tensor<5xindex>, %init: tensor<4x16xf32>)
    -> tensor<4x16xf32> {
  %c1 = arith.constant 1 : index
  %y = scf.forall (%e) in (4) shared_outs(%out = %init) -> (tensor<4x16xf32>) {
    %next = arith.addi %e, %c1 : index
    %begin = tensor.extract %offsets[%e] : tensor<5xindex>
    %end = tensor.extract %offsets[%next] : tensor<5xindex>
    %rows = arith.subi %end, %begin : index
    %run = tensor.extract_slice %x[%begin, 0] [%rows, 16] [1, 1]
        : tensor<?x16xf32> to tensor<?x16xf32>
    %place = tensor.extract_slice %out[%e, 0] [1, 16] [1, 1]
        : tensor<4x16xf32> to tensor<16xf32>
    %sum = linalg.reduce { arith.addf } ins(%run : tensor<?x16xf32>)
        outs(%place : tensor<16xf32>) dimensions = [0]
    scf.forall.in_parallel {
      tensor.parallel_insert_slice %sum into %out[%e, 0] [1, 16] [1, 1]
          : tensor<16xf32> into tensor<4x16xf32>
    }
  }
  return %y : tensor<4x16xf32>
}
