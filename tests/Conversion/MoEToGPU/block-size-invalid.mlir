// RUN: not %moe-opt %s --moe-to-nvvm=block-size=0 2>&1 | FileCheck %s -DSIZE=0
// RUN: not %moe-opt %s --moe-to-nvvm=block-size=100 2>&1 | FileCheck %s -DSIZE=100
// RUN: not %moe-opt %s --moe-to-nvvm=block-size=2048 2>&1 | FileCheck %s -DSIZE=2048
// RUN: not %moe-opt %s --moe-to-nvvm=max-rows=0 2>&1 | FileCheck %s --check-prefix=ROWS

// CHECK: expected block-size to be a multiple of 32 up to 1024, found [[SIZE]]
// ROWS: expected tiles of at least 1 row, found 0
func.func @add(%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %out = tensor.empty() : tensor<8x8xf32>
  %sum = linalg.add ins(%a, %b : tensor<8x8xf32>, tensor<8x8xf32>)
      outs(%out : tensor<8x8xf32>) -> tensor<8x8xf32>
  return %sum : tensor<8x8xf32>
}
