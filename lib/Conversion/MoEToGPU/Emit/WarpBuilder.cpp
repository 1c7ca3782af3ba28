//===- WarpBuilder.cpp - Code of a warp on tensor cores -------------------===//

#include "WarpBuilder.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"

using namespace mlir;
using namespace mlir::moe;

/// The fields of a struct of registers.
static SmallVector<Value> getFields(ThreadBuilder &b, Value registers) {
  auto type = cast<LLVM::LLVMStructType>(registers.getType());
  SmallVector<Value> fields;
  for (int64_t i = 0, n = type.getBody().size(); i < n; ++i)
    fields.push_back(LLVM::ExtractValueOp::create(b, registers, i));
  return fields;
}

/// Four 8x8 matrices of 16-bit elements, each lane giving a unit of a row:
/// lanes 8i to 8i+7 those of matrix i.
static SmallVector<Value> loadMatrices(WarpBuilder &b, Value shared, Value row,
                                       Value unit, int64_t rowBytes,
                                       int64_t offset, bool transpose) {
  // Not a part of row or unit: the instruction adds it.
  Value pointer = b.at(b.at(shared, b.swizzle(row, unit, rowBytes)), offset);
  auto type = LLVM::LLVMStructType::getLiteral(
      b.getContext(), SmallVector<Type>(4, b.getI32Type()));
  Value registers = NVVM::LdMatrixOp::create(
      b, type, pointer, /*num=*/4,
      transpose ? NVVM::MMALayout::col : NVVM::MMALayout::row,
      NVVM::LdStMatrixShapeAttr::get(b.getContext(), 8, 8),
      NVVM::LdStMatrixEltType::B16);
  return getFields(b, registers);
}

SmallVector<Value> WarpBuilder::loadLeft(Value shared, Value row, Value unit,
                                         int64_t rowBytes, int64_t offset) {
  row = add(row, rem(lane(), 16));
  unit = add(unit, div(lane(), 16));
  return loadMatrices(*this, shared, row, unit, rowBytes, offset,
                      /*transpose=*/false);
}

SmallVector<Value> WarpBuilder::loadRight(Value shared, Value row, Value unit,
                                          int64_t rowBytes, int64_t offset) {
  row = add(row, add(mul(div(lane(), 16), i32(8)), rem(lane(), 8)));
  unit = add(unit, rem(div(lane(), 8), 2));
  return loadMatrices(*this, shared, row, unit, rowBytes, offset,
                      /*transpose=*/false);
}

SmallVector<Value> WarpBuilder::loadTransposedRight(Value shared, Value row,
                                                    Value unit,
                                                    int64_t rowBytes,
                                                    int64_t offset) {
  row = add(row, rem(lane(), 16));
  unit = add(unit, div(lane(), 16));
  return loadMatrices(*this, shared, row, unit, rowBytes, offset,
                      /*transpose=*/true);
}

SmallVector<Value> WarpBuilder::multiplyAdd(ValueRange a, ValueRange b,
                                            ValueRange c, Type element) {
  auto type = LLVM::LLVMStructType::getLiteral(
      getContext(), SmallVector<Type>(4, getF32Type()));
  if (element.isBF16()) {
    std::array<NVVM::MMATypes, 2> types{NVVM::MMATypes::bf16,
                                        NVVM::MMATypes::bf16};
    std::array<NVVM::MMALayout, 2> layouts{NVVM::MMALayout::row,
                                           NVVM::MMALayout::col};
    return getFields(*this, NVVM::MmaOp::create(*this, type, a, b, c,
                                                {16, 8, 16}, std::nullopt,
                                                std::nullopt, types, layouts));
  }
  // The op wants vectors of f16 where the instruction has the same registers.
  auto pair = VectorType::get({2}, element);
  auto toPairs = [&](ValueRange registers) {
    return llvm::map_to_vector(registers, [&](Value v) -> Value {
      return LLVM::BitcastOp::create(*this, pair, v);
    });
  };
  std::array<NVVM::MMATypes, 2> types{NVVM::MMATypes::f16, NVVM::MMATypes::f16};
  std::array<NVVM::MMALayout, 2> layouts{NVVM::MMALayout::row,
                                         NVVM::MMALayout::col};
  return getFields(*this,
                   NVVM::MmaOp::create(*this, type, toPairs(a), toPairs(b), c,
                                       {16, 8, 16}, std::nullopt, std::nullopt,
                                       types, layouts));
}

Value WarpBuilder::packBF16(Value low, Value high) {
  Value pair = NVVM::ConvertF32x2ToBF16x2Op::create(
      *this, VectorType::get({2}, getBF16Type()), high, low,
      /*random_bits=*/Value(), NVVM::FPRoundingMode::RN);
  return LLVM::BitcastOp::create(*this, getI32Type(), pair);
}

std::pair<Value, Value> WarpBuilder::unpackBF16(Value packed) {
  Value low = op<arith::ShLIOp>(packed, i32(16));
  Value high = both(packed, i32(0xffff0000));
  return {LLVM::BitcastOp::create(*this, getF32Type(), low),
          LLVM::BitcastOp::create(*this, getF32Type(), high)};
}

std::pair<Value, Value> WarpBuilder::unpackF16(Value packed) {
  auto type = VectorType::get({2}, getF16Type());
  Value pair = LLVM::BitcastOp::create(*this, type, packed);
  auto widen = [&](int64_t i) -> Value {
    Value half = LLVM::ExtractElementOp::create(*this, pair, i32(i));
    return LLVM::FPExtOp::create(*this, getF32Type(), half);
  };
  Value low = widen(0);
  return {low, widen(1)};
}

SmallVector<Value> WarpBuilder::splitBF16(Value low, Value high,
                                          int64_t parts) {
  SmallVector<Value> registers;
  for (int64_t part = 0; part < parts; ++part) {
    registers.push_back(packBF16(low, high));
    if (part + 1 == parts)
      break;
    auto [roundedLow, roundedHigh] = unpackBF16(registers.back());
    low = sub(low, roundedLow);
    high = sub(high, roundedHigh);
  }
  return registers;
}

void WarpBuilder::storeSplit(ArrayRef<Value> values, Value pointer,
                             int64_t parts, int64_t termBytes) {
  auto four = VectorType::get({4}, getI32Type());
  SmallVector<Value> rows(parts, LLVM::UndefOp::create(*this, four));
  for (int64_t i = 0; i < 4; ++i)
    for (auto [row, part] : llvm::zip_equal(
             rows, splitBF16(values[2 * i], values[2 * i + 1], parts)))
      row = LLVM::InsertElementOp::create(*this, row, part, i32(i));
  for (auto [term, row] : llvm::enumerate(rows))
    store(row, at(pointer, term * termBytes), kUnitBytes);
}

void mlir::moe::keepRolled(ArrayRef<Value> loopResults) {
  // The annotation is that of the branch which the loop becomes.
  Operation *loop = loopResults[0].getDefiningOp();
  MLIRContext *context = loop->getContext();
  auto unroll = LLVM::LoopUnrollAttr::get(
      context, /*disable=*/BoolAttr::get(context, true), /*count=*/{},
      /*runtimeDisable=*/{}, /*full=*/{}, /*followupUnrolled=*/{},
      /*followupRemainder=*/{}, /*followupAll=*/{});
  LLVM::LoopAnnotationAttr annotation = LLVM::LoopAnnotationAttr::get(
      context, /*disableNonforced=*/{}, /*vectorize=*/{}, /*interleave=*/{},
      unroll, /*unrollAndJam=*/{}, /*licm=*/{}, /*distribute=*/{},
      /*pipeline=*/{}, /*peeled=*/{}, /*unswitch=*/{}, /*mustProgress=*/{},
      /*isVectorized=*/{}, /*startLoc=*/{}, /*endLoc=*/{},
      /*parallelAccesses=*/{});
  loop->setAttr("loop_annotation", annotation);
}
