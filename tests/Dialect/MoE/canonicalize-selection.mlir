// RUN: %moe-opt %s --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --canonicalize --canonicalize --split-input-file | FileCheck %s

// The score that `kind` implies is not written, nor the eps of no sum.

// CHECK-LABEL: func @forgets_implied_attributes
// CHECK:         moe.topk_renorm
// CHECK-SAME:      {renorm = false}
// CHECK:         moe.topk_renorm
// CHECK-SAME:      {kind = #moe.score_kind<probs>}
// CHECK:         moe.topk_renorm
// CHECK-SAME:      score = #moe.score_function<sigmoid>
func.func @forgets_implied_attributes(
    %z: tensor<?x8xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xf32>, tensor<?x2xf32>) {
  %a, %i = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {score = #moe.score_function<softmax>, renorm = false, eps = 0.5 : f64}
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %b, %j = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {score = #moe.score_function<none>, kind = #moe.score_kind<probs>}
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %c, %k = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {score = #moe.score_function<sigmoid>}
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %a, %b, %c : tensor<?x2xf32>, tensor<?x2xf32>, tensor<?x2xf32>
}

// -----

// CHECK-LABEL: func @forgets_masks_and_biases_without_effect
// CHECK:         moe.topk_renorm ins(%{{[^)]*}}) outs(
// CHECK:         moe.topk_renorm ins(%{{[^)]*}}) bias(%{{[^)]*}}) mask(
func.func @forgets_masks_and_biases_without_effect(
    %z: tensor<5x4xf32>, %g0: tensor<5x2xf32>, %i0: tensor<5x2xi32>)
    -> (tensor<5x2xf32>, tensor<5x2xf32>) {
  %trues = arith.constant dense<true> : tensor<5xi1>
  %some = arith.constant dense<[true, false, true, true, true]> : tensor<5xi1>
  %same = arith.constant dense<0.5> : tensor<4xf32>
  %other = arith.constant dense<[0.0, 1.0, 0.0, 0.0]> : tensor<4xf32>
  %a, %i = moe.topk_renorm ins(%z : tensor<5x4xf32>) bias(%same : tensor<4xf32>)
      mask(%trues : tensor<5xi1>)
      outs(%g0, %i0 : tensor<5x2xf32>, tensor<5x2xi32>)
      -> tensor<5x2xf32>, tensor<5x2xi32>
  %b, %j = moe.topk_renorm ins(%z : tensor<5x4xf32>) bias(%other : tensor<4xf32>)
      mask(%some : tensor<5xi1>)
      outs(%g0, %i0 : tensor<5x2xf32>, tensor<5x2xi32>)
      -> tensor<5x2xf32>, tensor<5x2xi32>
  return %a, %b : tensor<5x2xf32>, tensor<5x2xf32>
}

// -----

// The softmax of all experts sums to 1 already; that of some does not, and
// forced experts may leave some out.

// CHECK-LABEL: func @renormalises_a_selection_of_all
// CHECK:         moe.topk_renorm
// CHECK-NOT:       renorm = false
// CHECK:         return
func.func @renormalises_a_selection_of_all(
    %z: tensor<?x4xf32>, %g0: tensor<?x4xf32>, %i0: tensor<?x4xi32>)
    -> tensor<?x4xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x4xf32>)
      outs(%g0, %i0 : tensor<?x4xf32>, tensor<?x4xi32>)
      {renorm = false} -> tensor<?x4xf32>, tensor<?x4xi32>
  return %g : tensor<?x4xf32>
}

// CHECK-LABEL: func @keeps_raw_gates_of_some
// CHECK-COUNT-3: renorm = false
func.func @keeps_raw_gates_of_some(
    %z: tensor<?x4xf32>, %g0: tensor<?x4xf32>, %i0: tensor<?x4xi32>,
    %g1: tensor<?x3xf32>, %i1: tensor<?x3xi32>)
    -> (tensor<?x4xf32>, tensor<?x4xf32>, tensor<?x3xf32>) {
  %a, %i = moe.topk_renorm ins(%z : tensor<?x4xf32>) forced(%i0 : tensor<?x4xi32>)
      outs(%g0, %i0 : tensor<?x4xf32>, tensor<?x4xi32>)
      {renorm = false} -> tensor<?x4xf32>, tensor<?x4xi32>
  %b, %j = moe.topk_renorm ins(%z : tensor<?x4xf32>)
      outs(%g0, %i0 : tensor<?x4xf32>, tensor<?x4xi32>)
      {renorm = false, score = #moe.score_function<sigmoid>}
      -> tensor<?x4xf32>, tensor<?x4xi32>
  %c, %k = moe.topk_renorm ins(%z : tensor<?x4xf32>)
      outs(%g1, %i1 : tensor<?x3xf32>, tensor<?x3xi32>)
      {renorm = false} -> tensor<?x3xf32>, tensor<?x3xi32>
  return %a, %b, %c : tensor<?x4xf32>, tensor<?x4xf32>, tensor<?x3xf32>
}

// -----

// A softmax that only the selection reads becomes part of it.

// CHECK-LABEL: func @selects_from_the_logits_of_a_softmax
// CHECK-SAME:    %[[Z:[^:]*]]: tensor<?x8xf32>
// CHECK-NOT:     linalg.softmax
// CHECK:         moe.topk_renorm ins(%[[Z]] :
// CHECK-SAME:      {renorm = false}
func.func @selects_from_the_logits_of_a_softmax(
    %z: tensor<?x8xf32>, %p0: tensor<?x8xf32>, %g0: tensor<?x2xf32>,
    %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %p = linalg.softmax dimension(1) ins(%z : tensor<?x8xf32>)
      outs(%p0 : tensor<?x8xf32>) -> tensor<?x8xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<probs>, renorm = false}
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g : tensor<?x2xf32>
}

// -----

// The same from the loop nests that a softmax of torch is imported as.

#whole = affine_map<(b, n, e) -> (b, n, e)>
#row = affine_map<(b, n, e) -> (b, n)>

// CHECK-LABEL: func @selects_from_the_logits_of_an_imported_softmax
// CHECK-SAME:    %[[Z:[^:]*]]: tensor<2x7x8xf32>
// CHECK-NOT:     linalg.generic
// CHECK:         moe.topk_renorm ins(%[[Z]] :
// CHECK-NOT:       probs
// CHECK:         return
func.func @selects_from_the_logits_of_an_imported_softmax(
    %z: tensor<2x7x8xf32>, %g0: tensor<2x7x2xf32>, %i0: tensor<2x7x2xi32>)
    -> (tensor<2x7x2xf32>, tensor<2x7x2xi32>) {
  %zero = arith.constant 0.0 : f32
  %low = arith.constant 0xFF800000 : f32
  %rows = tensor.empty() : tensor<2x7xf32>
  %all = tensor.empty() : tensor<2x7x8xf32>
  %m0 = linalg.fill ins(%low : f32) outs(%rows : tensor<2x7xf32>) -> tensor<2x7xf32>
  %m = linalg.generic {indexing_maps = [#whole, #row],
                       iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%z : tensor<2x7x8xf32>) outs(%m0 : tensor<2x7xf32>) {
  ^bb0(%x: f32, %acc: f32):
    %y = arith.maximumf %x, %acc : f32
    linalg.yield %y : f32
  } -> tensor<2x7xf32>
  %exps = linalg.generic {indexing_maps = [#whole, #row, #whole],
                          iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%z, %m : tensor<2x7x8xf32>, tensor<2x7xf32>)
      outs(%all : tensor<2x7x8xf32>) {
  ^bb0(%x: f32, %peak: f32, %out: f32):
    %s = arith.subf %x, %peak : f32
    %y = math.exp %s : f32
    linalg.yield %y : f32
  } -> tensor<2x7x8xf32>
  %s0 = linalg.fill ins(%zero : f32) outs(%rows : tensor<2x7xf32>) -> tensor<2x7xf32>
  %sum = linalg.generic {indexing_maps = [#whole, #row],
                         iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%exps : tensor<2x7x8xf32>) outs(%s0 : tensor<2x7xf32>) {
  ^bb0(%x: f32, %acc: f32):
    %y = arith.addf %x, %acc : f32
    linalg.yield %y : f32
  } -> tensor<2x7xf32>
  %p = linalg.generic {indexing_maps = [#whole, #row, #whole],
                       iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%exps, %sum : tensor<2x7x8xf32>, tensor<2x7xf32>)
      outs(%all : tensor<2x7x8xf32>) {
  ^bb0(%x: f32, %total: f32, %out: f32):
    %y = arith.divf %x, %total : f32
    linalg.yield %y : f32
  } -> tensor<2x7x8xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<2x7x8xf32>)
      outs(%g0, %i0 : tensor<2x7x2xf32>, tensor<2x7x2xi32>)
      {kind = #moe.score_kind<probs>}
      -> tensor<2x7x2xf32>, tensor<2x7x2xi32>
  return %g, %i : tensor<2x7x2xf32>, tensor<2x7x2xi32>
}

// -----

// Probabilities that are needed anyway are selected from as they are, and so
// are those of a softmax over tokens.

// CHECK-LABEL: func @keeps_probabilities_with_another_use
// CHECK:         %[[P:.*]] = linalg.softmax
// CHECK:         moe.topk_renorm ins(%[[P]] :
func.func @keeps_probabilities_with_another_use(
    %z: tensor<?x8xf32>, %p0: tensor<?x8xf32>, %g0: tensor<?x2xf32>,
    %i0: tensor<?x2xi32>) -> (tensor<?x2xf32>, tensor<?x8xf32>) {
  %p = linalg.softmax dimension(1) ins(%z : tensor<?x8xf32>)
      outs(%p0 : tensor<?x8xf32>) -> tensor<?x8xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %p : tensor<?x2xf32>, tensor<?x8xf32>
}

// CHECK-LABEL: func @keeps_a_softmax_over_tokens
// CHECK:         %[[P:.*]] = linalg.softmax
// CHECK:         moe.topk_renorm ins(%[[P]] :
func.func @keeps_a_softmax_over_tokens(
    %z: tensor<?x8xf32>, %p0: tensor<?x8xf32>, %g0: tensor<?x2xf32>,
    %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %p = linalg.softmax dimension(0) ins(%z : tensor<?x8xf32>)
      outs(%p0 : tensor<?x8xf32>) -> tensor<?x8xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g : tensor<?x2xf32>
}

// -----

#id = affine_map<(n, k) -> (n, k)>

// CHECK-LABEL: func @folds_a_factor_into_the_route_scale
// CHECK:         %[[ROUTED:.*]]:2 = moe.topk_renorm
// CHECK-SAME:      {route_scale = 5.000000e+00 : f64}
// CHECK-NOT:     linalg.generic
// CHECK:         return %[[ROUTED]]#0, %[[ROUTED]]#1
func.func @folds_a_factor_into_the_route_scale(
    %z: tensor<?x8xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c = arith.constant 2.5 : f32
  %g, %i = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {route_scale = 2.0 : f64} -> tensor<?x2xf32>, tensor<?x2xi32>
  %scaled = linalg.generic {indexing_maps = [#id, #id],
                            iterator_types = ["parallel", "parallel"]}
      ins(%g : tensor<?x2xf32>) outs(%g0 : tensor<?x2xf32>) {
  ^bb0(%x: f32, %out: f32):
    %y = arith.mulf %x, %c : f32
    linalg.yield %y : f32
  } -> tensor<?x2xf32>
  return %scaled, %i : tensor<?x2xf32>, tensor<?x2xi32>
}

// Gates that are needed without the factor keep it apart.

// CHECK-LABEL: func @keeps_the_factor_of_one_use
// CHECK:         moe.topk_renorm
// CHECK-NOT:       route_scale
// CHECK:         linalg.generic
func.func @keeps_the_factor_of_one_use(
    %z: tensor<?x8xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xf32>) {
  %c = arith.constant 2.5 : f32
  %g, %i = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %scaled = linalg.generic {indexing_maps = [#id, #id],
                            iterator_types = ["parallel", "parallel"]}
      ins(%g : tensor<?x2xf32>) outs(%g0 : tensor<?x2xf32>) {
  ^bb0(%x: f32, %out: f32):
    %y = arith.mulf %x, %c : f32
    linalg.yield %y : f32
  } -> tensor<?x2xf32>
  return %scaled, %g : tensor<?x2xf32>, tensor<?x2xf32>
}
