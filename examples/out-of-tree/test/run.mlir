// RUN: softcap-opt %s --softcap-insert=cap=2.0 --convert-softcap-to-linalg --moe-to-cpu | %run | FileCheck %s

// The logits 100 and 0 become 2 and 0, so the gates are softmax(2, 0); without
// the cap they would be 1 and 0.
func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %z = arith.constant dense<[[-100.0, 100.0, 0.0, -1.0]]> : tensor<1x4xf32>
  %g0 = tensor.empty() : tensor<1x2xf32>
  %i0 = tensor.empty() : tensor<1x2xi32>
  %g, %i = moe.topk_renorm ins(%z : tensor<1x4xf32>) outs(%g0, %i0 : tensor<1x2xf32>, tensor<1x2xi32>)
      {kind = #moe.score_kind<logits>} -> tensor<1x2xf32>, tensor<1x2xi32>
  // CHECK: ( 0.88079{{[0-9]*}}, 0.1192{{[0-9]*}} )
  %v = vector.transfer_read %g[%c0, %c0], %pad {in_bounds = [true]} : tensor<1x2xf32>, vector<2xf32>
  vector.print %v : vector<2xf32>
  return
}
