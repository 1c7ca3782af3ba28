//===- MoELossOps.td - What keeps the experts balanced -----*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOELOSSOPS_TD
#define MOE_DIALECT_MOE_IR_MOELOSSOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// balance_loss
//===----------------------------------------------------------------------===//

def MoE_BalanceLossOp : MoE_StructuredOp<"balance_loss", ["loss", "load"], [AttrSizedOperandSegments]> {
  let summary = "measure how unevenly experts are chosen";
  let description = [{
    `load_e` = the number of assignments to `e`, `f_e = load_e / sum load`,
    `P_e = (1 / tokens) sum_n p_ne`, `loss = E sum_e f_e P_e` (Switch (4);
    ACMoE and SymphonySMoE train with it). `divisor = assignments` divides the
    sum of `p` by `k tokens` instead, as the code that descends from fastmoe
    does.

    | operand | dims | element type |
    |---|---|---|
    | `p` | `[n, e]` | f32 |
    | `indices` | `[n, k]` | i32 or i64; outside `[0, e)`: no assignment |
    | `mask` (optional) | `[n]` | i1, true = real token |
    | `loss` (out) | scalar tensor | f32 |
    | `load` (out) | `[e]` | i32 |

    Iterators: all dims whole, since the result needs all tokens. Counts are
    integers; sums over tokens are formed in `f64` in token order. Masked tokens
    count nowhere (E10, E11); without a token the loss is 0.

    Differs from a variance of the load in that it has a gradient, through `p`.
    Training inserts it; it runs as the `linalg` that `moe-decompose` makes of
    it.

    ```mlir
    func.func @balance(%p: tensor<?x16xf32>, %indices: tensor<?x2xi32>,
                       %init: tensor<f32>, %load: tensor<16xi32>) -> tensor<f32> {
      %r:2 = moe.balance_loss ins(%p, %indices : tensor<?x16xf32>, tensor<?x2xi32>)
          outs(%init, %load : tensor<f32>, tensor<16xi32>) -> tensor<f32>, tensor<16xi32>
      return %r#0 : tensor<f32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$p,
    MoE_ExpertIndex:$indices,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<MoE_LossDivisorAttr, "LossDivisor::Tokens">:$divisor);
  let assemblyFormat = [{
    `ins` `(` $p `,` $indices `:` type($p) `,` type($indices) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// z_loss
//===----------------------------------------------------------------------===//

def MoE_ZLossOp : MoE_StructuredOp<"z_loss", ["loss", "lse"], [AttrSizedOperandSegments]> {
  let summary = "measure how large the logits are";
  let description = [{
    `lse_n = ln sum_e exp z_ne`, `loss = mean_n lse_n^2` (ST-MoE (5)).

    | operand | dims | element type |
    |---|---|---|
    | `z` | `[n, e]` | f32, bf16 or f16 |
    | `mask` (optional) | `[n]` | i1, true = real token |
    | `loss` (out) | scalar tensor | f32 |
    | `lse` (out) | `[n]` | f32 |

    Iterators: all dims whole, since the result needs all tokens; the sum over
    them is formed in `f64` in token order. A token without support (E6) has
    `lse = -inf` and counts with 0; a masked one has `lse = -inf` and does not
    count (E10). Without a token the loss is 0.

    Differs from a reduction of `linalg` in the stable log-sum-exp. Training
    inserts it; it runs as the `linalg` that `moe-decompose` makes of it.

    ```mlir
    func.func @keep_small(%z: tensor<?x16xf32>, %init: tensor<f32>,
                          %lse: tensor<?xf32>) -> tensor<f32> {
      %r:2 = moe.z_loss ins(%z : tensor<?x16xf32>)
          outs(%init, %lse : tensor<f32>, tensor<?xf32>) -> tensor<f32>, tensor<?xf32>
      return %r#0 : tensor<f32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$z,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Score>:$outs);
  let assemblyFormat = [{
    `ins` `(` $z `:` type($z) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// bias_update
//===----------------------------------------------------------------------===//

def MoE_BiasUpdateOp : MoE_StructuredOp<"bias_update", ["bias_new"]> {
  let summary = "raise the selection bias of experts with little load";
  let description = [{
    `bias_new_e = bias_e + gamma sign(mean load - load_e)`, `sign(0) = 0`, with
    `load = counts` (DeepSeek-V3's balancing without a loss, SymphonySMoE F.1).

    | operand | dims | element type |
    |---|---|---|
    | `bias` | `[e]` | f32 |
    | `counts` | `[e]` | i32 or i64 |
    | `bias_new` (out) | `[e]` | f32 |

    Iterators: `e` whole, since the mean needs all experts. The comparison is
    `sum counts` against `E counts_e` in 64-bit integers, so it is exact.

    Differs from an optimizer step in that only the sign counts. Grouped routers
    call it once after each step; it runs as the `linalg` that `moe-decompose`
    makes of it.

    ```mlir
    func.func @rebalance(%bias: tensor<256xf32>, %counts: tensor<256xi32>,
                         %init: tensor<256xf32>) -> tensor<256xf32> {
      %new = moe.bias_update ins(%bias, %counts : tensor<256xf32>, tensor<256xi32>)
          outs(%init : tensor<256xf32>) -> tensor<256xf32>
      return %new : tensor<256xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$bias,
    MoE_ExpertIndex:$counts,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "0.001">:$gamma);
  let assemblyFormat = [{
    `ins` `(` $bias `,` $counts `:` type($bias) `,` type($counts) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOELOSSOPS_TD
