// RUN: rm -rf %t && mkdir -p %t && moe-opt %s --moe-to-cpu --mlir-print-ir-tree-dir=%t/all -o /dev/null
// RUN: ls %t/all/builtin_module_no-symbol-name %t/all/builtin_module_no-symbol-name/func_func_select | FileCheck %s
// RUN: cat %t/all/*/func_func_select/*_moe-tile-and-fuse.mlir | FileCheck %s --check-prefix=TILED

// The folder alone is enough: it gets a file for every pass that changed
// something, in order.

// CHECK:     {{[0-9]+}}_one-shot-bufferize.mlir
// CHECK:     {{[0-9_]+}}_convert-moe-to-cpu.mlir

// Passes that are asked for are the ones that are written.
// RUN: moe-opt %s --moe-to-cpu --mlir-print-ir-tree-dir=%t/one --mlir-print-ir-after=one-shot-bufferize -o /dev/null
// RUN: ls %t/one/builtin_module_no-symbol-name | count 1

// TILED: scf.forall
// TILED: moe.topk_renorm
func.func @select(%z: tensor<?x16xf32>, %gates: tensor<?x2xf32>,
                  %indices: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%gates, %indices : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi32>
}
