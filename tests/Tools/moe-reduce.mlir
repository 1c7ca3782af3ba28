// Reduces a module to the op that a script finds interesting.
// RUN: printf '#!/bin/sh\ngrep -q moe.topk_renorm "$1" && exit 1 || exit 0\n' > %t.sh
// RUN: chmod +x %t.sh
// RUN: moe-reduce %s -reduction-tree='traversal-mode=0 test=%t.sh' | FileCheck %s

// CHECK-NOT: moe.router_logits
// CHECK:     moe.topk_renorm
// CHECK-NOT: moe.router_logits
func.func @uninteresting(%h: tensor<4x8xf32>, %w: tensor<4x8xf32>,
                         %z0: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<4x8xf32>, tensor<4x8xf32>)
      outs(%z0 : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %z : tensor<4x4xf32>
}
func.func @interesting(%z: tensor<4x4xf32>, %g0: tensor<4x2xf32>,
                       %i0: tensor<4x2xi32>) -> tensor<4x2xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<4x4xf32>)
      outs(%g0, %i0 : tensor<4x2xf32>, tensor<4x2xi32>)
      -> tensor<4x2xf32>, tensor<4x2xi32>
  return %g : tensor<4x2xf32>
}
