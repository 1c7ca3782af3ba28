//===- NarrowFloats.cpp - half and bfloat on every CPU --------------------===//
//
// Arithmetic becomes that of float, rounded once an operation; one rounding of
// a float result is that of the exact one, as float has more than twice the
// bits. Conversions become arithmetic on bits, to the nearest and ties to even,
// with the payload and the quiet bit of NaN as x86's instructions have them.
// The one to bfloat takes subnormals for zero: vectors that hold some, which is
// rare, are rounded by their bits on every CPU, and so are scalars, of which
// the loop vectorizer then makes vectors that are as quick.
//
// This runs before any optimisation: later ones narrow fptrunc(fadd(fpext,
// fpext)) to an addition of half, but do not look through bits.
//
//===----------------------------------------------------------------------===//

#include "NarrowFloats.h"

#include "llvm/Analysis/VectorUtils.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/IntrinsicsX86.h"
#include "llvm/IR/MDBuilder.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"

using namespace llvm;

namespace {
class NarrowFloats {
public:
  NarrowFloats(const TargetMachine &machine, LLVMContext &context)
      : builder(context) {
    const MCSubtargetInfo &cpu = *machine.getMCSubtargetInfo();
    hasHalf = cpu.checkFeatures("+f16c");
    roundsVectors = cpu.checkFeatures("+avx512bf16,+avx512dq");
  }

  void expand(Function &function) {
    // Blocks are split on the way.
    SmallVector<Instruction *> all;
    for (Instruction &instruction : instructions(function))
      all.push_back(&instruction);
    for (Instruction *instruction : all) {
      builder.SetInsertPoint(instruction);
      Value *result = expand(*instruction);
      if (!result)
        continue;
      instruction->replaceAllUsesWith(result);
      instruction->eraseFromParent();
    }
  }

private:
  /// Whether arithmetic of `type` is to become that of float.
  bool lacks(Type *type) const {
    Type *scalar = type->getScalarType();
    return (scalar->isHalfTy() && !hasHalf) || scalar->isBFloatTy();
  }

  Type *toFloatType(Type *type) const {
    return lacks(type)
               ? type->getWithNewType(Type::getFloatTy(type->getContext()))
               : type;
  }

  Value *expand(Instruction &instruction);
  Value *expandTruncation(FPTruncInst &truncation);
  Value *expandComputation(Instruction &instruction);
  Value *expandIntrinsic(IntrinsicInst &call);

  Value *widen(Value *narrow);
  Value *widenHalf(Value *bits, Type *floats);
  Value *round(Value *wide, Type *type);
  Value *roundVector(Value *wide, Type *type);
  Value *roundBits(Value *wide, Type *type);
  Value *roundToBFloat(Value *wide, Value *bits);
  Value *roundToHalf(Value *bits, Type *floats);

  IRBuilder<> builder;
  bool hasHalf, roundsVectors;
};
} // namespace

//===----------------------------------------------------------------------===//
// Conversions
//===----------------------------------------------------------------------===//

/// The float of the same value.
Value *NarrowFloats::widen(Value *narrow) {
  Type *floats = toFloatType(narrow->getType());
  Type *shorts = narrow->getType()->getWithNewType(builder.getInt16Ty());
  Type *ints = narrow->getType()->getWithNewType(builder.getInt32Ty());
  Value *bits = builder.CreateZExt(builder.CreateBitCast(narrow, shorts), ints);
  if (narrow->getType()->getScalarType()->isBFloatTy()) // an upper half
    return builder.CreateBitCast(builder.CreateShl(bits, 16), floats);
  return widenHalf(bits, floats);
}

/// Half has 5 bits of exponent with a bias of 15, float 8 with 127.
Value *NarrowFloats::widenHalf(Value *bits, Type *floats) {
  Type *ints = bits->getType();
  auto constant = [&](uint32_t value) { return ConstantInt::get(ints, value); };
  Value *sign = builder.CreateShl(builder.CreateAnd(bits, 0x8000), 16);
  Value *magnitude = builder.CreateShl(builder.CreateAnd(bits, 0x7fff), 13);
  Value *normal = builder.CreateAdd(magnitude, constant((127 - 15) << 23));
  // 2^-14 (1 + fraction) - 2^-14: no subnormal float on the way, so the result
  // is right where the process flushes those to zero.
  Constant *least = ConstantFP::get(floats, 0x1p-14);
  Value *shifted =
      builder.CreateBitCast(builder.CreateOr(magnitude, 113u << 23), floats);
  Value *subnormal =
      builder.CreateBitCast(builder.CreateFSub(shifted, least), ints);
  Value *special = builder.CreateOr(magnitude, 0xffu << 23);
  Value *quieted = builder.CreateOr(special, 1u << 22);

  Value *result = builder.CreateSelect(
      builder.CreateICmpULT(magnitude, constant(1u << 23)), subnormal, normal);
  result = builder.CreateSelect(
      builder.CreateICmpUGE(magnitude, constant(31u << 23)), special, result);
  result = builder.CreateSelect(
      builder.CreateICmpUGT(magnitude, constant(31u << 23)), quieted, result);
  return builder.CreateBitCast(builder.CreateOr(result, sign), floats);
}

/// The nearest value of `type` to a float; ties go to the even one.
Value *NarrowFloats::round(Value *wide, Type *type) {
  auto *vector = dyn_cast<FixedVectorType>(type);
  return roundsVectors && vector && vector->getElementType()->isBFloatTy() &&
                 vector->getNumElements() == 16
             ? roundVector(wide, type)
             : roundBits(wide, type);
}

/// By an instruction for a whole register, unless a lane is subnormal.
Value *NarrowFloats::roundVector(Value *wide, Type *type) {
  Value *usual = builder.CreateFPTrunc(wide, type);
  constexpr unsigned denormal = 0x20;
  Value *isSubnormal =
      builder.CreateIntrinsic(Intrinsic::x86_avx512_fpclass_ps_512, {},
                              {wide, builder.getInt32(denormal)});
  Value *isRare = builder.CreateOrReduce(isSubnormal);
  Instruction *next = &*builder.GetInsertPoint();
  MDNode *unlikely =
      MDBuilder(next->getContext()).createUnlikelyBranchWeights();
  Instruction *end =
      SplitBlockAndInsertIfThen(isRare, next, /*Unreachable=*/false, unlikely);
  builder.SetInsertPoint(end);
  Value *exact = roundBits(wide, type);
  builder.SetInsertPoint(next);
  PHINode *result = builder.CreatePHI(type, 2);
  result->addIncoming(exact, end->getParent());
  result->addIncoming(usual, end->getParent()->getSinglePredecessor());
  return result;
}

Value *NarrowFloats::roundBits(Value *wide, Type *type) {
  Type *ints = wide->getType()->getWithNewType(builder.getInt32Ty());
  Type *shorts = wide->getType()->getWithNewType(builder.getInt16Ty());
  Value *bits = builder.CreateBitCast(wide, ints);
  Value *rounded = type->getScalarType()->isBFloatTy()
                       ? roundToBFloat(wide, bits)
                       : roundToHalf(bits, wide->getType());
  return builder.CreateBitCast(builder.CreateTrunc(rounded, shorts), type);
}

/// The last 16 bits are cut off after half a unit is added, less one for an
/// even number; a carry goes on into the exponent, up to infinity.
Value *NarrowFloats::roundToBFloat(Value *wide, Value *bits) {
  Type *ints = bits->getType();
  Value *isOdd = builder.CreateAnd(builder.CreateLShr(bits, 16), 1);
  Value *nearest = builder.CreateAdd(
      builder.CreateAdd(bits, ConstantInt::get(ints, 0x7fff)), isOdd);
  Value *quieted = builder.CreateOr(bits, 1u << 22);
  Value *isNaN = builder.CreateFCmpUNO(wide, wide);
  return builder.CreateLShr(builder.CreateSelect(isNaN, quieted, nearest), 16);
}

Value *NarrowFloats::roundToHalf(Value *bits, Type *floats) {
  Type *ints = bits->getType();
  auto constant = [&](uint32_t value) { return ConstantInt::get(ints, value); };
  Value *magnitude = builder.CreateAnd(bits, 0x7fffffff);
  Value *sign = builder.CreateLShr(builder.CreateXor(bits, magnitude), 16);
  // As for bfloat, with 13 bits less and another bias.
  Value *isOdd = builder.CreateAnd(builder.CreateLShr(magnitude, 13), 1);
  Value *normal = builder.CreateAdd(
      builder.CreateAdd(magnitude,
                        constant(uint32_t(15 - 127) * (1u << 23) + 0xfff)),
      isOdd);
  normal = builder.CreateLShr(normal, 13);
  // The last bit of 1/2 + x is worth 2^-24, that of a subnormal half.
  Constant *half = ConstantFP::get(floats, 0.5);
  Value *sum =
      builder.CreateFAdd(builder.CreateBitCast(magnitude, floats), half);
  Value *subnormal =
      builder.CreateSub(builder.CreateBitCast(sum, ints), constant(126u << 23));
  Value *payload = builder.CreateOr(
      builder.CreateAnd(builder.CreateLShr(magnitude, 13), 0x3ff), 0x7e00);

  Value *result = builder.CreateSelect(
      builder.CreateICmpULT(magnitude, constant(113u << 23)), subnormal,
      normal);
  result = builder.CreateSelect(
      builder.CreateICmpUGE(magnitude, constant(143u << 23)), constant(0x7c00),
      result);
  result = builder.CreateSelect(
      builder.CreateICmpUGT(magnitude, constant(255u << 23)), payload, result);
  return builder.CreateOr(result, sign);
}

//===----------------------------------------------------------------------===//
// Instructions
//===----------------------------------------------------------------------===//

/// From double the way leads over float, as in torch, whatever the CPU: no
/// instruction of most CPUs goes straight.
Value *NarrowFloats::expandTruncation(FPTruncInst &truncation) {
  Value *source = truncation.getOperand(0);
  Type *type = truncation.getType();
  Type *scalar = type->getScalarType();
  bool isFromDouble = source->getType()->getScalarType()->isDoubleTy();
  if ((!scalar->isHalfTy() && !scalar->isBFloatTy()) ||
      (!isFromDouble && !lacks(type)))
    return nullptr;
  if (isFromDouble)
    source = builder.CreateFPTrunc(source,
                                   type->getWithNewType(builder.getFloatTy()));
  return lacks(type) ? round(source, type)
                     : builder.CreateFPTrunc(source, type);
}

static bool isComputation(const IntrinsicInst &call) {
  switch (call.getIntrinsicID()) {
  case Intrinsic::copysign:
  case Intrinsic::fabs:
    return false; // of bits alone
  case Intrinsic::vector_reduce_fadd:
  case Intrinsic::vector_reduce_fmax:
  case Intrinsic::vector_reduce_fmaximum:
  case Intrinsic::vector_reduce_fmin:
  case Intrinsic::vector_reduce_fminimum:
  case Intrinsic::vector_reduce_fmul:
    return true;
  default:
    return isTriviallyVectorizable(call.getIntrinsicID());
  }
}

/// The same intrinsic on float, if there is one.
Value *NarrowFloats::expandIntrinsic(IntrinsicInst &call) {
  auto arguments = map_to_vector(call.args(), [&](Value *argument) {
    return lacks(argument->getType()) ? widen(argument) : argument;
  });
  CallInst *result = mlir::moe::createIntrinsicLike(
      call, toFloatType(call.getType()), arguments, builder);
  if (!result)
    return nullptr; // several results
  if (isa<FPMathOperator>(result))
    result->copyFastMathFlags(&call);
  return lacks(call.getType()) ? round(result, call.getType()) : result;
}

Value *NarrowFloats::expandComputation(Instruction &instruction) {
  Instruction *copy = instruction.clone();
  for (Use &operand : copy->operands())
    if (lacks(operand->getType()))
      operand = widen(operand);
  copy->mutateType(toFloatType(instruction.getType()));
  builder.Insert(copy);
  return lacks(instruction.getType()) ? round(copy, instruction.getType())
                                      : copy;
}

/// What takes the place of `instruction`; null if it stays.
Value *NarrowFloats::expand(Instruction &instruction) {
  if (auto *truncation = dyn_cast<FPTruncInst>(&instruction))
    return expandTruncation(*truncation);
  bool isLacking = lacks(instruction.getType()) ||
                   any_of(instruction.operands(), [&](const Use &operand) {
                     return lacks(operand->getType());
                   });
  if (!isLacking)
    return nullptr;
  switch (instruction.getOpcode()) {
  case Instruction::FPExt: {
    Value *wide = widen(instruction.getOperand(0));
    return builder.CreateFPExt(wide, instruction.getType());
  }
  case Instruction::FAdd:
  case Instruction::FSub:
  case Instruction::FMul:
  case Instruction::FDiv:
  case Instruction::FRem:
  case Instruction::FCmp:
  case Instruction::FPToSI:
  case Instruction::FPToUI:
  case Instruction::SIToFP:
  case Instruction::UIToFP:
    return expandComputation(instruction);
  case Instruction::Call:
    if (auto *intrinsic = dyn_cast<IntrinsicInst>(&instruction);
        intrinsic && isComputation(*intrinsic))
      return expandIntrinsic(*intrinsic);
    return nullptr;
  default: // moves
    return nullptr;
  }
}

CallInst *mlir::moe::createIntrinsicLike(const IntrinsicInst &call,
                                         llvm::Type *type,
                                         ArrayRef<llvm::Value *> arguments,
                                         IRBuilderBase &builder) {
  auto types = map_to_vector(
      arguments, [](llvm::Value *argument) { return argument->getType(); });
  SmallVector<llvm::Type *> overloads;
  if (!Intrinsic::getIntrinsicSignature(
          call.getIntrinsicID(),
          llvm::FunctionType::get(type, types, /*isVarArg=*/false), overloads))
    return nullptr;
  return builder.CreateIntrinsic(call.getIntrinsicID(), overloads, arguments);
}

void mlir::moe::expandNarrowFloats(Module &code, const TargetMachine &machine) {
  // Code generators of other architectures make no calls for these types.
  if (!machine.getTargetTriple().isX86())
    return;
  NarrowFloats floats(machine, code.getContext());
  for (Function &function : code)
    floats.expand(function);
}
