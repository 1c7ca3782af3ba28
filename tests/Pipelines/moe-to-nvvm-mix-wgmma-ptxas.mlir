// REQUIRES: ptxas
// RUN: moe-compile %s -o %t.ptx --target=sm_90a --emit=ptx
// RUN: %ptxas -arch=sm_90a -v -warn-spills -warn-lmem-usage -Werror %t.ptx -o %t.cubin 2>&1 | \
// RUN:   FileCheck %s --implicit-check-not=warning --implicit-check-not=C75

// The widest forms on warpgroups keep their values in registers, and ptxas does
// not serialize their products (which it would say in remarks C7510 to C7517).

// CHECK-COUNT-3: 0 bytes spill stores, 0 bytes spill loads

func.func @long_rows(%q: tensor<1x2x?x1024xf16>, %v: tensor<1x?x64xf16>)
    -> (tensor<1x2x?x64xf32>, tensor<1x2x?xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x2x?x1024xf16>
  %o0 = tensor.empty(%n) : tensor<1x2x?x64xf32>
  %o1 = tensor.empty(%n) : tensor<1x2x?xf32>
  %r:2 = moe.softmax_mix
      ins(%q, %q : tensor<1x2x?x1024xf16>, tensor<1x2x?x1024xf16>)
      values(%v : tensor<1x?x64xf16>)
      outs(%o0, %o1 : tensor<1x2x?x64xf32>, tensor<1x2x?xf32>)
      {visibility = #moe.visibility<causal>}
      -> tensor<1x2x?x64xf32>, tensor<1x2x?xf32>
  return %r#0, %r#1 : tensor<1x2x?x64xf32>, tensor<1x2x?xf32>
}

func.func @many_columns(%q: tensor<1x2x?x128xbf16>, %v: tensor<1x?x256xf32>)
    -> (tensor<1x2x?x256xf32>, tensor<1x2x?xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x2x?x128xbf16>
  %o0 = tensor.empty(%n) : tensor<1x2x?x256xf32>
  %o1 = tensor.empty(%n) : tensor<1x2x?xf32>
  %r:2 = moe.softmax_mix
      ins(%q, %q : tensor<1x2x?x128xbf16>, tensor<1x2x?x128xbf16>)
      values(%v : tensor<1x?x256xf32>)
      outs(%o0, %o1 : tensor<1x2x?x256xf32>, tensor<1x2x?xf32>)
      -> tensor<1x2x?x256xf32>, tensor<1x2x?xf32>
  return %r#0, %r#1 : tensor<1x2x?x256xf32>, tensor<1x2x?xf32>
}

func.func @entropy(%q: tensor<1x2x?x512xbf16>, %v: tensor<1x?x16xbf16>)
    -> (tensor<1x2x?x16xf32>, tensor<1x2x?xf32>, tensor<1x2x?xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x2x?x512xbf16>
  %o0 = tensor.empty(%n) : tensor<1x2x?x16xf32>
  %o1 = tensor.empty(%n) : tensor<1x2x?xf32>
  %o2 = tensor.empty(%n) : tensor<1x2x?xf32>
  %r:3 = moe.softmax_mix
      ins(%q, %q : tensor<1x2x?x512xbf16>, tensor<1x2x?x512xbf16>)
      values(%v : tensor<1x?x16xbf16>)
      outs(%o0, %o1, %o2 : tensor<1x2x?x16xf32>, tensor<1x2x?xf32>, tensor<1x2x?xf32>)
      {visibility = #moe.visibility<causal>, with_entropy = true}
      -> tensor<1x2x?x16xf32>, tensor<1x2x?xf32>, tensor<1x2x?xf32>
  return %r#0, %r#1, %r#2 : tensor<1x2x?x16xf32>, tensor<1x2x?xf32>, tensor<1x2x?xf32>
}
