//===- NarrowMoves.cpp - Vectors of half and bfloat as their bits ---------===//

#include "NarrowFloats.h"

#include "llvm/ADT/PostOrderIterator.h"
#include "llvm/IR/Constants.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"

using namespace llvm;

namespace {
/// Makes a second instruction of integers for every move of a function, and
/// lets all others read its bits.
class NarrowMoves {
public:
  explicit NarrowMoves(const TargetMachine &machine) {
    const MCSubtargetInfo &cpu = *machine.getMCSubtargetInfo();
    hasHalf = cpu.checkFeatures("+f16c");
    hasBFloat = cpu.checkFeatures("+avx512bf16");
  }

  void rewrite(Function &function);

private:
  bool lacks(Type *type) const {
    Type *scalar = type->getScalarType();
    return (scalar->isHalfTy() && !hasHalf) ||
           (scalar->isBFloatTy() && !hasBFloat);
  }

  bool lacksVector(Type *type) const {
    return isa<FixedVectorType>(type) && lacks(type);
  }

  Type *toBitsType(Type *type) const {
    return lacks(type)
               ? type->getWithNewType(Type::getInt16Ty(type->getContext()))
               : type;
  }

  bool isMove(const Instruction &instruction) const;
  Value *bitsOf(Value *value);
  Value *copy(Instruction &move);
  Value *copyMasked(IntrinsicInst &move);
  void castForUser(Use &use);

  bool hasHalf, hasBFloat;
  /// Of moves their copies, of other values a cast.
  DenseMap<Value *, Value *> bits;
};
} // namespace

static bool isMasked(const IntrinsicInst &call) {
  switch (call.getIntrinsicID()) {
  case Intrinsic::masked_load:
  case Intrinsic::masked_store:
  case Intrinsic::masked_gather:
  case Intrinsic::masked_scatter:
  case Intrinsic::masked_expandload:
  case Intrinsic::masked_compressstore:
    return true;
  default:
    return false;
  }
}

bool NarrowMoves::isMove(const Instruction &instruction) const {
  if (!lacksVector(instruction.getType()) &&
      none_of(instruction.operands(), [&](const Use &operand) {
        return lacksVector(operand->getType());
      }))
    return false;
  switch (instruction.getOpcode()) {
  case Instruction::BitCast:
  case Instruction::ExtractElement:
  case Instruction::Freeze:
  case Instruction::InsertElement:
  case Instruction::Load:
  case Instruction::PHI:
  case Instruction::Select:
  case Instruction::ShuffleVector:
  case Instruction::Store:
    return true;
  case Instruction::Call: {
    auto *intrinsic = dyn_cast<IntrinsicInst>(&instruction);
    return intrinsic && isMasked(*intrinsic);
  }
  default:
    return false;
  }
}

Value *NarrowMoves::bitsOf(Value *value) {
  if (!lacks(value->getType()))
    return value;
  Type *type = toBitsType(value->getType());
  if (auto *constant = dyn_cast<Constant>(value))
    return ConstantExpr::getBitCast(constant, type);
  Value *&known = bits[value];
  if (known)
    return known;
  IRBuilder<> builder(value->getContext());
  if (auto *argument = dyn_cast<Argument>(value))
    builder.SetInsertPointPastAllocas(argument->getParent());
  else
    builder.SetInsertPoint(
        *cast<Instruction>(value)->getInsertionPointAfterDef());
  return known = builder.CreateBitCast(value, type);
}

Value *NarrowMoves::copyMasked(IntrinsicInst &move) {
  IRBuilder<> builder(&move);
  auto arguments = map_to_vector(
      move.args(), [&](Value *argument) { return bitsOf(argument); });
  CallInst *result = mlir::moe::createIntrinsicLike(
      move, toBitsType(move.getType()), arguments, builder);
  assert(result && "masked moves are there for all types of elements");
  result->setAttributes(move.getAttributes()); // the alignment is one
  result->copyMetadata(move);
  return result;
}

/// The same move of integers; what a PHI has is filled in later.
Value *NarrowMoves::copy(Instruction &move) {
  IRBuilder<> builder(&move);
  Type *type = toBitsType(move.getType());
  if (isa<BitCastInst>(move))
    return builder.CreateBitCast(bitsOf(move.getOperand(0)), type);
  if (auto *phi = dyn_cast<PHINode>(&move))
    return builder.CreatePHI(type, phi->getNumIncomingValues());
  if (auto *intrinsic = dyn_cast<IntrinsicInst>(&move))
    return copyMasked(*intrinsic);
  Instruction *result = move.clone();
  if (isa<FPMathOperator>(result)) // which a choice of integers is not
    result->setFastMathFlags(FastMathFlags());
  for (Use &operand : result->operands())
    operand.set(bitsOf(operand.get()));
  result->mutateType(type);
  return builder.Insert(result);
}

/// Gives another instruction what it reads of a move, where it reads it: such a
/// vector must not go from block to block.
void NarrowMoves::castForUser(Use &use) {
  auto *user = cast<Instruction>(use.getUser());
  if (auto *phi = dyn_cast<PHINode>(user))
    user = phi->getIncomingBlock(use)->getTerminator();
  IRBuilder<> builder(user);
  use.set(builder.CreateBitCast(bits[use.get()], use->getType()));
}

void NarrowMoves::rewrite(Function &function) {
  if (function.isDeclaration())
    return;
  EliminateUnreachableBlocks(function);
  bits.clear();
  SmallVector<PHINode *> phis;
  SmallVector<Instruction *> moves;
  for (Instruction &instruction : instructions(function))
    if (auto *phi = dyn_cast<PHINode>(&instruction); phi && isMove(*phi))
      phis.push_back(phi);
  for (PHINode *phi : phis)
    bits[phi] = copy(*phi);
  // What a block reads of earlier ones is there before it, but for PHIs.
  for (BasicBlock *block : ReversePostOrderTraversal<Function *>(&function))
    for (Instruction &instruction : make_early_inc_range(*block))
      if (!isa<PHINode>(instruction) && isMove(instruction)) {
        Value *made = copy(instruction);
        moves.push_back(&instruction);
        bits[&instruction] = made;
      }
  for (PHINode *phi : phis)
    for (auto [value, block] : zip(phi->incoming_values(), phi->blocks()))
      cast<PHINode>(bits[phi])->addIncoming(bitsOf(value), block);

  moves.append(phis.begin(), phis.end());
  SmallPtrSet<Instruction *, 16> old(moves.begin(), moves.end());
  for (Instruction *move : moves)
    for (Use &use : make_early_inc_range(move->uses()))
      if (!old.contains(cast<Instruction>(use.getUser())))
        castForUser(use);
  for (Instruction *move : moves)
    move->dropAllReferences();
  for (Instruction *move : moves)
    move->eraseFromParent();
}

void mlir::moe::moveNarrowFloatsAsBits(Module &code,
                                       const TargetMachine &machine) {
  if (!machine.getTargetTriple().isX86())
    return;
  NarrowMoves moves(machine);
  for (Function &function : code)
    moves.rewrite(function);
}
