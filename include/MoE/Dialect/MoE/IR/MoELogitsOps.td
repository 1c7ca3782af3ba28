//===- MoELogitsOps.td - From tokens to router logits ------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOELOGITSOPS_TD
#define MOE_DIALECT_MOE_IR_MOELOGITSOPS_TD

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

#endif // MOE_DIALECT_MOE_IR_MOELOGITSOPS_TD
