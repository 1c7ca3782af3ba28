// RUN: %moe-opt %s --moe-access-bools-as-bytes | FileCheck %s
// RUN: %moe-opt %s --moe-access-bools-as-bytes --expand-strided-metadata --finalize-memref-to-llvm | FileCheck %s --check-prefix=LLVM

// CHECK-LABEL: func @stores_a_byte
// CHECK-SAME:    %[[M:[^:]*]]: memref<4x?xi1>, %[[V:[^:]*]]: i1
// CHECK:         memref.extract_strided_metadata %[[M]]
// CHECK:         %[[P:.*]] = llvm.inttoptr
// CHECK:         %[[BYTE:.*]] = arith.extui %[[V]] : i1 to i8
// CHECK:         llvm.store %[[BYTE]], %[[P]]
// CHECK-NOT:     memref.store
// LLVM-LABEL: func @stores_a_byte
// LLVM-NOT:     memref.
func.func @stores_a_byte(%m: memref<4x?xi1>, %v: i1, %i: index, %j: index) {
  memref.store %v, %m[%i, %j] : memref<4x?xi1>
  return
}

// CHECK-LABEL: func @keeps_stores_of_bytes
// CHECK:         memref.store
func.func @keeps_stores_of_bytes(%m: memref<4xi8>, %v: i8, %i: index) {
  memref.store %v, %m[%i] : memref<4xi8>
  return
}

// CHECK-LABEL: func @loads_a_byte
// CHECK:         %[[BYTE:.*]] = llvm.load %{{.*}} : !llvm.ptr -> i8
// CHECK:         arith.cmpi ne, %[[BYTE]]
// LLVM-LABEL: func @loads_a_byte
// LLVM-NOT:     memref.
func.func @loads_a_byte(%m: memref<4xi1>, %i: index) -> i1 {
  %v = memref.load %m[%i] : memref<4xi1>
  return %v : i1
}
