// A table has the numbers of other CPUs, too; what is wrong in it is an error.
// RUN: rm -rf %t && mkdir %t
// RUN: echo '{"moe_mlir_tuning": 1, "cpus": {"another": {"product-rows": 2}}}' > %t/other.json
// RUN: moe-compile %s --emit=llvm --tuning=%t/other.json -o - | FileCheck %s
// RUN: not moe-compile %s --emit=llvm --tuning=%t/none.json -o - 2>&1 | FileCheck %s --check-prefix=NONE
// RUN: echo 'x' > %t/text.json
// RUN: not moe-compile %s --emit=llvm --tuning=%t/text.json -o - 2>&1 | FileCheck %s --check-prefix=TEXT
// RUN: echo '{"moe_mlir_tuning": 2}' > %t/later.json
// RUN: not moe-compile %s --emit=llvm --tuning=%t/later.json -o - 2>&1 | FileCheck %s --check-prefix=LATER

// CHECK: define {{.*}}f(
// NONE: error: cannot read '{{.*}}none.json': No such file or directory
// TEXT: error: tuning table: expected JSON, found:
// LATER: error: tuning table: expected an object with "moe_mlir_tuning": 1, found another file; moe tune writes one
func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
