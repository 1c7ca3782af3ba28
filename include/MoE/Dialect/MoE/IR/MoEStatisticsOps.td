//===- MoEStatisticsOps.td - What the next step needs ------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOESTATISTICSOPS_TD
#define MOE_DIALECT_MOE_IR_MOESTATISTICSOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// mad_dispersion
//===----------------------------------------------------------------------===//

def MoE_MadDispersionOp : MoE_StructuredOp<"mad_dispersion", ["s", "mean", "count"], [AttrSizedOperandSegments]> {
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
// dispersion_weights
//===----------------------------------------------------------------------===//

def MoE_DispersionWeightsOp : MoE_StructuredOp<"dispersion_weights", ["m"]> {
  let summary = "turn dispersions into the metric of each cluster";
  let description = [{
    `w = 1 / (s + eps)`, capped at `clamp` times its mean, then divided by a
    mean (ACMoE section 3.1, (21)). Means run over the live clusters, those
    with tokens (E14); with `include_empty`, over all of them.

    | `scale` | the divisor |
    |---|---|
    | `cluster` | the mean over `d` of the row; makes `m / d` the optimum of Theorem 1 |
    | `feature` | the mean over the live clusters, one a feature |
    | `global` | the mean over live clusters and features, after the cap |
    | `global_preclamp` | that mean before the cap |
    | `none` | 1 |
    | `dispersion` | none of these: `m = mean_d(s + eps) / (s + eps)`, without the cap |

    | operand | dims | element type |
    |---|---|---|
    | `s` | `[e, d]` | f32, the dispersions |
    | `count` | `[e]` | i32 or i64, tokens of each cluster |
    | `m` (out) | `[e, d]` | f32; 1 in the rows of clusters that are not live |

    Iterators: `e`, `d` whole, since the means span both. `eps > 0` because a
    cluster of equal tokens has `s = 0` (E15). Sums are taken in f64.

    Routers of ACMoE insert it between `moe.mad_dispersion` and
    `moe.ac_logits`; `moe-decompose` gives its meaning in `linalg`.

    ```mlir
    func.func @weigh(%s: tensor<16x512xf32>, %count: tensor<16xi32>,
                     %init: tensor<16x512xf32>) -> tensor<16x512xf32> {
      %m = moe.dispersion_weights
          ins(%s, %count : tensor<16x512xf32>, tensor<16xi32>)
          outs(%init : tensor<16x512xf32>)
          {clamp = 10.0 : f64, scale = #moe.dispersion_scale<feature>}
          -> tensor<16x512xf32>
      return %m : tensor<16x512xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Score:$s,
    MoE_Count:$count,
    Variadic<MoE_Score>:$outs,
    DefaultValuedAttr<F64Attr, "1.0e-4">:$eps,
    OptionalAttr<F64Attr>:$clamp,
    DefaultValuedAttr<MoE_DispersionScaleAttr, "DispersionScale::Cluster">:$scale,
    DefaultValuedAttr<BoolAttr, "false">:$include_empty);
  let assemblyFormat = [{
    `ins` `(` $s `,` $count `:` type($s) `,` type($count) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// adjacency_gate
//===----------------------------------------------------------------------===//

def MoE_AdjacencyGateOp : MoE_StructuredOp<"adjacency_gate", ["g"], [
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
  let extraClassDeclaration = structuredClassDeclaration # [{
    unsigned getNumLeadingDims();
  }];
}

//===----------------------------------------------------------------------===//
// adjacency_update
//===----------------------------------------------------------------------===//

def MoE_AdjacencyUpdateOp : MoE_StructuredOp<"adjacency_update", ["a_new"], [
    AttrSizedOperandSegments,
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
    for the result, and `moe-fuse-reductions` takes them in the loop that
    selects. A batch without a valid token leaves `a` as it is (E18). The
    indices are those of the base scores, not of the smoothed ones.

    The Symphony routers insert it after the gate; `moe-decompose` turns it into
    `moe.co_selections` and a blend in `linalg`.

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

//===----------------------------------------------------------------------===//
// co_selections
//===----------------------------------------------------------------------===//

def MoE_CoSelectionsOp : MoE_StructuredOp<"co_selections", ["counts"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder", "accumulates"]>,
  ]> {
  let summary = "count the pairs of experts that tokens select together";
  let description = [{
    `counts_el += sum_n s_ne s_nl` with `s_n` the 0/1 vector of the experts that
    token `n` selected (SymphonySMoE Algorithm 1 lines 3-9): the diagonal holds
    the loads.

    | operand | dims | element type |
    |---|---|---|
    | `indices` | `[n, k]` | i32 or i64; outside `[0, e)`: nothing selected |
    | `mask` (optional) | `[n]` | i1, true = real token |
    | `counts` (in and out) | `[e, l]`, square | i32 |

    Iterators: all dims whole, because indices are absolute. Differs from the
    other ops in that it adds to what its destination holds: tokens may be
    counted a few at a time, in any order.

    `moe-decompose` makes it of `moe.adjacency_update`, and
    `moe-fuse-reductions` puts it into the loop that selects;
    `convert-moe-to-cpu` lowers it.

    ```mlir
    func.func @count(%indices: tensor<?x2xi32>, %before: tensor<16x16xi32>)
        -> tensor<16x16xi32> {
      %counts = moe.co_selections ins(%indices : tensor<?x2xi32>)
          outs(%before : tensor<16x16xi32>) -> tensor<16x16xi32>
      return %counts : tensor<16x16xi32>
    }
    ```
  }];
  let arguments = (ins
    MoE_ExpertIndex:$indices,
    Optional<MoE_Mask>:$mask,
    Variadic<MoE_Any>:$outs);
  let assemblyFormat = [{
    `ins` `(` $indices `:` type($indices) `)`
    (`mask` `(` $mask^ `:` type($mask) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOESTATISTICSOPS_TD
