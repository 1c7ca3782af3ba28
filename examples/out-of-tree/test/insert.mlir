// RUN: softcap-opt %s --softcap-insert=cap=5.0 | FileCheck %s
// RUN: softcap-opt %s --softcap-insert=cap=5.0 --softcap-insert=cap=5.0 | FileCheck %s
// RUN: not softcap-opt %s --softcap-insert=cap=-1 2>&1 | FileCheck %s --check-prefix=NEGATIVE

// NEGATIVE: error: softcap-insert: expected cap to be positive, found -1

// CHECK-LABEL: @logits(
// CHECK-SAME: %[[Z:.*]]: tensor<?x64xf32>, %
// CHECK: %[[Y:.*]] = softcap.cap %[[Z]] by 5.000000e+00 : tensor<?x64xf32>
// CHECK-NOT: softcap.cap
// CHECK: moe.topk_renorm ins(%[[Y]] : tensor<?x64xf32>)
func.func @logits(%z: tensor<?x64xf32>, %gates: tensor<?x8xf32>, %indices: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%gates, %indices : tensor<?x8xf32>, tensor<?x8xi32>)
      {kind = #moe.score_kind<logits>} -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// Probabilities lie between 0 and 1 already.
// CHECK-LABEL: @probabilities(
// CHECK-NOT: softcap.cap
func.func @probabilities(%p: tensor<?x64xf32>, %gates: tensor<?x8xf32>, %indices: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%p : tensor<?x64xf32>)
      outs(%gates, %indices : tensor<?x8xf32>, tensor<?x8xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}
