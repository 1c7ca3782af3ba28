//===- MoEBase.td - Dialect, type constraints and op classes -*- tablegen -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOEBASE_TD
#define MOE_DIALECT_MOE_IR_MOEBASE_TD

include "mlir/Dialect/Linalg/IR/LinalgInterfaces.td"
include "mlir/IR/AttrTypeBase.td"
include "mlir/IR/BuiltinAttributes.td"
include "mlir/IR/OpBase.td"
include "mlir/Interfaces/DestinationStyleOpInterface.td"
include "mlir/Interfaces/IndexingMapOpInterface.td"
include "mlir/Interfaces/InferTypeOpInterface.td"
include "mlir/Interfaces/SideEffectInterfaces.td"
include "MoE/Dialect/MoE/IR/MoEInterfaces.td"

def MoE_Dialect : Dialect {
  let name = "moe";
  let cppNamespace = "::mlir::moe";
  let summary = "routing operations of mixture-of-experts models";
  let description = [{
    The `moe` dialect says what a router means: logits, their mixing over
    tokens, the selection of experts, and the statistics that the next step
    needs. Ops are destination-passing, work on tensors and on buffers, and
    carry the facts that drivers need (maps, whole dimensions, effects), so
    that tiling, fusion, decomposition and bufferization know no op by name.

    Dimensions have the same names everywhere: `n` tokens (`i` queries and `j`
    keys where tokens meet tokens), `e` experts, `k` selected experts, `d`
    features, `h` heads, `b` batch.

    Scores, probabilities, gates, dispersions and adjacency are `f32`;
    activations are `f32`, `bf16` or `f16` and are accumulated in `f32`.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect",
  ];
  let hasConstantMaterializer = 1;
  let useDefaultAttributePrinterParser = 1;
}

//===----------------------------------------------------------------------===//
// Type constraints
//===----------------------------------------------------------------------===//

def MoE_Activation : TensorOrMemRef<[F32, BF16, F16]>;
/// Floats, or the codes of a quantized weight.
def MoE_Weight : TensorOrMemRef<[F32, BF16, F16, I8]>;
/// Floats, or bytes of two levels.
def MoE_Scale : TensorOrMemRef<[F32, BF16, F16, I8]>;
def MoE_Score : TensorOrMemRef<[F32]>;
def MoE_ExpertIndex : TensorOrMemRef<[I32, I64]>;
def MoE_Count : TensorOrMemRef<[I32, I64]>;
def MoE_Mask : TensorOrMemRef<[I1]>;
def MoE_Any : TensorOrMemRef<[AnyType]>;

//===----------------------------------------------------------------------===//
// Op classes
//===----------------------------------------------------------------------===//

class MoE_Op<string mnemonic, list<Trait> traits = []>
    : Op<MoE_Dialect, mnemonic, traits>;

/// An op whose meaning is an iteration domain, one map an operand, and one
/// destination a result. Everything that a driver asks is answered from these
/// facts; an op adds its dims, its maps, its verifier and its decomposition.
///
/// `arguments` list the operands first and the attributes after them, because
/// diagnostics name an operand by its position.
class MoE_StructuredOp<string mnemonic, list<string> names,
                       list<Trait> traits = []>
    : MoE_Op<mnemonic, !listconcat([
        DestinationStyleOpInterface,
        DeclareOpInterfaceMethods<IndexingMapOpInterface, ["getIndexingMaps"]>,
        DeclareOpInterfaceMethods<MemoryEffectsOpInterface>,
        DeclareOpInterfaceMethods<MoEStructuredOpInterface, ["getDims"]>,
        DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface,
                                  ["reifyResultShapes"]>,
      ], traits)> {
  list<string> outNames = names;
  let results = (outs Variadic<AnyRankedTensor>:$results);
  let hasVerifier = 1;
  code structuredClassDeclaration = [{
    ::mlir::MutableOperandRange getDpsInitsMutable() { return getOutsMutable(); }
    ::llvm::ArrayRef<int64_t> getShape(::mlir::OpOperand *operand) {
      auto type = ::llvm::dyn_cast<::mlir::ShapedType>(operand->get().getType());
      return type ? type.getShape() : ::llvm::ArrayRef<int64_t>();
    }
    /// The names that diagnostics give to operands: operands come first among
    /// the arguments, in the order of their ODS positions.
    static ::llvm::ArrayRef<::llvm::StringLiteral> getArgumentNames() {
      static constexpr ::llvm::StringLiteral names[] = {}]
      # !interleave(!foreach(i, !range(!size(arguments)),
                             "\"" # !getdagname(arguments, i) # "\""), ", ")
      # [{};
      return names;
    }
    static ::llvm::ArrayRef<::llvm::StringLiteral> getOutNames() {
      static constexpr ::llvm::StringLiteral names[] = {}]
      # !interleave(!foreach(name, outNames, "\"" # name # "\""), ", ") # [{};
      return names;
    }
  }];
  let extraClassDeclaration = structuredClassDeclaration;
  let extraClassDefinition = [{
    void $cppClass::getEffects(
        ::llvm::SmallVectorImpl<::mlir::SideEffects::EffectInstance<
            ::mlir::MemoryEffects::Effect>> &effects) {
      ::mlir::moe::getStructuredEffects(*this, effects);
    }
    ::llvm::LogicalResult $cppClass::reifyResultShapes(
        ::mlir::OpBuilder &builder,
        ::mlir::ReifiedRankedShapedTypeDims &shapes) {
      return ::mlir::moe::reifyFromInits(*this, builder, shapes);
    }
  }];
}

/// softmax_mix of tokens with themselves, or its gradient: the keys are the
/// queries, and without a bias between them logits are symmetric.
class MoE_SelfMixOp<string mnemonic, list<string> names>
    : MoE_StructuredOp<mnemonic, names, [
    AttrSizedOperandSegments,
    DeclareOpInterfaceMethods<MoEStructuredOpInterface, ["getDims"]>,
    MixLogitsOpInterface,
  ]> {
  code selfMixClassDeclaration = structuredClassDeclaration # [{
    ::mlir::Value getK() { return getQ(); }
    ::mlir::Value getKeyBias() { return {}; }
    ::mlir::Value getBias() { return {}; }
    ::mlir::Value getQueryMask() { return getMask(); }
    ::mlir::Value getKeyMask() { return getMask(); }
    ::mlir::Value getQueryLevel() { return getLevel(); }
    ::mlir::Value getKeyLevel() { return getLevel(); }
  }];
}

#endif // MOE_DIALECT_MOE_IR_MOEBASE_TD
