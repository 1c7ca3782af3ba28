//===- MoELogitsOps.td - From tokens to router logits ------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOELOGITSOPS_TD
#define MOE_DIALECT_MOE_IR_MOELOGITSOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// router_logits
//===----------------------------------------------------------------------===//

def MoE_RouterLogitsOp : MoE_StructuredOp<"router_logits", ["z"], [AttrSizedOperandSegments]> {
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
// cosine_logits
//===----------------------------------------------------------------------===//

def MoE_CosineLogitsOp : MoE_StructuredOp<"cosine_logits", ["z"], [AttrSizedOperandSegments]> {
  let summary = "compare the directions of tokens and experts";
  let description = [{
    `z_ne = cos(omega h_n, emb_e) / tau` (X-MoE, as SymphonySMoE Appendix C
    prints it). With `x^ = x / max(|x|, eps)`, `norm_token` says whether
    `omega h_n` is replaced by its `x^` and `norm_emb` whether `emb_e` is.

    | operand | dims | element type |
    |---|---|---|
    | `h` | `[n.., d]` | f32, bf16 or f16 |
    | `emb` | `[e, c]` | f32, bf16 or f16; `[e, d]` without `omega` |
    | `omega` (optional) | `[c, d]` | f32, bf16 or f16; absent: identity |
    | `tau_value` (optional) | scalar | f32; replaces the attribute `tau` |
    | `z` (out) | `[n.., e]` | f32 |

    Iterators: `n`, `e` parallel; `d`, `c` reductions, kept whole by tiling. A
    token of zeros has `z = 0` everywhere. The norm of a token is a positive
    factor of its row: it changes gates, never the selection. Norms are sums of
    squares in f64, which no f32 overflows.

    Differs from `moe.router_logits` in the norms. The importer writes it for
    X-MoE routers; canonicalisation normalises constant embeddings once, and
    where no norm is left to take writes the op as `moe.router_logits`;
    `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @directions(%h: tensor<?x352xf32>, %emb: tensor<16x8xf32>,
                          %omega: tensor<8x352xf32>, %init: tensor<?x16xf32>)
        -> tensor<?x16xf32> {
      %z = moe.cosine_logits
          ins(%h, %emb : tensor<?x352xf32>, tensor<16x8xf32>)
          omega(%omega : tensor<8x352xf32>)
          outs(%init : tensor<?x16xf32>) {tau = 0.3 : f64} -> tensor<?x16xf32>
      return %z : tensor<?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$h,
    MoE_Activation:$emb,
    Optional<MoE_Activation>:$omega,
    Optional<F32>:$tau_value,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$tau,
    DefaultValuedAttr<F64Attr, "1.0e-4">:$eps,
    DefaultValuedAttr<BoolAttr, "true">:$norm_token,
    DefaultValuedAttr<BoolAttr, "true">:$norm_emb);
  let assemblyFormat = [{
    `ins` `(` $h `,` $emb `:` type($h) `,` type($emb) `)`
    (`omega` `(` $omega^ `:` type($omega) `)`)?
    (`tau` `(` $tau_value^ `:` type($tau_value) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let hasCanonicalizer = 1;
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// hyper_router
//===----------------------------------------------------------------------===//

def MoE_HyperRouterOp : MoE_StructuredOp<"hyper_router", ["weight", "bias"]> {
  let summary = "generate a router from an embedding";
  let description = [{
    `rows = w2 relu(w1 e + b1) + b2`, read as `[e, d + 1]`: the first `d`
    columns are `weight`, the last one is `bias` (HyperRouter (2), Appendix
    C.1; the layout is that of the authors' code).

    | operand | dims | element type |
    |---|---|---|
    | `e` | `[c]` | f32, bf16 or f16 |
    | `w1`, `b1` | `[h, c]`, `[h]` | f32, bf16 or f16 |
    | `w2`, `b2` | `[g, h]`, `[g]`, `g = e (d + 1)` | f32, bf16 or f16 |
    | `weight` (out) | `[e, d]` | f32 |
    | `bias` (out) | `[e]` | f32 |

    Iterators: `e`, `d` parallel and whole, since both lie along `g`; `g`, `h`,
    `c` reductions.

    No operand depends on the tokens. With constant operands the op folds to
    two constants, so that a HyperRouter at inference is a plain router, op for
    op (C.4). Folding accumulates in f64: it rounds once.

    ```mlir
    func.func @generate(%e: tensor<32xf32>, %w1: tensor<64x32xf32>,
                        %b1: tensor<64xf32>, %w2: tensor<4112x64xf32>,
                        %b2: tensor<4112xf32>, %weight: tensor<16x256xf32>,
                        %bias: tensor<16xf32>)
        -> (tensor<16x256xf32>, tensor<16xf32>) {
      %w, %b = moe.hyper_router
          ins(%e, %w1, %b1, %w2, %b2 : tensor<32xf32>, tensor<64x32xf32>,
              tensor<64xf32>, tensor<4112x64xf32>, tensor<4112xf32>)
          outs(%weight, %bias : tensor<16x256xf32>, tensor<16xf32>)
          -> tensor<16x256xf32>, tensor<16xf32>
      return %w, %b : tensor<16x256xf32>, tensor<16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$e,
    MoE_Activation:$w1,
    MoE_Activation:$b1,
    MoE_Activation:$w2,
    MoE_Activation:$b2,
    Variadic<MoE_Score>:$outs);
  let assemblyFormat = [{
    `ins` `(` $e `,` $w1 `,` $b1 `,` $w2 `,` $b2 `:` type($e) `,` type($w1) `,`
    type($b1) `,` type($w2) `,` type($b2) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let hasFolder = 1;
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// ac_logits
//===----------------------------------------------------------------------===//

def MoE_ACLogitsOp : MoE_StructuredOp<"ac_logits", ["z"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "project tokens onto experts in the metric of their cluster";
  let description = [{
    `z_ne = sum_d h_nd mix_nd emb_ed + bias_e` with
    `mix_nd = sum_a alpha_na m[prev_idx_na, d]` (ACMoE (8), Definition 2; more
    than one previous expert: Appendix C.6). `alpha` are the previous gates
    divided by their sum over `r`. A place with `prev_idx` outside of `[0, l)`
    takes no part; a token without any place, or whose gates are all 0, has
    `mix = 1`: plain router logits (Remark 1).

    | operand | dims | element type |
    |---|---|---|
    | `h` | `[n.., d]` | f32, bf16 or f16 |
    | `m` | `[l, d]`, `l = e` | f32, the weights of `moe.dispersion_weights` |
    | `prev_idx` | `[n.., r]` | i32 or i64 |
    | `emb` | `[e, d]` | f32, bf16 or f16 |
    | `prev_gates` (optional) | `[n.., r]` | f32; absent only with `r = 1` |
    | `bias` (optional) | `[e]` | f32, bf16 or f16 |
    | `z` (out) | `[n.., e]` | f32 |

    Iterators: `n`, `e` parallel; `l`, `r`, `d` reductions, kept whole by
    tiling. The metric scales the token, not the product: no tensor over `n`,
    `d` and `e` exists.

    Routers of ACMoE insert it; as the producer of a selection it is tiled with
    it, so that the scaled token is the prologue of the product. `moe-decompose`
    gives its meaning in `linalg`.

    ```mlir
    func.func @metric(%h: tensor<?x512xf32>, %m: tensor<16x512xf32>,
                      %idx: tensor<?x2xi32>, %gates: tensor<?x2xf32>,
                      %emb: tensor<16x512xf32>, %init: tensor<?x16xf32>)
        -> tensor<?x16xf32> {
      %z = moe.ac_logits
          ins(%h, %m, %idx, %emb : tensor<?x512xf32>, tensor<16x512xf32>,
              tensor<?x2xi32>, tensor<16x512xf32>)
          gates(%gates : tensor<?x2xf32>)
          outs(%init : tensor<?x16xf32>) -> tensor<?x16xf32>
      return %z : tensor<?x16xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$h,
    MoE_Score:$m,
    MoE_ExpertIndex:$prev_idx,
    MoE_Activation:$emb,
    Optional<MoE_Score>:$prev_gates,
    Optional<MoE_Activation>:$bias,
    Variadic<MoE_Score>:$outs);
  let assemblyFormat = [{
    `ins` `(` $h `,` $m `,` $prev_idx `,` $emb `:` type($h) `,` type($m) `,`
    type($prev_idx) `,` type($emb) `)`
    (`gates` `(` $prev_gates^ `:` type($prev_gates) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let hasCanonicalizer = 1;
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOELOGITSOPS_TD
