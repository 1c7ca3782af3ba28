// RUN: moe-opt %s --emit-bytecode -o %t.mlirbc
// RUN: not moe-compile %t.mlirbc -o - --emit=mlir 2>&1 | FileCheck %s --check-prefix=REFUSED
// RUN: moe-compile %t.mlirbc -o - --emit=mlir --allow-bytecode | FileCheck %s

// REFUSED: error: expected MLIR text, found bytecode; pass --allow-bytecode if you trust the file

// CHECK: func.func private @declared
func.func private @declared()
