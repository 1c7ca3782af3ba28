// REQUIRES: ptxas
// RUN: %python %S/Inputs/assemble_for_every_chip.py %s %ptxas %t

// The forms of the mixture assemble without a warning and keep their values in
// registers.

// CHECK-COUNT-4: 0 bytes spill stores, 0 bytes spill loads
// CHECK-NOT: warning

func.func @wide(%q: tensor<?x2x?x352xbf16>, %k: tensor<?x2x?x352xbf16>, %v: tensor<?x?x16xbf16>)
    -> (tensor<?x2x?x16xf32>, tensor<?x2x?xf32>) {
  %c0 = arith.constant 0 : index
  %c2 = arith.constant 2 : index
  %b = tensor.dim %q, %c0 : tensor<?x2x?x352xbf16>
  %n = tensor.dim %q, %c2 : tensor<?x2x?x352xbf16>
  %o0 = tensor.empty(%b, %n) : tensor<?x2x?x16xf32>
  %o1 = tensor.empty(%b, %n) : tensor<?x2x?xf32>
  %r:2 = moe.softmax_mix
      ins(%q, %k : tensor<?x2x?x352xbf16>, tensor<?x2x?x352xbf16>)
      values(%v : tensor<?x?x16xbf16>)
      outs(%o0, %o1 : tensor<?x2x?x16xf32>, tensor<?x2x?xf32>)
      {visibility = #moe.visibility<causal>}
      -> tensor<?x2x?x16xf32>, tensor<?x2x?xf32>
  return %r#0, %r#1 : tensor<?x2x?x16xf32>, tensor<?x2x?xf32>
}

func.func @narrow(%q: tensor<?x2x?x64xf16>, %k: tensor<?x2x?x64xf16>, %v: tensor<?x?x32xf32>)
    -> (tensor<?x2x?x32xf32>, tensor<?x2x?xf32>) {
  %c0 = arith.constant 0 : index
  %c2 = arith.constant 2 : index
  %b = tensor.dim %q, %c0 : tensor<?x2x?x64xf16>
  %n = tensor.dim %q, %c2 : tensor<?x2x?x64xf16>
  %o0 = tensor.empty(%b, %n) : tensor<?x2x?x32xf32>
  %o1 = tensor.empty(%b, %n) : tensor<?x2x?xf32>
  %r:2 = moe.softmax_mix
      ins(%q, %k : tensor<?x2x?x64xf16>, tensor<?x2x?x64xf16>)
      values(%v : tensor<?x?x32xf32>)
      outs(%o0, %o1 : tensor<?x2x?x32xf32>, tensor<?x2x?xf32>)
      {visibility = #moe.visibility<causal, window = 512>}
      -> tensor<?x2x?x32xf32>, tensor<?x2x?xf32>
  return %r#0, %r#1 : tensor<?x2x?x32xf32>, tensor<?x2x?xf32>
}

func.func @no_values(%q: tensor<?x2x?x64xbf16>, %k: tensor<?x2x?x64xbf16>)
    -> (tensor<?x2x?xf32>, tensor<?x2x?xf32>) {
  %c0 = arith.constant 0 : index
  %c2 = arith.constant 2 : index
  %b = tensor.dim %q, %c0 : tensor<?x2x?x64xbf16>
  %n = tensor.dim %q, %c2 : tensor<?x2x?x64xbf16>
  %o0 = tensor.empty(%b, %n) : tensor<?x2x?xf32>
  %o1 = tensor.empty(%b, %n) : tensor<?x2x?xf32>
  %r:2 = moe.softmax_mix
      ins(%q, %k : tensor<?x2x?x64xbf16>, tensor<?x2x?x64xbf16>)
      outs(%o0, %o1 : tensor<?x2x?xf32>, tensor<?x2x?xf32>)
      {visibility = #moe.visibility<causal, exclude_self>, with_entropy = true}
      -> tensor<?x2x?xf32>, tensor<?x2x?xf32>
  return %r#0, %r#1 : tensor<?x2x?xf32>, tensor<?x2x?xf32>
}

func.func @floats(%q: tensor<?x2x?x352xf32>, %k: tensor<?x2x?x352xf32>, %v: tensor<?x?x64xf32>)
    -> (tensor<?x2x?x64xf32>, tensor<?x2x?xf32>, tensor<?x2x?xf32>) {
  %c0 = arith.constant 0 : index
  %c2 = arith.constant 2 : index
  %b = tensor.dim %q, %c0 : tensor<?x2x?x352xf32>
  %n = tensor.dim %q, %c2 : tensor<?x2x?x352xf32>
  %o0 = tensor.empty(%b, %n) : tensor<?x2x?x64xf32>
  %o1 = tensor.empty(%b, %n) : tensor<?x2x?xf32>
  %o2 = tensor.empty(%b, %n) : tensor<?x2x?xf32>
  %r:3 = moe.softmax_mix
      ins(%q, %k : tensor<?x2x?x352xf32>, tensor<?x2x?x352xf32>)
      values(%v : tensor<?x?x64xf32>)
      outs(%o0, %o1, %o2 : tensor<?x2x?x64xf32>, tensor<?x2x?xf32>, tensor<?x2x?xf32>)
      {visibility = #moe.visibility<causal>, with_entropy = true}
      -> tensor<?x2x?x64xf32>, tensor<?x2x?xf32>, tensor<?x2x?xf32>
  return %r#0, %r#1, %r#2 : tensor<?x2x?x64xf32>, tensor<?x2x?xf32>, tensor<?x2x?xf32>
}
