//===- SoftmaxMix.cpp - The mixing ops as softmax_mix ---------------------===//
//
// What MixingOpInterface asks for: similarity_inform and attention_posterior in
// terms of the one op that kernels implement without the token-by-token matrix.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMix.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

SoftmaxMixOp Mix::build(OpBuilder &builder, Location loc) const {
  return SoftmaxMixOp::create(builder, loc, TypeRange(ValueRange(outs)), q, k,
                              v, keyBias, bias, queryMask, keyMask, queryLevel,
                              keyLevel, origin, outs, APFloat(scale),
                              visibility, withEntropy, precision);
}

SoftmaxMixSelfOp Mix::buildSelf(OpBuilder &builder, Location loc) const {
  return SoftmaxMixSelfOp::create(builder, loc, TypeRange(ValueRange(outs)), q,
                                  v, keyMask, keyLevel, outs, APFloat(scale),
                                  visibility, precision);
}

Value mlir::moe::addHeadDim(OpBuilder &builder, Location loc, Value value) {
  auto type = cast<RankedTensorType>(value.getType());
  SmallVector<int64_t> shape(type.getShape());
  shape.insert(shape.begin() + 1, 1);
  SmallVector<ReassociationIndices> groups{{0}, {1, 2}};
  for (int64_t dim = 3; dim <= type.getRank(); ++dim)
    groups.push_back({dim});
  return tensor::ExpandShapeOp::create(
      builder, loc, RankedTensorType::get(shape, type.getElementType()), value,
      groups);
}

Value mlir::moe::dropHeadDim(OpBuilder &builder, Location loc, Value value) {
  int64_t rank = cast<RankedTensorType>(value.getType()).getRank();
  SmallVector<ReassociationIndices> groups{{0}, {1, 2}};
  for (int64_t dim = 3; dim < rank; ++dim)
    groups.push_back({dim});
  return tensor::CollapseShapeOp::create(builder, loc, value, groups);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixSelfOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(SoftmaxMixSelfOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Mix mix = startSelfMix(op);
  mix.outs = llvm::to_vector(op.getOuts());
  return SmallVector<Value>(mix.build(builder, op.getLoc()).getResults());
}

//===----------------------------------------------------------------------===//
// SimilarityInformOp
//===----------------------------------------------------------------------===//

Access mlir::moe::buildSimilarityQueries(Domain &domain,
                                         const SimilarityOperands &op) {
  using namespace similarity;
  Access u = domain.at(op.u, {b, i, d});
  if (!op.ws)
    return u;
  return domain.contract(u, domain.at(op.ws, {d, f}), {b, i, f});
}

Mix mlir::moe::startSimilarityMix(OpBuilder &builder, Domain &domain,
                                  const SimilarityOperands &op,
                                  Access queries) {
  using namespace similarity;
  Location loc = domain.getBody().getLoc();
  Mix mix;
  mix.q = addHeadDim(builder, loc, queries.value);
  mix.k = addHeadDim(builder, loc, op.uk ? op.uk : op.u);
  mix.v = op.e;
  mix.scale = op.tauValue ? 1.0 : 1.0 / op.tau;
  mix.keyMask = op.keyMask;
  mix.queryMask = op.queryMask;
  if (op.restrictedTo == Restrict::Entropy) {
    // Keys and queries are the same tokens: one tensor of levels for both.
    Access levels = buildEntropies(domain, domain.at(op.e, {b, i, e}), {b, i});
    mix.queryLevel = mix.keyLevel = levels.value;
  }
  mix.origin = op.origin;
  mix.visibility = op.visibility;
  mix.precision = op.precision;
  return mix;
}

Replacements mlir::moe::convertToSoftmaxMix(SimilarityInformOp op,
                                            OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Location loc = op.getLoc();
  Domain domain(builder, op);
  Access q = buildSimilarityQueries(domain, op);
  // A learned tau is a value, which the scale attribute cannot hold.
  if (op.getTauValue())
    q = domain.map(
        {q}, domain.empty(q.dims, builder.getF32Type()),
        [&](Body &b, ValueRange in) { return b.div(in[0], op.getTauValue()); });
  Mix mix = startSimilarityMix(builder, domain, op, q);
  for (Value out : op.getOuts())
    mix.outs.push_back(addHeadDim(builder, loc, out));
  Operation *mixed = takesPairsOnce(op)
                         ? mix.buildSelf(builder, loc).getOperation()
                         : mix.build(builder, loc).getOperation();
  return llvm::map_to_vector(mixed->getResults(), [&](Value result) {
    return dropHeadDim(builder, loc, result);
  });
}

//===----------------------------------------------------------------------===//
// AttentionPosteriorOp
//===----------------------------------------------------------------------===//

HeadOperands mlir::moe::getHeadOperands(Domain &domain,
                                        const PosteriorOperands &op) {
  using namespace posterior;
  HeadOperands all{domain.at(op.q, {b, h, i, f}),
                   domain.at(op.k, {b, h, j, f}),
                   std::nullopt,
                   std::nullopt,
                   std::nullopt,
                   std::nullopt,
                   std::nullopt,
                   std::nullopt,
                   h};
  if (op.vp) {
    all.vp = domain.at(op.vp, {b, h, j, d});
  } else {
    all.v = domain.at(op.v, {b, h, j, c});
    all.wo = domain.at(op.wo, {h, d, c});
  }
  if (op.bias)
    all.bias = domain.at(op.bias, getBiasDims(op.bias, b, h, i, j));
  return all;
}

HeadOperands mlir::moe::pickHead(const HeadOperands &all, int64_t one,
                                 function_ref<Access(const Access &)> pick) {
  auto pickIf = [&](const std::optional<Access> &access) {
    if (!access || !llvm::is_contained(access->dims, all.head))
      return access;
    return std::optional<Access>(pick(*access));
  };
  return {pick(all.q),
          pick(all.k),
          pickIf(all.vp),
          pickIf(all.v),
          pickIf(all.wo),
          pickIf(all.bias),
          pickIf(all.rowLse),
          pickIf(all.rowEntropy),
          one};
}

/// access[.., head, ..] with the head dim of size 1.
static Access sliceHead(OpBuilder &builder, Domain &domain,
                        const Access &access, int64_t one, int64_t head) {
  Location loc = access.value.getLoc();
  SmallVector<OpFoldResult> offsets,
      sizes = tensor::getMixedSizes(builder, loc, access.value);
  SmallVector<int64_t> dims;
  for (auto [position, dim] : llvm::enumerate(access.dims)) {
    bool isHead = dim == posterior::h;
    offsets.push_back(builder.getIndexAttr(isHead ? head : 0));
    if (isHead)
      sizes[position] = builder.getIndexAttr(1);
    dims.push_back(isHead ? one : dim);
  }
  SmallVector<OpFoldResult> strides(dims.size(), builder.getIndexAttr(1));
  return domain.at(tensor::ExtractSliceOp::create(builder, loc, access.value,
                                                  offsets, sizes, strides),
                   dims);
}

Access mlir::moe::gatherHead(Domain &domain, const Access &access, int64_t one,
                             Access head) {
  SmallVector<int64_t> dims{posterior::b, one};
  for (int64_t dim : access.dims)
    if (dim != posterior::h && dim != posterior::b && dim != Access::kBroadcast)
      dims.push_back(dim);
  Access out = domain.empty(dims, access.getElementType());
  return domain.map({head}, out, [&](Body &b, ValueRange in) -> Value {
    SmallVector<Value> indices;
    for (int64_t dim : access.dims) {
      if (dim == posterior::h)
        indices.push_back(b.castInt(in[0], b.getIndexType()));
      else if (dim == Access::kBroadcast)
        indices.push_back(b.constantInt(b.getIndexType(), 0));
      else
        indices.push_back(b.iteration(dim));
    }
    return tensor::ExtractOp::create(b, access.value, indices);
  });
}

Value mlir::moe::concatFeatures(OpBuilder &builder, Domain &domain, Access lhs,
                                Access rhs) {
  if (lhs.getElementType() != rhs.getElementType())
    for (Access *access : {&lhs, &rhs})
      if (!access->getElementType().isF32())
        *access = domain.map({*access},
                             domain.empty(access->dims, builder.getF32Type()),
                             [](Body &b, ValueRange in) { return in[0]; });
  auto concat =
      tensor::ConcatOp::create(builder, lhs.value.getLoc(), lhs.dims.size() - 1,
                               ValueRange{lhs.value, rhs.value});
  // Bufferization knows slices, not concatenations.
  FailureOr<SmallVector<Value>> slices = concat.decomposeOperation(builder);
  if (failed(slices))
    return concat;
  concat.erase();
  return slices->front();
}

Access mlir::moe::buildGramProducts(Domain &domain,
                                    const HeadOperands &operands) {
  using namespace posterior;
  int64_t h = operands.head, c2 = domain.addTwin(c);
  Access wo = *operands.wo, wo2 = wo;
  llvm::replace(wo2.dims, int64_t(c), c2);
  SmallVector<int64_t> gramDims(ArrayRef<int64_t>(wo.dims).drop_back(2));
  Access gram = domain.contract(wo, wo2, join(gramDims, {c, c2}));
  return domain.contract(domain.at(operands.v->value, {b, h, j, c2}), gram,
                         {b, h, j, c});
}

Value mlir::moe::buildKeyBias(Domain &domain, const HeadOperands &operands,
                              Value precision) {
  using namespace posterior;
  int64_t h = operands.head;
  // With v and wo, |v'|^2 = v^T (wo^T wo) v.
  Access norms =
      operands.vp
          ? domain.contract(*operands.vp, *operands.vp, {b, h, j})
          : domain.contract(*operands.v, buildGramProducts(domain, operands),
                            {b, h, j});
  Access out = domain.empty({b, h, j}, domain.getBody().getF32Type());
  return domain
      .map({norms}, out,
           [&](Body &b, ValueRange in) {
             return b.mul(in[0], b.mul(b.f32(-0.5), precision));
           })
      .value;
}

Value mlir::moe::buildQueryFeatures(OpBuilder &builder, Domain &domain,
                                    const PosteriorOperands &op, Access u,
                                    const HeadOperands &operands,
                                    Value precision) {
  using namespace posterior;
  int64_t h = operands.head;
  Type f32 = builder.getF32Type();
  Access scaled = domain.map(
      {operands.q}, domain.empty({b, h, i, f}, f32),
      [&](Body &b, ValueRange in) { return b.mul(in[0], b.f32(op.scale)); });
  SmallVector<int64_t> dims{b, h, i, d};
  if (operands.wo) {
    dims.back() = c;
    u = domain.contract(u, *operands.wo, dims);
  }
  Access likelihood =
      domain.map({u}, domain.empty(dims, f32), [&](Body &b, ValueRange in) {
        return b.mul(in[0], precision);
      });
  return concatFeatures(builder, domain, scaled, likelihood);
}

Mix mlir::moe::startMix(const AttentionOperands &op,
                        const HeadOperands &operands) {
  Mix mix;
  if (operands.bias)
    mix.bias = operands.bias->value;
  mix.keyMask = op.keyMask;
  mix.queryMask = op.queryMask;
  mix.visibility = op.visibility;
  mix.precision = op.precision;
  return mix;
}

namespace {
/// What is known of the rows of the prior.
struct PriorRows {
  Access lse;
  std::optional<Access> entropy;
};
} // namespace

/// The log-sum-exps of the prior, and its entropies if `entropy` is given: what
/// the attention itself has emitted, or else from an attention without values.
static PriorRows buildPriorRows(OpBuilder &builder, Domain &domain,
                                AttentionPosteriorOp op,
                                const HeadOperands &operands, Access lse,
                                std::optional<Access> entropy = {}) {
  if (operands.rowLse) {
    Body &outer = domain.getBody();
    lse = hideRows(domain, *operands.rowLse, op.getQueryMask(),
                   outer.negInfinity(), lse);
    if (entropy)
      entropy = hideRows(domain, *operands.rowEntropy, op.getQueryMask(),
                         outer.f32(0.0), *entropy);
    return {lse, entropy};
  }
  Mix mix = startMix(op, operands);
  mix.q = operands.q.value;
  mix.k = operands.k.value;
  mix.scale = *op.getScaleValue();
  mix.outs = {lse.value};
  if (entropy) {
    mix.outs.push_back(entropy->value);
    mix.withEntropy = true;
  }
  SoftmaxMixOp prior = mix.build(builder, op.getLoc());
  lse.value = prior.getResult(0);
  if (entropy)
    entropy->value = prior.getResult(1);
  return {lse, entropy};
}

/// The posterior attention mixing e.
static SoftmaxMixOp buildPosteriorMix(OpBuilder &builder, Domain &domain,
                                      AttentionPosteriorOp op,
                                      const HeadOperands &operands, Value mixed,
                                      Value lse) {
  Mix mix = startMix(op, operands);
  Value precision = buildPrecision(domain, op);
  mix.q = buildQueryFeatures(
      builder, domain, op,
      domain.at(op.getU(), {posterior::b, posterior::i, posterior::d}),
      operands, precision);
  mix.k = concatFeatures(builder, domain, operands.k,
                         operands.vp ? *operands.vp : *operands.v);
  mix.keyBias = buildKeyBias(domain, operands, precision);
  mix.v = op.getE();
  mix.outs = {mixed, lse};
  return mix.build(builder, op.getLoc());
}

/// All that has a head.
static HeadOperands getAllOperands(Domain &domain, AttentionPosteriorOp op) {
  using namespace posterior;
  HeadOperands all = getHeadOperands(domain, op);
  if (op.getRowLse()) {
    all.rowLse = domain.at(op.getRowLse(), {b, h, i});
    all.rowEntropy = domain.at(op.getRowEntropy(), {b, h, i});
  }
  return all;
}

/// head_mode = all: both mixes over all heads, then the sum over heads (13).
static SmallVector<Value> convertAllHeads(OpBuilder &builder, Domain &domain,
                                          AttentionPosteriorOp op) {
  using namespace posterior;
  Body &outer = domain.getBody();
  HeadOperands operands = getAllOperands(domain, op);
  Access mixed = domain.empty({b, h, i, e}, builder.getF32Type());
  Access priorLse = buildPriorRows(builder, domain, op, operands,
                                   domain.at(op.getOuts()[2], {b, h, i}))
                        .lse;
  SoftmaxMixOp joint = buildPosteriorMix(builder, domain, op, operands,
                                         mixed.value, op.getOuts()[3]);
  mixed.value = joint.getResult(0);
  Value posteriorLse = joint.getResult(1);

  // p_i = sum_h H'_ih mixed_hi
  Access weights = buildHeadWeights(domain, op, priorLse,
                                    domain.at(posteriorLse, {b, h, i}));
  Access p = domain.fill(domain.at(op.getOuts()[0], {b, i, e}), outer.f32(0.0));
  p = domain.contract(weights, mixed, p);
  Access none = domain.fill(domain.at(op.getOuts()[1], {b}),
                            outer.constantInt(outer.getI32Type(), -1));
  return {p.value, none.value, priorLse.value, posteriorLse};
}

/// head_mode = min_entropy, fixed: the prior over all heads (for the entropies)
/// or over the fixed one, then the posterior of the chosen head only.
static SmallVector<Value> convertOneHead(OpBuilder &builder, Domain &domain,
                                         AttentionPosteriorOp op) {
  using namespace posterior;
  Body &outer = domain.getBody();
  Type f32 = builder.getF32Type();
  HeadOperands all = getAllOperands(domain, op);
  int64_t one = domain.addDim(builder.getIndexAttr(1));

  HeadOperands operands;
  Access head, priorLse;
  Access lseOut = domain.at(op.getOuts()[2], {b, one, i});
  if (op.getHeadMode() == HeadMode::Fixed) {
    head = domain.fill(domain.at(op.getOuts()[1], {b}),
                       outer.constantInt(outer.getI32Type(), *op.getHead()));
    operands = pickHead(all, one, [&](const Access &access) {
      return sliceHead(builder, domain, access, one, *op.getHead());
    });
    priorLse = buildPriorRows(builder, domain, op, operands, lseOut).lse;
  } else {
    PriorRows prior =
        buildPriorRows(builder, domain, op, all, domain.empty({b, h, i}, f32),
                       domain.empty({b, h, i}, f32));
    head = buildMinEntropyHead(domain, op, *prior.entropy);
    operands = pickHead(all, one, [&](const Access &access) {
      return gatherHead(domain, access, one, head);
    });
    Access lse = gatherHead(domain, prior.lse, one, head);
    priorLse =
        domain.map({lse}, lseOut, [](Body &b, ValueRange in) { return in[0]; });
  }

  SoftmaxMixOp joint = buildPosteriorMix(
      builder, domain, op, operands,
      addHeadDim(builder, op.getLoc(), op.getOuts()[0]), op.getOuts()[3]);
  return {dropHeadDim(builder, op.getLoc(), joint.getResult(0)), head.value,
          priorLse.value, joint.getResult(1)};
}

Replacements mlir::moe::convertToSoftmaxMix(AttentionPosteriorOp op,
                                            OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  if (op.getHeadMode() == HeadMode::All)
    return convertAllHeads(builder, domain, op);
  return convertOneHead(builder, domain, op);
}

//===----------------------------------------------------------------------===//
// AttentionEntropyOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::convertToSoftmaxMix(AttentionEntropyOp op,
                                            OpBuilder &builder) {
  using namespace entropy;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);

  Mix mix;
  mix.q = op.getQ();
  mix.k = op.getK();
  mix.bias = op.getBias();
  mix.keyMask = op.getKeyMask();
  mix.queryMask = op.getQueryMask();
  mix.scale = *op.getScaleValue();
  mix.visibility = op.getVisibility();
  mix.precision = op.getPrecision();
  mix.withEntropy = true;
  mix.outs = {domain.empty({b, h, i}, builder.getF32Type()).value,
              op.getOuts()[1]};
  Value rows = mix.build(builder, op.getLoc()).getResult(1);
  Access mean = buildMeanEntropies(domain, op, domain.at(rows, {b, h, i}));
  return SmallVector<Value>{mean.value, rows};
}
