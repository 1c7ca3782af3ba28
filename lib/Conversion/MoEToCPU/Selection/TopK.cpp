//===- TopK.cpp - moe.topk_renorm on vectors ----------------------------===//
//
// Matches moe.topk_renorm on buffers whose rows are contiguous. As many tokens
// as a vector has lanes are computed at once, one a lane: rows are brought in
// by transposes, and from there on every formula of the specification is the
// scalar formula on vectors. A token's bits do not depend on its lane or on
// the other tokens.
//
// Selection compares 32-bit integer keys in the order of E1..E5. The `k` best
// so far form a sorted list that a new expert enters by strict comparison, so
// that of equal scores the lower index stays ahead. Up to 16 places live in
// registers, and most experts can be dropped before (TopKFilter.cpp). More are
// selected a token at a time (TopKRowSelect.cpp); in a stack buffer where
// choice scores are staged or experts are very many.
//
// Where selection needs a value that one expert's score alone does not give (a
// bias, groups), the choice scores of a block of tokens are
// staged in a stack buffer of one vector an expert.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "TopKKernel.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

void TopKKernel::emitBlock(TokenBlock block) {
  RowStats stats;
  BestList best;
  if (isForced) {
    stats = computeStats(block);
    best = readForced(block);
  } else if (isStaged) {
    stageChoice(block, stats);
    best = selectStaged(stats);
  } else if (isByRow) {
    best = selectByRow(block, stats);
  } else if (isFiltered) {
    best = selectFiltered(block, stats);
  } else {
    best = select(block, stats);
  }

  Places gateValues = computeGates(block, best, stats);
  Places ids = getIds(block, best);
  Value tokens = getTokenMask(block);
  double scale = op.getRouteScale().convertToDouble();
  double nan = std::numeric_limits<double>::quiet_NaN();
  forEachPlace({}, [&](Place place, ValueRange) {
    Value gate = gateValues.get(e, place);
    if (scale != 1.0)
      gate = e.mul(gate, e.f32(scale));
    gate = e.select(stats.hasNaN, e.f32(nan), gate);
    if (isForced) {
      // A place that is forced to be none has gate 0 in any row, whatever the
      // sum of the gates is.
      Value isExpert = e.compare(arith::CmpIPredicate::ne,
                                 best.keys.get(e, place), e.i32(kEmptyKey));
      gate = e.select(isExpert, gate, e.f32(0.0));
    }
    Value id = ids.get(e, place);
    if (tokens) {
      gate = e.select(tokens, gate, e.f32(0.0));
      id = e.select(tokens, id, e.constantInt(id.getType(), -1));
    }
    gateValues.set(e, place, gate);
    ids.set(e, place, id);
    return Values();
  });
  writeResults(block, gateValues, ids);
}

/// How many tokens ahead scores are fetched: whole blocks of tokens.
int64_t TopKKernel::getFetchDistance() {
  auto type = cast<MemRefType>(op.getScores().getType());
  int64_t experts = op.getNumExperts();
  if (ShapedType::isDynamic(experts))
    return e.width;
  int64_t bytes = experts * type.getElementTypeBitWidth() / 8;
  return llvm::alignTo(llvm::divideCeil(e.target.getFetchBytes(), bytes),
                       e.width);
}

/// The tokens from `first` on, fewer than a block or as many.
TokenBlock TopKKernel::getPartialBlock(Value first) {
  TokenBlock block{first, {}, e.firstLanes(e.sub(numTokens, first)), {}};
  Value last = e.sub(numTokens, e.index(1));
  for (int64_t lane = 0; lane < e.width; ++lane)
    block.rows.push_back(e.minSigned(e.add(first, e.index(lane)), last));
  return block;
}

/// All tokens at one position of the leading dims: whole blocks in a loop, and
/// a partial block for the rest.
void TopKKernel::emitRows(ValueRange leading) {
  auto slice = [&](Value memref) {
    return memref ? sliceLeading(e, memref, leading) : Value();
  };
  scores = slice(op.getScores());
  forced = slice(op.getForced());
  mask = slice(op.getMask());
  gates = slice(op.getGatesInit());
  indices = slice(op.getIndicesInit());
  bool isOneToken = cast<MemRefType>(scores.getType()).getRank() == 1;
  if (isOneToken)
    for (Value *view : {&scores, &forced, &mask, &gates, &indices})
      if (*view)
        *view = addLeadingUnitDim(e, *view);

  numTokens = e.dim(scores, 0);
  numExperts = e.dim(scores, 1);
  if (Value numValid = op.getNumValid()) {
    // num_valid counts tokens over all leading dims.
    Value first = e.index(0);
    for (auto [position, index] : llvm::enumerate(leading))
      first = e.add(e.mul(first, e.dim(op.getScores(), position)), index);
    if (!isOneToken)
      first = e.mul(first, numTokens);
    validEnd = e.sub(e.toIndex(numValid), first);
  }

  int64_t size = cast<MemRefType>(scores.getType()).getDimSize(0);
  bool isAlwaysWhole = !ShapedType::isDynamic(size) && size % e.width == 0;
  // Where experts are selected a token at a time, one loop for all blocks costs
  // nothing but the masks of results, and half the code.
  if ((isFiltered || isByRow) && !isAlwaysWhole)
    return e.loop(e.index(0), numTokens, e.width,
                  [&](Value first) { emitBlock(getPartialBlock(first)); });
  Value wholeEnd = e.sub(numTokens, e.rest(numTokens, e.width));
  int64_t distance = getFetchDistance();
  if (ShapedType::isDynamic(size) || size >= e.width)
    e.loop(e.index(0), wholeEnd, e.width, [&](Value first) {
      TokenBlock block{first, {}, {}, {}};
      for (int64_t lane = 0; lane < e.width; ++lane) {
        block.rows.push_back(e.add(first, e.index(lane)));
        // Behind the last token there is nothing to fetch, and no harm in it.
        block.ahead.push_back(e.add(first, e.index(distance + lane)));
      }
      emitBlock(block);
    });
  if (isAlwaysWhole)
    return;
  Value hasRest = e.compare(arith::CmpIPredicate::slt, wholeEnd, numTokens);
  e.ifThen(hasRest, [&] { emitBlock(getPartialBlock(wholeEnd)); });
}

void TopKKernel::emit() {
  auto type = cast<MemRefType>(op.getScores().getType());
  bool isDynamic = isStaged && type.isDynamicDim(type.getRank() - 1);
  e.withScratch(isDynamic, [&] {
    if (isStaged)
      stage =
          e.scratch({getSize(e, op.getScores(), type.getRank() - 1)}, e.ints());
    // All leading dims but the last, whose tokens fill the lanes.
    e.loopOverLeading(op.getScores(), std::max<int64_t>(type.getRank() - 2, 0),
                      [&](ValueRange leading) { emitRows(leading); });
  });
}

static LogicalResult matchTopK(TopKRenormOp op, PatternRewriter &rewriter) {
  if (ShapedType::isDynamic(op.getNumSelected()))
    return rewriter.notifyMatchFailure(op, "expected a static k");
  return matchContiguousBuffers(op, rewriter);
}

static bool hasKernel(TopKRenormOp op) {
  return !ShapedType::isDynamic(op.getNumSelected());
}

void mlir::moe::addTopKFacts(KernelFacts &facts) {
  facts.addForms<TopKRenormOp>(hasKernel, "a static number of choices");
}

void mlir::moe::populateTopKToCPUPatterns(RewritePatternSet &patterns,
                                          const CPUTarget &options) {
  patterns.add<KernelPattern<TopKRenormOp, TopKKernel, matchTopK>>(
      patterns.getContext(), options);
}
