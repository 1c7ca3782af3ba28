// Equal remarks are one with their number; those about moe ops are the last, and counted.

// RUN: moe-compile %s -o - --emit=llvm --remarks 2>&1 >/dev/null | FileCheck %s
// CHECK:      model.py:7:1: remark: {{.*}} Remark="linalg.exp not fused into linalg.matmul" (2 times)
// CHECK:      model.py:9:1: remark: {{.*}} Remark="moe.dispatch not fused with moe.topk_renorm"
// CHECK-NEXT: remarks: 3 different ones, 1 of them about moe ops, at the end

#exp = loc("model.py":7:1)
#dispatch = loc("model.py":9:1)
func.func @count(%z: tensor<?x16xf32>, %slots: tensor<?x2xi64>, %offsets: tensor<17xi32>,
                 %counts: tensor<16xi32>) -> tensor<16xi32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x16xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi64>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>) outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi64>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi64>
  %s, %o, %c = moe.dispatch ins(%i : tensor<?x2xi64>)
      outs(%slots, %offsets, %counts : tensor<?x2xi64>, tensor<17xi32>, tensor<16xi32>)
      -> tensor<?x2xi64>, tensor<17xi32>, tensor<16xi32> loc(#dispatch)
  return %c : tensor<16xi32>
}

func.func @shared(%a: tensor<256x32xf32>, %b: tensor<32x16xf32>, %e0: tensor<256x32xf32>,
                  %c: tensor<256x16xf32>)
    -> (tensor<256x32xf32>, tensor<256x16xf32>, tensor<256x32xf32>, tensor<256x16xf32>) {
  %e = linalg.exp ins(%a : tensor<256x32xf32>) outs(%e0 : tensor<256x32xf32>)
      -> tensor<256x32xf32> loc(#exp)
  %r = linalg.matmul ins(%e, %b : tensor<256x32xf32>, tensor<32x16xf32>)
      outs(%c : tensor<256x16xf32>) -> tensor<256x16xf32>
  %f = linalg.exp ins(%e : tensor<256x32xf32>) outs(%e0 : tensor<256x32xf32>)
      -> tensor<256x32xf32> loc(#exp)
  %q = linalg.matmul ins(%f, %b : tensor<256x32xf32>, tensor<32x16xf32>)
      outs(%c : tensor<256x16xf32>) -> tensor<256x16xf32>
  return %e, %r, %f, %q
      : tensor<256x32xf32>, tensor<256x16xf32>, tensor<256x32xf32>, tensor<256x16xf32>
}
