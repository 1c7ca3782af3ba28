//===- GroupedLinear.cpp - moe.grouped_linear of few rows to a grid -------===//
//
// Where experts have few rows, their weights are what takes the time, so that
// each is read once, and many of them are on their way together. A block has 16
// rows of an expert's weight and up to kMaxRows rows of x:
//
//   rows       which expert's, and which of them, follows from the offsets: the
//              blocks number the groups of rows of all experts
//   features   each warp has a part of those of x, in chunks of 64. A lane
//              reads 16 bytes of a row of the weight, and of one of x: what
//              lies 8 features apart there are neighbours in mma.sync, on both
//              sides, which changes the order of a chunk's terms and no more
//   sums       each chunk is added up by the tensor core from 0, and the chunks
//              in their order in f32; the warps' parts are added in the order
//              of the warps
//
// With a gate the 16 rows are those of 8 features of y and of their factors,
// which meet in one lane.
//
//===----------------------------------------------------------------------===//

#include "GroupedLinear.h"

#include "Emit/Cluster.h"
#include "Emit/WarpBuilder.h"
#include "GroupedLinearWarpgroup.h"
#include "Product/FeatureChunks.h"
#include "RowGroups.h"
#include "Schedules.h"

#include "MoE/Dialect/MoE/IR/ExpertActivations.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/BuiltinTypes.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

static constexpr int64_t kWarps = 8;
/// Rows of the weight, and of x that one product takes.
static constexpr int64_t kWeightRows = 16, kProductRows = 8;
/// Products of a block, whose sums a warp has in registers.
static constexpr int64_t kProducts = 4;
static constexpr int64_t kMaxRows = kProducts * kProductRows;
/// Features that a lane reads at once, and that its warp does.
static constexpr int64_t kUnit = 8, kStep = 4 * kUnit;
/// Chunks whose weights a warp waits for together.
static constexpr int64_t kChunksAtATime = 2;
/// Sums of a lane: those of one product.
static constexpr int64_t kLaneSums = 4;
/// What the warps leave in workgroup memory.
static constexpr int64_t kPartsShape[] = {kWarps, kProducts, kLaneSums,
                                          kWarpSize};

//===----------------------------------------------------------------------===//
// Which ops
//===----------------------------------------------------------------------===//

static ShapedType getShaped(Value value) {
  return cast<ShapedType>(value.getType());
}

bool mlir::moe::hasKernelOfFewRows(GroupedLinearOp op) {
  Type element = getShaped(op.getX()).getElementType();
  int64_t features = getShaped(op.getX()).getDimSize(1);
  return !op.isQuantized() && !op.getPacked() && !op.getTransposed() &&
         (element.isBF16() || element.isF16()) &&
         getShaped(op.getW()).getElementType() == element &&
         getShaped(op.getW()).getRank() == 3 &&
         !ShapedType::isDynamic(features) && features > 0 &&
         features % kChunk == 0 && getShaped(op.getW()).getDimSize(1) > 0 &&
         canCopyRows(op.getX()) && canCopyRows(op.getW()) &&
         hasWholeRows(op.getOuts()[0]);
}

//===----------------------------------------------------------------------===//
// The product
//===----------------------------------------------------------------------===//

namespace {
class FewRows {
public:
  /// `parts` is workgroup memory of `kPartsShape`.
  FewRows(WarpBuilder &b, GroupedLinearOp op, Value tile, const RowGroup &rows,
          Value parts)
      : b(b), op(op), rows(rows), parts(parts),
        element(getShaped(op.getX()).getElementType()) {
    lane = b.lane();
    warp = b.div(b.thread(), kWarpSize);
    place = b.div(lane, 4);
    unit = b.mul(b.rem(lane, 4), b.i32(kUnit));
    findFeatures(tile);
  }

  void emit();

private:
  void findFeatures(Value tile);
  Value getWeightRow(Value feature);
  Value getRow(int64_t product, Value weightRow);
  SmallVector<Value> loadUnits(Value row, Value chunk, Value isReal);
  SmallVector<Value> multiplyChunks(Value chunk, int64_t count,
                                    ValueRange sums);
  SmallVector<Value> sumOwnChunks();
  Value isProduct(Value number) {
    Value first = b.add(rows.begin, b.mul(number, b.i32(kProductRows)));
    return b.less(first, rows.end);
  }
  /// Where the warps leave sum `number` of a product.
  SmallVector<Value> placeOfSum(Value ofWarp, Value product, int64_t number) {
    return {b.toIndex(ofWarp), b.toIndex(product), b.index(number),
            b.toIndex(lane)};
  }
  void finish();
  void store(Value product, ValueRange sums);
  void storeFeature(Value row, Value feature, Value count, Value y);
  Value addBias(Value sum, Value feature);

  WarpBuilder &b;
  GroupedLinearOp op;
  const RowGroup &rows;
  Value parts;
  Type element;
  Value lane, warp;
  /// The lane's row of a product's operands, and where its features begin.
  Value place, unit;
  /// The two rows of the weight of which a lane has sums; the first, and
  /// without a gate the second, are features of y.
  Value low, high, lowOfY, highOfY, numOfY;
  Value weights[2];
  SmallVector<Value> x, isRow;
};
} // namespace

void FewRows::findFeatures(Value tile) {
  Value y = op.getOuts()[0];
  numOfY = b.toI32(memref::DimOp::create(b, y, b.index(1)));
  int64_t width = op.isGated() ? kWeightRows / 2 : kWeightRows;
  lowOfY = b.add(b.mul(b.toI32(tile), b.i32(width)), place);
  highOfY = b.add(lowOfY, b.i32(kWeightRows / 2));
  // Of features that there are not the last one is read again.
  auto clamp = [&](Value feature) {
    return b.minSigned(feature, b.sub(numOfY, b.i32(1)));
  };
  low = clamp(lowOfY);
  switch (op.getGate()) {
  case GateLayout::None:
    high = clamp(highOfY);
    break;
  case GateLayout::Concatenated:
    high = b.add(low, numOfY);
    break;
  case GateLayout::Interleaved:
    low = b.mul(low, b.i32(2));
    high = b.add(low, b.i32(1));
    break;
  }
}

Value FewRows::getWeightRow(Value feature) {
  return b.addressOf(
      op.getW(), {b.toIndex(rows.expert), b.toIndex(feature), b.toIndex(unit)});
}

/// The lane's row of x for a product. Rows past the end are the last one again;
/// for a row that x does not have a row of the weight is read.
Value FewRows::getRow(int64_t product, Value weightRow) {
  Value row = b.add(rows.begin, b.add(place, b.i32(product * kProductRows)));
  row = b.toIndex(b.minSigned(row, b.sub(rows.end, b.i32(1))));
  if (!op.getRows()) {
    isRow.push_back({});
    return b.addressOf(op.getX(), {row, b.toIndex(unit)});
  }
  Value token = b.toIndex(memref::LoadOp::create(b, op.getRows(), row));
  Value numTokens = memref::DimOp::create(b, op.getX(), b.index(0));
  Value exists = b.compare(CmpIPredicate::ult, token, numTokens);
  token = b.select(exists, token, b.index(0));
  isRow.push_back(exists);
  return b.select(exists, b.addressOf(op.getX(), {token, b.toIndex(unit)}),
                  weightRow);
}

/// The registers of both steps of a chunk, from the lane's place of a row on;
/// 0 where the row is not real.
SmallVector<Value> FewRows::loadUnits(Value row, Value chunk, Value isReal) {
  SmallVector<Value> registers;
  auto type = VectorType::get({4}, b.getI32Type());
  for (int64_t step = 0; step < kChunk / kStep; ++step) {
    Value at = b.at(b.at(row, chunk), step * 2 * kStep);
    Value loaded = b.load(type, at, kUnitBytes);
    for (int64_t i = 0; i < 4; ++i) {
      Value pair = vector::ExtractOp::create(b, loaded, i);
      registers.push_back(isReal ? b.select(isReal, pair, b.i32(0)) : pair);
    }
  }
  return registers;
}

/// The sums of all products with those of `count` chunks from `chunk` (i32) on.
SmallVector<Value> FewRows::multiplyChunks(Value chunk, int64_t count,
                                           ValueRange sums) {
  SmallVector<Value> offsets;
  SmallVector<SmallVector<Value>> lows, highs;
  for (int64_t i = 0; i < count; ++i) {
    offsets.push_back(b.mul(b.add(chunk, b.i32(i)), b.i32(kChunkBytes)));
    lows.push_back(loadUnits(weights[0], offsets[i], /*isReal=*/{}));
    highs.push_back(loadUnits(weights[1], offsets[i], /*isReal=*/{}));
  }
  auto multiply = [&](WarpBuilder &b, int64_t product) {
    SmallVector<Value> own(sums.slice(product * kLaneSums, kLaneSums));
    SmallVector<SmallVector<Value>> right;
    for (Value offset : offsets)
      right.push_back(loadUnits(x[product], offset, isRow[product]));
    for (int64_t i = 0; i < count; ++i) {
      SmallVector<Value> ofChunk(kLaneSums, b.f32(0.0));
      for (int64_t at = 0; at < 8; at += 2)
        ofChunk = b.multiplyAdd(
            {lows[i][at], highs[i][at], lows[i][at + 1], highs[i][at + 1]},
            {right[i][at], right[i][at + 1]}, ofChunk, element);
      for (auto [sum, term] : llvm::zip_equal(own, ofChunk))
        sum = b.add(sum, term);
    }
    return own;
  };
  SmallVector<Value> next = multiply(b, 0);
  for (int64_t product = 1; product < kProducts; ++product) {
    ValueRange old = sums.slice(product * kLaneSums, kLaneSums);
    auto branch =
        scf::IfOp::create(b, old.getTypes(), isProduct(b.i32(product)),
                          /*addThenBlock=*/true,
                          /*addElseBlock=*/true);
    {
      OpBuilder::InsertionGuard guard(b);
      b.setInsertionPointToStart(branch.thenBlock());
      scf::YieldOp::create(b, multiply(b, product));
      b.setInsertionPointToStart(branch.elseBlock());
      scf::YieldOp::create(b, old);
    }
    llvm::append_range(next, branch.getResults());
  }
  return next;
}

/// The sums over the warp's part of the features.
SmallVector<Value> FewRows::sumOwnChunks() {
  int64_t chunks = getShaped(op.getX()).getDimSize(1) / kChunk;
  auto getPartBegin = [&](Value number) {
    return b.div(b.mul(number, b.i32(chunks)), kWarps);
  };
  Value begin = getPartBegin(warp);
  Value end = getPartBegin(b.add(warp, b.i32(1)));
  Value step = b.i32(kChunksAtATime);
  Value whole = b.op<arith::DivUIOp>(b.sub(end, begin), step);
  whole = b.add(begin, b.mul(whole, step));
  SmallVector<Value> sums(kProducts * kLaneSums, b.f32(0.0));
  auto multiply = [&](Value from, Value to, int64_t count) {
    sums = b.loop(b.toIndex(from), b.toIndex(to), count, sums,
                  [&](Value chunk, ValueRange carried) {
                    return multiplyChunks(b.toI32(chunk), count, carried);
                  });
  };
  multiply(begin, whole, kChunksAtATime);
  multiply(whole, end, 1);
  return sums;
}

void FewRows::emit() {
  weights[0] = getWeightRow(low);
  weights[1] = getWeightRow(high);
  for (int64_t product = 0; product < kProducts; ++product)
    x.push_back(getRow(product, weights[0]));
  SmallVector<Value> sums = sumOwnChunks();
  for (int64_t product = 0; product < kProducts; ++product)
    b.ifThen(isProduct(b.i32(product)), [&] {
      for (int64_t i = 0; i < kLaneSums; ++i)
        memref::StoreOp::create(b, sums[product * kLaneSums + i], parts,
                                placeOfSum(warp, b.i32(product), i));
    });
  b.barrier();
  Value isFinisher = b.both(b.less(warp, b.i32(kProducts)), isProduct(warp));
  b.ifThen(isFinisher, [&] { finish(); });
}

/// Each of the first warps adds up one product's parts and stores it.
void FewRows::finish() {
  SmallVector<Value> sums;
  for (int64_t i = 0; i < kLaneSums; ++i) {
    Value sum;
    for (int64_t part = 0; part < kWarps; ++part) {
      Value own =
          memref::LoadOp::create(b, parts, placeOfSum(b.i32(part), warp, i));
      sum = sum ? b.add(sum, own) : own;
    }
    sums.push_back(sum);
  }
  store(warp, sums);
}

Value FewRows::addBias(Value sum, Value feature) {
  if (!op.getBias())
    return sum;
  return b.add(sum, b.loadF32(op.getBias(),
                              {b.toIndex(rows.expert), b.toIndex(feature)}));
}

void FewRows::storeFeature(Value row, Value feature, Value count, Value y) {
  Value isReal = b.both(b.less(row, rows.end), b.less(feature, count));
  b.ifThen(isReal, [&] {
    Value result = b.select(rows.isOfExpert, y, b.f32(0.0));
    if (!element.isF32())
      result = arith::TruncFOp::create(b, element, result);
    memref::StoreOp::create(b, result, op.getOuts()[0],
                            ValueRange{b.toIndex(row), b.toIndex(feature)});
  });
}

/// Two neighbouring rows of y; of each the sums of two rows of the weight.
void FewRows::store(Value product, ValueRange sums) {
  Value first = b.add(rows.begin, b.mul(product, b.i32(kProductRows)));
  first = b.add(first, b.mul(b.rem(lane, 4), b.i32(2)));
  for (int64_t i = 0; i < 2; ++i) {
    Value row = b.add(first, b.i32(i));
    Value lowSum = addBias(sums[i], low), highSum = addBias(sums[2 + i], high);
    if (op.isGated()) {
      storeFeature(row, lowOfY, numOfY,
                   buildGatedActivation(b, op, lowSum, highSum));
      continue;
    }
    storeFeature(row, lowOfY, numOfY, buildActivation(b, op, lowSum));
    storeFeature(row, highOfY, numOfY, buildActivation(b, op, highSum));
  }
}

//===----------------------------------------------------------------------===//
// Grid
//===----------------------------------------------------------------------===//

static SmallVector<KernelChoice<GroupedLinearOp>>
getFewRowChoices(GroupedLinearOp op, BlockShape) {
  if (!hasKernelOfFewRows(op))
    return {};
  return {{KernelConfigAttr::get(op.getContext(), /*rows=*/0, /*threads=*/0,
                                 KernelSchedule::Mma, KernelLoop::Kernel,
                                 /*shared_bytes=*/0),
           [=](WarpBuilder &b, GroupedLinearOp op) {
             Value y = op.getOuts()[0];
             int64_t width = op.isGated() ? kWeightRows / 2 : kWeightRows;
             OpFoldResult tiles = affine::makeComposedFoldedAffineApply(
                 b, b.getLoc(), b.getAffineSymbolExpr(0).ceilDiv(width),
                 {memref::getMixedSize(b, b.getLoc(), y, 1)});
             // Neighbouring blocks read the same weights.
             Value groups = RowGroups::getBound(b, op, kMaxRows);
             SmallVector<Value> ids = createGrid(b, {tiles, groups});
             setBlockThreads(b, kWarps * kWarpSize);
             Value parts = memref::AllocOp::create(
                 b, MemRefType::get(kPartsShape, b.getF32Type()));
             RowGroup rows = RowGroups(b, op, kMaxRows).find(b.toI32(ids[1]));
             b.ifThen(rows.exists,
                      [&] { FewRows(b, op, ids[0], rows, parts).emit(); });
           }}};
}

static SmallVector<KernelChoice<GroupedLinearOp>>
getManyRowChoices(GroupedLinearOp op, BlockShape block) {
  if (!block.hasWgmma || !hasKernelOfManyRows(op))
    return {};
  return {{KernelConfigAttr::get(op.getContext(), /*rows=*/0, /*threads=*/0,
                                 KernelSchedule::Wgmma, KernelLoop::Kernel,
                                 /*shared_bytes=*/0),
           emitGroupedLinearOnWarpgroups}};
}

static constexpr Schedule<GroupedLinearOp> kSchedules[] = {
    {KernelSchedule::Mma,
     "rows and weights of one 16-bit type without gaps, a static number of "
     "features, a multiple of 64, and weights [experts, out, in] as they are",
     getFewRowChoices},
    {KernelSchedule::Wgmma,
     "sm_90a, and rows and weights of one 16-bit type without gaps, whose "
     "sizes "
     "but the number of rows are static, rows of whole units of 16 bytes",
     getManyRowChoices},
};

ArrayRef<Schedule<GroupedLinearOp>> mlir::moe::getGroupedLinearSchedules() {
  return kSchedules;
}

/// A buffer like `value`, without gaps.
static Value createWhole(ImplicitLocOpBuilder &b, Value value) {
  auto type = cast<MemRefType>(value.getType());
  SmallVector<Value> sizes;
  for (int64_t dim = 0; dim < type.getRank(); ++dim)
    if (type.isDynamicDim(dim))
      sizes.push_back(b.createOrFold<memref::DimOp>(value, dim));
  return memref::AllocOp::create(
      b, MemRefType::get(type.getShape(), type.getElementType()), sizes);
}

void mlir::moe::closeGapsOfGroupedLinear(func::FuncOp function) {
  for (auto op : llvm::to_vector(function.getOps<GroupedLinearOp>())) {
    if (!op.hasPureBufferSemantics())
      continue;
    ImplicitLocOpBuilder b(op.getLoc(), op);
    for (OpOperand *operand : {&op.getXMutable(), &op.getWMutable()}) {
      Value old = operand->get();
      if (canCopyRows(old))
        continue;
      Value whole = createWhole(b, old);
      memref::CopyOp::create(b, old, whole);
      operand->set(whole);
    }
    OpOperand &out = op.getOutsMutable()[0];
    Value old = out.get();
    if (hasWholeRows(old))
      continue;
    out.set(createWhole(b, old));
    b.setInsertionPointAfter(op);
    memref::CopyOp::create(b, out.get(), old);
  }
}

void mlir::moe::addGroupedLinearGridFacts(KernelFacts &facts,
                                          BlockShape block) {
  auto hasKernel = [=](GroupedLinearOp op) {
    return hasKernelOfFewRows(op) ||
           (block.hasWgmma && hasKernelOfManyRows(op));
  };
  facts.addForms<GroupedLinearOp>(hasKernel, kSchedules[0].requirement);
  facts.addConfigs<GroupedLinearOp>([=](GroupedLinearOp op) {
    return getConfigs(getGroupedLinearSchedules(), op, block);
  });
}

void mlir::moe::populateGroupedLinearToGridPatterns(RewritePatternSet &patterns,
                                                    BlockShape block) {
  patterns.add<ScheduleToGrid<GroupedLinearOp>>(
      patterns.getContext(), getGroupedLinearSchedules(), block);
}
