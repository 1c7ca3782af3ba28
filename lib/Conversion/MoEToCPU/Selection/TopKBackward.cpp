//===- TopKBackward.cpp - moe.topk_renorm_backward on vectors -------------===//
//
// Matches moe.topk_renorm_backward on buffers with contiguous rows. A token is
// two passes over its k choices, in scalars (g the gate without route_scale, dg
// its cotangent with it):
//
//   c = sum_a g_a dg_a under renorm, else 0
//   w_b = g_b (dg_b - c), and from it the gradient of the chosen score
//
// and one over its experts, in vectors: zeros, or softmax's -s_e sum w. Sums
// run in the order of the choices and of the experts, whatever the token.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// From that share on a choice's exponential is far from both ends of f32.
static constexpr double kLikely = 0x1p-20;
/// Up to that many choices of a token are read once.
static constexpr int64_t kMaxKeptChoices = 16;
/// Rows of up to that many vectors stay in registers.
static constexpr int64_t kMaxRowVectors = 16;

namespace {
class TopKBackwardKernel {
public:
  TopKBackwardKernel(Emitter &e, TopKRenormBackwardOp op) : e(e), op(op) {}

  void emit();

private:
  /// A choice: whether it is an expert with a gradient, which one (0 if none),
  /// g and dg (0 if none).
  struct Choice {
    Value exists, expert, share, gradient;
  };

  void emitToken(ValueRange token);
  Choice readChoice(Value place);
  Values forEachChoice(ValueRange carried,
                       function_ref<Values(Choice, ValueRange)> body);
  Value number(double value) { return e.constant(e.getF32Type(), value); }
  Value divideOrZero(Value a, Value b);

  void storeDense(Value total);
  void storeSoftmax(Value total);
  void storeSoftmaxFrom(Choice choice, Value total);
  void storeDenseFromRegisters(Value total, int64_t numVectors);
  void storeDenseInLoops(Value total);
  Value loadScores(Value first, Value mask);
  Value getShift(Value maxima);
  Value getFactor(Value total, Value sums);
  void addGradient(Choice choice, Value mean, Value inverseSum);

  Emitter &e;
  TopKRenormBackwardOp op;
  /// Those of the token at hand that are kept.
  SmallVector<Choice> choices;
  // Views of one token.
  Value dgates, gates, indices, scores, dscores;
};
} // namespace

Value TopKBackwardKernel::divideOrZero(Value a, Value b) {
  Value isZero = e.compare(arith::CmpFPredicate::OEQ, b, number(0.0));
  return e.select(isZero, number(0.0), e.div(a, b));
}

TopKBackwardKernel::Choice TopKBackwardKernel::readChoice(Value place) {
  double scale = op.getRouteScale().convertToDouble();
  Value index = e.load(indices, {place});
  // Forced ids are the caller's. As an unsigned number -1 is large, too.
  Value position = e.toIndex(index);
  Value exists =
      e.compare(arith::CmpIPredicate::ult, position, e.dim(dscores, 0));
  Value expert = e.select(exists, position, e.index(0));
  if (op.getScoreFunction() == ScoreFunction::None && scores) {
    // A choice of -inf has gate 0 whatever else there is.
    Value score = e.toF32(e.load(scores, {expert}));
    exists = e.both(exists, e.compare(arith::CmpFPredicate::UNE, score,
                                      number(-kInfinity)));
  }
  Value share =
      e.mul(e.load(gates, {place}), number(scale == 0.0 ? 0.0 : 1.0 / scale));
  Value gradient = e.mul(e.load(dgates, {place}), number(scale));
  return {exists, expert, e.select(exists, share, number(0.0)),
          e.select(exists, gradient, number(0.0))};
}

/// Calls `body` for every choice in order. A few are read once and kept.
Values TopKBackwardKernel::forEachChoice(
    ValueRange carried, function_ref<Values(Choice, ValueRange)> body) {
  int64_t count = cast<MemRefType>(gates.getType()).getDimSize(0);
  if (ShapedType::isDynamic(count) || count > kMaxKeptChoices)
    return e.loop(e.index(0), e.dim(gates, 0), 1, carried,
                  [&](Value place, ValueRange carried) {
                    return body(readChoice(place), carried);
                  });
  if (choices.empty())
    for (int64_t place = 0; place < count; ++place)
      choices.push_back(readChoice(e.index(place)));
  Values state(carried);
  for (Choice choice : choices)
    state = body(choice, state);
  return state;
}

/// dscores = -s sum w with the softmax s of the scores; 0 without support.
void TopKBackwardKernel::storeDense(Value total) {
  if (op.getRenorm())
    return storeSoftmax(total);
  // The first choice's gate is its s, and s_e = s exp(x_e - x): no maximum and
  // no sum, unless that choice is unlikely (a bias may put it first) or none.
  Choice first = readChoice(e.index(0));
  Value isLikely =
      e.both(first.exists, e.compare(arith::CmpFPredicate::OGE, first.share,
                                     number(kLikely)));
  Value isUnlikely =
      arith::XOrIOp::create(e, isLikely, e.constantInt(e.getI1Type(), 1));
  e.ifThen(isLikely, [&] { storeSoftmaxFrom(first, total); });
  e.ifThen(isUnlikely, [&] { storeSoftmax(total); });
}

void TopKBackwardKernel::storeSoftmaxFrom(Choice choice, Value total) {
  Value shift = e.splat(e.toF32(e.load(scores, {choice.expert})));
  Value factor = e.splat(e.mul(e.sub(number(0.0), total), choice.share));
  Value size = e.dim(scores, 0);
  Value rest = e.rest(size, e.width);
  Value wholeEnd = e.sub(size, rest);
  auto store = [&](Value first, Value mask) {
    Value weight = e.exp(e.sub(loadScores(first, mask), shift));
    e.storeVector(e.mul(weight, factor), dscores, {first}, mask);
  };
  e.loop(e.index(0), wholeEnd, e.width,
         [&](Value first) { store(first, Value()); });
  Value hasRest = e.compare(arith::CmpIPredicate::ne, rest, e.index(0));
  e.ifThen(hasRest, [&] { store(wholeEnd, e.firstLanes(rest)); });
}

/// The same from the scores alone. One exponential an expert: they wait in
/// registers, or in dscores, for their sum.
void TopKBackwardKernel::storeSoftmax(Value total) {
  int64_t size = cast<MemRefType>(scores.getType()).getDimSize(0);
  if (!ShapedType::isDynamic(size) && size <= kMaxRowVectors * e.width)
    storeDenseFromRegisters(total, llvm::divideCeil(size, e.width));
  else
    storeDenseInLoops(total);
}

Value TopKBackwardKernel::loadScores(Value first, Value mask) {
  return e.loadFloats(scores, {first}, mask, -kInfinity);
}

/// The row's maximum, or 0 without support.
Value TopKBackwardKernel::getShift(Value maxima) {
  Value peak = e.reduceMax(maxima);
  Value isEmpty =
      e.compare(arith::CmpFPredicate::OEQ, peak, number(-kInfinity));
  return e.splat(e.select(isEmpty, number(0.0), peak));
}

/// -total / sum of the exponentials, in every lane.
Value TopKBackwardKernel::getFactor(Value total, Value sums) {
  return e.splat(divideOrZero(e.sub(number(0.0), total), e.reduceAdd(sums)));
}

void TopKBackwardKernel::storeDenseFromRegisters(Value total,
                                                 int64_t numVectors) {
  Value size = e.dim(scores, 0);
  Values firsts, masks, weights;
  for (int64_t i = 0; i < numVectors; ++i) {
    firsts.push_back(e.index(i * e.width));
    // Of the last vector alone lanes may be missing.
    bool isWhole =
        (i + 1) * e.width <= cast<MemRefType>(scores.getType()).getDimSize(0);
    masks.push_back(isWhole ? Value()
                            : e.firstLanes(e.sub(size, firsts.back())));
    weights.push_back(loadScores(firsts[i], masks[i]));
  }
  Value maxima = weights.front(), sums = e.f32(0.0);
  for (Value x : ArrayRef(weights).drop_front())
    maxima = e.maxOrRhs(x, maxima);
  Value shift = getShift(maxima);
  for (Value &x : weights) {
    x = e.exp(e.sub(x, shift));
    sums = e.add(sums, x);
  }
  Value factor = getFactor(total, sums);
  for (int64_t i = 0; i < numVectors; ++i)
    e.storeVector(e.mul(weights[i], factor), dscores, {firsts[i]}, masks[i]);
}

void TopKBackwardKernel::storeDenseInLoops(Value total) {
  Value size = e.dim(scores, 0), zero = e.index(0);
  auto forEach = [&](ValueRange carried,
                     function_ref<Values(Value, Value, ValueRange)> body) {
    return e.loop(zero, size, e.width, carried,
                  [&](Value first, ValueRange carried) -> Values {
                    Value mask = e.firstLanes(e.sub(size, first));
                    return body(first, mask, carried);
                  });
  };
  Values max =
      forEach(e.negInfinity(),
              [&](Value first, Value mask, ValueRange carried) -> Values {
                return {e.maxOrRhs(loadScores(first, mask), carried[0])};
              });
  Value shift = getShift(max[0]);
  Values sum = forEach(
      e.f32(0.0), [&](Value first, Value mask, ValueRange carried) -> Values {
        Value weight = e.exp(e.sub(loadScores(first, mask), shift));
        e.storeVector(weight, dscores, {first}, mask);
        return {e.add(carried[0], weight)};
      });
  Value factor = getFactor(total, sum[0]);
  forEach(ValueRange(), [&](Value first, Value mask, ValueRange) -> Values {
    Value weight = e.loadFloats(dscores, {first}, mask);
    e.storeVector(e.mul(weight, factor), dscores, {first}, mask);
    return {};
  });
}

/// Adds the gradient of one choice to dscores.
void TopKBackwardKernel::addGradient(Choice choice, Value mean,
                                     Value inverseSum) {
  Value gradient = e.sub(choice.gradient, mean);
  ScoreFunction function = op.getScoreFunction();
  if (function != ScoreFunction::None)
    gradient = e.mul(choice.share, gradient);
  else if (inverseSum)
    gradient = e.mul(gradient, inverseSum);
  if (function != ScoreFunction::None && isElementwise(function)) {
    Value x = e.toF32(e.load(scores, {choice.expert}));
    gradient = e.mul(gradient, buildLogSlope(e, function, x));
  }
  // What is no expert adds nothing to the first one.
  Value old = e.load(dscores, {choice.expert});
  Value sum = e.select(choice.exists, e.add(old, gradient), old);
  e.store(sum, dscores, {choice.expert});
}

void TopKBackwardKernel::emitToken(ValueRange token) {
  auto view = [&](Value memref) {
    return memref ? sliceLeading(e, memref, token) : Value();
  };
  dgates = view(op.getDgates());
  gates = view(op.getGates());
  indices = view(op.getIndices());
  scores = view(op.getScores());
  dscores = view(op.getOuts()[0]);
  choices.clear();
  bool needsSum =
      op.getScoreFunction() == ScoreFunction::None && op.getRenorm();

  // Sums of g dg, of g, and of the chosen probabilities.
  Values sums = forEachChoice(
      Values(3, number(0.0)), [&](Choice choice, ValueRange carried) -> Values {
        Value probability = number(0.0);
        if (needsSum)
          probability =
              e.select(choice.exists, e.toF32(e.load(scores, {choice.expert})),
                       number(0.0));
        return {e.add(carried[0], e.mul(choice.share, choice.gradient)),
                e.add(carried[1], choice.share),
                e.add(carried[2], probability)};
      });
  Value mean = op.getRenorm() ? sums[0] : number(0.0);
  Value inverseSum;
  if (needsSum)
    inverseSum = divideOrZero(
        number(1.0), e.add(sums[2], number(op.getEps().convertToDouble())));

  if (op.isDense()) {
    // sum w = sum g dg - c sum g
    storeDense(e.sub(sums[0], e.mul(mean, sums[1])));
  } else {
    Value size = e.dim(dscores, 0);
    e.loop(e.index(0), size, e.width, [&](Value first) {
      e.storeVector(e.f32(0.0), dscores, {first},
                    e.firstLanes(e.sub(size, first)));
    });
  }
  forEachChoice({}, [&](Choice choice, ValueRange) {
    addGradient(choice, mean, inverseSum);
    return Values();
  });
}

void TopKBackwardKernel::emit() {
  auto type = cast<MemRefType>(op.getGates().getType());
  e.loopOverLeading(op.getGates(), type.getRank() - 1,
                    [&](ValueRange token) { emitToken(token); });
}

void mlir::moe::populateTopKBackwardToCPUPatterns(RewritePatternSet &patterns,
                                                  const CPUTarget &options) {
  patterns.add<KernelPattern<TopKRenormBackwardOp, TopKBackwardKernel>>(
      patterns.getContext(), options);
}
