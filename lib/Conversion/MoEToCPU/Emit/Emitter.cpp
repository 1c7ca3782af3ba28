//===- Emitter.cpp - Writing 1-D vector code ------------------------------===//

#include "Emitter.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/IR/TypeUtilities.h"
#include "llvm/ADT/STLExtras.h"

#include <functional>
#include <limits>

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Constants
//===----------------------------------------------------------------------===//

Value Emitter::iota() {
  auto lanes = llvm::to_vector(llvm::seq<int32_t>(0, width));
  return arith::ConstantOp::create(
      *this,
      DenseElementsAttr::get(vectorOf(getI32Type()), ArrayRef<int32_t>(lanes)));
}

//===----------------------------------------------------------------------===//
// Arithmetic
//===----------------------------------------------------------------------===//

//===----------------------------------------------------------------------===//
// Casts
//===----------------------------------------------------------------------===//

Value Emitter::toF32(Value a) {
  if (getElementTypeOrSelf(a.getType()).isF32())
    return a;
  Type type = getF32Type();
  if (auto vector = dyn_cast<VectorType>(a.getType()))
    type = vector.clone(type);
  return arith::ExtFOp::create(*this, type, a);
}

Value Emitter::splat(Value scalar) {
  return vector::BroadcastOp::create(*this, vectorOf(scalar.getType()), scalar);
}

//===----------------------------------------------------------------------===//
// Reductions
//===----------------------------------------------------------------------===//

/// Folds the upper half of the lanes onto the lower half until one is left.
static Value foldLanes(Emitter &e, Value vector,
                       function_ref<Value(Value, Value)> combine) {
  for (int64_t half = e.width / 2; half > 0; half /= 2) {
    auto low = llvm::to_vector(llvm::seq<int64_t>(0, half));
    auto high = llvm::to_vector(llvm::seq<int64_t>(half, 2 * half));
    vector = combine(vector::ShuffleOp::create(e, vector, vector, low),
                     vector::ShuffleOp::create(e, vector, vector, high));
  }
  return vector::ExtractOp::create(e, vector, ArrayRef<int64_t>{0});
}

Value Emitter::reduceMax(Value vector) {
  return foldLanes(*this, vector,
                   [&](Value a, Value b) { return maxOrRhs(a, b); });
}
Value Emitter::reduceAdd(Value vector) {
  return foldLanes(*this, vector, [&](Value a, Value b) { return add(a, b); });
}
Value Emitter::anyLane(Value mask) {
  return vector::ReductionOp::create(*this, vector::CombiningKind::OR, mask);
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

Value Emitter::dim(Value memref, int64_t position) {
  auto type = cast<MemRefType>(memref.getType());
  if (!type.isDynamicDim(position))
    return index(type.getDimSize(position));
  return memref::DimOp::create(*this, memref, position);
}

Value Emitter::rest(Value size, int64_t step) {
  if (std::optional<int64_t> constant = getConstantIntValue(size))
    return index(*constant % step);
  return arith::RemSIOp::create(*this, size, index(step));
}

Value Emitter::loadFloats(Value memref, ValueRange indices, Value mask,
                          double pad) {
  VectorType type =
      vectorOf(cast<MemRefType>(memref.getType()).getElementType());
  if (!mask)
    return toF32(vector::LoadOp::create(*this, type, memref, indices));
  return toF32(vector::MaskedLoadOp::create(*this, type, memref, indices, mask,
                                            constant(type, pad)));
}

Value Emitter::loadVector(Value memref, ValueRange indices) {
  VectorType type =
      vectorOf(cast<MemRefType>(memref.getType()).getElementType());
  return vector::LoadOp::create(*this, type, memref, indices);
}

void Emitter::storeVector(Value vector, Value memref, ValueRange indices,
                          Value mask) {
  if (mask)
    vector::MaskedStoreOp::create(*this, memref, indices, mask, vector);
  else
    vector::StoreOp::create(*this, vector, memref, indices);
}

Value Emitter::firstLanes(Value count) {
  return vector::CreateMaskOp::create(*this, vectorOf(getI1Type()), count);
}

Value Emitter::loadPairs(Value memref, ValueRange indices, Value count) {
  auto type = VectorType::get({2 * width}, getBF16Type());
  Value elements;
  if (count) {
    Value mask = vector::CreateMaskOp::create(
        *this, VectorType::get(type.getShape(), getI1Type()), count);
    elements = vector::MaskedLoadOp::create(*this, type, memref, indices, mask,
                                            constant(type, 0.0));
  } else {
    elements = vector::LoadOp::create(*this, type, memref, indices);
  }
  return vector::BitCastOp::create(*this, ints(), elements);
}

Value Emitter::splatPair(Value memref, ValueRange indices) {
  Value pair = vector::LoadOp::create(
      *this, VectorType::get({2}, getBF16Type()), memref, indices);
  pair = vector::BitCastOp::create(*this, VectorType::get({1}, getI32Type()),
                                   pair);
  return splat(vector::ExtractOp::create(*this, pair, ArrayRef<int64_t>{0}));
}

Value Emitter::dotPairs(Value left, Value right, Value sum) {
  auto pairs = VectorType::get({2 * width}, getBF16Type());
  left = vector::BitCastOp::create(*this, pairs, left);
  right = vector::BitCastOp::create(*this, pairs, right);
  return LLVM::CallIntrinsicOp::create(
             *this, sum.getType(),
             getStringAttr("llvm.x86.avx512bf16.dpbf16ps.512"),
             ValueRange{sum, left, right})
      .getResult(0);
}

/// A call of the intrinsic of vectors of 512 or 256 bits.
static Value callByWidth(Emitter &e, StringRef wide, StringRef narrow,
                         Type type, ValueRange operands) {
  StringAttr name = e.getStringAttr(e.width == 16 ? wide : narrow);
  return LLVM::CallIntrinsicOp::create(e, type, name, operands).getResult(0);
}

Value Emitter::dotBytes(Value left, Value right, Value sum) {
  auto bytes = VectorType::get({4 * width}, getI8Type());
  return callByWidth(*this, "llvm.x86.avx512.vpdpbusd.512",
                     "llvm.x86.avx512.vpdpbusd.256", sum.getType(),
                     {sum, vector::BitCastOp::create(*this, bytes, left),
                      vector::BitCastOp::create(*this, bytes, right)});
}

Value Emitter::multiplyBytePairs(Value left, Value right) {
  auto bytes = VectorType::get({4 * width}, getI8Type());
  return callByWidth(*this, "llvm.x86.avx512.pmaddubs.w.512",
                     "llvm.x86.avx2.pmadd.ub.sw",
                     VectorType::get({2 * width}, getI16Type()),
                     {vector::BitCastOp::create(*this, bytes, left),
                      vector::BitCastOp::create(*this, bytes, right)});
}

Value Emitter::dotWords(Value left, Value right, Value sum) {
  auto words = VectorType::get({2 * width}, getI16Type());
  auto cast = [&](Value lanes) -> Value {
    return vector::BitCastOp::create(*this, words, lanes);
  };
  return add(sum, callByWidth(*this, "llvm.x86.avx512.pmaddw.d.512",
                              "llvm.x86.avx2.pmadd.wd", ints(),
                              {cast(left), cast(right)}));
}

Value Emitter::addWords(Value words, Value sum) {
  Value ones = arith::ConstantOp::create(
      *this, DenseElementsAttr::get(cast<ShapedType>(words.getType()),
                                    static_cast<int16_t>(1)));
  return dotWords(words, ones, sum);
}

Value Emitter::lookUpBytes(Value bytes, ArrayRef<int8_t> table) {
  auto type = VectorType::get({4 * width}, getI8Type());
  auto constant = [&](ArrayRef<int8_t> values) -> Value {
    return arith::ConstantOp::create(*this,
                                     DenseElementsAttr::get(type, values));
  };
  auto call = [&](StringRef name, ValueRange operands) -> Value {
    return LLVM::CallIntrinsicOp::create(*this, type, getStringAttr(name),
                                         operands)
        .getResult(0);
  };
  Value numbers = vector::BitCastOp::create(*this, type, bytes), found;
  if (table.size() == 128) {
    found = call("llvm.x86.avx512.vpermi2var.qi.512",
                 {constant(table.take_front(64)), numbers,
                  constant(table.take_back(64))});
  } else {
    // Each 128 bits are looked up in those of the table.
    SmallVector<int8_t> tables;
    while (static_cast<int64_t>(tables.size()) < 4 * width)
      llvm::append_range(tables, table);
    StringRef name =
        width == 16 ? "llvm.x86.avx512.pshuf.b.512" : "llvm.x86.avx2.pshuf.b";
    found = call(name, {constant(tables), numbers});
  }
  return vector::BitCastOp::create(*this, ints(), found);
}

Value Emitter::scratch(ArrayRef<OpFoldResult> shape, Type element) {
  SmallVector<int64_t> sizes;
  Values dynamicSizes;
  dispatchIndexOpFoldResults(shape, dynamicSizes, sizes);
  auto type = MemRefType::get(sizes, element);
  InsertionGuard guard(*this);
  if (dynamicSizes.empty()) {
    Block *block = getInsertionBlock();
    while (!block->getParentOp()->hasTrait<OpTrait::AutomaticAllocationScope>())
      block = block->getParentOp()->getBlock();
    setInsertionPointToStart(block);
  }
  return memref::AllocaOp::create(*this, type, dynamicSizes,
                                  getI64IntegerAttr(64));
}

std::pair<Value, Value> Emitter::scratchPairs(ArrayRef<int64_t> shape) {
  SmallVector<int64_t> elements(shape);
  elements.back() *= 2;
  int64_t bytes = 2 * ShapedType::getNumElements(elements);
  Value buffer = scratch({getIndexAttr(bytes)}, getI8Type());
  auto view = [&](ArrayRef<int64_t> shape, Type element) -> Value {
    return memref::ViewOp::create(*this, MemRefType::get(shape, element),
                                  buffer, index(0), ValueRange());
  };
  return {view(shape, getI32Type()), view(elements, getBF16Type())};
}

void Emitter::withScratch(bool dynamic, function_ref<void()> body) {
  if (!dynamic)
    return body();
  InsertionGuard guard(*this);
  auto scope = memref::AllocaScopeOp::create(*this, TypeRange());
  createBlock(&scope.getBodyRegion());
  body();
  memref::AllocaScopeReturnOp::create(*this, ValueRange());
}

//===----------------------------------------------------------------------===//
// Control flow
//===----------------------------------------------------------------------===//

Values Emitter::loop(Value lower, Value upper, int64_t step, ValueRange carried,
                     function_ref<Values(Value, ValueRange)> body) {
  auto loop = scf::ForOp::create(*this, lower, upper, index(step), carried);
  InsertionGuard guard(*this);
  // A loop that carries nothing is built with its terminator.
  if (carried.empty())
    setInsertionPoint(loop.getBody()->getTerminator());
  else
    setInsertionPointToEnd(loop.getBody());
  Values next = body(loop.getInductionVar(), loop.getRegionIterArgs());
  if (!carried.empty())
    scf::YieldOp::create(*this, next);
  return Values(loop.getResults());
}

void Emitter::loop(Value lower, Value upper, int64_t step,
                   function_ref<void(Value)> body) {
  loop(lower, upper, step, ValueRange(), [&](Value iv, ValueRange) {
    body(iv);
    return Values();
  });
}

// Bodies are written into ops that are in place already: scratch buffers look
// for the function around them.

void Emitter::loopOverLeading(Value memref, int64_t numDims,
                              function_ref<void(ValueRange ivs)> body) {
  Values ivs;
  std::function<void()> nest = [&] {
    int64_t position = ivs.size();
    if (position == numDims)
      return body(ivs);
    loop(index(0), dim(memref, position), 1, [&](Value iv) {
      ivs.push_back(iv);
      nest();
      ivs.pop_back();
    });
  };
  nest();
}

Values Emitter::ifElse(Value condition, TypeRange types,
                       function_ref<Values()> thenBody,
                       function_ref<Values()> elseBody) {
  auto branch =
      scf::IfOp::create(*this, types, condition, /*withElseRegion=*/true);
  InsertionGuard guard(*this);
  auto fill = [&](Block *block, function_ref<Values()> body) {
    // Without results the op came with its terminators.
    if (types.empty()) {
      setInsertionPoint(block->getTerminator());
      body();
      return;
    }
    setInsertionPointToStart(block);
    scf::YieldOp::create(*this, body());
  };
  fill(branch.thenBlock(), thenBody);
  fill(branch.elseBlock(), elseBody);
  return Values(branch.getResults());
}

void Emitter::ifThen(Value condition, function_ref<void()> body) {
  auto branch = scf::IfOp::create(*this, condition, /*withElseRegion=*/false);
  InsertionGuard guard(*this);
  setInsertionPoint(branch.thenYield());
  body();
}

void Emitter::switchIndex(Value value, int64_t fewest, int64_t most,
                          function_ref<void(int64_t)> body) {
  if (std::optional<int64_t> constant = getConstantIntValue(value))
    return body(*constant);
  auto cases = llvm::to_vector(llvm::seq<int64_t>(fewest, most));
  auto branch = scf::IndexSwitchOp::create(*this, TypeRange(), value, cases,
                                           cases.size());
  InsertionGuard guard(*this);
  auto fill = [&](Region &region, int64_t constant) {
    createBlock(&region);
    setInsertionPoint(scf::YieldOp::create(*this));
    body(constant);
  };
  fill(branch.getDefaultRegion(), most);
  for (auto [region, constant] :
       llvm::zip_equal(branch.getCaseRegions(), cases))
    fill(region, constant);
}

void Emitter::parallel(Value count, function_ref<void(Value)> body) {
  auto loop = scf::ForallOp::create(*this, ArrayRef<OpFoldResult>{count},
                                    ValueRange(), /*mapping=*/std::nullopt);
  InsertionGuard guard(*this);
  setInsertionPoint(loop.getTerminator());
  body(loop.getInductionVar(0));
}

//===----------------------------------------------------------------------===//
// Views
//===----------------------------------------------------------------------===//

OpFoldResult mlir::moe::getSize(Emitter &e, Value memref, int64_t position) {
  auto type = cast<MemRefType>(memref.getType());
  if (!type.isDynamicDim(position))
    return e.getIndexAttr(type.getDimSize(position));
  return e.dim(memref, position);
}

OpFoldResult mlir::moe::getLastSize(Emitter &e, Value memref) {
  return getSize(e, memref, cast<MemRefType>(memref.getType()).getRank() - 1);
}

Values mlir::moe::clampRows(Emitter &e, Value first, int64_t count,
                            Value size) {
  Value last = e.sub(size, e.index(1));
  Values rows;
  for (int64_t i = 0; i < count; ++i)
    rows.push_back(e.minSigned(e.add(first, e.index(i)), last));
  return rows;
}

Value mlir::moe::sliceLeading(Emitter &e, Value memref, ValueRange indices) {
  if (indices.empty())
    return memref;
  auto type = cast<MemRefType>(memref.getType());
  SmallVector<OpFoldResult> offsets, sizes;
  SmallVector<OpFoldResult> strides(type.getRank(), e.getIndexAttr(1));
  SmallVector<int64_t> shape;
  for (int64_t position = 0; position < type.getRank(); ++position) {
    bool dropped = position < static_cast<int64_t>(indices.size());
    offsets.push_back(dropped ? OpFoldResult(indices[position])
                              : OpFoldResult(e.getIndexAttr(0)));
    sizes.push_back(dropped ? OpFoldResult(e.getIndexAttr(1))
                            : getSize(e, memref, position));
    if (!dropped)
      shape.push_back(type.getDimSize(position));
  }
  auto sliceType = memref::SubViewOp::inferRankReducedResultType(
      shape, type, offsets, sizes, strides);
  return memref::SubViewOp::create(e, sliceType, memref, offsets, sizes,
                                   strides);
}

Value mlir::moe::addLeadingUnitDim(Emitter &e, Value memref) {
  auto type = cast<MemRefType>(memref.getType());
  SmallVector<int64_t> shape(type.getShape());
  shape.insert(shape.begin(), 1);
  SmallVector<OpFoldResult> sizes{e.getIndexAttr(1)};
  for (int64_t position = 0; position < type.getRank(); ++position)
    sizes.push_back(getSize(e, memref, position));
  SmallVector<ReassociationIndices> groups;
  for (int64_t position = 0; position < type.getRank(); ++position)
    groups.push_back(position == 0 ? ReassociationIndices{0, 1}
                                   : ReassociationIndices{position + 1});
  return memref::ExpandShapeOp::create(e, shape, memref, groups, sizes);
}

bool mlir::moe::isInnermostContiguous(Type memref) {
  auto type = cast<MemRefType>(memref);
  if (type.getRank() == 0)
    return true;
  SmallVector<int64_t> strides;
  int64_t offset;
  return succeeded(type.getStridesAndOffset(strides, offset)) &&
         strides.back() == 1;
}

LogicalResult mlir::moe::matchBuffers(DestinationStyleOpInterface op,
                                      PatternRewriter &rewriter) {
  if (!op.hasPureBufferSemantics())
    return rewriter.notifyMatchFailure(op, "expected buffers");
  return success();
}

LogicalResult mlir::moe::matchContiguousBuffers(DestinationStyleOpInterface op,
                                                PatternRewriter &rewriter) {
  if (failed(matchBuffers(op, rewriter)))
    return failure();
  for (Value operand : op->getOperands())
    if (isa<MemRefType>(operand.getType()) &&
        !isInnermostContiguous(operand.getType()))
      return rewriter.notifyMatchFailure(
          op, "expected operands with contiguous rows");
  return success();
}

bool mlir::moe::isContiguousFrom(MemRefType type, int64_t first) {
  SmallVector<int64_t> strides;
  int64_t offset;
  if (failed(type.getStridesAndOffset(strides, offset)))
    return false;
  int64_t expected = 1;
  for (int64_t position = type.getRank() - 1; position >= first; --position) {
    if (strides[position] != expected)
      return false;
    if (type.isDynamicDim(position) && position > first)
      return false;
    expected *= type.getDimSize(position);
  }
  return true;
}

//===----------------------------------------------------------------------===//
// Moving lanes
//===----------------------------------------------------------------------===//

namespace {
/// One shuffle of two vectors that x86 has as a single instruction: within
/// each group of lanes, `low` or high halves (even or odd groups) of both.
struct LanePattern {
  int64_t width;

  /// Interleaves units of `unit` lanes from the low or high half of each
  /// 128-bit group of four lanes.
  SmallVector<int64_t> unpack(int64_t unit, bool high) const {
    SmallVector<int64_t> mask;
    for (int64_t group = 0; group < width; group += 4)
      for (int64_t half = 0; half < 2; half += unit)
        for (int64_t source : {int64_t(0), width})
          for (int64_t lane = 0; lane < unit; ++lane)
            mask.push_back(source + group + (high ? 2 : 0) + half + lane);
    return mask;
  }
  /// The even or odd groups of four lanes of one vector, then of the other.
  SmallVector<int64_t> groups(bool odd) const {
    SmallVector<int64_t> mask;
    for (int64_t source : {int64_t(0), width})
      for (int64_t group = odd ? 4 : 0; group < width; group += 8)
        for (int64_t lane = 0; lane < 4; ++lane)
          mask.push_back(source + group + lane);
    return mask;
  }
};
} // namespace

/// `count` vectors of `count` groups of four lanes: result i holds group i of
/// each vector.
static Values transposeGroups(Emitter &e, ArrayRef<Value> vectors) {
  if (vectors.size() == 1)
    return Values(vectors);
  LanePattern pattern{e.width};
  Values even, odd;
  for (size_t i = 0; i < vectors.size(); i += 2) {
    even.push_back(vector::ShuffleOp::create(e, vectors[i], vectors[i + 1],
                                             pattern.groups(false)));
    odd.push_back(vector::ShuffleOp::create(e, vectors[i], vectors[i + 1],
                                            pattern.groups(true)));
  }
  even = transposeGroups(e, even);
  odd = transposeGroups(e, odd);
  Values result;
  for (auto [a, b] : llvm::zip_equal(even, odd)) {
    result.push_back(a);
    result.push_back(b);
  }
  return result;
}

Values mlir::moe::transposeInGroups(Emitter &e, ArrayRef<Value> rows) {
  LanePattern pattern{e.width};
  Values pairs, columns;
  for (int64_t pair : {0, 2})
    for (bool high : {false, true})
      pairs.push_back(vector::ShuffleOp::create(e, rows[pair], rows[pair + 1],
                                                pattern.unpack(1, high)));
  for (int64_t column = 0; column < 4; ++column)
    columns.push_back(vector::ShuffleOp::create(e, pairs[column / 2],
                                                pairs[2 + column / 2],
                                                pattern.unpack(2, column % 2)));
  return columns;
}

Values mlir::moe::transposeLanes(Emitter &e, ArrayRef<Value> rows) {
  // Each four rows are transposed in each 128-bit group of four lanes...
  SmallVector<Values> byColumn(4);
  for (int64_t row = 0; row < e.width; row += 4)
    for (auto [column, vector] :
         llvm::enumerate(transposeInGroups(e, rows.slice(row, 4))))
      byColumn[column].push_back(vector);
  // ... and then the groups among the rows.
  Values result(e.width);
  for (int64_t column = 0; column < 4; ++column)
    for (auto [group, vector] :
         llvm::enumerate(transposeGroups(e, byColumn[column])))
      result[4 * group + column] = vector;
  return result;
}

Values mlir::moe::interleave(Emitter &e, ArrayRef<Value> vectors) {
  if (vectors.size() == 1)
    return Values(vectors);
  Values even, odd;
  for (auto [i, vector] : llvm::enumerate(vectors))
    (i % 2 ? odd : even).push_back(vector);
  even = interleave(e, even);
  odd = interleave(e, odd);
  Values result;
  for (auto [a, b] : llvm::zip_equal(even, odd))
    for (int64_t half : {int64_t(0), e.width / 2}) {
      SmallVector<int64_t> mask;
      for (int64_t lane = 0; lane < e.width / 2; ++lane) {
        mask.push_back(half + lane);
        mask.push_back(e.width + half + lane);
      }
      result.push_back(vector::ShuffleOp::create(e, a, b, mask));
    }
  return result;
}
