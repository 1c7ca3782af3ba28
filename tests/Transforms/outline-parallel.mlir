// RUN: %moe-opt %s --moe-outline-parallel --canonicalize --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %moe-opt %s --moe-outline-parallel --moe-outline-parallel --canonicalize --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %moe-opt %s --moe-outline-parallel=threads=false --split-input-file --verify-diagnostics | FileCheck %s --check-prefix=LOOPS

// The count is the product of the trip counts; values from outside travel in
// a struct, constants are rebuilt.

// CHECK-LABEL: func private @passes_captures_in_a_struct_parallel
// CHECK-SAME:    (%[[BEGIN:.*]]: i64, %[[END:.*]]: i64, %[[CONTEXT:.*]]: !llvm.ptr)
// CHECK-DAG:     %[[CST:.*]] = arith.constant 1.000000e+00 : f32
// CHECK-DAG:     llvm.getelementptr %[[CONTEXT]]
// CHECK-DAG:     %[[FROM:.*]] = arith.index_cast %[[BEGIN]]
// CHECK-DAG:     %[[TO:.*]] = arith.index_cast %[[END]]
// CHECK:         scf.for %{{.*}} = %[[FROM]] to %[[TO]]
// CHECK:           memref.store %[[CST]]

// CHECK-LABEL: func @passes_captures_in_a_struct
// CHECK:         %[[STORAGE:.*]] = llvm.alloca
// CHECK:         %[[FIELD:.*]] = llvm.getelementptr %[[STORAGE]]
// CHECK:         llvm.store %{{.*}}, %[[FIELD]]
// CHECK:         call @moe_parallel_for(%{{.*}}, %{{.*}}, %[[STORAGE]])
// CHECK-NOT:     scf.forall
// CHECK:       func private @moe_parallel_for(i64, !llvm.ptr, !llvm.ptr)

// LOOPS-LABEL: func @passes_captures_in_a_struct
// LOOPS-NOT:     moe_parallel_for
// LOOPS:         scf.for
// LOOPS:           scf.for
func.func @passes_captures_in_a_struct(%x: memref<2x?xf32>, %n: index) {
  %one = arith.constant 1.0 : f32
  scf.forall (%i, %j) = (0, 0) to (2, %n) step (1, 64) {
    memref.store %one, %x[%i, %j] : memref<2x?xf32>
  }
  return
}

// -----

// Only the outermost loop becomes a call: the runtime runs nested ones in place.

// CHECK-LABEL: func private @outlines_outermost_loops_only_parallel
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK-NOT:       scf.forall
// CHECK-LABEL: func @outlines_outermost_loops_only
// CHECK:         call @moe_parallel_for
func.func @outlines_outermost_loops_only(%x: memref<8x8xf32>, %v: f32) {
  scf.forall (%i) in (8) {
    scf.forall (%j) in (8) {
      memref.store %v, %x[%i, %j] : memref<8x8xf32>
    }
  }
  return
}

// -----

// A buffer in a loop would grow the stack with every iteration.

// CHECK-LABEL: func private @hoists_buffers_out_of_the_loop_parallel
// CHECK:         memref.alloca
// CHECK:         scf.for
// CHECK-NOT:       memref.alloca
// LOOPS-LABEL: func @hoists_buffers_out_of_the_loop
// LOOPS:         memref.alloca
// LOOPS:         scf.for
// LOOPS-NOT:       memref.alloca
func.func @hoists_buffers_out_of_the_loop(%x: memref<8xf32>, %v: f32) {
  %c0 = arith.constant 0 : index
  scf.forall (%i) in (8) {
    %buffer = memref.alloca() : memref<4xf32>
    memref.store %v, %buffer[%c0] : memref<4xf32>
    %w = memref.load %buffer[%c0] : memref<4xf32>
    memref.store %w, %x[%i] : memref<8xf32>
  }
  return
}

// -----

// Loops that differ in what they are given share a function, whatever they stand
// in; one with another constant has its own.

// CHECK-LABEL: func private @shares_equal_functions_parallel(
// CHECK-LABEL: func @shares_equal_functions(
// CHECK:         constant @shares_equal_functions_parallel :
// CHECK-COUNT-2: call @moe_parallel_for
// CHECK-LABEL: func private @another_caller_parallel(
// CHECK:         arith.constant 2.000000e+00 : f32
// CHECK-LABEL: func @another_caller(
// CHECK-DAG:     constant @shares_equal_functions_parallel :
// CHECK-DAG:     constant @another_caller_parallel :
// CHECK-COUNT-2: call @moe_parallel_for
func.func @shares_equal_functions(%x: memref<?xf32>, %y: memref<?xf32>, %n: index, %m: index) {
  %one = arith.constant 1.0 : f32
  scf.forall (%i) in (%n) {
    memref.store %one, %x[%i] : memref<?xf32>
  }
  scf.forall (%i) in (%m) {
    memref.store %one, %y[%i] : memref<?xf32>
  }
  return
}
func.func @another_caller(%x: memref<?xf32>, %n: index) {
  %one = arith.constant 1.0 : f32
  %two = arith.constant 2.0 : f32
  scf.forall (%i) in (%n) {
    memref.store %one, %x[%i] : memref<?xf32>
  }
  scf.forall (%i) in (%n) {
    memref.store %two, %x[%i] : memref<?xf32>
  }
  return
}

// -----

func.func @expects_buffers(%x: tensor<8xf32>) -> tensor<8xf32> {
  // expected-error @below {{expected a parallel loop on buffers, found one with results; bufferize first}}
  %r = scf.forall (%i) in (8) shared_outs(%o = %x) -> tensor<8xf32> {
    %s = tensor.extract_slice %o[%i] [1] [1] : tensor<8xf32> to tensor<1xf32>
    scf.forall.in_parallel {
      tensor.parallel_insert_slice %s into %o[%i] [1] [1] : tensor<1xf32> into tensor<8xf32>
    }
  }
  return %r : tensor<8xf32>
}

// -----

// The count of threads that no tiling asked for is gone.

// CHECK-LABEL: func @asks_nobody
// CHECK-NOT:     moe_get_num_threads
// LOOPS-LABEL: func.func @asks_nobody
// LOOPS-NOT:     moe_get_num_threads
func.func @asks_nobody() {
  return
}
func.func private @moe_get_num_threads() -> i32
