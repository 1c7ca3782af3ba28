//===- MoEBackwardOps.td - Gradients of the routing ops ----*- tablegen -*-===//
//
// Each op is the gradient of one op of the other families: cotangents of its
// results come in, gradients of its operands go out, always in f32. The
// formulas are those of docs/Spec.md. Gradients that are matrix products only
// need no op: those of router_logits are two contractions, that of
// adjacency_gate is adjacency_gate with `a` transposed.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEBACKWARDOPS_TD
#define MOE_DIALECT_MOE_IR_MOEBACKWARDOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// attention_posterior_backward
//===----------------------------------------------------------------------===//

def MoE_AttentionPosteriorBackwardOp
    : MoE_StructuredOp<"attention_posterior_backward",
    ["dq", "dk", "du", "de", "dvp", "dv", "dwo", "dbias", "dhead_prior",
     "dsigma"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getOperandName"]>,
  ]> {
  let summary = "differentiate attention_posterior";
  let description = [{
    With `y` the joint logits of `moe.attention_posterior` and `W` the joint
    weight of a head and key (`A'_h` of the chosen head, `H' A'_h` of all),
    `dY_hij = W_hij (dp_i.e_j - dp_i.p_i)` and `R_hi = sum_j dY_hij`:

    `de_j = sum_hi W dp_i`, `du_i = sum_hj dY v'_hj / sigma^2`,
    `dv'_hj = sum_i dY (u_i - v'_hj) / sigma^2`,
    `dl = dY - R A` (the second term with all heads only),
    `dq = scale dl k`, `dk = scale dl^T q`, `dbias = dl`,
    `dhead_prior = R / head_prior`, `dsigma = -(2/sigma) (sum_i u_i.du_i -
    sum_hij dY |v'_hj|^2 / (2 sigma^2))`; `dv = wo^T dv'`, `dwo = dv' v^T`.

    The chosen head is a constant, and so are the log-sum-exps of the forward.

    | operand | dims | element type |
    |---|---|---|
    | `q`, `k`, `u`, `e`, `vp`, `v`, `wo`, `bias`, `head_prior`, masks, `sigma_value` | as in `moe.attention_posterior` | |
    | `p` | `[b, i, e]` | f32, the forward's result |
    | `prior_lse`, `posterior_lse` | `[b, l, i]` | f32, the forward's results |
    | `dp` | `[b, i, e]` | f32 |
    | `head` (optional) | `[b]` | i32, the head that each sequence chose; absent: all heads took part |
    | `dq`, `dk`, `du`, `de` (out) | as `q`, `k`, `u`, `e` | f32 |
    | `dvp`, or `dv` and `dwo` (out) | as `vp`, `v`, `wo` | f32 |
    | `dbias` (out, with `bias`) | as `bias` | f32 |
    | `dhead_prior` (out, with `head_prior`) | `[b, i, h]` | f32 |
    | `dsigma` (out, with `sigma_value`) | scalar | f32 |

    Iterators: all dims stay whole, since each gradient sums over another.
    Heads that took no part and masked tokens get 0; what lies in masked tokens
    does not leak (E11).

    Python's autograd writes it; `moe-convert-to-softmax-mix` turns it into
    `moe.softmax_mix_backward_dq` and `moe.softmax_mix_backward_dkv` over
    features of width `f + c`, and products over one token dim;
    `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @posterior_gradients(%q: tensor<1x4x?x16xf32>, %k: tensor<1x4x?x16xf32>,
        %u: tensor<1x?x64xf32>, %e: tensor<1x?x8xf32>, %p: tensor<1x?x8xf32>,
        %l1: tensor<1x1x?xf32>, %l2: tensor<1x1x?xf32>, %dp: tensor<1x?x8xf32>,
        %vp: tensor<1x4x?x64xf32>, %head: tensor<1xi32>,
        %dq: tensor<1x4x?x16xf32>, %dk: tensor<1x4x?x16xf32>,
        %du: tensor<1x?x64xf32>, %de: tensor<1x?x8xf32>,
        %dvp: tensor<1x4x?x64xf32>) -> tensor<1x?x64xf32> {
      %r:5 = moe.attention_posterior_backward
          ins(%q, %k, %u, %e, %p, %l1, %l2, %dp : tensor<1x4x?x16xf32>,
              tensor<1x4x?x16xf32>, tensor<1x?x64xf32>, tensor<1x?x8xf32>,
              tensor<1x?x8xf32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>,
              tensor<1x?x8xf32>)
          means(%vp : tensor<1x4x?x64xf32>) head(%head : tensor<1xi32>)
          outs(%dq, %dk, %du, %de, %dvp : tensor<1x4x?x16xf32>,
               tensor<1x4x?x16xf32>, tensor<1x?x64xf32>, tensor<1x?x8xf32>,
               tensor<1x4x?x64xf32>)
          {scale = 0.25 : f64, visibility = #moe.visibility<causal>}
          -> tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>, tensor<1x?x64xf32>,
             tensor<1x?x8xf32>, tensor<1x4x?x64xf32>
      return %r#2 : tensor<1x?x64xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$k,
    MoE_Activation:$u,
    MoE_Activation:$e,
    MoE_Score:$p,
    MoE_Score:$prior_lse,
    MoE_Score:$posterior_lse,
    MoE_Score:$dp,
    Optional<MoE_Activation>:$vp,
    Optional<MoE_Activation>:$v,
    Optional<MoE_Activation>:$wo,
    Optional<MoE_Activation>:$bias,
    Optional<MoE_Score>:$head_prior,
    Optional<MoE_Mask>:$query_mask,
    Optional<MoE_Mask>:$key_mask,
    Optional<F32>:$sigma_value,
    Optional<MoE_ExpertIndex>:$head,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$sigma,
    OptionalAttr<F64Attr>:$scale,
    MoE_DefaultVisibility:$visibility,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $k `,` $u `,` $e `,` $p `,` $prior_lse `,` $posterior_lse
    `,` $dp `:` type($q) `,` type($k) `,` type($u) `,` type($e) `,` type($p) `,`
    type($prior_lse) `,` type($posterior_lse) `,` type($dp) `)`
    (`means` `(` $vp^ `:` type($vp) `)`)?
    (`values` `(` $v^ `,` $wo `:` type($v) `,` type($wo) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`head_prior` `(` $head_prior^ `:` type($head_prior) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`key_mask` `(` $key_mask^ `:` type($key_mask) `)`)?
    (`sigma` `(` $sigma_value^ `:` type($sigma_value) `)`)?
    (`head` `(` $head^ `:` type($head) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    /// The factor of q.k: `scale`, or 1/sqrt of the head width.
    ::mlir::FailureOr<double> getScaleValue();
    /// The names of the destinations that the operands ask for, in order.
    ::llvm::SmallVector<::llvm::StringRef> getPresentOuts();
    /// The destination `name`, or null.
    ::mlir::Value getOut(::llvm::StringRef name);
  }];
}

//===----------------------------------------------------------------------===//
// similarity_inform_backward
//===----------------------------------------------------------------------===//

def MoE_SimilarityInformBackwardOp
    : MoE_StructuredOp<"similarity_inform_backward",
    ["du", "de", "duk", "dws", "dtau"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getOperandName"]>,
  ]> {
  let summary = "differentiate similarity_inform";
  let description = [{
    With `x` the logits of `moe.similarity_inform`, `S = exp(x - lse)` and
    `Q = u ws`, the queries:

    `dx_ij = S_ij (dp_i.e_j - dp_i.p_i + dlse_i)`, `de_j = sum_i S_ij dp_i`,
    `dQ_i = sum_j dx_ij uk_j / tau`, `du = dQ ws^T`, `dws = u^T dQ`,
    `duk_j = sum_i dx_ij Q_i / tau`, added to `du` where the keys are the
    queries, `dtau = -sum_i Q_i.dQ_i / tau`.

    | operand | dims | element type |
    |---|---|---|
    | `u`, `e`, `uk`, `ws`, `mask`, `query_mask`, `tau_value`, `origin` | as in `moe.similarity_inform` | |
    | `p`, `lse` | `[b, i, e]`, `[b, i]` | f32, the forward's results |
    | `dp` | `[b, i, e]` | f32 |
    | `dlse` (optional) | `[b, i]` | f32 |
    | `du`, `de` (out) | as `u`, `e` | f32 |
    | `duk` (out, with `uk`) | as `uk` | f32 |
    | `dws` (out, with `ws`) | as `ws` | f32 |
    | `dtau` (out, with `tau_value`) | scalar | f32 |

    Iterators: all dims stay whole, since each gradient sums over another.
    Visibility as in the forward. Masked tokens get 0, and what lies in them
    does not leak (E11); so does a query that sees no key, whatever its `dlse`.

    Python's autograd writes it; `moe-convert-to-softmax-mix` turns it into
    `moe.softmax_mix_backward_dq` and `moe.softmax_mix_backward_dkv`, which
    never hold `S`; `moe-decompose` gives its meaning in `linalg`, which does.

    ```mlir
    func.func @inform_gradients(%u: tensor<2x?x352xf32>, %e: tensor<2x?x16xf32>,
        %p: tensor<2x?x16xf32>, %lse: tensor<2x?xf32>, %dp: tensor<2x?x16xf32>,
        %du: tensor<2x?x352xf32>, %de: tensor<2x?x16xf32>)
        -> tensor<2x?x352xf32> {
      %r:2 = moe.similarity_inform_backward
          ins(%u, %e, %p, %lse, %dp : tensor<2x?x352xf32>, tensor<2x?x16xf32>,
              tensor<2x?x16xf32>, tensor<2x?xf32>, tensor<2x?x16xf32>)
          outs(%du, %de : tensor<2x?x352xf32>, tensor<2x?x16xf32>)
          {tau = 2.0 : f64, visibility = #moe.visibility<causal>}
          -> tensor<2x?x352xf32>, tensor<2x?x16xf32>
      return %r#0 : tensor<2x?x352xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$u,
    MoE_Activation:$e,
    MoE_Score:$p,
    MoE_Score:$lse,
    MoE_Score:$dp,
    Optional<MoE_Score>:$dlse,
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
    `ins` `(` $u `,` $e `,` $p `,` $lse `,` $dp `:` type($u) `,` type($e) `,`
    type($p) `,` type($lse) `,` type($dp) `)`
    (`dlse` `(` $dlse^ `:` type($dlse) `)`)?
    (`keys` `(` $uk^ `:` type($uk) `)`)?
    (`ws` `(` $ws^ `:` type($ws) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`tau` `(` $tau_value^ `:` type($tau_value) `)`)?
    (`origin` `(` $origin^ `:` type($origin) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    /// The names of the destinations that the operands ask for, in order.
    ::llvm::SmallVector<::llvm::StringRef> getPresentOuts();
    /// The destination `name`, or null.
    ::mlir::Value getOut(::llvm::StringRef name);
  }];
}

//===----------------------------------------------------------------------===//
// softmax_mix_backward_dq, softmax_mix_backward_dkv
//===----------------------------------------------------------------------===//

/// The two sweeps of the gradient of softmax_mix have the same operands.
class MoE_SoftmaxMixBackwardOp<string mnemonic, list<string> names>
    : MoE_StructuredOp<mnemonic, names, [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getOperandName", "getOrigins",
                               "makeExplicit"]>,
    MixLogitsOpInterface,
  ]> {
  let assemblyFormat = [{
    `ins` `(` $q `,` $k `,` $lse `,` $delta `:` type($q) `,` type($k) `,`
    type($lse) `,` type($delta) `)`
    (`values` `(` $v^ `,` $dmixed `:` type($v) `,` type($dmixed) `)`)?
    (`key_bias` `(` $key_bias^ `:` type($key_bias) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`query_mask` `(` $query_mask^ `:` type($query_mask) `)`)?
    (`key_mask` `(` $key_mask^ `:` type($key_mask) `)`)?
    (`levels` `(` $query_level^ `,` $key_level `:` type($query_level) `,` type($key_level) `)`)?
    (`origin` `(` $origin^ `:` type($origin) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  code mixGradientClassDeclaration = structuredClassDeclaration # [{
    /// The names of the destinations that the operands and flags ask for.
    ::llvm::SmallVector<::llvm::StringRef> getPresentOuts();
    /// The destination `name`, or null.
    ::mlir::Value getOut(::llvm::StringRef name);
  }];
}

def MoE_SoftmaxMixBackwardDqOp
    : MoE_SoftmaxMixBackwardOp<"softmax_mix_backward_dq",
                               ["dq", "sums", "dbias"]> {
  let summary = "differentiate softmax_mix by its queries";
  let description = [{
    The sweep over queries of the gradient of `moe.softmax_mix`. With `x` its
    logits and `A = exp(x - lse)`, recomputed where query `i` sees key `j`:

    `dx_hij = A_hij (dmixed_hi.v_j - delta_hi)`,
    `dq_hi = scale sum_j dx_hij k_hj`, `sums_hi = sum_j dx_hij`,
    `dbias = dx`, summed over the dims that `bias` broadcasts.

    `delta_hi = dmixed_hi.mixed_hi - dlse_hi` comes from the caller, which has
    `mixed`. Without `v` and `dmixed` their product is 0: the gradient of a
    log-sum-exp alone.

    | operand | dims | element type |
    |---|---|---|
    | `q`, `k`, `v`, `key_bias`, `bias`, masks, levels | as in `moe.softmax_mix` | |
    | `lse` | `[b, h, i]` | f32, the forward's result |
    | `delta` | `[b, h, i]` | f32 |
    | `dmixed` (with `v`) | `[b, h, i, e]` | f32 |
    | `origin` (optional) | scalar | index; key position of query 0, default `Nk - N` |
    | `dq` (out) | `[b, h, i, f]` | f32 |
    | `sums` (out, with `with_sums`) | `[b, h, i]` | f32 |
    | `dbias` (out, with `with_dbias`) | as `bias` | f32 |

    Iterators: `b`, `h`, `i` parallel; `b` and `h` stay whole where `dbias`
    sums over them; `j`, `f`, `e` reductions. A masked query, and one whose
    `lse` is `-inf`, gets 0; nothing that a masked token holds is read (E11).

    Differs from `moe.softmax_mix_backward_dkv` in which tokens' rows are
    independent: each recomputes `A`, so that no sum crosses a tile and the
    order of every sum is fixed without atomics. `moe-convert-to-softmax-mix`
    inserts it; `convert-moe-to-cpu` lowers it to register tiles, in memory
    linear in the number of tokens.

    ```mlir
    func.func @mix_dq(%q: tensor<1x2x?x64xf32>, %k: tensor<1x2x?x64xf32>,
                      %lse: tensor<1x2x?xf32>, %delta: tensor<1x2x?xf32>,
                      %v: tensor<1x?x16xf32>, %dmixed: tensor<1x2x?x16xf32>,
                      %init: tensor<1x2x?x64xf32>) -> tensor<1x2x?x64xf32> {
      %dq = moe.softmax_mix_backward_dq
          ins(%q, %k, %lse, %delta : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>,
              tensor<1x2x?xf32>, tensor<1x2x?xf32>)
          values(%v, %dmixed : tensor<1x?x16xf32>, tensor<1x2x?x16xf32>)
          outs(%init : tensor<1x2x?x64xf32>)
          {scale = 0.125 : f64, visibility = #moe.visibility<causal>}
          -> tensor<1x2x?x64xf32>
      return %dq : tensor<1x2x?x64xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$k,
    MoE_Score:$lse,
    MoE_Score:$delta,
    Optional<MoE_Activation>:$v,
    Optional<MoE_Score>:$dmixed,
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
    DefaultValuedAttr<BoolAttr, "false">:$with_sums,
    DefaultValuedAttr<BoolAttr, "false">:$with_dbias,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let extraClassDeclaration = mixGradientClassDeclaration;
}

def MoE_SoftmaxMixBackwardDkvOp
    : MoE_SoftmaxMixBackwardOp<"softmax_mix_backward_dkv",
                               ["dk", "dv", "sums"]> {
  let summary = "differentiate softmax_mix by its keys and values";
  let description = [{
    The sweep over keys of the gradient of `moe.softmax_mix`. With `A` and `dx`
    as in `moe.softmax_mix_backward_dq`:

    `dk_hj = scale sum_i dx_hij q_hi`, `dv_hj = sum_i A_hij dmixed_hi` (a head
    at a time: the gradient of `v` is their sum), `sums_hj = sum_i dx_hij`,
    which is the gradient of `key_bias`.

    | operand | dims | element type |
    |---|---|---|
    | all but `origin` | as in `moe.softmax_mix_backward_dq` | |
    | `origin` (optional) | scalar | index; query position of key 0, default `N - Nk` |
    | `dk` (out) | `[b, h, j, f]` | f32 |
    | `dv` (out, with `v`) | `[b, h, j, e]` | f32 |
    | `sums` (out, with `with_sums`) | `[b, h, j]` | f32 |

    Iterators: `b`, `h`, `j` parallel; `i`, `f`, `e` reductions. A masked key
    gets 0; nothing that a masked token holds is read (E11).

    Differs from `moe.softmax_mix_backward_dq` in which tokens' rows are
    independent. `moe-convert-to-softmax-mix` inserts it; `convert-moe-to-cpu`
    lowers both by the same code, with queries and keys exchanged.

    ```mlir
    func.func @mix_dkv(%q: tensor<1x2x?x64xf32>, %k: tensor<1x2x?x64xf32>,
                       %lse: tensor<1x2x?xf32>, %delta: tensor<1x2x?xf32>,
                       %v: tensor<1x?x16xf32>, %dmixed: tensor<1x2x?x16xf32>,
                       %dk0: tensor<1x2x?x64xf32>, %dv0: tensor<1x2x?x16xf32>)
        -> (tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>) {
      %dk, %dv = moe.softmax_mix_backward_dkv
          ins(%q, %k, %lse, %delta : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>,
              tensor<1x2x?xf32>, tensor<1x2x?xf32>)
          values(%v, %dmixed : tensor<1x?x16xf32>, tensor<1x2x?x16xf32>)
          outs(%dk0, %dv0 : tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>)
          {scale = 0.125 : f64, visibility = #moe.visibility<causal>}
          -> tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>
      return %dk, %dv : tensor<1x2x?x64xf32>, tensor<1x2x?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Activation:$k,
    MoE_Score:$lse,
    MoE_Score:$delta,
    Optional<MoE_Activation>:$v,
    Optional<MoE_Score>:$dmixed,
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
    DefaultValuedAttr<BoolAttr, "false">:$with_sums,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let extraClassDeclaration = mixGradientClassDeclaration;
}

//===----------------------------------------------------------------------===//
// softmax_mix_backward_self
//===----------------------------------------------------------------------===//

def MoE_SoftmaxMixBackwardSelfOp
    : MoE_SelfMixOp<"softmax_mix_backward_self", ["dq", "dv"]> {
  let summary = "differentiate softmax_mix by tokens that mix with themselves";
  let description = [{
    Both sweeps of the gradient of `moe.softmax_mix` at once, where queries and
    keys are the same tokens and so `q_i.q_j = q_j.q_i`. Token `i` meets token
    `j` as a query of its key, and as a key of its query:

    `x_hij = scale q_hi.q_hj`, `A_hij = exp(x_hij - lse_hi)` where `i` sees `j`,
    `dx_hij = A_hij (dmixed_hi.v_j - delta_hi)`,
    `dq_hi = scale sum_j (dx_hij + dx_hji) q_hj`,
    `dv_hi = sum_j A_hji dmixed_hj`.

    `dq` is the whole gradient of the tokens, `dv` that of their values.

    | operand | dims | element type |
    |---|---|---|
    | `q` | `[b, h, i, f]` | f32, bf16 or f16 |
    | `lse`, `delta` | `[b, h, i]` | f32 |
    | `v`, `dmixed` | `[b, i, e]`, `[b, h, i, e]` | f32, bf16 or f16; f32 |
    | `mask` (optional) | `[b, i]` | i1, true = real token |
    | `level` (optional) | `[b, i]` | f32; token `j` visible iff `level_j <= level_i` |
    | `dq`, `dv` (out) | `[b, h, i, f]`, `[b, h, i, e]` | f32 |

    Iterators: `b`, `h`, `i` parallel and whole, because rows share products, so
    that a kernel itself deals out the pairs; `f`, `e` reductions. A masked
    token gets 0, and nothing that it holds is read (E11).

    Differs from `moe.softmax_mix_backward_dq` and
    `moe.softmax_mix_backward_dkv` in taking three products of features for two
    tokens instead of eight, under a causal mask instead of four.
    `moe-convert-to-softmax-mix` inserts it for targets with a kernel for it
    (the schedule `pairs_once`); `convert-moe-to-cpu` lowers it; `moe-decompose` writes it as
    those two.

    ```mlir
    func.func @mix_self(%u: tensor<1x1x?x64xf32>, %l: tensor<1x1x?xf32>,
                        %delta: tensor<1x1x?xf32>, %v: tensor<1x?x16xf32>,
                        %dmixed: tensor<1x1x?x16xf32>)
        -> (tensor<1x1x?x64xf32>, tensor<1x1x?x16xf32>) {
      %du, %dv = moe.softmax_mix_backward_self
          ins(%u, %l, %delta, %v, %dmixed : tensor<1x1x?x64xf32>,
              tensor<1x1x?xf32>, tensor<1x1x?xf32>, tensor<1x?x16xf32>,
              tensor<1x1x?x16xf32>)
          outs(%u, %dmixed : tensor<1x1x?x64xf32>, tensor<1x1x?x16xf32>)
          {scale = 0.125 : f64, visibility = #moe.visibility<causal>}
          -> tensor<1x1x?x64xf32>, tensor<1x1x?x16xf32>
      return %du, %dv : tensor<1x1x?x64xf32>, tensor<1x1x?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$q,
    MoE_Score:$lse,
    MoE_Score:$delta,
    MoE_Activation:$v,
    MoE_Score:$dmixed,
    Optional<MoE_Mask>:$mask,
    Optional<MoE_Score>:$level,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$scale,
    MoE_DefaultVisibility:$visibility,
    DefaultValuedAttr<MoE_PrecisionAttr, "Precision::IEEE">:$precision);
  let assemblyFormat = [{
    `ins` `(` $q `,` $lse `,` $delta `,` $v `,` $dmixed `:` type($q) `,`
    type($lse) `,` type($delta) `,` type($v) `,` type($dmixed) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    (`level` `(` $level^ `:` type($level) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = selfMixClassDeclaration;
}

//===----------------------------------------------------------------------===//
// topk_renorm_backward
//===----------------------------------------------------------------------===//

def MoE_TopKRenormBackwardOp : MoE_StructuredOp<"topk_renorm_backward",
    ["dscores"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "differentiate topk_renorm";
  let description = [{
    The selection is a constant. With `g = gates / route_scale`,
    `dg = route_scale dgates`, `c = sum_a g_a dg_a` under `renorm`, else 0, and
    `b` among the selected experts of a token:

    | scores | `dscores_b` |
    |---|---|
    | `kind = probs` | `(dg_b - c) / (sum_a p_a + eps)` with `renorm`, 0 where the sum is 0; else `dg_b` |
    | softmax | `w_b - s_b sum_a w_a`, `w_b = g_b (dg_b - c)`; the second term, which every expert gets, is 0 with `renorm` and `eps = 0` |
    | sigmoid | `w_b (1 - s_b)` |
    | sqrtsoftplus | `w_b sigmoid(x_b) / (2 softplus(x_b))` |

    Experts that are not selected get 0 but for softmax's second term. The
    factors behind `w` are `d ln s / dx`: nothing divides by a score that
    underflows. A choice bias has no gradient, and neither has a choice of -inf
    where the scores are given.

    | operand | dims | element type |
    |---|---|---|
    | `dgates`, `gates` | `[n.., k]` | f32, the cotangent and the forward's result |
    | `indices` | `[n.., k]` | i32 or i64, the forward's result; a negative one is no expert |
    | `scores` (optional) | `[n.., e]` | f32, bf16 or f16; needed unless the formula has no `s`, `p` or `x` |
    | `dscores` (out) | `[n.., e]` | f32 |

    Iterators: `n` parallel; `e` and `k` kept whole by tiling. Masked tokens
    have indices -1 and so get 0.

    Python's autograd writes it; `convert-moe-to-cpu` lowers it to `k` scalar
    steps a token beside the softmax; `moe-decompose` gives its meaning in
    `linalg`.

    ```mlir
    func.func @select_gradient(%dgates: tensor<?x8xf32>, %gates: tensor<?x8xf32>,
        %indices: tensor<?x8xi32>, %init: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %dz = moe.topk_renorm_backward
          ins(%dgates, %gates, %indices : tensor<?x8xf32>, tensor<?x8xf32>,
              tensor<?x8xi32>)
          outs(%init : tensor<?x64xf32>) {kind = #moe.score_kind<logits>}
          -> tensor<?x64xf32>
      return %dz : tensor<?x64xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$dgates,
    MoE_Score:$gates,
    MoE_ExpertIndex:$indices,
    Optional<MoE_Activation>:$scores,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<MoE_ScoreKindAttr, "ScoreKind::Logits">:$kind,
    OptionalAttr<MoE_ScoreFunctionAttr>:$score,
    DefaultValuedAttr<BoolAttr, "true">:$renorm,
    DefaultValuedAttr<F64Attr, "0.0">:$eps,
    DefaultValuedAttr<F64Attr, "1.0">:$route_scale);
  let assemblyFormat = [{
    `ins` `(` $dgates `,` $gates `,` $indices `:` type($dgates) `,`
    type($gates) `,` type($indices) `)`
    (`scores` `(` $scores^ `:` type($scores) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    /// The score function in force: `score`, or what `kind` implies.
    ScoreFunction getScoreFunction();
    /// Whether every expert gets a gradient, from the softmax's denominator.
    bool isDense();
    /// Whether the formula reads the scores.
    bool needsScores();
  }];
}

#endif // MOE_DIALECT_MOE_IR_MOEBACKWARDOPS_TD
