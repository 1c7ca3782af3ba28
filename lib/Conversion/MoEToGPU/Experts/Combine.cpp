//===- Combine.cpp - moe.combine to a grid --------------------------------===//
//
// A thread has as many features of a token as one access of the experts' rows
// holds, and adds up the rows of the token's slots, in the order of k as the
// CPU does. It asks for eight rows at a time, so that they are on their way
// together. Blocks lie along tokens, and along features where a token has more
// than a block's threads do: one token has several blocks.
//
//===----------------------------------------------------------------------===//

#include "Emit/ThreadBuilder.h"
#include "Schedules.h"

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// The bytes of one access.
static constexpr int64_t kAccessBytes = 16;
/// Rows that a thread asks for before it adds them up.
static constexpr int64_t kRowsAtATime = 8;

static MemRefType getType(Value buffer) {
  return cast<MemRefType>(buffer.getType());
}

/// The features that a thread takes: one access of the experts' rows where all
/// rows start at a multiple of it.
static int64_t getWidth(CombineOp op) {
  MemRefType rows = getType(op.getExpertOut());
  int64_t width = kAccessBytes / getElementBytes(rows.getElementType());
  SmallVector<Value> buffers{op.getExpertOut(), op.getOuts()[0]};
  if (op.getShared())
    buffers.push_back(op.getShared());
  bool isAligned = llvm::all_of(buffers, [](Value buffer) {
    return getType(buffer).getLayout().isIdentity();
  });
  bool isWhole = !rows.isDynamicDim(1) && rows.getDimSize(1) % width == 0;
  return isAligned && isWhole ? width : 1;
}

namespace {
/// How the features of the tokens are cut into blocks.
struct Shape {
  Shape(ThreadBuilder &b, CombineOp op, BlockShape block);

  int64_t width;
  /// Threads of a block along the features, and along tokens.
  int64_t lanes, tokens;
  /// Blocks along them.
  SmallVector<OpFoldResult> numBlocks;
};

class CombiningThread {
public:
  CombiningThread(ThreadBuilder &b, CombineOp op, const Shape &shape)
      : b(b), op(op), shape(shape) {
    numPlaces = cast<ShapedType>(op.getGates().getType()).getShape().back();
  }
  /// The thread's features of its token, in block `ids`.
  void emit(ValueRange ids);

private:
  SmallVector<Value> loadRow(Value buffer, SmallVector<Value> place);
  SmallVector<Value> addExperts(Value first, Value end, ValueRange sums);
  void storeRow(ValueRange sums);

  SmallVector<Value> ofToken(Value last) {
    SmallVector<Value> place(token);
    place.push_back(last);
    return place;
  }

  ThreadBuilder &b;
  CombineOp op;
  const Shape &shape;
  /// Choices of a token, kDynamic where that is not known.
  int64_t numPlaces;
  SmallVector<Value> token;
  Value column, numRows;
};
} // namespace

Shape::Shape(ThreadBuilder &b, CombineOp op, BlockShape block)
    : width(getWidth(op)), lanes(block.numThreads) {
  int64_t columns = getType(op.getExpertOut()).getDimSize(1);
  int64_t wanted = std::max<int64_t>(
      llvm::PowerOf2Ceil(llvm::divideCeil(columns, width)), 1);
  // Tokens share a block where that leaves no thread over.
  if (!ShapedType::isDynamic(columns) && block.numThreads % wanted == 0)
    lanes = wanted;
  tokens = block.numThreads / lanes;
  auto evaluate = [&](AffineExpr expr, ArrayRef<OpFoldResult> sizes) {
    return affine::makeComposedFoldedAffineApply(b, b.getLoc(), expr, sizes);
  };
  AffineExpr count = b.getAffineConstantExpr(1);
  SmallVector<OpFoldResult> sizes =
      memref::getMixedSizes(b, b.getLoc(), op.getGates());
  sizes.pop_back();
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    count = count * b.getAffineSymbolExpr(dim);
  AffineExpr size = b.getAffineSymbolExpr(0);
  numBlocks = {
      evaluate(size.ceilDiv(width * lanes),
               memref::getMixedSize(b, b.getLoc(), op.getExpertOut(), 1)),
      evaluate(count.ceilDiv(tokens), sizes)};
}

/// The thread's features of a row as f32.
SmallVector<Value> CombiningThread::loadRow(Value buffer,
                                            SmallVector<Value> place) {
  place.push_back(column);
  if (shape.width == 1)
    return {b.loadF32(buffer, place)};
  Type element = getType(buffer).getElementType();
  int64_t bytes = shape.width * getElementBytes(element);
  Value row = vector::LoadOp::create(
      b, VectorType::get({shape.width}, element), buffer, place,
      /*nontemporal=*/false, llvm::MaybeAlign(std::min(bytes, kAccessBytes)));
  SmallVector<Value> features;
  for (int64_t i = 0; i < shape.width; ++i)
    features.push_back(b.toF32(vector::ExtractOp::create(b, row, i)));
  return features;
}

/// The sums and the rows of the slots from choice `first` on, as far as there
/// are more.
SmallVector<Value> CombiningThread::addExperts(Value first, Value end,
                                               ValueRange sums) {
  int64_t count = ShapedType::isDynamic(numPlaces)
                      ? kRowsAtATime
                      : std::min(numPlaces, kRowsAtATime);
  bool areAll = !ShapedType::isDynamic(numPlaces) && numPlaces % count == 0;
  SmallVector<Value> counted, gates;
  SmallVector<SmallVector<Value>> rows;
  for (int64_t i = 0; i < count; ++i) {
    Value place = b.add(first, b.index(i)), exists;
    if (!areAll) {
      exists = b.compare(CmpIPredicate::ult, place, end);
      place = b.op<arith::MinUIOp>(place, b.sub(end, b.index(1)));
    }
    Value slot =
        b.toIndex(memref::LoadOp::create(b, op.getSlots(), ofToken(place)));
    // As an unsigned number a negative one is large.
    Value isRow = b.compare(CmpIPredicate::ult, slot, numRows);
    counted.push_back(exists ? b.both(exists, isRow) : isRow);
    gates.push_back(memref::LoadOp::create(b, op.getGates(), ofToken(place)));
    rows.push_back(
        loadRow(op.getExpertOut(), {b.select(isRow, slot, b.index(0))}));
  }
  SmallVector<Value> next(sums);
  for (int64_t i = 0; i < count; ++i)
    for (auto [sum, feature] : llvm::zip_equal(next, rows[i]))
      sum = b.select(counted[i], b.fma(gates[i], feature, sum), sum);
  return next;
}

void CombiningThread::storeRow(ValueRange sums) {
  Value y = op.getOuts()[0];
  Type element = getType(y).getElementType();
  SmallVector<Value> features(sums);
  if (!element.isF32())
    for (Value &feature : features)
      feature = arith::TruncFOp::create(b, element, feature);
  SmallVector<Value> place = ofToken(column);
  if (shape.width == 1) {
    memref::StoreOp::create(b, features[0], y, place);
    return;
  }
  int64_t bytes = shape.width * getElementBytes(element);
  Value row = vector::FromElementsOp::create(
      b, VectorType::get({shape.width}, element), features);
  vector::StoreOp::create(b, row, y, place, /*nontemporal=*/false,
                          llvm::MaybeAlign(std::min(bytes, kAccessBytes)));
}

void CombiningThread::emit(ValueRange ids) {
  Value thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  Value lanes = b.index(shape.lanes);
  Value unit = b.add(b.mul(ids[0], lanes), b.op<arith::RemUIOp>(thread, lanes));
  column = b.mul(unit, b.index(shape.width));
  Value row = b.add(b.mul(ids[1], b.index(shape.tokens)),
                    b.op<arith::DivUIOp>(thread, lanes));
  numRows = memref::DimOp::create(b, op.getExpertOut(), b.index(0));
  Value columns = memref::DimOp::create(b, op.getExpertOut(), b.index(1));
  Value isReal =
      b.both(b.compare(CmpIPredicate::ult, column, columns),
             b.compare(CmpIPredicate::ult, row,
                       getNumRows(b, op.getGates(), /*numInner=*/1)));
  b.ifThen(isReal, [&] {
    token = getRowIndices(b, op.getGates(), /*numInner=*/1, row);
    SmallVector<Value> sums(shape.width, b.f32(0.0));
    if (op.getShared())
      sums = loadRow(op.getShared(), token);
    // Where there is no row at all, none may stand for one that is not read.
    Value hasRows = b.compare(CmpIPredicate::ne, numRows, b.index(0));
    Value places =
        memref::DimOp::create(b, op.getGates(), b.index(int64_t(token.size())));
    Value end = b.select(hasRows, places, b.index(0));
    int64_t step = ShapedType::isDynamic(numPlaces)
                       ? kRowsAtATime
                       : std::clamp<int64_t>(numPlaces, 1, kRowsAtATime);
    if (numPlaces != 0)
      sums = b.loop(b.index(0), end, step, sums,
                    [&](Value first, ValueRange carried) {
                      return addExperts(first, end, carried);
                    });
    storeRow(sums);
  });
}

//===----------------------------------------------------------------------===//
// Schedule
//===----------------------------------------------------------------------===//

/// Its blocks lie along features, too, so that no loop over rows cuts it.
static SmallVector<KernelChoice<CombineOp>> getChoices(CombineOp op,
                                                       BlockShape block) {
  return {{KernelConfigAttr::get(op.getContext(), /*rows=*/0, /*threads=*/0,
                                 KernelSchedule::Any, KernelLoop::Kernel,
                                 /*shared_bytes=*/0),
           [=](WarpBuilder &b, CombineOp op) {
             Shape shape(b, op, block);
             SmallVector<Value> ids = createGrid(b, shape.numBlocks);
             CombiningThread(b, op, shape).emit(ids);
           }}};
}

static constexpr Schedule<CombineOp> kSchedules[] = {
    {KernelSchedule::Any,
     "a configuration as moe-select-kernel-config chooses it", getChoices},
};

ArrayRef<Schedule<CombineOp>> mlir::moe::getCombineSchedules() {
  return kSchedules;
}

void mlir::moe::addCombineFacts(KernelFacts &facts, BlockShape block) {
  facts.addConfigs<CombineOp>([=](CombineOp op) {
    return getConfigs(getCombineSchedules(), op, block);
  });
}

void mlir::moe::populateCombineToGridPatterns(RewritePatternSet &patterns,
                                              BlockShape block) {
  patterns.add<ScheduleToGrid<CombineOp>>(patterns.getContext(),
                                          getCombineSchedules(), block);
}
