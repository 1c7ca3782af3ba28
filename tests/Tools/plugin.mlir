// The dialect and its passes load into the toolchain's own mlir-opt. A pass of
// a plugin is reached through --pass-pipeline only.
// RUN: %mlir-opt %s --load-dialect-plugin=%moe_lib_dir/libMoEPlugin.so --load-pass-plugin=%moe_lib_dir/libMoEPlugin.so --pass-pipeline='builtin.module(func.func(moe-tile-and-fuse))' | FileCheck %s
// RUN: not %mlir-opt %s 2>&1 | FileCheck %s --check-prefix=STOCK

// STOCK: error: {{.*}}moe.router_logits

// CHECK: scf.forall
// CHECK:   moe.router_logits
func.func @logits(%h: tensor<256x32xf32>, %w: tensor<64x32xf32>,
                  %z0: tensor<256x64xf32>) -> tensor<256x64xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<256x32xf32>, tensor<64x32xf32>)
      outs(%z0 : tensor<256x64xf32>) -> tensor<256x64xf32>
  return %z : tensor<256x64xf32>
}
