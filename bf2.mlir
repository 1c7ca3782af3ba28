// softmax(TopK(W h)): 16 experts, the best 2 for each token.
func.func @route(%h: tensor<?x1024xbf16>, %weight: tensor<64x1024xbf16>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : tensor<?x1024xbf16>
  %logits_init = tensor.empty(%n) : tensor<?x64xf32>
  %gates_init = tensor.empty(%n) : tensor<?x2xf32>
  %indices_init = tensor.empty(%n) : tensor<?x2xi32>
  %logits = moe.router_logits
      ins(%h, %weight : tensor<?x1024xbf16>, tensor<64x1024xbf16>)
      outs(%logits_init : tensor<?x64xf32>) -> tensor<?x64xf32>
  %gates, %indices = moe.topk_renorm ins(%logits : tensor<?x64xf32>)
      outs(%gates_init, %indices_init : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %gates, %indices : tensor<?x2xf32>, tensor<?x2xi32>
}
