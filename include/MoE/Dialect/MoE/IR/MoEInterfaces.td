//===- MoEInterfaces.td - Op interfaces of the moe dialect -*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOEINTERFACES_TD
#define MOE_DIALECT_MOE_IR_MOEINTERFACES_TD

include "mlir/IR/OpBase.td"

def MoEStructuredOpInterface : OpInterface<"MoEStructuredOpInterface"> {
  let cppNamespace = "::mlir::moe";
  let description = [{
    What `IndexingMapOpInterface` and `DestinationStyleOpInterface` leave open
    about an op with an iteration domain: the names and kinds of its dims, and
    how an op that leaves operands implicit says the same with all of them.
    The one tiling model of the dialect reads nothing else.
  }];
  let methods = [
    InterfaceMethod<
      /*desc=*/[{
        The dims of the iteration domain, in the order of the maps' dims.
      }],
      /*retTy=*/"::llvm::SmallVector<::mlir::moe::Dim>",
      /*methodName=*/"getDims"
    >,
    InterfaceMethod<
      /*desc=*/[{
        The name of an operand or of the result tied to it, as the op's
        signature writes it.
      }],
      /*retTy=*/"::std::string",
      /*methodName=*/"getOperandName",
      /*args=*/(ins "unsigned":$operandNumber),
      /*methodBody=*/"",
      /*defaultImplementation=*/[{
        for (unsigned group = 0;; ++group) {
          auto [start, length] = $_op.getODSOperandIndexAndLength(group);
          if (operandNumber >= start + length)
            continue;
          ::llvm::StringRef name = ConcreteOp::getArgumentNames()[group];
          return name == "outs"
                     ? ConcreteOp::getOutNames()[operandNumber - start].str()
                     : name.str();
        }
      }]
    >,
    InterfaceMethod<
      /*desc=*/[{
        Pairs of dims (smaller, larger): the size of the first must not exceed
        that of the second. Checked by the verifier where both are static and
        by the runtime verification where they are not.
      }],
      /*retTy=*/"::llvm::SmallVector<std::pair<unsigned, unsigned>>",
      /*methodName=*/"getDimOrder",
      /*args=*/(ins),
      /*methodBody=*/"",
      /*defaultImplementation=*/[{ return {}; }]
    >,
    InterfaceMethod<
      /*desc=*/[{
        Index operands that hold the position, in the untiled problem, of the
        first row of a dim: pairs (operand number, dim). Tiling adds the tile's
        offset to them.
      }],
      /*retTy=*/"::llvm::SmallVector<std::pair<unsigned, unsigned>>",
      /*methodName=*/"getOrigins",
      /*args=*/(ins),
      /*methodBody=*/"",
      /*defaultImplementation=*/[{ return {}; }]
    >,
    InterfaceMethod<
      /*desc=*/[{
        The number of leading dims that the op does not tell apart: it takes
        any number of them, in row-major order, in front of its own. They are
        the first dims of the maps. 0 for an op with a fixed rank.
      }],
      /*retTy=*/"unsigned",
      /*methodName=*/"getNumLeadingDims",
      /*args=*/(ins),
      /*methodBody=*/"",
      /*defaultImplementation=*/[{ return 0; }]
    >,
    InterfaceMethod<
      /*desc=*/[{
        Whether the op adds to what its destinations hold; the others overwrite
        them.
      }],
      /*retTy=*/"bool",
      /*methodName=*/"accumulates",
      /*args=*/(ins),
      /*methodBody=*/"",
      /*defaultImplementation=*/[{ return false; }]
    >,
    InterfaceMethod<
      /*desc=*/[{
        The operands of this op with every implicit one spelled out, so that
        each operand is read through one map only. An op that has implicit
        operands (keys that are the queries, a default position) builds the
        explicit op before the insertion point and returns it; the others
        return themselves.
      }],
      /*retTy=*/"::mlir::Operation *",
      /*methodName=*/"makeExplicit",
      /*args=*/(ins "::mlir::OpBuilder &":$builder),
      /*methodBody=*/"",
      /*defaultImplementation=*/[{ return $_op.getOperation(); }]
    >,
  ];
}

def SplitReductionOpInterface : OpInterface<"SplitReductionOpInterface"> {
  let cppNamespace = "::mlir::moe";
  let description = [{
    An op whose only result is a function of a table that some of its tokens
    after others are folded into, in any order and with the same bits: of
    integer counts. The dialect's model of `PartialReductionOpInterface` reads
    nothing else. It cuts the tokens into parts with a table each.
  }];
  let methods = [
    InterfaceMethod<
      /*desc=*/[{ The dim of the tokens. }],
      /*retTy=*/"unsigned",
      /*methodName=*/"getSplitDim"
    >,
    InterfaceMethod<
      /*desc=*/[{
        A table for each of `numParts` parts, `[part, ...]`, into which no token
        was folded.
      }],
      /*retTy=*/"::mlir::Value",
      /*methodName=*/"buildEmptyTables",
      /*args=*/(ins "::mlir::OpBuilder &":$builder,
                    "::mlir::OpFoldResult":$numParts)
    >,
    InterfaceMethod<
      /*desc=*/[{
        The op that folds tokens into `table`. `operands` are the op's own with
        the tokens along the split dim.
      }],
      /*retTy=*/"::mlir::Operation *",
      /*methodName=*/"foldIntoTable",
      /*args=*/(ins "::mlir::OpBuilder &":$builder,
                    "::mlir::ValueRange":$operands, "::mlir::Value":$table)
    >,
    InterfaceMethod<
      /*desc=*/[{ The op's result, from the tables of all parts. }],
      /*retTy=*/"::mlir::Value",
      /*methodName=*/"finishTables",
      /*args=*/(ins "::mlir::OpBuilder &":$builder, "::mlir::Value":$tables)
    >,
  ];
}

def MixingOpInterface : OpInterface<"MixingOpInterface"> {
  let cppNamespace = "::mlir::moe";
  let description = [{
    An op that is a softmax over tokens and a mix of per-token values, or the
    gradient of one: it can be written with `moe.softmax_mix` or its backward
    ops, which kernels implement without ever holding the token-by-token
    matrix.
  }];
  let methods = [
    InterfaceMethod<
      /*desc=*/[{
        Builds the op from `moe.softmax_mix` or its backward ops and smaller
        ops; one value a result of the op, or failure with nothing built.
      }],
      /*retTy=*/"::mlir::FailureOr<::llvm::SmallVector<::mlir::Value>>",
      /*methodName=*/"convertToSoftmaxMix",
      /*args=*/(ins "::mlir::OpBuilder &":$builder)
    >,
  ];
}

/// An operand or attribute getter, which the ops' own accessors implement.
class MoE_Getter<string type, string name, string description>
    : InterfaceMethod<description, type, name>;

def MixLogitsOpInterface : OpInterface<"MixLogitsOpInterface"> {
  let cppNamespace = "::mlir::moe";
  let description = [{
    An op over the logits of `moe.softmax_mix`, `x_hij = scale q_hi.k_hj +
    key_bias_hj + bias_hij` where query `i` sees key `j`: what builds the
    logits reads nothing else. The dims are numbered as in `moe.softmax_mix`.
  }];
  let methods = [
    MoE_Getter<"::mlir::Value", "getQ", "`[b, h, i, f]`.">,
    MoE_Getter<"::mlir::Value", "getK", "`[b, h, j, f]`.">,
    MoE_Getter<"::mlir::Value", "getKeyBias", "`[b, h, j]` or null.">,
    MoE_Getter<"::mlir::Value", "getBias",
               "`[b or 1, h or 1, i, j]` or null.">,
    MoE_Getter<"::mlir::Value", "getQueryMask", "`[b, i]` or null.">,
    MoE_Getter<"::mlir::Value", "getKeyMask", "`[b, j]` or null.">,
    MoE_Getter<"::mlir::Value", "getQueryLevel", "`[b, i]` or null.">,
    MoE_Getter<"::mlir::Value", "getKeyLevel", "`[b, j]` or null.">,
    MoE_Getter<"::llvm::APFloat", "getScale", "The factor of q.k.">,
    MoE_Getter<"::mlir::moe::VisibilityAttr", "getVisibility",
               "Which keys a query sees by their positions.">,
  ];
}

#endif // MOE_DIALECT_MOE_IR_MOEINTERFACES_TD
