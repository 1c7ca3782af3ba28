//===- ThreadBuilder.cpp - Code of one GPU thread -------------------------===//

#include "ThreadBuilder.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

void mlir::moe::registerThreadDialects(DialectRegistry &registry) {
  registry
      .insert<LLVM::LLVMDialect, NVVM::NVVMDialect, vector::VectorDialect>();
}

//===----------------------------------------------------------------------===//
// Arithmetic
//===----------------------------------------------------------------------===//

static Value callIntrinsic(ThreadBuilder &b, StringRef name, ValueRange args) {
  return LLVM::CallIntrinsicOp::create(b, b.getF32Type(), b.getStringAttr(name),
                                       args)
      .getResult(0);
}

Value ThreadBuilder::widenBF16(Value value) {
  // A bf16 is the upper half of an f32. Chips before sm_90 have no
  // instruction for it.
  Value bits = arith::BitcastOp::create(*this, getI16Type(), value);
  bits = arith::ExtUIOp::create(*this, getI32Type(), bits);
  bits = op<arith::ShLIOp>(bits, i32(16));
  return arith::BitcastOp::create(*this, getF32Type(), bits);
}

Value ThreadBuilder::maximumNumber(Value lhs, Value rhs) {
  return op<LLVM::MaxNumOp>(lhs, rhs);
}

Value ThreadBuilder::minimumNumber(Value lhs, Value rhs) {
  return op<LLVM::MinNumOp>(lhs, rhs);
}

Value ThreadBuilder::fma(Value a, Value b, Value c) {
  return callIntrinsic(*this, "llvm.fma.f32", {a, b, c});
}

Value ThreadBuilder::exp(Value x) {
  constexpr double log2e = 1.4426950408889634;
  return callIntrinsic(*this, "llvm.nvvm.ex2.approx.ftz.f", mul(x, f32(log2e)));
}

Value ThreadBuilder::log1p(Value x) {
  // ln(1 + x) = 2 artanh(s), s = x / (2 + x) in [0, 1/3]. The first term left
  // out is s^14 / 15 of the sum: 1.4e-8.
  Value s = div(x, add(x, f32(2.0)));
  Value square = mul(s, s);
  Value sum = f32(1.0 / 13.0);
  for (int power : {11, 9, 7, 5, 3, 1})
    sum = fma(sum, square, f32(1.0 / power));
  return mul(mul(s, f32(2.0)), sum);
}

Value ThreadBuilder::log(Value x) {
  // x = 2^e f with f in [sqrt(1/2), sqrt(2)), ln f = 2 artanh(s) with
  // s = (f - 1) / (f + 1), |s| < 0.1716. The first term left out is 2 s^11 / 11
  // of the sum: 1e-9. ln 2 is split so that e times its upper part is exact.
  constexpr int64_t sqrtHalf = 0x3f3504f3;
  Value bits = arith::BitcastOp::create(*this, getI32Type(), x);
  Value exponent = op<arith::ShRSIOp>(sub(bits, i32(sqrtHalf)), i32(23));
  Value fraction = arith::BitcastOp::create(
      *this, getF32Type(), sub(bits, op<arith::ShLIOp>(exponent, i32(23))));
  Value s = div(sub(fraction, f32(1.0)), add(fraction, f32(1.0)));
  Value square = mul(s, s);
  Value sum = f32(1.0 / 9.0);
  for (int power : {7, 5, 3})
    sum = fma(sum, square, f32(1.0 / power));
  // 2 s stays apart from the smaller terms.
  Value twice = mul(s, f32(2.0));
  Value e = arith::SIToFPOp::create(*this, getF32Type(), exponent);
  Value low = fma(e, f32(-2.12194440e-4), mul(mul(sum, square), twice));
  Value result = fma(e, f32(0.693359375), add(twice, low));
  // The bits of a NaN are no exponent and fraction.
  return select(isNaN(x), x, result);
}

Value ThreadBuilder::sqrt(Value x) {
  return callIntrinsic(*this, "llvm.nvvm.sqrt.rn.f", x);
}

Value ThreadBuilder::reciprocal(Value x) {
  return callIntrinsic(*this, "llvm.nvvm.rcp.approx.ftz.f", x);
}

Value ThreadBuilder::abs(Value x) {
  return callIntrinsic(*this, "llvm.fabs.f32", x);
}

//===----------------------------------------------------------------------===//
// Control flow
//===----------------------------------------------------------------------===//

SmallVector<Value> ThreadBuilder::loop(Value begin, Value end, int64_t step,
                                       ValueRange initial, LoopBody body) {
  auto loop = scf::ForOp::create(*this, begin, end, index(step), initial);
  InsertionGuard guard(*this);
  setInsertionPointToStart(loop.getBody());
  SmallVector<Value> next =
      body(loop.getInductionVar(), loop.getRegionIterArgs());
  // Without carried values the loop has its terminator already.
  if (!initial.empty())
    scf::YieldOp::create(*this, next);
  return SmallVector<Value>(loop.getResults());
}

void ThreadBuilder::loop(Value begin, Value end, int64_t step,
                         function_ref<void(Value)> body) {
  loop(begin, end, step, ValueRange(),
       [&](Value iteration, ValueRange) -> SmallVector<Value> {
         body(iteration);
         return {};
       });
}

void ThreadBuilder::ifThen(Value condition, function_ref<void()> body) {
  auto branch = scf::IfOp::create(*this, condition, /*withElseRegion=*/false);
  InsertionGuard guard(*this);
  setInsertionPointToStart(branch.thenBlock());
  body();
}

void ThreadBuilder::ifThenElse(Value condition, function_ref<void()> thenBody,
                               function_ref<void()> elseBody) {
  auto branch = scf::IfOp::create(*this, condition, /*withElseRegion=*/true);
  InsertionGuard guard(*this);
  setInsertionPointToStart(branch.thenBlock());
  thenBody();
  setInsertionPointToStart(branch.elseBlock());
  elseBody();
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

Value ThreadBuilder::toF32(Value value) {
  if (value.getType().isF32())
    return value;
  if (!value.getType().isBF16())
    return arith::ExtFOp::create(*this, getF32Type(), value);
  return widenBF16(value);
}

Value ThreadBuilder::loadF32(Value memref, ValueRange indices) {
  return toF32(memref::LoadOp::create(*this, memref, indices));
}

void ThreadBuilder::atomicAdd(Value memref, Value position, Value amount) {
  // memref.atomic_rmw would order everything around it, at the cost of fences.
  constexpr int64_t bytes = 4;
  Value address = memref::ExtractAlignedPointerAsIndexOp::create(*this, memref);
  address = add(address, mul(toIndex(position), index(bytes)));
  Value pointer =
      LLVM::IntToPtrOp::create(*this, LLVM::LLVMPointerType::get(getContext()),
                               castInt(address, getI64Type()));
  LLVM::AtomicRMWOp::create(*this, LLVM::AtomicBinOp::add, pointer, amount,
                            LLVM::AtomicOrdering::monotonic, "device", bytes);
}

//===----------------------------------------------------------------------===//
// Warps
//===----------------------------------------------------------------------===//

Value ThreadBuilder::shuffleFrom(Value value, Value source) {
  auto shuffle = gpu::ShuffleOp::create(*this, value, source, i32(kWarpSize),
                                        gpu::ShuffleMode::IDX);
  return shuffle.getShuffleResult();
}

void ThreadBuilder::syncWarp() { NVVM::SyncWarpOp::create(*this, i32(-1)); }

Value ThreadBuilder::ballot(Value condition) {
  return NVVM::VoteSyncOp::create(*this, getI32Type(), i32(-1), condition,
                                  NVVM::VoteSyncKind::ballot);
}

Value ThreadBuilder::countBits(Value bits) {
  return LLVM::CallIntrinsicOp::create(*this, getI32Type(),
                                       getStringAttr("llvm.ctpop.i32"), bits)
      .getResult(0);
}

Value ThreadBuilder::shuffleXor(Value value, int64_t distance) {
  auto shuffle = gpu::ShuffleOp::create(*this, value, i32(distance),
                                        i32(kWarpSize), gpu::ShuffleMode::XOR);
  return shuffle.getShuffleResult();
}

Value ThreadBuilder::reduceLanes(Value value, int64_t lanes,
                                 function_ref<Value(Value, Value)> combine) {
  assert(llvm::isPowerOf2_64(lanes) && lanes <= kWarpSize);
  for (int64_t distance = 1; distance < lanes; distance *= 2)
    value = combine(value, shuffleXor(value, distance));
  return value;
}
