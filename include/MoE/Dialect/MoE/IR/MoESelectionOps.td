//===- MoESelectionOps.td - The choice of experts ----------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOESELECTIONOPS_TD
#define MOE_DIALECT_MOE_IR_MOESELECTIONOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// topk_renorm
//===----------------------------------------------------------------------===//

def MoE_TopKRenormOp : MoE_StructuredOp<"topk_renorm", ["gates", "indices"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder", "makeExplicit"]>,
  ]> {
  let summary = "select k experts a token and weigh them";
  let description = [{
    Selects the `k` best experts of each token and computes their gates, `k`
    being the last dim of the results.

    1. `s = score(x)`: softmax over `e`, sigmoid, or `sqrt(ln(1 + exp x))`;
       with `kind = probs` the scores are probabilities already.
    2. Choice score `c = s + select_bias`; without bias and sums of scores
       (`top2_sum`) `c = x`: the same order, but it does not saturate or round.
    3. `n_group > 1`: the `topk_group` groups of consecutive experts with the
       best value (sum of their two largest `c`, or their largest) stay, the
       lower group winning a tie; the `c` of the others is `-inf`.
    4. `indices` = the top `k` of `c`, or `forced` where given.
    5. `v` = the unbiased scores at `indices`;
       `gates = route_scale * (renorm ? v / (sum v + eps) : v)`.

    With `kind = logits`, `renorm` this is `softmax(TopK(z))` (Mutual-Inform
    (2), ACMoE (1)-(2), SymphonySMoE (2)); with `kind = probs`, `renorm` it is
    `TopM_Renormalize(p)` (Mutual-Inform A.3 (24)), and the two agree on
    `p = softmax(z)`. Without `renorm` it is `TopK(softmax(z))` (HyperRouter
    (1)-(2)) and `TopK(p)` (SymphonySMoE (8)).

    | operand | dims | element type |
    |---|---|---|
    | `scores` | `[n.., e]` | f32, bf16 or f16 |
    | `select_bias` (optional) | `[e]` | f32, bf16 or f16 |
    | `forced` (optional) | `[n.., k]` | i32 or i64, -1 = no expert, gate 0 |
    | `mask` (optional) | `[n..]` | i1, true = real token |
    | `num_valid` (optional) | scalar | i32; tokens from this flat index on are padding |
    | `gates` (out) | `[n.., k]` | f32 |
    | `indices` (out) | `[n.., k]` | i32 or i64 |

    Iterators: `n` parallel; `e` reduction and `k`, both kept whole by tiling.
    Flat indices are absolute, so tiling turns `num_valid` into a mask; on
    buffers it keeps `n` whole instead.

    The order is total (E1): value descending, then index ascending; +0 equals
    -0 (E2); NaN ranks below -inf and makes the row's gates NaN (E3). The
    indices of an unmasked token are distinct and in range whatever the scores
    are. A token without support has gates 0 and indices `0..k-1` (E6); a zero
    sum gives gates 0 (E7); a masked token has indices -1 and gates 0 (E10).

    Differs from `linalg` sorts and from `torch.topk` in exactly that order,
    and in that the gates come with it. The importer's router matcher writes
    it; `convert-moe-to-cpu` and `convert-moe-to-gpu` lower it to one pass over
    the scores; `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @select(%z: tensor<?x64xf32>, %gates: tensor<?x8xf32>,
                      %indices: tensor<?x8xi32>)
        -> (tensor<?x8xf32>, tensor<?x8xi32>) {
      %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
          outs(%gates, %indices : tensor<?x8xf32>, tensor<?x8xi32>)
          {kind = #moe.score_kind<logits>} -> tensor<?x8xf32>, tensor<?x8xi32>
      return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$scores,
    Optional<MoE_Activation>:$select_bias,
    Optional<MoE_ExpertIndex>:$forced,
    Optional<MoE_Mask>:$mask,
    Optional<I32>:$num_valid,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<MoE_ScoreKindAttr, "ScoreKind::Logits">:$kind,
    OptionalAttr<MoE_ScoreFunctionAttr>:$score,
    DefaultValuedAttr<BoolAttr, "true">:$renorm,
    DefaultValuedAttr<F64Attr, "0.0">:$eps,
    DefaultValuedAttr<F64Attr, "1.0">:$route_scale,
    DefaultValuedAttr<I64Attr, "1">:$n_group,
    DefaultValuedAttr<I64Attr, "1">:$topk_group,
    DefaultValuedAttr<MoE_GroupScoreAttr, "GroupScore::Top2Sum">:$group_score);
  let assemblyFormat = [{
    `ins` `(` $scores `:` type($scores) `)`
    (`bias` `(` $select_bias^ `:` type($select_bias) `)`)?
    (`forced` `(` $forced^ `:` type($forced) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    (`num_valid` `(` $num_valid^ `:` type($num_valid) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let hasCanonicalizer = 1;
  let extraClassDeclaration = structuredClassDeclaration # [{
    unsigned getNumLeadingDims();
    ::mlir::Value getGatesInit() { return getOuts()[0]; }
    ::mlir::Value getIndicesInit() { return getOuts()[1]; }
    /// The score function in force: `score`, or what `kind` implies.
    ScoreFunction getScoreFunction();
    /// The number of experts and of selected ones; kDynamic where unknown.
    int64_t getNumExperts();
    int64_t getNumSelected();
  }];
}

//===----------------------------------------------------------------------===//
// threshold_renorm
//===----------------------------------------------------------------------===//

def MoE_ThresholdRenormOp : MoE_StructuredOp<"threshold_renorm", ["gates", "count"], [AttrSizedOperandSegments]> {
  let summary = "select the experts above a threshold and weigh them";
  let description = [{
    Selects every expert with `p_ne > theta`, or the best one where there is
    none (E20), and weighs them: `gates = renorm ? p / sum of the selected p :
    p` on the selected experts, 0 elsewhere; `count` is their number. This is
    the dynamic top-p router of ACMoE C.10, which despite its name compares
    with a threshold.

    | operand | dims | element type |
    |---|---|---|
    | `p` | `[n.., e]` | f32 |
    | `theta_value` (optional) | scalar | f32; replaces the attribute `theta` |
    | `mask` (optional) | `[n..]` | i1, true = real token |
    | `gates` (out) | `[n.., e]` | f32 |
    | `count` (out) | `[n..]` | i32 |

    Iterators: `n` parallel; `e` kept whole, since the best expert and the sum
    need the row. The comparison is strict. The best expert is the first of
    `topk_renorm`'s order (E1); NaN makes the row's gates NaN (E3); a zero sum
    gives gates 0 (E7); a masked token has gates and count 0 (E10).

    Differs from `topk_renorm` in that the number of experts varies by token,
    so the gates stay dense. The dynamic top-p router inserts it; it runs as
    the `linalg` that `moe-decompose` makes of it.

    ```mlir
    func.func @above(%p: tensor<?x16xf32>, %gates: tensor<?x16xf32>,
                     %count: tensor<?xi32>) -> (tensor<?x16xf32>, tensor<?xi32>) {
      %g, %c = moe.threshold_renorm ins(%p : tensor<?x16xf32>)
          outs(%gates, %count : tensor<?x16xf32>, tensor<?xi32>)
          {theta = 0.05 : f64} -> tensor<?x16xf32>, tensor<?xi32>
      return %g, %c : tensor<?x16xf32>, tensor<?xi32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$p,
    Optional<F32>:$theta_value,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<F64Attr, "0.05">:$theta,
    DefaultValuedAttr<BoolAttr, "true">:$renorm);
  let assemblyFormat = [{
    `ins` `(` $p `:` type($p) `)`
    (`theta` `(` $theta_value^ `:` type($theta_value) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    unsigned getNumLeadingDims();
  }];
}

//===----------------------------------------------------------------------===//
// densify
//===----------------------------------------------------------------------===//

def MoE_DensifyOp : MoE_StructuredOp<"densify", ["dense"], [
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "spread the gates of the selected experts over all experts";
  let description = [{
    `dense_ne = sum_k [indices_nk = e] gates_nk`: the gate of each selected
    expert at its place, 0 elsewhere.

    | operand | dims | element type |
    |---|---|---|
    | `gates` | `[n.., k]` | f32 |
    | `indices` | `[n.., k]` | i32 or i64; outside `[0, e)`: nowhere |
    | `dense` (out) | `[n.., e]` | f32 |

    Iterators: `n` parallel; `e` kept whole, since indices are absolute; `k`
    reduction.

    Differs from a scatter in that an index out of range is dropped and equal
    indices add up in the order of `k`. Routers whose next op wants a
    distribution over experts insert it; it runs as the `linalg` that
    `moe-decompose` makes of it.

    ```mlir
    func.func @spread(%gates: tensor<?x2xf32>, %indices: tensor<?x2xi32>,
                      %init: tensor<?x16xf32>) -> tensor<?x16xf32> {
      %dense = moe.densify ins(%gates, %indices : tensor<?x2xf32>, tensor<?x2xi32>)
          outs(%init : tensor<?x16xf32>) -> tensor<?x16xf32>
      return %dense : tensor<?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$gates,
    MoE_ExpertIndex:$indices,
    Variadic<MoE_Score>:$outs);
  let assemblyFormat = [{
    `ins` `(` $gates `,` $indices `:` type($gates) `,` type($indices) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// make_finite
//===----------------------------------------------------------------------===//

def MoE_MakeFiniteOp : MoE_StructuredOp<"make_finite", ["finite"]> {
  let summary = "replace scores that are not finite by the least finite one";
  let description = [{
    `finite_ne = isfinite(scores_ne) ? scores_ne : min of the finite scores` of
    the row (`scope = row`) or of all of `scores` (`scope = tensor`, what the
    public X-MoE and StableMoE code does). Where no score is finite it is 0.

    | operand | dims | element type |
    |---|---|---|
    | `scores` | `[n.., e]` | f32, bf16 or f16 |
    | `finite` (out) | `[n.., e]` | f32 |

    Iterators: with `scope = row`, `n` parallel and `e` whole; with `scope =
    tensor` all dims are whole, since every element needs every other.

    Differs from a clamp in that the bound depends on the data. The public
    cosine routers insert it before the selection; it runs as the `linalg` that
    `moe-decompose` makes of it.

    ```mlir
    func.func @clean(%z: tensor<?x16xf32>, %init: tensor<?x16xf32>) -> tensor<?x16xf32> {
      %finite = moe.make_finite ins(%z : tensor<?x16xf32>)
          outs(%init : tensor<?x16xf32>) {scope = #moe.finite_scope<tensor>}
          -> tensor<?x16xf32>
      return %finite : tensor<?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$scores,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<MoE_FiniteScopeAttr, "FiniteScope::Row">:$scope);
  let assemblyFormat = [{
    `ins` `(` $scores `:` type($scores) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOESELECTIONOPS_TD
