// What the text form can say, bytecode can say: every form of every op comes
// back from it unchanged.

// RUN: %moe-opt %S/roundtrip.mlir -o %t.text.mlir
// RUN: %moe-opt %S/roundtrip.mlir --emit-bytecode -o %t.mlirbc
// RUN: %moe-opt %t.mlirbc -o %t.back.mlir
// RUN: diff %t.text.mlir %t.back.mlir
// RUN: %python -c "import sys; sys.exit(open(sys.argv[1], 'rb').read(4) != b'ML\xefR')" %t.mlirbc
