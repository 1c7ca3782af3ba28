//===- MaskedStores.cpp - Stores of a single lane -------------------------===//

#include "MaskedStores.h"

#include "llvm/IR/Constants.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/Module.h"

using namespace llvm;

/// The lane of a mask that is the only one to be stored, if it is known.
static std::optional<unsigned> findOnlyLane(const Value *mask) {
  auto *lanes = dyn_cast<ConstantVector>(mask);
  std::optional<unsigned> found;
  for (unsigned lane = 0; lanes && lane < lanes->getNumOperands(); ++lane) {
    if (lanes->getOperand(lane)->isNullValue())
      continue;
    if (found || !lanes->getOperand(lane)->isOneValue())
      return std::nullopt;
    found = lane;
  }
  return found;
}

static void storeAsElement(IntrinsicInst &call, unsigned lane) {
  IRBuilder<> builder(&call);
  Value *vector = call.getArgOperand(0), *address = call.getArgOperand(1);
  Type *element = vector->getType()->getScalarType();
  TypeSize bytes = call.getModule()->getDataLayout().getTypeStoreSize(element);
  Align align = commonAlignment(call.getParamAlign(1).valueOrOne(),
                                lane * bytes.getFixedValue());
  builder.CreateAlignedStore(builder.CreateExtractElement(vector, lane),
                             builder.CreateConstGEP1_32(element, address, lane),
                             align);
  call.eraseFromParent();
}

void mlir::moe::storeSingleLanesAsElements(Module &code) {
  for (Function &function : code)
    for (Instruction &instruction :
         make_early_inc_range(instructions(function))) {
      auto *call = dyn_cast<IntrinsicInst>(&instruction);
      if (!call || call->getIntrinsicID() != Intrinsic::masked_store)
        continue;
      if (std::optional<unsigned> lane = findOnlyLane(call->getArgOperand(2)))
        storeAsElement(*call, *lane);
    }
}
