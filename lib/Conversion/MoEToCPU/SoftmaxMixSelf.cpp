//===- SoftmaxMixSelf.cpp - moe.softmax_mix_self on vectors ---------------===//
//
// Matches moe.softmax_mix_self on buffers with contiguous rows. Where queries
// and keys are the same tokens, x_ij = x_ji: one product serves both ways.
// Tokens are cut into columns, blocks of four vectors, and into rows, blocks of
// 96. A block of rows meets the block of columns that its first token is in,
// and those behind it:
//
//   rows     (m, l, o)_i takes x_ij as in moe.softmax_mix, for each group of
//            six rows (SoftmaxMixState.h);
//   columns  (m, l, o)_j takes x_ij of all rows before the block of columns at
//            once. Tokens are lanes here, so nothing is reduced over lanes:
//            m_j' = max(m_j, max_i x_ij), p_ij = exp(x_ij - m_j'),
//            l_j' = a_j l_j + sum_i p_ij, o_j' = a_j o_j + sum_i p_ij v_i.
//
// Each pair of tokens in different blocks of columns is multiplied once, those
// within one block twice. Nothing is assumed about the tokens' norms.
//
// Blocks of rows are dealt out to strips, which run in parallel and each keep a
// state of all columns. Their number follows from the number of tokens alone,
// and their states are merged in order: bits do not depend on the threads.
// Memory is linear in the tokens.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "SoftmaxMixState.h"

#include "mlir/Dialect/Math/IR/Math.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

/// Rows whose logits are kept for the columns, a multiple of kGroupRows.
static constexpr int64_t kRowBlock = 96;
/// Each strip packs all columns: they are few, and have two blocks of rows
/// where there are enough.
static constexpr int64_t kMaxStrips = 8;
/// Strips that run at once, over batches and heads: their states are what the
/// kernel needs of memory.
static constexpr int64_t kStripsAtOnce = 32;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

namespace {
class SelfMixKernel {
public:
  SelfMixKernel(Emitter &e, SoftmaxMixSelfOp op)
      : e(e), op(op), asQuery(op, /*rowsAreKeys=*/false),
        asKey(op, /*rowsAreKeys=*/true),
        blockColumns(getColumnVectors(e) * e.width) {}

  void emit();

private:
  Value allocate(ArrayRef<OpFoldResult> shape);
  void allocateStates();
  void takeViews(Value pair, Value place);

  // One strip.
  void emitStrip(Value strip);
  void clearStates(Value strip);
  Value getFirstRow(Value strip, Value turn);
  void emitBlock(Value firstRow, Value firstColumn);
  void emitGroup(Value firstRow, Value group, Value firstColumn);
  Value getVisible(const PositionRule &rule, Value row, Value firstColumn,
                   int64_t vector);
  void keepForColumns(Value slot, Value row, Value firstColumn, int64_t vector,
                      Value x);

  // The online softmax of columns.
  void packRowValues(Value firstRow);
  void updateColumns(Value firstColumn, Value numRows);
  Values sumWeights(ArrayRef<Value> shifts, Value numRows);
  void mixColumns(Value firstColumn, ArrayRef<Value> decays, Value numRows,
                  Value firstValue, int64_t numValues);

  // The results of one vector of tokens.
  void mergeTokens(Value first);
  Value findMax(Value first);
  Value sumStrips(Value own, Value first);
  void writeValues(Value first, ArrayRef<Value> factors, ArrayRef<Value> sums,
                   ArrayRef<Value> empty);

  Value at(Value first, int64_t vector) {
    return e.add(first, e.index(vector * e.width));
  }

  Emitter &e;
  SoftmaxMixSelfOp op;
  const PositionRule asQuery, asKey;
  const int64_t blockColumns;

  Value numTokens, numStrips;
  /// Of all pairs of a batch and a head at once: the states of rows, and those
  /// of columns for each strip, `[place, strip, ..., token]`.
  RowState allRows;
  Value allMax, allSums, allMixed;
  Values workspace;
  /// Views at one place.
  RowState rows;
  Value columnMax, columnSum, columnMixed;
  /// Views at one batch and head.
  MixKeys tokens;
  Value mixed, lse;
  // Of one strip.
  std::optional<KeyBlock> block;
  Value weights, logits, rowTerms, rowValues;
  // Of one vector of tokens.
  Value factors;
};
} // namespace

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

Value SelfMixKernel::allocate(ArrayRef<OpFoldResult> shape) {
  SmallVector<int64_t> sizes;
  Values dynamicSizes;
  dispatchIndexOpFoldResults(shape, dynamicSizes, sizes);
  auto type = MemRefType::get(sizes, e.getF32Type());
  workspace.push_back(memref::AllocOp::create(e, type, dynamicSizes,
                                              e.getI64IntegerAttr(64)));
  return workspace.back();
}

void SelfMixKernel::allocateStates() {
  // Whole blocks of rows and of columns.
  Value unit = e.index(2 * kRowBlock);
  Value units = arith::CeilDivSIOp::create(e, numTokens, unit);
  numStrips = e.minIndex(units, e.index(kMaxStrips));
  OpFoldResult padded = e.mul(units, unit);
  OpFoldResult strips = numStrips;
  Value numPairs = e.mul(e.dim(op.getQ(), 0), e.dim(op.getQ(), 1));
  // Of no token there is no strip.
  Value most = e.maxIndex(numStrips, e.index(1));
  OpFoldResult places =
      e.minIndex(numPairs, arith::CeilDivSIOp::create(
                               e, e.index(kStripsAtOnce), most));
  OpFoldResult lanes = e.getIndexAttr(e.width);
  OpFoldResult values = padToVectors(e, getSize(e, op.getV(), 2));
  allRows.max = allocate({places, padded});
  allRows.sum = allocate({places, padded, lanes});
  allRows.mixed = allocate({places, padded, values});
  allMax = allocate({places, strips, padded});
  allSums = allocate({places, strips, padded});
  allMixed = allocate({places, strips, values, padded});
}

/// `place` is that of the pair of a batch and a head among those at once.
void SelfMixKernel::takeViews(Value pair, Value place) {
  Value numHeads = e.dim(op.getQ(), 1);
  Value batch = arith::DivSIOp::create(e, pair, numHeads);
  Value head = arith::RemSIOp::create(e, pair, numHeads);
  auto view = [&](Value memref, ValueRange indices) {
    return memref ? sliceLeading(e, memref, indices) : Value();
  };
  tokens = {view(op.getQ(), {batch, head}), view(op.getV(), {batch}), Value(),
            view(op.getMask(), {batch}), view(op.getLevel(), {batch})};
  mixed = view(op.getOuts()[0], {batch, head});
  lse = view(op.getOuts()[1], {batch, head});
  rows = {view(allRows.max, place), view(allRows.sum, place), Value(),
          view(allRows.mixed, place)};
  columnMax = view(allMax, place);
  columnSum = view(allSums, place);
  columnMixed = view(allMixed, place);
}

//===----------------------------------------------------------------------===//
// Strips
//===----------------------------------------------------------------------===//

/// The blocks of rows of a strip: in every other turn they are dealt out in
/// reverse order, because later ones meet fewer columns.
Value SelfMixKernel::getFirstRow(Value strip, Value turn) {
  Value isOdd = e.compare(arith::CmpIPredicate::ne,
                          arith::RemSIOp::create(e, turn, e.index(2)),
                          e.index(0));
  Value reversed = e.sub(e.sub(numStrips, e.index(1)), strip);
  Value block = e.add(e.mul(turn, numStrips), e.select(isOdd, reversed, strip));
  return e.mul(block, e.index(kRowBlock));
}

/// Forgets what was seen by the strip's rows and, in this strip, by columns.
void SelfMixKernel::clearStates(Value strip) {
  Value zero = e.index(0);
  Value padded = e.dim(columnMax, 1);
  e.loop(zero, padded, e.width, [&](Value column) {
    e.storeVector(e.f32(-kInfinity), columnMax, {strip, column});
    e.storeVector(e.f32(0.0), columnSum, {strip, column});
  });
  e.loop(zero, e.dim(columnMixed, 1), 1, [&](Value value) {
    e.loop(zero, padded, e.width, [&](Value column) {
      e.storeVector(e.f32(0.0), columnMixed, {strip, value, column});
    });
  });
}

void SelfMixKernel::emitStrip(Value strip) {
  auto isDynamic = [](Value memref, int64_t position) {
    return cast<MemRefType>(memref.getType()).isDynamicDim(position);
  };
  e.withScratch(isDynamic(op.getQ(), 3) || isDynamic(op.getV(), 2), [&] {
    Type f32 = e.getF32Type();
    OpFoldResult group = e.getIndexAttr(kGroupRows),
                 columns = e.getIndexAttr(blockColumns),
                 rowBlock = e.getIndexAttr(kRowBlock);
    block.emplace(e, op.getQ(),
                  MixKeys{op.getQ(), op.getV(), Value(), op.getMask(),
                          op.getLevel()});
    weights = e.scratch({group, columns}, f32);
    logits = e.scratch({rowBlock, columns}, f32);
    rowTerms = e.scratch({rowBlock}, f32);
    rowValues = e.scratch(
        {rowBlock, padToVectors(e, getSize(e, op.getV(), 2))}, f32);
    clearStates(strip);
    columnMax = sliceLeading(e, columnMax, strip);
    columnSum = sliceLeading(e, columnSum, strip);
    columnMixed = sliceLeading(e, columnMixed, strip);
    Value zero = e.index(0);
    Value numBlocks =
        arith::CeilDivSIOp::create(e, numTokens, e.index(kRowBlock));
    Value numTurns = arith::CeilDivSIOp::create(e, numBlocks, numStrips);
    e.loop(zero, numTurns, 1, [&](Value turn) {
      Value first = getFirstRow(strip, turn);
      e.ifThen(e.compare(arith::CmpIPredicate::slt, first, numTokens), [&] {
        rows.clear(e, first, e.add(first, e.index(kRowBlock)));
      });
    });
    e.loop(zero, numTokens, blockColumns, [&](Value firstColumn) {
      block->pack(e, tokens, firstColumn);
      Value end =
          e.minIndex(e.add(firstColumn, e.index(blockColumns)), numTokens);
      e.loop(zero, numTurns, 1, [&](Value turn) {
        Value first = getFirstRow(strip, turn);
        e.ifThen(e.compare(arith::CmpIPredicate::slt, first, end),
                 [&] { emitBlock(first, firstColumn); });
      });
    });
  });
}

/// A block of rows and a block of columns, of which the former begins first.
void SelfMixKernel::emitBlock(Value firstRow, Value firstColumn) {
  Value end = e.minIndex(e.add(firstColumn, e.index(blockColumns)), numTokens);
  Value count = e.minIndex(e.sub(end, firstRow), e.index(kRowBlock));
  e.loop(e.index(0), count, kGroupRows,
         [&](Value group) { emitGroup(firstRow, group, firstColumn); });
  // Rows of this block of columns meet it as rows only.
  Value before =
      e.minIndex(e.sub(firstColumn, firstRow), e.index(kRowBlock));
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, before, e.index(0)), [&] {
    packRowValues(firstRow);
    updateColumns(firstColumn, before);
  });
}

//===----------------------------------------------------------------------===//
// A group of rows
//===----------------------------------------------------------------------===//

/// Which columns of a vector a row sees, or is seen by, by position and level;
/// null for all.
Value SelfMixKernel::getVisible(const PositionRule &rule, Value row,
                                Value firstColumn, int64_t vector) {
  Value visible = rule.getVisible(e, row, at(firstColumn, vector));
  if (!tokens.level)
    return visible;
  Value own = e.splat(e.load(tokens.level, {row}));
  Value levels = e.loadVector(block->level, {e.index(vector * e.width)});
  if (&rule == &asKey)
    std::swap(own, levels);
  return e.both(visible,
                e.compare(arith::CmpFPredicate::OLE, levels, own));
}

/// x of row `slot` of the block, -inf where the columns do not see it.
void SelfMixKernel::keepForColumns(Value slot, Value row, Value firstColumn,
                                   int64_t vector, Value x) {
  Value hidden = e.f32(-kInfinity);
  if (Value visible = getVisible(asKey, row, firstColumn, vector))
    x = e.select(visible, x, hidden);
  // What a masked token holds may be NaN.
  if (tokens.mask)
    x = e.select(e.load(tokens.mask, {row}), x, hidden);
  e.storeVector(x, logits, {slot, e.index(vector * e.width)});
}

void SelfMixKernel::emitGroup(Value firstRow, Value group, Value firstColumn) {
  Value first = e.add(firstRow, group);
  Value end = e.add(firstColumn, e.index(blockColumns));
  // Slots behind the last token repeat it; nobody reads their state.
  Values places = clampRows(e, first, kGroupRows, numTokens);
  Tile products = multiplyTile(e, tokens.features, places, block->features);
  Values decays;
  for (int64_t row = 0; row < kGroupRows; ++row) {
    Value slot = e.add(first, e.index(row));
    // Rows of later columns have seen these as columns.
    Value isEarlier =
        e.compare(arith::CmpIPredicate::slt, slot, end);
    Values visible;
    for (auto [vector, product] : llvm::enumerate(products[row])) {
      Value base = e.loadVector(block->bias, {e.index(vector * e.width)});
      Value x = e.fma(product, e.f32(op.getScale().convertToDouble()), base);
      keepForColumns(e.add(group, e.index(row)), places[row], firstColumn,
                     vector, x);
      Value hidden = e.f32(-kInfinity);
      if (Value seen = getVisible(asQuery, places[row], firstColumn, vector))
        x = e.select(seen, x, hidden);
      visible.push_back(e.select(isEarlier, x, hidden));
    }
    decays.push_back(rows.update(e, slot, visible, weights, row));
  }
  accumulateTile(e, weights, block->values, rows.mixed, first, decays,
                 getSize(e, tokens.values, 1));
}

//===----------------------------------------------------------------------===//
// The online softmax of columns
//===----------------------------------------------------------------------===//

/// The values of a block of rows in f32, 0 for masked ones.
void SelfMixKernel::packRowValues(Value firstRow) {
  Type f32 = e.getF32Type();
  Value last = e.sub(numTokens, e.index(1));
  e.loop(e.index(0), e.index(kRowBlock), 1, [&](Value slot) {
    Value term = e.constant(f32, 0.0);
    if (tokens.mask) {
      Value row = e.minIndex(e.add(firstRow, slot), last);
      term = e.select(e.load(tokens.mask, {row}), term,
                      e.constant(f32, -kInfinity));
    }
    e.store(term, rowTerms, {slot});
  });
  packRows(e, tokens.values, firstRow, kRowBlock, rowTerms, rowValues);
}

/// Turns the kept logits into p = exp(x - shift) and returns its sums over the
/// rows.
Values SelfMixKernel::sumWeights(ArrayRef<Value> shifts, Value numRows) {
  Values zeros(shifts.size(), e.f32(0.0));
  return e.loop(
      e.index(0), numRows, 1, zeros,
      [&](Value row, ValueRange sums) -> Values {
        Values next;
        for (auto [vector, shift] : llvm::enumerate(shifts)) {
          Values place{row, e.index(vector * e.width)};
          Value weight = e.exp(e.sub(e.loadVector(logits, place), shift));
          e.storeVector(weight, logits, place);
          next.push_back(e.add(sums[vector], weight));
        }
        return next;
      });
}

/// o' = a o + sum_i p_i v_i for `numValues` values from `firstValue` on.
void SelfMixKernel::mixColumns(Value firstColumn, ArrayRef<Value> decays,
                               Value numRows, Value firstValue,
                               int64_t numValues) {
  int64_t numVectors = decays.size();
  Values zeros(numValues * numVectors, e.f32(0.0));
  Values sums = e.loop(
      e.index(0), numRows, 1, zeros,
      [&](Value row, ValueRange old) -> Values {
        Values columns, next;
        for (int64_t vector = 0; vector < numVectors; ++vector)
          columns.push_back(
              e.loadVector(logits, {row, e.index(vector * e.width)}));
        for (int64_t i = 0; i < numValues; ++i) {
          Value value = e.splat(
              e.load(rowValues, {row, e.add(firstValue, e.index(i))}));
          for (auto [vector, column] : llvm::enumerate(columns))
            next.push_back(e.fma(value, column, old[i * numVectors + vector]));
        }
        return next;
      });
  for (int64_t i = 0; i < numValues; ++i)
    for (auto [vector, decay] : llvm::enumerate(decays)) {
      Values place{e.add(firstValue, e.index(i)), at(firstColumn, vector)};
      Value old = e.loadVector(columnMixed, place);
      e.storeVector(e.fma(old, decay, sums[i * numVectors + vector]),
                    columnMixed, place);
    }
}

/// Takes `numRows` kept logits of each column of a block into its state.
void SelfMixKernel::updateColumns(Value firstColumn, Value numRows) {
  int64_t numVectors = getColumnVectors(e);
  Value hidden = e.f32(-kInfinity);
  Values none(numVectors, hidden);
  Values blockMax = e.loop(
      e.index(0), numRows, 1, none, [&](Value row, ValueRange old) -> Values {
        Values next;
        for (int64_t vector = 0; vector < numVectors; ++vector)
          next.push_back(
              e.max(e.loadVector(logits, {row, e.index(vector * e.width)}),
                    old[vector]));
        return next;
      });
  Values shifts, decays;
  for (int64_t vector = 0; vector < numVectors; ++vector) {
    Value place = at(firstColumn, vector);
    Value oldMax = e.loadVector(columnMax, {place});
    Value newMax = e.max(blockMax[vector], oldMax);
    e.storeVector(newMax, columnMax, {place});
    Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, newMax, hidden);
    shifts.push_back(e.select(isEmpty, e.f32(0.0), newMax));
    decays.push_back(e.exp(e.sub(oldMax, shifts.back())));
  }
  for (auto [vector, sum] : llvm::enumerate(sumWeights(shifts, numRows))) {
    Value place = at(firstColumn, vector);
    Value old = e.loadVector(columnSum, {place});
    e.storeVector(e.fma(old, decays[vector], sum), columnSum, {place});
  }
  std::optional<int64_t> numValues =
      getConstantIntValue(getSize(e, tokens.values, 1));
  if (!numValues) {
    e.loop(e.index(0), e.dim(tokens.values, 1), 1, [&](Value value) {
      mixColumns(firstColumn, decays, numRows, value, 1);
    });
    return;
  }
  int64_t rest = *numValues % kGroupRows, whole = *numValues - rest;
  e.loop(e.index(0), e.index(whole), kGroupRows, [&](Value value) {
    mixColumns(firstColumn, decays, numRows, value, kGroupRows);
  });
  if (rest)
    mixColumns(firstColumn, decays, numRows, e.index(whole), rest);
}

//===----------------------------------------------------------------------===//
// Merging
//===----------------------------------------------------------------------===//

/// The maxima of a vector of tokens over their own state and all strips'.
Value SelfMixKernel::findMax(Value first) {
  Values own{e.loadVector(rows.max, {first})};
  return e
      .loop(e.index(0), numStrips, 1, own,
            [&](Value strip, ValueRange old) -> Values {
              return {e.max(e.loadVector(columnMax, {strip, first}), old[0])};
            })
      .front();
}

/// The sums of a vector of tokens over their own, which has a factor `own`, and
/// all strips'.
Value SelfMixKernel::sumStrips(Value own, Value first) {
  Values lanes;
  for (int64_t lane = 0; lane < e.width; ++lane)
    lanes.push_back(
        e.loadVector(rows.sum, {e.add(first, e.index(lane)), e.index(0)}));
  Values start{e.mul(sumVectors(e, transposeLanes(e, lanes)), own)};
  return e
      .loop(e.index(0), numStrips, 1, start,
            [&](Value strip, ValueRange old) -> Values {
              Value factor = e.loadVector(factors, {strip, e.index(0)});
              return {e.fma(e.loadVector(columnSum, {strip, first}), factor,
                            old[0])};
            })
      .front();
}

/// mixed of a vector of tokens: a factor of their own state, a sum, and whether
/// there is nothing to mix, each a number a token.
void SelfMixKernel::writeValues(Value first, ArrayRef<Value> own,
                                ArrayRef<Value> sums, ArrayRef<Value> empty) {
  Value numValues = e.dim(tokens.values, 1);
  e.loop(e.index(0), numValues, e.width, [&](Value column) {
    Values zeros(e.width, e.f32(0.0));
    Values totals = e.loop(
        e.index(0), numStrips, 1, zeros,
        [&](Value strip, ValueRange old) -> Values {
          Value factor = e.loadVector(factors, {strip, e.index(0)});
          Values next;
          for (int64_t lane = 0; lane < e.width; ++lane) {
            Value value = e.add(column, e.index(lane));
            next.push_back(
                e.fma(e.loadVector(columnMixed, {strip, value, first}), factor,
                      old[lane]));
          }
          return next;
        });
    Value exists = e.firstLanes(e.sub(numValues, column));
    for (auto [lane, others] : llvm::enumerate(transposeLanes(e, totals))) {
      Value token = e.add(first, e.index(lane));
      Value total = e.fma(e.loadVector(rows.mixed, {token, column}),
                          e.splat(own[lane]), others);
      Value value = e.select(empty[lane], e.f32(0.0),
                             e.div(total, e.splat(sums[lane])));
      e.ifThen(e.compare(arith::CmpIPredicate::slt, token, numTokens),
               [&, column = column] {
                 e.storeVector(value, mixed, {token, column}, exists);
               });
    }
  });
}

/// The results of a vector of tokens from the states of all strips, in order.
void SelfMixKernel::mergeTokens(Value first) {
  factors = e.scratch({e.getIndexAttr(kMaxStrips), e.getIndexAttr(e.width)},
                      e.getF32Type());
  Value hidden = e.f32(-kInfinity), zero = e.f32(0.0);
  Value max = findMax(first);
  Value shift =
      e.select(e.compare(arith::CmpFPredicate::OEQ, max, hidden), zero, max);
  Value own = e.exp(e.sub(e.loadVector(rows.max, {first}), shift));
  e.loop(e.index(0), numStrips, 1, [&](Value strip) {
    Value old = e.loadVector(columnMax, {strip, first});
    e.storeVector(e.exp(e.sub(old, shift)), factors, {strip, e.index(0)});
  });
  Value sum = sumStrips(own, first);
  // Only a token that sees none sums to 0: its maximum alone does not tell, it
  // stays -inf when every logit is NaN (E3).
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, sum, zero);
  if (tokens.mask) {
    Value isReal =
        loadLanes(e, tokens.mask, clampRows(e, first, e.width, numTokens));
    isEmpty = e.select(isReal, isEmpty, e.constantInt(isReal.getType(), 1));
  }
  Value logSum = math::LogOp::create(e, sum);
  e.storeVector(e.select(isEmpty, hidden, e.add(max, logSum)), lse, {first},
                e.firstLanes(e.sub(numTokens, first)));
  auto split = [&](Value vector) {
    Values lanes;
    for (int64_t lane = 0; lane < e.width; ++lane)
      lanes.push_back(
          vector::ExtractOp::create(e, vector, ArrayRef<int64_t>{lane}));
    return lanes;
  };
  writeValues(first, split(own), split(sum), split(isEmpty));
}

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

void SelfMixKernel::emit() {
  numTokens = e.dim(op.getQ(), 2);
  allocateStates();
  Value numPairs = e.mul(e.dim(op.getQ(), 0), e.dim(op.getQ(), 1));
  Value numPlaces = e.dim(allMax, 0);
  auto loop = scf::ForOp::create(e, e.index(0), numPairs, numPlaces);
  {
    OpBuilder::InsertionGuard guard(e);
    e.setInsertionPoint(loop.getBody()->getTerminator());
    Value firstPair = loop.getInductionVar();
    Value count = e.minIndex(numPlaces, e.sub(numPairs, firstPair));
    auto inParallel = [&](Value perPair, function_ref<void(Value)> body) {
      e.parallel(e.mul(count, perPair), [&](Value task) {
        Value place = arith::DivSIOp::create(e, task, perPair);
        takeViews(e.add(firstPair, place), place);
        body(arith::RemSIOp::create(e, task, perPair));
      });
    };
    inParallel(numStrips, [&](Value strip) { emitStrip(strip); });
    Value numBlocks =
        arith::CeilDivSIOp::create(e, numTokens, e.index(kRowBlock));
    inParallel(numBlocks, [&](Value blockOfRows) {
      Value first = e.mul(blockOfRows, e.index(kRowBlock));
      Value end = e.minIndex(e.add(first, e.index(kRowBlock)), numTokens);
      e.loop(first, end, e.width, [&](Value token) { mergeTokens(token); });
    });
  }
  for (Value buffer : workspace)
    memref::DeallocOp::create(e, buffer);
}

namespace {
/// moe.softmax_mix_self on buffers -> register tiles that serve both roles.
struct SoftmaxMixSelfToVector : OpRewritePattern<SoftmaxMixSelfOp> {
  SoftmaxMixSelfToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(SoftmaxMixSelfOp op,
                                PatternRewriter &rewriter) const override {
    if (failed(matchContiguousBuffers(op, rewriter)))
      return failure();
    Emitter emitter(op.getLoc(), rewriter, options);
    SelfMixKernel(emitter, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateSoftmaxMixSelfToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<SoftmaxMixSelfToVector>(patterns.getContext(), options);
}
