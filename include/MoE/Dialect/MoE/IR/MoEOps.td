//===- MoEOps.td - Operations of the moe dialect -----------*- tablegen -*-===//
//
// Constraints that the verifiers check are labelled `<op>_c<n>` and edge rules
// E<n>, as in docs/Spec.md; the tests are named after the labels.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEOPS_TD
#define MOE_DIALECT_MOE_IR_MOEOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// router_logits
//===----------------------------------------------------------------------===//

def MoE_RouterLogitsOp : MoE_StructuredOp<"router_logits", ["z"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
  ]> {
  let summary = "project tokens onto experts";
  let description = [{
    `z_ne = sum_d h_nd weight_ed + bias_e` (Mutual-Inform SMoE section 1.2,
    SymphonySMoE section 1.1; HyperRouter and ACMoE print no bias).

    | operand | dims | element type |
    |---|---|---|
    | `h` | `[n.., d]` | f32, bf16 or f16 |
    | `weight` | `[e, d]` | f32, bf16 or f16 |
    | `bias` (optional) | `[e]` | f32, bf16 or f16 |
    | `z` (out) | `[n.., e]` | f32 |

    Iterators: `n`, `e` parallel; `d` reduction, kept whole by tiling. Products
    of 16-bit inputs are exact in the `f32` accumulator.

    Differs from `linalg.matmul` in that the result is always f32 whatever the
    inputs are, and that fusion knows it as the producer of a selection. The
    importer writes it for a linear layer that feeds a recognised router;
    `moe-decompose` turns it into a `linalg.generic` contraction.

    ```mlir
    func.func @logits(%h: tensor<?x352xbf16>, %weight: tensor<16x352xbf16>,
                      %init: tensor<?x16xf32>) -> tensor<?x16xf32> {
      %z = moe.router_logits
          ins(%h, %weight : tensor<?x352xbf16>, tensor<16x352xbf16>)
          outs(%init : tensor<?x16xf32>) -> tensor<?x16xf32>
      return %z : tensor<?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$h,
    MoE_Activation:$weight,
    Optional<MoE_Activation>:$bias,
    Variadic<MoE_Score>:$outs);
  let assemblyFormat = [{
    `ins` `(` $h `,` $weight `:` type($h) `,` type($weight) `)`
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

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
  let hasCanonicalizeMethod = 1;
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

//===----------------------------------------------------------------------===//
// similarity_inform
//===----------------------------------------------------------------------===//

def MoE_SimilarityInformOp : MoE_StructuredOp<"similarity_inform", ["p", "lse"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
    DeclareOpInterfaceMethods<MixingOpInterface, ["convertToSoftmaxMix"]>,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getOrigins", "makeExplicit"]>,
  ]> {
  let summary = "mix expert probabilities of similar tokens";
  let description = [{
    `S_ij = softmax_j(u_i^T ws uk_j / tau)`, `p_i = sum_j S_ij e_j`
    (Mutual-Inform SMoE (5), (8), (11), Definition 1).

    | operand | dims | element type |
    |---|---|---|
    | `u` | `[b, i, d]` | f32, bf16 or f16 |
    | `e` | `[b, j, e]` | f32, bf16 or f16 |
    | `uk` (optional) | `[b, j, f]` | as `u`; absent: the keys are the queries |
    | `ws` (optional) | `[d, f]` | as `u`; absent: identity, `f = d` |
    | `mask` (optional) | `[b, j]` | i1, true = real key |
    | `query_mask` (optional) | `[b, i]` | i1; absent without `uk`: `mask` |
    | `tau_value` (optional) | scalar | f32; replaces the attribute `tau` |
    | `origin` (optional) | scalar | index; key position of query 0, default `Nk - N` |
    | `p` (out) | `[b, i, e]` | f32 |
    | `lse` (out) | `[b, i]` | f32, log-sum-exp of the visible logits |

    Iterators: `b`, `i`, `e` parallel; `j`, `d`, `f` reductions kept whole.

    Query `i` sits at key position `i + origin`. Key `j` is visible to it iff
    neither is masked, `causal` implies `j <= pos`, `window = L` implies
    `j > pos - L`, and `restrict = entropy` implies `H(e_j) <= H(e_i)` (the
    sets `J_i` of section 3.3). A query that sees no key has `p = 0` and
    `lse = -inf`. NaN at a masked key or query does not leak (E11). `causal`
    has no default in Python; the attribute's default is the paper's formula.

    Differs from attention in that the values are the experts' probabilities,
    narrow where the keys are wide. The importer writes it;
    `moe-convert-to-softmax-mix` turns it into `moe.softmax_mix`, which never
    holds `S`; `moe-decompose` gives its meaning in `linalg`, which does.

    ```mlir
    func.func @inform(%u: tensor<2x?x352xf32>, %e: tensor<2x?x16xf32>,
                      %p: tensor<2x?x16xf32>, %lse: tensor<2x?xf32>)
        -> tensor<2x?x16xf32> {
      %mixed, %sums = moe.similarity_inform
          ins(%u, %e : tensor<2x?x352xf32>, tensor<2x?x16xf32>)
          outs(%p, %lse : tensor<2x?x16xf32>, tensor<2x?xf32>)
          {causal = true, tau = 2.0 : f64}
          -> tensor<2x?x16xf32>, tensor<2x?xf32>
      return %mixed : tensor<2x?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$u,
    MoE_Activation:$e,
    Optional<MoE_Activation>:$uk,
    Optional<MoE_Activation>:$ws,
    Optional<MoE_Mask>:$mask,
    Optional<MoE_Mask>:$query_mask,
    Optional<F32>:$tau_value,
    Optional<Index>:$origin,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$tau,
    DefaultValuedAttr<BoolAttr, "false">:$causal,
    OptionalAttr<I64Attr>:$window,
    DefaultValuedAttr<MoE_RestrictAttr, "Restrict::All">:$restrict,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $u `,` $e `:` type($u) `,` type($e) `)`
    (`keys` `(` $uk^ `:` type($uk) `)`)?
    (`ws` `(` $ws^ `:` type($ws) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`tau` `(` $tau_value^ `:` type($tau_value) `)`)?
    (`origin` `(` $origin^ `:` type($origin) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// attention_posterior
//===----------------------------------------------------------------------===//

def MoE_AttentionPosteriorOp : MoE_StructuredOp<"attention_posterior",
    ["p", "head", "prior_lse", "posterior_lse"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
    DeclareOpInterfaceMethods<MixingOpInterface, ["convertToSoftmaxMix"]>,
  ]> {
  let summary = "mix expert probabilities by the posterior of attention";
  let description = [{
    With the prior `A_h = softmax_j(l_h,ij)`, `l = scale q.k + bias`, and the
    Gaussian means `v' = wo_h v` (or `vp`), the posterior of Mutual-Inform SMoE
    Lemma 1 (21) is `A'_h = softmax_j(l + u_i.v'_j/sigma^2 -
    |v'_j|^2/(2 sigma^2))` and that of the heads (22) is `H' = softmax_h(ln pi
    + LSE(posterior logits) - LSE(l))`.

    `head_mode = all`: `p_i = sum_h H'_ih sum_j A'_h,ij e_j` (13).
    `head_mode = min_entropy`: `p = A'_h* e` (17) with `h* = argmin_h mean_i
    H(A_h[i])` of the prior (15); ties go to the lower head (E19).
    `head_mode = fixed`: `p = A'_head e`.

    | operand | dims | element type |
    |---|---|---|
    | `q` | `[b, h, i, f]` | f32, bf16 or f16 |
    | `k` | `[b, h, j, f]` | as `q` |
    | `u` | `[b, i, d]` | f32, bf16 or f16 |
    | `e` | `[b, j, e]` | f32, bf16 or f16 |
    | `vp` (or `v`, `wo`) | `[b, h, j, d]` | f32, bf16 or f16 |
    | `v` | `[b, h, j, c]` | f32, bf16 or f16 |
    | `wo` | `[h, d, c]` | f32, bf16 or f16 |
    | `bias` (optional) | `[b or 1, h or 1, i, j]` | f32, bf16 or f16 |
    | `head_prior` (optional) | `[b, i, h]` | f32; default `1/h` |
    | `mask` (optional) | `[b, j]` | i1; covers the queries too when `i = j` |
    | `sigma_value` (optional) | scalar | f32; replaces the attribute `sigma` |
    | `p` (out) | `[b, i, e]` | f32 |
    | `head` (out) | `[b]` | i32; -1 with `head_mode = all` |
    | `prior_lse`, `posterior_lse` (out) | `[b, h, i]` with `all`, else `[b, 1, i]` | f32 |

    Iterators: `b` parallel; `i` stays whole because the head is chosen from
    all rows, `head_scope = batch` keeps `b` whole too; the rest whole.
    Visibility as in `moe.similarity_inform`, and `exclude_self` hides the
    query's own position. `v'` is never formed when `v` and `wo` are given.

    The importer writes it; `moe-convert-to-softmax-mix` turns it into
    `moe.softmax_mix` over features of width `f + c`; `moe-decompose` gives its
    meaning in `linalg`.

    ```mlir
    func.func @posterior(%q: tensor<1x4x?x16xf32>, %k: tensor<1x4x?x16xf32>,
                         %u: tensor<1x?x64xf32>, %e: tensor<1x?x8xf32>,
                         %v: tensor<1x4x?x16xf32>, %wo: tensor<4x64x16xf32>,
                         %p: tensor<1x?x8xf32>, %head: tensor<1xi32>,
                         %l1: tensor<1x1x?xf32>, %l2: tensor<1x1x?xf32>)
        -> (tensor<1x?x8xf32>, tensor<1xi32>) {
      %r:4 = moe.attention_posterior
          ins(%q, %k, %u, %e : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>,
              tensor<1x?x64xf32>, tensor<1x?x8xf32>)
          values(%v, %wo : tensor<1x4x?x16xf32>, tensor<4x64x16xf32>)
          outs(%p, %head, %l1, %l2 : tensor<1x?x8xf32>, tensor<1xi32>,
               tensor<1x1x?xf32>, tensor<1x1x?xf32>)
          {causal = true, scale = 0.25 : f64}
          -> tensor<1x?x8xf32>, tensor<1xi32>, tensor<1x1x?xf32>,
             tensor<1x1x?xf32>
      return %r#0, %r#1 : tensor<1x?x8xf32>, tensor<1xi32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$k,
    MoE_Activation:$u,
    MoE_Activation:$e,
    Optional<MoE_Activation>:$vp,
    Optional<MoE_Activation>:$v,
    Optional<MoE_Activation>:$wo,
    Optional<MoE_Activation>:$bias,
    Optional<MoE_Score>:$head_prior,
    Optional<MoE_Mask>:$mask,
    Optional<F32>:$sigma_value,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$sigma,
    OptionalAttr<F64Attr>:$scale,
    DefaultValuedAttr<MoE_HeadModeAttr, "HeadMode::MinEntropy">:$head_mode,
    OptionalAttr<I64Attr>:$head,
    DefaultValuedAttr<MoE_HeadScopeAttr, "HeadScope::Sequence">:$head_scope,
    DefaultValuedAttr<BoolAttr, "false">:$causal,
    OptionalAttr<I64Attr>:$window,
    DefaultValuedAttr<BoolAttr, "false">:$exclude_self,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $k `,` $u `,` $e `:` type($q) `,` type($k) `,` type($u) `,`
    type($e) `)`
    (`means` `(` $vp^ `:` type($vp) `)`)?
    (`values` `(` $v^ `,` $wo `:` type($v) `,` type($wo) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`head_prior` `(` $head_prior^ `:` type($head_prior) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    (`sigma` `(` $sigma_value^ `:` type($sigma_value) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    /// The factor of q.k: `scale`, or 1/sqrt of the head width.
    ::mlir::FailureOr<double> getScaleValue();
  }];
}

//===----------------------------------------------------------------------===//
// softmax_mix
//===----------------------------------------------------------------------===//

def MoE_SoftmaxMixOp : MoE_StructuredOp<"softmax_mix", ["mixed", "lse", "entropy"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getOrigins", "makeExplicit"]>,
  ]> {
  let summary = "mix values by a softmax over keys";
  let description = [{
    `x_hij = scale q_hi.k_hj + key_bias_hj + bias_hij`,
    `A_h = softmax_j(x)`, `mixed_hi = sum_j A_hij v_j`,
    `lse_hi = LSE_j(x_hij)`, `entropy_hi = lse_hi - sum_j A_hij x_hij`.

    The one op behind `moe.similarity_inform`, `moe.attention_posterior` and
    attention entropies: queries and keys may be wide and values narrow, and
    all heads share the values.

    | operand | dims | element type |
    |---|---|---|
    | `q` | `[b, h, i, f]` | f32, bf16 or f16 |
    | `k` | `[b, h, j, f]` | f32, bf16 or f16 |
    | `v` (optional) | `[b, j, e]` | f32, bf16 or f16 |
    | `key_bias` (optional) | `[b, h, j]` | f32 |
    | `bias` (optional) | `[b or 1, h or 1, i, j]` | f32, bf16 or f16 |
    | `query_mask` (optional) | `[b, i]` | i1 |
    | `key_mask` (optional) | `[b, j]` | i1 |
    | `query_level`, `key_level` (optional) | `[b, i]`, `[b, j]` | f32; key visible iff `key_level <= query_level` |
    | `origin` (optional) | scalar | index; key position of query 0, default `Nk - N` |
    | `mixed` (out, with `v`) | `[b, h, i, e]` | f32 |
    | `lse` (out) | `[b, h, i]` | f32 |
    | `entropy` (out, with `with_entropy`) | `[b, h, i]` | f32 |

    Iterators: `b`, `h`, `i`, `e` parallel; `j`, `f` reductions kept whole.
    Visibility as in `moe.similarity_inform`, and `exclude_self` hides the
    query's own position. A query that sees no key has `mixed = 0`,
    `lse = -inf`, `entropy = 0`.

    `moe-convert-to-softmax-mix` inserts it; `convert-moe-to-cpu` lowers it to
    one pass over the keys with a running maximum, so that memory is linear in
    the number of tokens.

    ```mlir
    func.func @mix(%q: tensor<1x2x?x64xf32>, %k: tensor<1x2x?x64xf32>,
                   %v: tensor<1x?x16xf32>, %o: tensor<1x2x?x16xf32>,
                   %l: tensor<1x2x?xf32>) -> tensor<1x2x?x16xf32> {
      %mixed, %lse = moe.softmax_mix
          ins(%q, %k : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
          values(%v : tensor<1x?x16xf32>)
          outs(%o, %l : tensor<1x2x?x16xf32>, tensor<1x2x?xf32>)
          {causal = true, scale = 0.125 : f64}
          -> tensor<1x2x?x16xf32>, tensor<1x2x?xf32>
      return %mixed : tensor<1x2x?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$k,
    Optional<MoE_Activation>:$v,
    Optional<MoE_Score>:$key_bias,
    Optional<MoE_Activation>:$bias,
    Optional<MoE_Mask>:$query_mask,
    Optional<MoE_Mask>:$key_mask,
    Optional<MoE_Score>:$query_level,
    Optional<MoE_Score>:$key_level,
    Optional<Index>:$origin,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$scale,
    DefaultValuedAttr<BoolAttr, "false">:$causal,
    OptionalAttr<I64Attr>:$window,
    DefaultValuedAttr<BoolAttr, "false">:$exclude_self,
    DefaultValuedAttr<BoolAttr, "false">:$with_entropy,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $k `:` type($q) `,` type($k) `)`
    (`values` `(` $v^ `:` type($v) `)`)?
    (`key_bias` `(` $key_bias^ `:` type($key_bias) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`key_mask` `(` $key_mask^ `:` type($key_mask) `)`)?
    (`levels` `(` $query_level^ `,` $key_level `:` type($query_level) `,` type($key_level) `)`)?
    (`origin` `(` $origin^ `:` type($origin) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    ::mlir::Value getMixedInit() { return getV() ? getOuts()[0] : ::mlir::Value(); }
    ::mlir::Value getLseInit() { return getOuts()[getV() ? 1 : 0]; }
    ::mlir::Value getEntropyInit() {
      return getWithEntropy() ? getOuts().back() : ::mlir::Value();
    }
  }];
}

//===----------------------------------------------------------------------===//
// mad_dispersion
//===----------------------------------------------------------------------===//

def MoE_MadDispersionOp : MoE_StructuredOp<"mad_dispersion", ["s", "mean", "count"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
  ]> {
  let summary = "measure how far the tokens of each cluster lie apart";
  let description = [{
    `mean_ed = (1/N_e) sum_{n in C_e} h_nd` and, by `measure`,
    `mad`: `s_ed = (1/N_e) sum_{n in C_e} |h_nd - mean_ed|` (ACMoE Definition
    1); `variance`: the mean squared deviation; `pairwise`:
    `N_e^-2 sum_{n,m in C_e} |h_nd - h_md|` (Theorem 1). `C_e` are the tokens
    with `assign = e`.

    | operand | dims | element type |
    |---|---|---|
    | `h` | `[n, d]` | f32, bf16 or f16 |
    | `assign` | `[n]` | i32 or i64; outside `[0, e)`: in no cluster |
    | `mask` (optional) | `[n]` | i1, true = real token |
    | `s`, `mean` (out) | `[e, d]` | f32 |
    | `count` (out) | `[e]` | i32 |

    Iterators: `d` parallel; `e` whole because assignments are absolute; `n`
    reduction kept whole. An empty cluster has `s = mean = 0` (E14), a cluster
    of one has `s = 0` (E13). The mean is taken before the deviations (two
    passes over `h`), and sums have a fixed order.

    Differs from a scatter-reduction in that the order of the sums is fixed.
    Routers of ACMoE insert it; `convert-moe-to-cpu` lowers it;
    `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @disperse(%h: tensor<?x512xf32>, %assign: tensor<?xi32>,
                        %s: tensor<16x512xf32>, %mean: tensor<16x512xf32>,
                        %count: tensor<16xi32>) -> tensor<16x512xf32> {
      %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x512xf32>, tensor<?xi32>)
          outs(%s, %mean, %count : tensor<16x512xf32>, tensor<16x512xf32>,
               tensor<16xi32>)
          -> tensor<16x512xf32>, tensor<16x512xf32>, tensor<16xi32>
      return %r#0 : tensor<16x512xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$h,
    MoE_ExpertIndex:$assign,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<MoE_DispersionMeasureAttr, "DispersionMeasure::Mad">:$measure);
  let assemblyFormat = [{
    `ins` `(` $h `,` $assign `:` type($h) `,` type($assign) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// adjacency_gate
//===----------------------------------------------------------------------===//

def MoE_AdjacencyGateOp : MoE_StructuredOp<"adjacency_gate", ["g"], [
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "smooth expert probabilities over the expert graph";
  let description = [{
    `g_ne = sum_l a_el p_nl` (SymphonySMoE (6), (8), Algorithm 1 line 11),
    where entries of `a` below `threshold` count as 0 (E21). The result is not
    a distribution. `cold_start = base`: an `a` of zeros acts as the identity
    (E17); `literal`: it gives zeros.

    | operand | dims | element type |
    |---|---|---|
    | `p` | `[n.., l]` | f32 |
    | `a` | `[e, l]`, square | f32 |
    | `g` (out) | `[n.., e]` | f32 |

    Iterators: `n` parallel; `e` kept whole, since the graph is; `l` reduction
    kept whole.

    Differs from a matrix product in the threshold and the cold start. The
    Symphony routers insert it; `moe-decompose` turns it into a
    `linalg.generic` contraction.

    ```mlir
    func.func @smooth(%p: tensor<?x16xf32>, %a: tensor<16x16xf32>,
                      %init: tensor<?x16xf32>) -> tensor<?x16xf32> {
      %g = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
          outs(%init : tensor<?x16xf32>) {threshold = 0.05 : f64}
          -> tensor<?x16xf32>
      return %g : tensor<?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$p,
    MoE_Score:$a,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "0.0">:$threshold,
    DefaultValuedAttr<MoE_ColdStartAttr, "ColdStart::Literal">:$cold_start);
  let assemblyFormat = [{
    `ins` `(` $p `,` $a `:` type($p) `,` type($a) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// adjacency_update
//===----------------------------------------------------------------------===//

def MoE_AdjacencyUpdateOp : MoE_StructuredOp<"adjacency_update", ["a_new"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<AggregatedOpInterface, ["decomposeOperation"]>,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "move the expert graph towards the batch's co-selections";
  let description = [{
    `C = sum_n s_n s_n^T` with `s_n` the 0/1 vector of the experts that token
    `n` selected, `a_new = beta a + (1 - beta) norm(C)` (SymphonySMoE Algorithm
    1 lines 3-9, 15, 16). `norm = row` divides each row by its sum, `col` each
    column, `eq7` each column by its diagonal entry (7); a row (column) of
    zeros stays 0 (E16). `diagonal = false` counts only pairs of different
    experts.

    | operand | dims | element type |
    |---|---|---|
    | `a` | `[e, l]`, square | f32 |
    | `indices` | `[n, k]` | i32 or i64; outside `[0, e)`: nothing selected |
    | `mask` (optional) | `[n]` | i1, true = real token |
    | `a_new` (out) | `[e, l]` | f32 |

    Iterators: all dims whole, because indices are absolute and the norms need
    whole rows and columns. Counts are integers, so their order does not matter
    for the result. A batch without a valid token leaves `a` as it is (E18).
    The indices are those of the base scores, not of the smoothed ones.

    The Symphony routers insert it after the gate; `convert-moe-to-cpu` lowers
    it; `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @update(%a: tensor<16x16xf32>, %indices: tensor<?x2xi32>,
                      %init: tensor<16x16xf32>) -> tensor<16x16xf32> {
      %new = moe.adjacency_update ins(%a, %indices : tensor<16x16xf32>, tensor<?x2xi32>)
          outs(%init : tensor<16x16xf32>) {beta = 0.95 : f64} -> tensor<16x16xf32>
      return %new : tensor<16x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$a,
    MoE_ExpertIndex:$indices,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "0.9">:$beta,
    DefaultValuedAttr<MoE_AdjacencyNormAttr, "AdjacencyNorm::Row">:$norm,
    DefaultValuedAttr<BoolAttr, "true">:$diagonal);
  let assemblyFormat = [{
    `ins` `(` $a `,` $indices `:` type($a) `,` type($indices) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOEOPS_TD
