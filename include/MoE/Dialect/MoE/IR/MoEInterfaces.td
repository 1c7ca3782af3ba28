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

def MixingOpInterface : OpInterface<"MixingOpInterface"> {
  let cppNamespace = "::mlir::moe";
  let description = [{
    An op that is a softmax over tokens and a mix of per-token values: it can
    be written with `moe.softmax_mix`, the op that kernels implement without
    ever holding the token-by-token matrix.
  }];
  let methods = [
    InterfaceMethod<
      /*desc=*/[{
        Builds the op from `moe.softmax_mix` and smaller ops; one value a
        result of the op, or failure with nothing built.
      }],
      /*retTy=*/"::mlir::FailureOr<::llvm::SmallVector<::mlir::Value>>",
      /*methodName=*/"convertToSoftmaxMix",
      /*args=*/(ins "::mlir::OpBuilder &":$builder)
    >,
  ];
}

#endif // MOE_DIALECT_MOE_IR_MOEINTERFACES_TD
