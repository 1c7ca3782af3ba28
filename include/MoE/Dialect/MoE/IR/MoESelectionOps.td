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
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder", "makeExplicit"]>,
  ]> {
  let summary = "select k experts a token and weigh them";
  let description = [{
    Selects the `k` best experts of each token and computes their gates, `k`
    being the last dim of the results.

    1. `s = score(x)`: softmax over `e`, sigmoid, or `sqrt(ln(1 + exp x))`;
       with `kind = probs` the scores are probabilities already.
    2. Choice score `c = s + select_bias`; without bias and groups `c = x`,
       which has the same order and does not saturate.
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
    | `forced` (optional) | `[n.., k]` | i32 or i64, -1 = no expert |
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
    ::mlir::Value getGatesInit() { return getOuts()[0]; }
    ::mlir::Value getIndicesInit() { return getOuts()[1]; }
    /// The score function in force: `score`, or what `kind` implies.
    ScoreFunction getScoreFunction();
    /// The number of experts and of selected ones; kDynamic where unknown.
    int64_t getNumExperts();
    int64_t getNumSelected();
  }];
}

#endif // MOE_DIALECT_MOE_IR_MOESELECTIONOPS_TD
