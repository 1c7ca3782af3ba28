//===- MoEDispatchOps.td - Tokens to experts and back ------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOEDISPATCHOPS_TD
#define MOE_DIALECT_MOE_IR_MOEDISPATCHOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// dispatch
//===----------------------------------------------------------------------===//

def MoE_DispatchOp : MoE_StructuredOp<"dispatch", ["slots", "offsets", "counts"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "give each assignment of a token to an expert its row";
  let description = [{
    Sorts the assignments `(n, k)` by expert. `counts_e` is the number of rows
    of expert `e`, `offsets_b = sum_{e < b} roundup(counts_e, alignment)` where
    its rows start, and `slots_nk` the row of an assignment, -1 where it has
    none. `combine` reads the rows back.

    1. Inside an expert all first choices come before all second choices, each
       in token order (Tutel); with `drop = priority` tokens come in descending
       `priority` instead, equal ones in token order (V-MoE's batch prioritized
       routing).
    2. An expert has at most `capacity` rows, or `k floor(capacity_factor
       ceil(n / e))`. It keeps those that come first (`drop = position`,
       `priority`), or those with the highest `gates`, equal ones by order
       (`drop = probs`). The others are dropped; nothing is renormalised.
    3. `expert_map` turns the logical expert of an index into a physical one,
       -1 for an expert that lives elsewhere, before anything is counted.

    | operand | dims | element type |
    |---|---|---|
    | `indices` | `[n, k]` | i32 or i64; out of range: no assignment |
    | `priority` (optional) | `[n]` | f32 |
    | `gates` (optional) | `[n, k]` | f32 |
    | `expert_map` (optional) | `[l]` | i32, physical expert of a logical one |
    | `capacity` (optional) | scalar | i32 |
    | `mask` (optional) | `[n]` | i1, true = real token |
    | `slots` (out) | `[n, k]` | i32 or i64 |
    | `offsets` (out) | `[b]`, `b = e + 1` | i32 or i64 |
    | `counts` (out) | `[e]` | i32 or i64, after dropping |

    Iterators: all dims whole, since a row depends on every assignment. Orders
    are total: NaN ranks last among priorities and gates (E3), so the result is
    the same on every machine and for every number of threads. A masked token
    has slots -1 (E10).

    Differs from a sort in that only places are computed; nothing moves.
    `MoELayer` inserts it after the selection. It is lowered to a counting sort
    in `O(n k + e)`, on a GPU over blocks of assignments, where an order by
    priorities or gates runs as its decomposition; `moe-decompose` gives its
    meaning in comparisons of all pairs.

    ```mlir
    func.func @sort(%indices: tensor<?x2xi32>, %slots: tensor<?x2xi32>,
                    %offsets: tensor<9xi32>, %counts: tensor<8xi32>)
        -> (tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>) {
      %r:3 = moe.dispatch ins(%indices : tensor<?x2xi32>)
          outs(%slots, %offsets, %counts : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
          {capacity_factor = 1.25 : f64}
          -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
      return %r#0, %r#1, %r#2 : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
    }
    ```
  }];
  let arguments = (ins
    MoE_ExpertIndex:$indices,
    Optional<MoE_Score>:$priority,
    Optional<MoE_Score>:$gates,
    Optional<MoE_ExpertIndex>:$expert_map,
    Optional<I32>:$capacity,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Any>:$outs,
    DefaultValuedAttr<MoE_DropRuleAttr, "DropRule::Position">:$drop,
    OptionalAttr<F64Attr>:$capacity_factor,
    DefaultValuedAttr<I64Attr, "1">:$alignment);
  let assemblyFormat = [{
    `ins` `(` $indices `:` type($indices) `)`
    (`priority` `(` $priority^ `:` type($priority) `)`)?
    (`gates` `(` $gates^ `:` type($gates) `)`)?
    (`expert_map` `(` $expert_map^ `:` type($expert_map) `)`)?
    (`capacity` `(` $capacity^ `:` type($capacity) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    ::mlir::Value getSlotsInit() { return getOuts()[0]; }
    ::mlir::Value getOffsetsInit() { return getOuts()[1]; }
    ::mlir::Value getCountsInit() { return getOuts()[2]; }
    /// Whether experts may have to drop assignments.
    bool hasCapacity() { return getCapacity() || getCapacityFactor(); }
  }];
}

//===----------------------------------------------------------------------===//
// combine
//===----------------------------------------------------------------------===//

def MoE_CombineOp : MoE_StructuredOp<"combine", ["y"], [AttrSizedOperandSegments]> {
  let summary = "add up what the experts made of each token";
  let description = [{
    `y_nd = shared_nd + sum_k gates_nk expert_out[slots_nk, d]` (Mutual-Inform
    (2), SymphonySMoE (2)), in the order of `k`. A slot outside of `[0, s)` adds
    nothing, whatever its gate; shared experts count with weight 1.

    | operand | dims | element type |
    |---|---|---|
    | `expert_out` | `[s, d]` | f32, bf16 or f16; row as `dispatch` numbers them |
    | `gates` | `[n.., k]` | f32 |
    | `slots` | `[n.., k]` | i32 or i64 |
    | `shared` (optional) | `[n.., d]` | f32, bf16 or f16 |
    | `y` (out) | `[n.., d]` | f32, bf16 or f16 |

    Iterators: `n`, `d` parallel; `k` reduction kept whole; `s` whole, since
    slots are absolute. The sum is formed in `f32` and rounded once.

    Differs from a gather in that rows are weighed and added as they are read.
    `MoELayer` inserts it after the experts. It is lowered to sums of vectors;
    `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @gather(%out: tensor<?x64xf32>, %gates: tensor<?x2xf32>,
                      %slots: tensor<?x2xi32>, %init: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %y = moe.combine ins(%out, %gates, %slots
          : tensor<?x64xf32>, tensor<?x2xf32>, tensor<?x2xi32>)
          outs(%init : tensor<?x64xf32>) -> tensor<?x64xf32>
      return %y : tensor<?x64xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$expert_out,
    MoE_Score:$gates,
    MoE_ExpertIndex:$slots,
    Optional<MoE_Activation>:$shared,
    Variadic<MoE_Activation>:$outs);
  let assemblyFormat = [{
    `ins` `(` $expert_out `,` $gates `,` $slots `:` type($expert_out) `,`
              type($gates) `,` type($slots) `)`
    (`shared` `(` $shared^ `:` type($shared) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// soft_dispatch
//===----------------------------------------------------------------------===//

def MoE_SoftDispatchOp : MoE_StructuredOp<"soft_dispatch", ["dispatch", "combine"], [AttrSizedOperandSegments]> {
  let summary = "weigh tokens for slots and slots for tokens";
  let description = [{
    With `x^ = x / max(|x|, eps)` over `d`, and `phi^` likewise,
    `l_nep = scale sum_d x^_nd phi^_dep`; `dispatch` is the softmax of `l` over
    the tokens `n`, `combine` the softmax over the slots `e, p` (SoftMoE). With
    `metric`, `x^` is multiplied by it elementwise (Soft-ACMoE, ACMoE C.7).

    | operand | dims | element type |
    |---|---|---|
    | `x` | `[b.., n, d]` | f32, bf16 or f16 |
    | `phi` | `[d, e, p]` | f32, bf16 or f16 |
    | `metric` (optional) | `[b.., n, d]` | f32 |
    | `scale_value` (optional) | scalar | f32; replaces the attribute `scale` |
    | `mask` (optional) | `[b.., n]` | i1, true = real token |
    | `dispatch`, `combine` (out) | `[b.., n, e, p]` | f32 |

    Iterators: `b` parallel; `n`, `e`, `p` whole, since the two softmaxes run
    over them; `d` reduction. A masked token is in no slot: its weights are 0
    (E10) and what it holds does not leak (E11); without a real token all
    weights are 0 (E6).

    Differs from an attention in that its one score matrix is normalised twice.
    SoftMoE routers insert it; it runs as the `linalg` that `moe-decompose`
    makes of it.

    ```mlir
    func.func @soften(%x: tensor<?x64xf32>, %phi: tensor<64x8x2xf32>,
                      %init: tensor<?x8x2xf32>)
        -> (tensor<?x8x2xf32>, tensor<?x8x2xf32>) {
      %r:2 = moe.soft_dispatch ins(%x, %phi : tensor<?x64xf32>, tensor<64x8x2xf32>)
          outs(%init, %init : tensor<?x8x2xf32>, tensor<?x8x2xf32>)
          -> tensor<?x8x2xf32>, tensor<?x8x2xf32>
      return %r#0, %r#1 : tensor<?x8x2xf32>, tensor<?x8x2xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$x,
    MoE_Activation:$phi,
    Optional<MoE_Score>:$metric,
    Optional<F32>:$scale_value,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0">:$scale,
    DefaultValuedAttr<F64Attr, "1.0e-6">:$eps);
  let assemblyFormat = [{
    `ins` `(` $x `,` $phi `:` type($x) `,` type($phi) `)`
    (`metric` `(` $metric^ `:` type($metric) `)`)?
    (`scale` `(` $scale_value^ `:` type($scale_value) `)`)?
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOEDISPATCHOPS_TD
