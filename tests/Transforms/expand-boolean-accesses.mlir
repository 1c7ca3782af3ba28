// RUN: %moe-opt %s --moe-expand-boolean-accesses | FileCheck %s
// RUN: %moe-opt %s --moe-expand-boolean-accesses --convert-vector-to-llvm --convert-to-llvm | FileCheck %s --check-prefix=LLVM

// CHECK-LABEL: func @booleans_are_vectors_of_one
// CHECK-SAME:    %[[M:[^:]*]]: memref<?xi1>, %[[I:[^:]*]]: index
// CHECK:         %[[IN:.*]] = vector.load %[[M]][%[[I]]] : memref<?xi1>, vector<1xi1>
// CHECK:         %[[B:.*]] = vector.extract %[[IN]][0]
// CHECK:         %[[OUT:.*]] = vector.broadcast %[[B]] : i1 to vector<1xi1>
// CHECK:         vector.store %[[OUT]], %[[M]][%[[I]]] : memref<?xi1>, vector<1xi1>
// LLVM-LABEL:  llvm.func @booleans_are_vectors_of_one
// LLVM:          llvm.load %{{.*}} : !llvm.ptr -> vector<1xi1>
// LLVM:          llvm.store %{{.*}} : vector<1xi1>, !llvm.ptr
func.func @booleans_are_vectors_of_one(%m: memref<?xi1>, %i: index) {
  %b = memref.load %m[%i] : memref<?xi1>
  memref.store %b, %m[%i] : memref<?xi1>
  return
}

// CHECK-LABEL: func @bytes_stay
// CHECK:         memref.load
// CHECK:         memref.store
func.func @bytes_stay(%m: memref<?xi8>, %i: index) {
  %b = memref.load %m[%i] : memref<?xi8>
  memref.store %b, %m[%i] : memref<?xi8>
  return
}

// CHECK-LABEL: func @a_single_boolean_is_a_vector_without_dims
// CHECK-SAME:    %[[M:[^:]*]]: memref<i1>
// CHECK:         vector.load %[[M]][] : memref<i1>, vector<i1>
// CHECK:         vector.store %{{.*}}, %[[M]][] : memref<i1>, vector<i1>
// LLVM-LABEL:  llvm.func @a_single_boolean_is_a_vector_without_dims
// LLVM:          llvm.load %{{.*}} : !llvm.ptr -> vector<1xi1>
// LLVM:          llvm.store %{{.*}} : vector<1xi1>, !llvm.ptr
func.func @a_single_boolean_is_a_vector_without_dims(%m: memref<i1>) {
  %b = memref.load %m[] : memref<i1>
  memref.store %b, %m[] : memref<i1>
  return
}
