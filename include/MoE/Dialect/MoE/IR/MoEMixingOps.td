//===- MoEMixingOps.td - Softmax mixing over tokens --------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOEMIXINGOPS_TD
#define MOE_DIALECT_MOE_IR_MOEMIXINGOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// similarity_inform
//===----------------------------------------------------------------------===//

def MoE_SimilarityInformOp : MoE_StructuredOp<"similarity_inform", ["p", "lse"], [
    AttrSizedOperandSegments,
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
    neither is masked, `visibility` admits the positions (its attribute says
    how; a token always informs itself: no `exclude_self`), and
    `restrict = entropy` implies `H(e_j) <= H(e_i)` (the sets `J_i` of section
    3.3). A query that sees no key has `p = 0` and `lse = -inf`. NaN at a masked
    key or query does not leak (E11). Python's `causal` has no default; that of
    `visibility`, every key, is the paper's formula.

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
          {tau = 2.0 : f64, visibility = #moe.visibility<causal>}
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
    MoE_DefaultVisibility:$visibility,
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
  let hasCanonicalizer = 1;
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// attention_posterior
//===----------------------------------------------------------------------===//

def MoE_AttentionPosteriorOp : MoE_StructuredOp<"attention_posterior",
    ["p", "head", "prior_lse", "posterior_lse"], [AttrSizedOperandSegments]> {
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
    | `query_mask`, `key_mask` (optional) | `[b, i]`, `[b, j]` | i1, true = real token |
    | `row_lse`, `row_entropy` (optional) | `[b, h, i]` | f32, what the attention has emitted of `A_h` |
    | `sigma_value` (optional) | scalar | f32; replaces the attribute `sigma` |
    | `p` (out) | `[b, i, e]` | f32 |
    | `head` (out) | `[b]` | i32; -1 with `head_mode = all` |
    | `prior_lse`, `posterior_lse` (out) | `[b, h, i]` with `all`, else `[b, 1, i]` | f32 |

    Iterators: `b` parallel; `i` stays whole because the head is chosen from
    all rows, `head_scope = batch` keeps `b` whole too; the rest whole.
    Visibility as in `moe.similarity_inform`, with `exclude_self` too. `v'` is
    never formed when `v` and `wo` are given. An attention that runs as
    `moe.softmax_mix` with `with_entropy` emits the log-sum-exps and entropies
    of its rows in its one pass; given them as `rows`, this op does not go
    through the keys of all heads again.

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
          {scale = 0.25 : f64, visibility = #moe.visibility<causal>}
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
    Optional<MoE_Mask>:$query_mask,
    Optional<MoE_Mask>:$key_mask,
    Optional<MoE_Score>:$row_lse,
    Optional<MoE_Score>:$row_entropy,
    Optional<F32>:$sigma_value,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$sigma,
    OptionalAttr<F64Attr>:$scale,
    DefaultValuedAttr<MoE_HeadModeAttr, "HeadMode::MinEntropy">:$head_mode,
    OptionalAttr<I64Attr>:$head,
    DefaultValuedAttr<MoE_HeadScopeAttr, "HeadScope::Sequence">:$head_scope,
    MoE_DefaultVisibility:$visibility,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $k `,` $u `,` $e `:` type($q) `,` type($k) `,` type($u) `,`
    type($e) `)`
    (`means` `(` $vp^ `:` type($vp) `)`)?
    (`values` `(` $v^ `,` $wo `:` type($v) `,` type($wo) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`head_prior` `(` $head_prior^ `:` type($head_prior) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`key_mask` `(` $key_mask^ `:` type($key_mask) `)`)?
    (`rows` `(` $row_lse^ `,` $row_entropy `:` type($row_lse) `,` type($row_entropy) `)`)?
    (`sigma` `(` $sigma_value^ `:` type($sigma_value) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let hasCanonicalizer = 1;
  let extraClassDeclaration = structuredClassDeclaration # [{
    /// The factor of q.k: `scale`, or 1/sqrt of the head width.
    ::mlir::FailureOr<double> getScaleValue();
  }];
}

//===----------------------------------------------------------------------===//
// attention_entropy
//===----------------------------------------------------------------------===//

def MoE_AttentionEntropyOp : MoE_StructuredOp<"attention_entropy",
    ["entropy", "rows"], [AttrSizedOperandSegments]> {
  let summary = "compute the entropy of each attention head";
  let description = [{
    `rows_hi = H(A_h[i])` with `A_h = softmax_j(scale q.k + bias)`, and
    `entropy_h` their mean over the unmasked queries (the quantity that
    Mutual-Inform SMoE (15) minimises over the heads), natural logarithm,
    `0 ln 0 = 0`.

    | operand | dims | element type |
    |---|---|---|
    | `q` | `[b, h, i, f]` | f32, bf16 or f16 |
    | `k` | `[b, h, j, f]` | as `q` |
    | `bias` (optional) | `[b or 1, h or 1, i, j]` | f32, bf16 or f16 |
    | `query_mask`, `key_mask` (optional) | `[b, i]`, `[b, j]` | i1, true = real token |
    | `entropy` (out) | `[b, h]` | f32 |
    | `rows` (out) | `[b, h, i]` | f32 |

    Iterators: `b`, `h` parallel; `i` parallel and whole, since the mean spans
    it; `j`, `f` reductions. Visibility as in `moe.attention_posterior`. A
    masked query has entropy 0 and does not count; an unmasked one that sees no
    key counts with 0; without an unmasked query the mean is 0.

    The importer writes it; `moe-convert-to-softmax-mix` turns it into
    `moe.softmax_mix` without values, whose one pass over the keys emits the
    entropy; `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @sureness(%q: tensor<1x4x?x16xf32>, %k: tensor<1x4x?x16xf32>,
                        %mean: tensor<1x4xf32>, %rows: tensor<1x4x?xf32>)
        -> tensor<1x4xf32> {
      %entropy, %each = moe.attention_entropy
          ins(%q, %k : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>)
          outs(%mean, %rows : tensor<1x4xf32>, tensor<1x4x?xf32>)
          {visibility = #moe.visibility<causal>}
          -> tensor<1x4xf32>, tensor<1x4x?xf32>
      return %entropy : tensor<1x4xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$k,
    Optional<MoE_Activation>:$bias,
    Optional<MoE_Mask>:$query_mask,
    Optional<MoE_Mask>:$key_mask,
    Variadic<MoE_Score>:$outs,
    OptionalAttr<F64Attr>:$scale,
    MoE_DefaultVisibility:$visibility,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $k `:` type($q) `,` type($k) `)`
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`key_mask` `(` $key_mask^ `:` type($key_mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let hasCanonicalizer = 1;
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
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getOrigins", "makeExplicit"]>,
    MixLogitsOpInterface,
  ]> {
  let summary = "mix values by a softmax over keys";
  let description = [{
    `x_hij = scale q_hi.k_hj + key_bias_hj + bias_hij`,
    `A_h = softmax_j(x)`, `mixed_hi = sum_j A_hij v_j`,
    `lse_hi = LSE_j(x_hij)`, `entropy_hi = lse_hi - sum_j A_hij x_hij`.

    The one op behind `moe.similarity_inform`, `moe.attention_posterior` and
    attention entropies: queries and keys may be wide and values narrow, and
    all heads share the values. With values of each head it is attention
    itself, which emits its log-sum-exps and entropies in the same pass.

    | operand | dims | element type |
    |---|---|---|
    | `q` | `[b, h, i, f]` | f32, bf16 or f16 |
    | `k` | `[b, h, j, f]` | f32, bf16 or f16 |
    | `v` (optional) | `[b, j, e]`, or `[b, h, j, e]` | f32, bf16 or f16 |
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
    Visibility as in `moe.similarity_inform`, with `exclude_self` too. A query
    that sees no key has `mixed = 0`, `lse = -inf`, `entropy = 0`. A bias of
    -inf hides a key; whether a NaN there reaches the query is unspecified,
    because blocks of hidden keys are skipped.

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
          {scale = 0.125 : f64, visibility = #moe.visibility<causal>}
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
    MoE_DefaultVisibility:$visibility,
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
  let hasCanonicalizer = 1;
  let extraClassDeclaration = structuredClassDeclaration # [{
    ::mlir::Value getMixedInit() { return getV() ? getOuts()[0] : ::mlir::Value(); }
    ::mlir::Value getLseInit() { return getOuts()[getV() ? 1 : 0]; }
    ::mlir::Value getEntropyInit() {
      return getWithEntropy() ? getOuts().back() : ::mlir::Value();
    }
  }];
}

//===----------------------------------------------------------------------===//
// softmax_mix_self
//===----------------------------------------------------------------------===//

def MoE_SoftmaxMixSelfOp : MoE_SelfMixOp<"softmax_mix_self", ["mixed", "lse"]> {
  let summary = "mix values by a softmax over the queries themselves";
  let description = [{
    `moe.softmax_mix` where queries and keys are the same tokens and nothing
    stands between them: `x_hij = scale q_hi.q_hj` is symmetric, so that one
    product of features serves query `i` of key `j` and query `j` of key `i`.

    | operand | dims | element type |
    |---|---|---|
    | `q` | `[b, h, i, f]` | f32, bf16 or f16 |
    | `v` | `[b, i, e]` | f32, bf16 or f16 |
    | `mask` (optional) | `[b, i]` | i1, true = real token |
    | `level` (optional) | `[b, i]` | f32; token `j` visible iff `level_j <= level_i` |
    | `mixed` (out) | `[b, h, i, e]` | f32 |
    | `lse` (out) | `[b, h, i]` | f32 |

    Iterators: `b`, `h`, `i`, `e` parallel, all but `e` whole: rows share
    products, so that a kernel itself deals out the pairs; `f` reduction.
    Visibility as in `moe.softmax_mix`, but never causal: then each pair has
    one role only, and there is nothing to share.

    Differs from `moe.softmax_mix` in taking half of the products, for a state
    of each token a strip of rows. `moe-convert-to-softmax-mix` inserts it for
    targets with a kernel for it (the schedule `pairs_once`); `convert-moe-to-cpu` lowers it;
    `moe-decompose` writes it as `moe.softmax_mix`.

    ```mlir
    func.func @mix_self(%u: tensor<1x1x?x64xf32>, %v: tensor<1x?x16xf32>,
                        %o: tensor<1x1x?x16xf32>, %l: tensor<1x1x?xf32>)
        -> tensor<1x1x?x16xf32> {
      %mixed, %lse = moe.softmax_mix_self
          ins(%u, %v : tensor<1x1x?x64xf32>, tensor<1x?x16xf32>)
          outs(%o, %l : tensor<1x1x?x16xf32>, tensor<1x1x?xf32>)
          {scale = 0.125 : f64} -> tensor<1x1x?x16xf32>, tensor<1x1x?xf32>
      return %mixed : tensor<1x1x?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$v,
    Optional<MoE_Mask>:$mask,
    Optional<MoE_Score>:$level,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$scale,
    MoE_DefaultVisibility:$visibility,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $v `:` type($q) `,` type($v) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    (`level` `(` $level^ `:` type($level) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = selfMixClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOEMIXINGOPS_TD
