// RUN: %moe-opt %s --moe-outline-loops=min-loops=2 --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-outline-loops --split-input-file | FileCheck %s --check-prefix=FEW

// Loops that do the same share a function, which LLVM must not inline. Of a
// buffer its pointer travels and what its type does not say.

// CHECK-LABEL: func private @many_loops_loop(
// CHECK-SAME:    %[[CONTEXT:.*]]: !llvm.ptr) attributes {passthrough = ["noinline"]}
// CHECK:         llvm.getelementptr %[[CONTEXT]]{{.*}} -> !llvm.ptr, !llvm.struct<(f32, ptr, i64, i64)>
// CHECK:         scf.for
// CHECK:           memref.store
// CHECK:         return

// CHECK-LABEL: func @many_loops(
// CHECK-SAME:    %[[X:[^:]*]]: memref<?x8xf32>, %[[Y:[^:]*]]: memref<?x8xf32>
// CHECK-NOT:     scf.for
// CHECK:         call @many_loops_loop(
// CHECK-NOT:     scf.for
// CHECK:         call @many_loops_loop(
// CHECK-NOT:     scf.for
// CHECK:         return

// FEW-LABEL: func.func @many_loops(
// FEW-NOT:     call
// FEW:         scf.for
// FEW:         scf.for
func.func @many_loops(%x: memref<?x8xf32>, %y: memref<?x8xf32>, %v: f32, %n: index) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  scf.for %i = %zero to %n step %one {
    memref.store %v, %x[%i, %zero] : memref<?x8xf32>
  }
  scf.for %i = %zero to %n step %one {
    memref.store %v, %y[%i, %zero] : memref<?x8xf32>
  }
  return
}

// -----

// Loops inside of others go with them; one that computes a value stays.

// CHECK-LABEL: func private @nested_loops_loop(
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK-LABEL: func @nested_loops(
// CHECK:         call @nested_loops_loop(
// CHECK:         call @nested_loops_loop
// CHECK:         scf.for {{.*}} iter_args
// CHECK:         return
func.func @nested_loops(%x: memref<4x8xf32>, %v: f32) -> f32 {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %four = arith.constant 4 : index
  %eight = arith.constant 8 : index
  scf.for %i = %zero to %four step %one {
    scf.for %j = %zero to %eight step %one {
      memref.store %v, %x[%i, %j] : memref<4x8xf32>
    }
  }
  scf.for %i = %zero to %eight step %one {
    memref.store %v, %x[%zero, %i] : memref<4x8xf32>
  }
  %sum = scf.for %i = %zero to %four step %one iter_args(%s = %v) -> f32 {
    %a = memref.load %x[%i, %zero] : memref<4x8xf32>
    %b = arith.addf %s, %a : f32
    scf.yield %b : f32
  }
  return %sum : f32
}

// -----

// Strides and offsets that a type does not say travel, too.

// CHECK-LABEL: func private @strided_loop(
// CHECK:         !llvm.struct<(f32, ptr, i64, i64, i64)>
// CHECK-LABEL: func @strided(
func.func @strided(%x: memref<4x8xf32, strided<[?, 1], offset: ?>>, %v: f32, %k: index) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %four = arith.constant 4 : index
  scf.for %i = %zero to %four step %one {
    memref.store %v, %x[%i, %k] : memref<4x8xf32, strided<[?, 1], offset: ?>>
  }
  scf.for %i = %zero to %four step %one {
    memref.store %v, %x[%i, %i] : memref<4x8xf32, strided<[?, 1], offset: ?>>
  }
  return
}
