// RUN: %moe-opt %s --convert-to-llvm | FileCheck %s

// The message is stored once; values are passed as 64 bits.

// CHECK:       llvm.mlir.global internal constant @[[MESSAGE:moe_message_[0-9A-F]+]]("row {0} of {1}\00")
// CHECK-NOT:   llvm.mlir.global {{.*}}"row
// CHECK:       llvm.func @moe_fail(i32, !llvm.ptr, !llvm.ptr)
// CHECK-LABEL: llvm.func @twice
// CHECK:         llvm.cond_br %{{.*}}, ^[[INSIDE:.*]], ^[[FAILED:.*]]
// CHECK:       ^[[FAILED]]:
// CHECK:         llvm.mlir.constant(0 : i32)
// CHECK:         llvm.mlir.addressof @[[MESSAGE]]
// CHECK:         llvm.alloca
// CHECK:         llvm.sext %{{.*}} : i32 to i64
// CHECK:         llvm.call @moe_fail
// CHECK-NEXT:    llvm.unreachable
// CHECK:       ^[[INSIDE]]:
// CHECK:         llvm.cond_br
func.func @twice(%inside: i1, %also: i1, %row: i32, %rows: i64) {
  moe.assert <index> %inside, "row {0} of {1}" (%row, %rows : i32, i64)
  moe.assert <index> %also, "row {0} of {1}" (%row, %rows : i32, i64)
  return
}

// What fails ends the call, where upstream's lowering would end the process.

// CHECK-LABEL: llvm.func @shapes
// CHECK-NOT:     abort
// CHECK:         llvm.call @moe_fail
func.func @shapes(%agree: i1) {
  cf.assert %agree, "expected equal sizes"
  return
}
