//===- MoEExpertOps.td - The layers of experts -------------*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOEEXPERTOPS_TD
#define MOE_DIALECT_MOE_IR_MOEEXPERTOPS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

//===----------------------------------------------------------------------===//
// token_rows
//===----------------------------------------------------------------------===//

def MoE_TokenRowsOp : MoE_StructuredOp<"token_rows", ["rows"]> {
  let summary = "give each row of the experts its token";
  let description = [{
    `rows_r` is the token `n` of the assignment with `slots_nk = r`, the inverse
    of what `dispatch` computes. A row that no assignment has belongs to token
    0; a slot outside of `[0, r)` has no row.

    | operand | dims | element type |
    |---|---|---|
    | `slots` | `[n, k]` | i32 or i64, no row twice |
    | `rows` (out) | `[r]` | i32 or i64 |

    Iterators: all dims whole, since slots are absolute.

    Differs from a scatter in that rows nobody writes are defined.
    `run_experts` inserts it behind `dispatch`. A GPU has a kernel for it; on a
    CPU it runs as the loop over assignments that `moe-decompose` makes of it.

    ```mlir
    func.func @invert(%slots: tensor<?x2xi32>, %init: tensor<?xi64>) -> tensor<?xi64> {
      %rows = moe.token_rows ins(%slots : tensor<?x2xi32>)
          outs(%init : tensor<?xi64>) -> tensor<?xi64>
      return %rows : tensor<?xi64>
    }
    ```
  }];
  let arguments = (ins
    MoE_ExpertIndex:$slots,
    Variadic<MoE_ExpertIndex>:$outs);
  let assemblyFormat = [{
    `ins` `(` $slots `:` type($slots) `)`
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

//===----------------------------------------------------------------------===//
// grouped_linear
//===----------------------------------------------------------------------===//

def MoE_GroupedLinearOp : MoE_StructuredOp<"grouped_linear", ["y"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "multiply each row by the weight of its expert";
  let description = [{
    Rows `offsets_e <= i < offsets_{e+1}` are those of expert `e`: its run. With
    `row(i) = rows_i`, or `i` without `rows`,
    `z_if = bias_ef + sum_d x_{row(i), d} w_efd`, and `y_i = act(z_i)`. Rows of
    no run are 0.

    1. Without `gate` there are as many features `g` of `y` as features `f` of
       `z`, and `act` is the `activation`, elementwise. With one, half of the
       features of `z` gate the other half: `z_ig` and `z_{i, g + f/2}`
       (`concatenated`), or `z_{i, 2g}` and `z_{i, 2g + 1}` (`interleaved`), are
       the gate `a` and the factor `u` of `y_ig`.
    2. The activations are those of torch: `relu`, `relu2` (its square), `gelu`
       (by erf), `gelu_tanh`, and `silu`, `a sigmoid(alpha a)`.
    3. A gated feature is bounded by `limit`, its factor `u` by `up_limit`, or
       by `limit` without it:

    | `bound` | `y` |
    |---|---|
    | `clamp` | `act(min(a, limit)) (clamp(u, -up_limit, up_limit) + up_offset)` |
    | `clamp_activated` | `min(act(a), limit) (clamp(u, -up_limit, up_limit) + up_offset)` |
    | `softcap` | `cap(a, limit) sigmoid(alpha a) (cap(u, up_limit) + up_offset)`, `cap(v, l) = l tanh(v / l)` |

    | operand | dims | element type |
    |---|---|---|
    | `x` | `[n, d]`, `[r, d]` without `rows` | f32, bf16 or f16 |
    | `w` | `[e, f, d]`; `[e, d, f]` if `transposed` | f32, bf16 or f16 |
    | | `[e, p, d, q]` or `[e, p, t, q, s]` if `packed` | the second of bf16 |
    | | `[e, f, c]`, or `[e, p, t, q, s]` if `packed` | i8 with a `format` |
    | `offsets` | `[b]`, `b = e + 1`, ascending | i32 or i64 |
    | `rows` (optional) | `[r]` | i32 or i64 |
    | `bias` (optional) | `[e, f]` | f32, bf16 or f16 |
    | `scales` (with a `format`) | `[e, f, u]`; `[e, p, u, q]` if `packed` | f32, bf16 or f16; i8 of two levels |
    | `zeros` (optional) | as `scales` | f32, bf16 or f16; i8 if `scales` are |
    | `y` (out) | `[r, g]` | f32, bf16 or f16 |

    A weight that is `packed = q` lies in panels, so that a kernel reads it in
    the order of addresses: panel `p` of `ceil(f / q)` has the output features
    `p q` to `p q + q - 1`. With a `concatenated` gate it has half as many gates,
    from `p q/2` on, and behind them their factors. What is behind the last
    feature is zero. Weights of bf16 lie in panels of pairs: the features `2t`
    and `2t + 1` of `x` are neighbours, `s` is 2, `t` is `ceil(d / 2)`, and what
    is behind the last of `d` is zero.

    A weight with a `format` is quantized: `w` holds codes, and stands for
    `scales_efu (value(code) - zeros_efu)` with `u = d / group`; without `group`
    a row has one scale.

    | `format` | codes | `value(code)` |
    |---|---|---|
    | `int4` | 4 bits | 0 to 15; without `zeros` they are 8 |
    | `int6` | 6 bits, of groups of 16 or more | 0 to 63; without `zeros` they are 32 |
    | `int8` | 8 bits | 0 to 255; without `zeros` they are 128 |
    | `fp4_e2m1` | 4 bits: sign, 2 of exponent, 1 of mantissa | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no `zeros` |
    | `fp8_e4m3` | 8 bits: sign, 4 of exponent, 3 of mantissa | that of float8_e4m3fn, at most 448; 127 and 255, its NaN, are 480 and -480; no `zeros` |

    With the scales of their checkpoints these are the weights of GPTQ, AWQ and
    compressed-tensors, MXFP4 and MXFP8 (`group = 32`), NVFP4 (`group = 16`) and
    FP8 with blocks or rows. Of 4 bits
    byte `c` has the codes of features `2c`, in its low half, and `2c + 1`. In
    panels a byte `[t, q, s]`, `s` to 4, has those of the features `8t + s` and,
    in its high half, `8t + 4 + s`; of 8 bits the byte is that of `4t + s`. Of 6
    bits 16 features take three `t`: two have the lower 4 bits of codes, as
    those of 4 bits, and the third the upper 2, of feature `4m + s` in its bits
    `2m` and `2m + 1`. Without panels `c` is `4t + s`.
    There are as many `t` as `ceil(d / 32)` blocks of 32 features take, and what
    is behind the last feature is not read. `scales` and `zeros` lie in panels
    as the features of the weight do.

    Scales of i8 have two levels, as those of the K-quants of GGUF: of each 256
    features first a signed byte for each `group`, then the two bytes of an f16,
    the lower one first, and a scale is its byte times the f16. Where `zeros` are
    given they have two levels, too, and are minima: the weight is
    `scales_efu value(code) - zeros_efu`.

    With `activations = int8` each block of 32 features of a row of `x`, or of
    `group` where that is less, is `a q`, `a = max |x| / 127`, with `q` rounded
    to the nearest integer, ties to even: products are those of integers.
    Without it they are those of `x` itself. A row with an infinite or NaN
    feature has results that are not finite; which of them, is not said.

    Iterators: all dims whole, since rows are absolute and kernels cut runs
    among themselves. Sums are f32, in an order that depends on the size of `d`
    alone, whatever the other rows are, and the bias is in them; each element is
    rounded once, at the end.
    Offsets are cut to `[0, r]`; a row whose `row(i)` is outside of `[0, n)`
    reads zeros.

    Differs from a batched product in that rows and experts meet by data.
    `run_experts` and imported models insert it; `moe-decompose` gives its
    meaning as one product an expert.

    ```mlir
    func.func @swiglu(%x: tensor<?x64xbf16>, %w: tensor<8x96x64xbf16>,
                      %offsets: tensor<9xi32>, %rows: tensor<?xi64>,
                      %init: tensor<?x48xbf16>) -> tensor<?x48xbf16> {
      %y = moe.grouped_linear ins(%x, %w, %offsets
          : tensor<?x64xbf16>, tensor<8x96x64xbf16>, tensor<9xi32>)
          rows(%rows : tensor<?xi64>) outs(%init : tensor<?x48xbf16>)
          {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>}
          -> tensor<?x48xbf16>
      return %y : tensor<?x48xbf16>
    }

    func.func @int4(%x: tensor<?x64xbf16>, %w: tensor<8x96x32xi8>,
                    %scales: tensor<8x96x2xbf16>, %offsets: tensor<9xi32>,
                    %init: tensor<?x96xbf16>) -> tensor<?x96xbf16> {
      %y = moe.grouped_linear ins(%x, %w, %offsets
          : tensor<?x64xbf16>, tensor<8x96x32xi8>, tensor<9xi32>)
          scales(%scales : tensor<8x96x2xbf16>) outs(%init : tensor<?x96xbf16>)
          {format = #moe.weight_format<int4>, group = 32 : i64}
          -> tensor<?x96xbf16>
      return %y : tensor<?x96xbf16>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$x,
    MoE_Weight:$w,
    MoE_ExpertIndex:$offsets,
    Optional<MoE_ExpertIndex>:$rows,
    Optional<MoE_Activation>:$bias,
    Optional<MoE_Scale>:$scales,
    Optional<MoE_Scale>:$zeros,
    Variadic<MoE_Activation>:$outs,
    UnitAttr:$transposed,
    OptionalAttr<I64Attr>:$packed,
    OptionalAttr<MoE_WeightFormatAttr>:$format,
    OptionalAttr<I64Attr>:$group,
    DefaultValuedAttr<MoE_ActivationFormatAttr, "ActivationFormat::None">:$activations,
    DefaultValuedAttr<MoE_ExpertActivationAttr, "ExpertActivation::None">:$activation,
    DefaultValuedAttr<F64Attr, "1.0">:$alpha,
    DefaultValuedAttr<MoE_GateLayoutAttr, "GateLayout::None">:$gate,
    DefaultValuedAttr<MoE_GateBoundAttr, "GateBound::Clamp">:$bound,
    OptionalAttr<F64Attr>:$limit,
    OptionalAttr<F64Attr>:$up_limit,
    DefaultValuedAttr<F64Attr, "0.0">:$up_offset);
  let assemblyFormat = [{
    `ins` `(` $x `,` $w `,` $offsets `:` type($x) `,` type($w) `,`
              type($offsets) `)`
    (`rows` `(` $rows^ `:` type($rows) `)`)?
    (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`scales` `(` $scales^ `:` type($scales) `)`)?
    (`zeros` `(` $zeros^ `:` type($zeros) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration # [{
    /// Whether half of the output features gate the others.
    bool isGated() { return getGate() != GateLayout::None; }
    /// Whether anything is done to a sum but to round it.
    bool hasEpilogue() {
      return isGated() || getActivation() != ExpertActivation::None;
    }
    /// Whether a panel of a packed weight has gates, then their factors.
    bool hasPanelsOfHalves() {
      return getPacked() && getGate() == GateLayout::Concatenated;
    }
    /// Whether features of x lie in pairs in a packed weight.
    bool isPackedInPairs() {
      return !getFormat() &&
             ::llvm::cast<::mlir::ShapedType>(getW().getType()).getRank() == 5;
    }
    /// Whether the weight is codes with scales.
    bool isQuantized() { return getFormat().has_value(); }
    /// The features of x that are summed before a scale is applied, and that
    /// share one where they are rounded.
    int64_t getProductBlock() {
      return std::min<int64_t>(getGroup().value_or(kProductBlock), kProductBlock);
    }
    /// The features of x that panels are whole blocks of.
    static constexpr int64_t kProductBlock = 32;
    /// The bits of a code.
    int64_t getCodeBits();
    /// Whether scales, and what stands for zeros, are bytes times an f16 of each
    /// `kSuperblock` features.
    bool hasTwoLevels();
    static constexpr int64_t kSuperblock = 256;
    /// The bytes of a superblock, with those of its f16 behind them.
    int64_t getSuperblockScales() { return kSuperblock / *getGroup() + 2; }
    /// Whether codes are floats, with a sign, and not counted from a zero.
    bool hasFloatCodes() {
      return getFormat() == WeightFormat::Fp4E2M1 ||
             getFormat() == WeightFormat::Fp8E4M3;
    }
  }];
}

//===----------------------------------------------------------------------===//
// grouped_outer
//===----------------------------------------------------------------------===//

def MoE_GroupedOuterOp : MoE_StructuredOp<"grouped_outer", ["dw"], [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface,
                              ["getDims", "getDimOrder"]>,
  ]> {
  let summary = "add up the outer products of each expert's rows";
  let description = [{
    `dw_efd = sum_i dy_if x_{row(i), d}` over the rows `offsets_e <= i <
    offsets_{e+1}` of expert `e`, with `row(i)` as in `grouped_linear`: the
    gradient of its weight. With `x` all ones it is that of its bias.

    | operand | dims | element type |
    |---|---|---|
    | `dy` | `[r, f]` | f32, bf16 or f16 |
    | `x` | `[n, d]`, `[r, d]` without `rows` | f32, bf16 or f16 |
    | `offsets` | `[b]`, `b = e + 1`, ascending | i32 or i64 |
    | `rows` (optional) | `[r]` | i32 or i64 |
    | `dw` (out) | `[e, f, d]` | f32, bf16 or f16 |

    Iterators: all dims whole, as in `grouped_linear`. Sums are f32, in the
    order of the rows, and rounded once. An expert without rows has zeros.
    Offsets are cut to `[0, r]`; a row whose `row(i)` is outside of `[0, n)`
    reads zeros.

    Differs from a batched product as `grouped_linear` does. The backward of
    `grouped_linear` inserts it; `moe-decompose` gives its meaning as one
    product an expert.

    ```mlir
    func.func @weight_gradient(%dy: tensor<?x32xf32>, %x: tensor<?x64xf32>,
                               %offsets: tensor<9xi32>, %init: tensor<8x32x64xf32>)
        -> tensor<8x32x64xf32> {
      %dw = moe.grouped_outer ins(%dy, %x, %offsets
          : tensor<?x32xf32>, tensor<?x64xf32>, tensor<9xi32>)
          outs(%init : tensor<8x32x64xf32>) -> tensor<8x32x64xf32>
      return %dw : tensor<8x32x64xf32>
    }
    ```
  }];
  let arguments = (ins
    MoE_Activation:$dy,
    MoE_Activation:$x,
    MoE_ExpertIndex:$offsets,
    Optional<MoE_ExpertIndex>:$rows,
    Variadic<MoE_Activation>:$outs);
  let assemblyFormat = [{
    `ins` `(` $dy `,` $x `,` $offsets `:` type($dy) `,` type($x) `,`
              type($offsets) `)`
    (`rows` `(` $rows^ `:` type($rows) `)`)?
    `outs` `(` $outs `:` type($outs) `)` attr-dict (`->` type($results)^)?
  }];
  let extraClassDeclaration = structuredClassDeclaration;
}

#endif // MOE_DIALECT_MOE_IR_MOEEXPERTOPS_TD
