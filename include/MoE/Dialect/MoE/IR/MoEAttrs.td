//===- MoEAttrs.td - Typed attributes of the moe dialect -*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOEATTRS_TD
#define MOE_DIALECT_MOE_IR_MOEATTRS_TD

include "mlir/IR/AttrTypeBase.td"
include "mlir/IR/EnumAttr.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

class MoE_I32Enum<string name, string summary, list<I32EnumAttrCase> cases>
    : I32EnumAttr<name, summary, cases> {
  let cppNamespace = "::mlir::moe";
  let genSpecializedAttr = 0;
}
class MoE_EnumAttr<I32EnumAttr enum, string mnemonic>
    : EnumAttr<MoE_Dialect, enum, mnemonic> {
  let assemblyFormat = "`<` $value `>`";
}

def MoE_ScoreKind : MoE_I32Enum<"ScoreKind", "what the scores of a selection are", [
  I32EnumAttrCase<"Logits", 0, "logits">,
  I32EnumAttrCase<"Probs", 1, "probs">,
]>;
def MoE_ScoreKindAttr : MoE_EnumAttr<MoE_ScoreKind, "score_kind">;

def MoE_ScoreFunction : MoE_I32Enum<"ScoreFunction", "logits to scores", [
  I32EnumAttrCase<"Softmax", 0, "softmax">,
  I32EnumAttrCase<"Sigmoid", 1, "sigmoid">,
  I32EnumAttrCase<"SqrtSoftplus", 2, "sqrtsoftplus">,
  I32EnumAttrCase<"None", 3, "none">,
]>;
def MoE_ScoreFunctionAttr : MoE_EnumAttr<MoE_ScoreFunction, "score_function">;

def MoE_GroupScore : MoE_I32Enum<"GroupScore", "the value of a group of experts", [
  I32EnumAttrCase<"Top2Sum", 0, "top2_sum">,
  I32EnumAttrCase<"Max", 1, "max">,
]>;
def MoE_GroupScoreAttr : MoE_EnumAttr<MoE_GroupScore, "group_score">;

def MoE_Restrict : MoE_I32Enum<"Restrict", "which keys a query may mix", [
  I32EnumAttrCase<"All", 0, "all">,
  I32EnumAttrCase<"Entropy", 1, "entropy">,
]>;
def MoE_RestrictAttr : MoE_EnumAttr<MoE_Restrict, "restrict">;

def MoE_Precision : MoE_I32Enum<"Precision", "how products of activations are formed", [
  I32EnumAttrCase<"IEEE", 0, "ieee">,
  I32EnumAttrCase<"TF32", 1, "tf32">,
]>;
def MoE_PrecisionAttr : MoE_EnumAttr<MoE_Precision, "precision">;

def MoE_HeadMode : MoE_I32Enum<"HeadMode", "which attention heads take part", [
  I32EnumAttrCase<"MinEntropy", 0, "min_entropy">,
  I32EnumAttrCase<"All", 1, "all">,
  I32EnumAttrCase<"Fixed", 2, "fixed">,
]>;
def MoE_HeadModeAttr : MoE_EnumAttr<MoE_HeadMode, "head_mode">;

def MoE_HeadScope : MoE_I32Enum<"HeadScope", "the rows whose mean entropy chooses the head", [
  I32EnumAttrCase<"Sequence", 0, "sequence">,
  I32EnumAttrCase<"Batch", 1, "batch">,
]>;
def MoE_HeadScopeAttr : MoE_EnumAttr<MoE_HeadScope, "head_scope">;

def MoE_DispersionMeasure : MoE_I32Enum<"DispersionMeasure", "how far a cluster's rows lie apart", [
  I32EnumAttrCase<"Mad", 0, "mad">,
  I32EnumAttrCase<"Variance", 1, "variance">,
  I32EnumAttrCase<"Pairwise", 2, "pairwise">,
]>;
def MoE_DispersionMeasureAttr : MoE_EnumAttr<MoE_DispersionMeasure, "dispersion_measure">;

def MoE_DispersionScale : MoE_I32Enum<"DispersionScale", "the mean that weights of features are divided by", [
  I32EnumAttrCase<"Cluster", 0, "cluster">,
  I32EnumAttrCase<"Feature", 1, "feature">,
  I32EnumAttrCase<"Global", 2, "global">,
  I32EnumAttrCase<"GlobalPreclamp", 3, "global_preclamp">,
  I32EnumAttrCase<"Dispersion", 4, "dispersion">,
  I32EnumAttrCase<"None", 5, "none">,
]>;
def MoE_DispersionScaleAttr : MoE_EnumAttr<MoE_DispersionScale, "dispersion_scale">;

def MoE_AdjacencyNorm : MoE_I32Enum<"AdjacencyNorm", "how co-selection counts become weights", [
  I32EnumAttrCase<"Row", 0, "row">,
  I32EnumAttrCase<"Col", 1, "col">,
  I32EnumAttrCase<"Eq7", 2, "eq7">,
]>;
def MoE_AdjacencyNormAttr : MoE_EnumAttr<MoE_AdjacencyNorm, "adjacency_norm">;

def MoE_ColdStart : MoE_I32Enum<"ColdStart", "what an adjacency of zeros means", [
  I32EnumAttrCase<"Literal", 0, "literal">,
  I32EnumAttrCase<"Base", 1, "base">,
]>;
def MoE_ColdStartAttr : MoE_EnumAttr<MoE_ColdStart, "cold_start">;

def MoE_FiniteScope : MoE_I32Enum<"FiniteScope", "where the least finite score is looked for", [
  I32EnumAttrCase<"Row", 0, "row">,
  I32EnumAttrCase<"Tensor", 1, "tensor">,
]>;
def MoE_FiniteScopeAttr : MoE_EnumAttr<MoE_FiniteScope, "finite_scope">;

def MoE_DropRule : MoE_I32Enum<"DropRule", "which assignments an expert at capacity keeps", [
  I32EnumAttrCase<"Position", 0, "position">,
  I32EnumAttrCase<"Priority", 1, "priority">,
  I32EnumAttrCase<"Probs", 2, "probs">,
]>;
def MoE_DropRuleAttr : MoE_EnumAttr<MoE_DropRule, "drop">;

def MoE_LossDivisor : MoE_I32Enum<"LossDivisor", "what summed probabilities are divided by", [
  I32EnumAttrCase<"Tokens", 0, "tokens">,
  I32EnumAttrCase<"Assignments", 1, "assignments">,
]>;
def MoE_LossDivisorAttr : MoE_EnumAttr<MoE_LossDivisor, "loss_divisor">;

def MoE_ExpertActivation : MoE_I32Enum<"ExpertActivation", "what an expert's layer ends with", [
  I32EnumAttrCase<"None", 0, "none">,
  I32EnumAttrCase<"Relu", 1, "relu">,
  I32EnumAttrCase<"Relu2", 2, "relu2">,
  I32EnumAttrCase<"Gelu", 3, "gelu">,
  I32EnumAttrCase<"GeluTanh", 4, "gelu_tanh">,
  I32EnumAttrCase<"Silu", 5, "silu">,
]>;
def MoE_ExpertActivationAttr : MoE_EnumAttr<MoE_ExpertActivation, "activation">;

def MoE_GateLayout : MoE_I32Enum<"GateLayout", "which output features gate which others", [
  I32EnumAttrCase<"None", 0, "none">,
  I32EnumAttrCase<"Concatenated", 1, "concatenated">,
  I32EnumAttrCase<"Interleaved", 2, "interleaved">,
]>;
def MoE_GateLayoutAttr : MoE_EnumAttr<MoE_GateLayout, "gate">;

def MoE_GateBound : MoE_I32Enum<"GateBound", "how the factors of a gated layer are bounded", [
  I32EnumAttrCase<"Clamp", 0, "clamp">,
  I32EnumAttrCase<"ClampActivated", 1, "clamp_activated">,
  I32EnumAttrCase<"Softcap", 2, "softcap">,
]>;
def MoE_GateBoundAttr : MoE_EnumAttr<MoE_GateBound, "bound">;

def MoE_WeightFormat : MoE_I32Enum<"WeightFormat", "what the codes of a quantized weight stand for", [
  I32EnumAttrCase<"Int4", 0, "int4">,
  I32EnumAttrCase<"Int8", 1, "int8">,
  I32EnumAttrCase<"Fp4E2M1", 2, "fp4_e2m1">,
  I32EnumAttrCase<"Fp8E4M3", 3, "fp8_e4m3">,
  I32EnumAttrCase<"Int6", 4, "int6">,
]>;
def MoE_WeightFormatAttr : MoE_EnumAttr<MoE_WeightFormat, "weight_format">;

def MoE_ActivationFormat : MoE_I32Enum<"ActivationFormat", "how the rows of a product are rounded before it", [
  I32EnumAttrCase<"None", 0, "none">,
  I32EnumAttrCase<"Int8", 1, "int8">,
]>;
def MoE_ActivationFormatAttr : MoE_EnumAttr<MoE_ActivationFormat, "activation_format">;

def MoE_ErrorKind : MoE_I32Enum<"ErrorKind", "what a call's error is about", [
  I32EnumAttrCase<"Index", 0, "index">,
  I32EnumAttrCase<"ZeroDivision", 1, "zero_division">,
  I32EnumAttrCase<"Value", 2, "value">,
]>;
def MoE_ErrorKindAttr : MoE_EnumAttr<MoE_ErrorKind, "error_kind">;

//===----------------------------------------------------------------------===//
// Visibility
//===----------------------------------------------------------------------===//

def MoE_VisibilityAttr : AttrDef<MoE_Dialect, "Visibility"> {
  let mnemonic = "visibility";
  let summary = "which keys a query sees by their positions";
  let description = [{
    Query `i` sits at key position `pos = i + origin`. Key `j` is visible to it
    iff every part that is written admits it:

    | part | admits |
    |---|---|
    | `causal` | `j <= pos` |
    | `window = L` | `j > pos - L`, and with `exclude_self` `j > pos - L - 1`: `L` keys remain |
    | `exclude_self` | `j != pos` |

    `#moe.visibility<>`, under which every query sees every key, is the default
    of every op and is not printed. Masks, levels and the origin are operands,
    and hide keys besides.

    ```mlir
    #sees = #moe.visibility<causal, window = 4, exclude_self>
    ```
  }];
  let parameters = (ins
    "bool":$causal,
    OptionalParameter<"::std::optional<int64_t>">:$window,
    "bool":$excludeSelf);
  let constBuilderCall = "$_builder.getAttr<" # cppType # ">($0)";
  let hasCustomAssemblyFormat = 1;
  let genVerifyDecl = 1;
  let extraClassDeclaration = [{
    /// Whether every query sees every key.
    bool admitsAll() const {
      return !getCausal() && !getWindow() && !getExcludeSelf();
    }
    /// The distance behind a query from which on a window hides keys.
    ::std::optional<int64_t> getReach() const;
  }];
}

def MoE_DefaultVisibility
    : DefaultValuedAttr<MoE_VisibilityAttr, "false, ::std::nullopt, false">;

#endif // MOE_DIALECT_MOE_IR_MOEATTRS_TD
