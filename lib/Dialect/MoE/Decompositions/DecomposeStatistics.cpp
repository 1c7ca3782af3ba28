//===- DecomposeStatistics.cpp - The meaning of the statistics ------------===//
//
// adjacency_gate is a product with the graph. mad_dispersion and
// adjacency_update are reductions over the tokens; the counts of the second are
// an op of their own, which kernels and loops over tiles of tokens take.
// Membership is a comparison, not an index, so an assignment outside of [0, e)
// counts nowhere. dispersion_weights makes a metric of what the first one
// measured.
//
//===----------------------------------------------------------------------===//

#include "Domain.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// acc + value where `condition` holds. The addend is selected, not multiplied:
/// what is masked may be NaN (E11).
static Value addIf(Body &b, Value condition, Value acc, Value value) {
  return b.select(condition, b.add(acc, value), acc);
}

/// The number of times that `in` is true, as an integer of `type`.
static Value count(Body &b, Type type, Value acc, Value condition) {
  return b.add(acc, arith::ExtUIOp::create(b, type, condition));
}

//===----------------------------------------------------------------------===//
// MadDispersionOp
//===----------------------------------------------------------------------===//

/// member_ne = [assign_n = e], and the token is real.
static Access buildMembers(Domain &domain, MadDispersionOp op) {
  using namespace dispersion;
  SmallVector<Access> ins{domain.at(op.getAssign(), {n})};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), {n}));
  return domain.map(ins, domain.empty({n, e}, domain.getBody().getI1Type()),
                    [](Body &b, ValueRange in) {
                      Value member = b.equal(
                          in[0], b.castInt(b.iteration(e), in[0].getType()));
                      return in.size() == 1 ? member : b.both(member, in[1]);
                    });
}

/// The sum of the deviations of each cluster, from the mean or between pairs.
static Access buildDeviations(Domain &domain, MadDispersionOp op,
                              Access members, Access mean) {
  using namespace dispersion;
  Access h = domain.at(op.getH(), {n, d});
  Access sums = domain.filled({e, d}, 0.0f);
  if (op.getMeasure() == DispersionMeasure::Pairwise) {
    // sum_{n, m in C_e} |h_nd - h_md|
    int64_t m = domain.addTwin(n);
    return domain.reduce({h, domain.at(op.getH(), {m, d}), members,
                          domain.at(members.value, {m, e})},
                         sums, [](Body &b, ValueRange in, Value acc) {
                           return addIf(
                               b, b.both(in[2], in[3]), acc,
                               math::AbsFOp::create(b, b.sub(in[0], in[1])));
                         });
  }
  bool isVariance = op.getMeasure() == DispersionMeasure::Variance;
  return domain.reduce(
      {h, mean, members}, sums, [&](Body &b, ValueRange in, Value acc) {
        Value deviation = b.sub(in[0], in[1]);
        Value term = isVariance ? b.mul(deviation, deviation)
                                : math::AbsFOp::create(b, deviation);
        return addIf(b, in[2], acc, term);
      });
}

Replacements mlir::moe::decompose(MadDispersionOp op, OpBuilder &builder) {
  using namespace dispersion;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Body &outer = domain.getBody();
  Type i32 = outer.getI32Type();

  Access members = buildMembers(domain, op);
  Access counts =
      domain.fill(domain.at(op.getOuts()[2], {e}), outer.constantInt(i32, 0));
  counts =
      domain.reduce({members}, counts, [&](Body &b, ValueRange in, Value acc) {
        return count(b, i32, acc, in[0]);
      });

  // mean_ed = (1/N_e) sum_{n in C_e} h_nd
  Access sums = domain.reduce({domain.at(op.getH(), {n, d}), members},
                              domain.filled({e, d}, 0.0f),
                              [](Body &b, ValueRange in, Value acc) {
                                return addIf(b, in[1], acc, in[0]);
                              });
  auto divideByCount = [](Body &b, Value sum, Value count) {
    return divideOrZero(b, sum,
                        arith::SIToFPOp::create(b, b.getF32Type(), count));
  };
  Access mean = domain.map(
      {sums, counts}, domain.at(op.getOuts()[1], {e, d}),
      [&](Body &b, ValueRange in) { return divideByCount(b, in[0], in[1]); });

  // s_ed = (1/N_e) sum_{n in C_e} |h_nd - mean_ed|, or N_e^-2 over pairs
  bool isPairwise = op.getMeasure() == DispersionMeasure::Pairwise;
  Access s = domain.map({buildDeviations(domain, op, members, mean), counts},
                        domain.at(op.getOuts()[0], {e, d}),
                        [&](Body &b, ValueRange in) {
                          Value s = divideByCount(b, in[0], in[1]);
                          return isPairwise ? divideByCount(b, s, in[1]) : s;
                        });
  return SmallVector<Value>{s.value, mean.value, counts.value};
}

//===----------------------------------------------------------------------===//
// DispersionWeightsOp
//===----------------------------------------------------------------------===//

namespace {
/// The dims of dispersion_weights and the means that its scalings need.
struct Weighing {
  static constexpr int64_t e = 0, d = 1;

  Weighing(OpBuilder &builder, DispersionWeightsOp op)
      : op(op), domain(builder, op), s(domain.at(op.getS(), {e, d})),
        count(domain.at(op.getCount(), {e})),
        f32(domain.getBody().getF32Type()), width(domain.getSizeValue(d)) {}

  /// s + eps
  Value lifted(Body &b, Value s) {
    return b.add(s, b.f32(op.getEps().convertToDouble()));
  }
  /// Whether a cluster takes part in means and gets weights (E14).
  Value isLive(Body &b, Value count) {
    if (op.getIncludeEmpty())
      return b.boolean(true);
    return b.less(b.constantInt(count.getType(), 0), count);
  }
  Access buildNumLive();
  Access buildMean(Access w, ArrayRef<int64_t> kept, bool overFeatures);
  Access buildCapped(Access w, Access mean);
  Access buildWeights();

  DispersionWeightsOp op;
  Domain domain;
  Access s, count;
  Type f32;
  Value width;
};
} // namespace

/// The number of live clusters, f64.
Access Weighing::buildNumLive() {
  Body &outer = domain.getBody();
  return domain.reduce(
      {count},
      domain.fill(domain.empty({}, outer.getF64Type()), outer.f64(0.0)),
      [&](Body &b, ValueRange in, Value acc) {
        return b.select(isLive(b, in[0]), b.add(acc, b.f64(1.0)), acc);
      });
}

/// The mean of `w` over the live clusters, and over the features unless they
/// are among the dims `kept`.
Access Weighing::buildMean(Access w, ArrayRef<int64_t> kept,
                           bool overFeatures) {
  Access sum = domain.sumWide(
      {w, count}, kept,
      [&](Body &b, ValueRange in) {
        return b.select(isLive(b, in[1]), in[0], b.f32(0.0));
      },
      [&](Body &b, ValueRange in) {
        return overFeatures ? b.div(in[0], b.toF64(width)) : in[0];
      });
  return domain.map({sum, buildNumLive()}, domain.empty(kept, f32),
                    [](Body &b, ValueRange in) -> Value {
                      Value mean = b.div(b.toF64(in[0]), in[1]);
                      return arith::TruncFOp::create(b, b.getF32Type(), mean);
                    });
}

/// min(w, clamp * mean)
Access Weighing::buildCapped(Access w, Access mean) {
  if (!op.getClamp())
    return w;
  double clamp = op.getClamp()->convertToDouble();
  return domain.map({w, mean}, domain.empty({e, d}, f32),
                    [&](Body &b, ValueRange in) -> Value {
                      Value cap = b.mul(b.f32(clamp), in[1]);
                      return arith::MinimumFOp::create(b, in[0], cap);
                    });
}

/// The weights of live clusters, before the rows of the others become 1.
Access Weighing::buildWeights() {
  auto meanOfRow = [&](Access w) {
    return domain.sumWide(
        {w}, {e}, [](Body &, ValueRange in) { return in[0]; },
        [&](Body &b, ValueRange in) { return b.div(in[0], b.toF64(width)); });
  };
  auto divide = [&](Access numerator, Access denominator) {
    return domain.map(
        {numerator, denominator}, domain.empty({e, d}, f32),
        [](Body &b, ValueRange in) { return b.div(in[0], in[1]); });
  };
  DispersionScale scale = op.getScale();
  if (scale == DispersionScale::Dispersion) {
    Access spread =
        domain.map({s}, domain.empty({e, d}, f32),
                   [&](Body &b, ValueRange in) { return lifted(b, in[0]); });
    return divide(meanOfRow(spread), spread);
  }
  Access w =
      domain.map({s}, domain.empty({e, d}, f32), [&](Body &b, ValueRange in) {
        return b.div(b.f32(1.0), lifted(b, in[0]));
      });
  Access mean = buildMean(w, {}, /*overFeatures=*/true);
  Access capped = buildCapped(w, mean);
  switch (scale) {
  case DispersionScale::Cluster:
    return divide(capped, meanOfRow(capped));
  case DispersionScale::Feature:
    return divide(capped, buildMean(capped, {d}, /*overFeatures=*/false));
  case DispersionScale::Global:
    return divide(capped, buildMean(capped, {}, /*overFeatures=*/true));
  case DispersionScale::GlobalPreclamp:
    return divide(capped, mean);
  case DispersionScale::None:
    return capped;
  case DispersionScale::Dispersion:
    break;
  }
  llvm_unreachable("the scaling of the dispersions themselves came first");
}

Replacements mlir::moe::decompose(DispersionWeightsOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Weighing t(builder, op);
  Access weights = t.buildWeights();
  Access m =
      t.domain.map({weights, t.count}, t.domain.at(op.getOuts()[0], {t.e, t.d}),
                   [&](Body &b, ValueRange in) {
                     return b.select(t.isLive(b, in[1]), in[0], b.f32(1.0));
                   });
  return SmallVector<Value>{m.value};
}

//===----------------------------------------------------------------------===//
// AdjacencyGateOp
//===----------------------------------------------------------------------===//

/// The weights that the gate uses: `a` with the entries below the threshold
/// dropped, or the identity where `a` is all zero and the start is to be that
/// of the base router.
static Access buildUsedAdjacency(Domain &domain, AdjacencyGateOp op, int64_t e,
                                 int64_t l) {
  double threshold = op.getThreshold().convertToDouble();
  auto keep = [&](Body &b, Value a) {
    Value isKept = arith::CmpFOp::create(b, arith::CmpFPredicate::OGE, a,
                                         b.f32(threshold));
    return b.select(isKept, a, b.f32(0.0));
  };
  Access a = domain.at(op.getA(), {e, l});
  Access used = domain.empty({e, l}, domain.getBody().getF32Type());
  if (op.getColdStart() == ColdStart::Literal)
    return domain.map({a}, used,
                      [&](Body &b, ValueRange in) { return keep(b, in[0]); });

  Access cold = domain.reduce({a}, domain.filled({}, true),
                              [](Body &b, ValueRange in, Value acc) {
                                return b.both(acc, b.equal(in[0], b.f32(0.0)));
                              });
  return domain.map({a, cold}, used, [&](Body &b, ValueRange in) {
    Value identity = b.select(b.equal(b.iteration(e), b.iteration(l)),
                              b.f32(1.0), b.f32(0.0));
    return b.select(in[1], identity, keep(b, in[0]));
  });
}

Replacements mlir::moe::decompose(AdjacencyGateOp op, OpBuilder &builder) {
  // The used adjacency is a tensor of its own; buffers would need an
  // allocation, which is bufferization's business.
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  int64_t e = domain.getNumDims() - 2, l = e + 1;
  SmallVector<int64_t> n = llvm::to_vector(llvm::seq<int64_t>(0, e));

  Access used = buildUsedAdjacency(domain, op, e, l);
  // g_ne = sum_l p_nl a_el
  Access g = domain.at(op.getOuts()[0], join(n, {e}));
  g = domain.fill(g, domain.getBody().f32(0.0));
  g = domain.contract(domain.at(op.getP(), join(n, {l})), used, g);
  return SmallVector<Value>{g.value};
}

//===----------------------------------------------------------------------===//
// AdjacencyUpdateOp
//===----------------------------------------------------------------------===//

/// The number of tokens of `counts` that are counted at (e, l), i64.
static Value getCounted(Body &b, AdjacencyUpdateOp op, Value count) {
  using namespace adjacency;
  count = b.castInt(count, b.getI64Type());
  if (op.getDiagonal())
    return count;
  return b.select(b.equal(b.iteration(e), b.iteration(l)),
                  b.constantInt(count.getType(), 0), count);
}

/// What the counts are divided by: row sums, column sums, or the diagonal entry
/// of the column. Sums are of 64-bit integers: k counts of 32 bits each.
static Access buildDivisors(Domain &domain, AdjacencyUpdateOp op,
                            Access counts) {
  using namespace adjacency;
  int64_t kept = op.getNorm() == AdjacencyNorm::Row ? e : l;
  Type i64 = domain.getBody().getI64Type();
  return domain.reduce({counts}, domain.filled({kept}, i64, 0),
                       [&](Body &b, ValueRange in, Value acc) {
                         Value sum = b.add(acc, getCounted(b, op, in[0]));
                         if (op.getNorm() != AdjacencyNorm::Eq7)
                           return sum;
                         return b.select(
                             b.equal(b.iteration(e), b.iteration(l)), sum, acc);
                       });
}

/// a_new = beta a + (1 - beta) C / divisor, `counts` being C with its diagonal.
static Value buildNewGraph(Domain &domain, AdjacencyUpdateOp op,
                           Access counts) {
  using namespace adjacency;
  Access divisors = buildDivisors(domain, op, counts);
  // A batch without a selection, and so without a load, leaves `a` as it is
  // (E18).
  Access any = domain.reduce(
      {counts}, domain.filled({}, false),
      [](Body &b, ValueRange in, Value acc) {
        Value isLoad = b.both(b.equal(b.iteration(e), b.iteration(l)),
                              b.less(b.constantInt(in[0].getType(), 0), in[0]));
        return b.either(acc, isLoad);
      });
  double beta = op.getBeta().convertToDouble();
  Access updated = domain.map(
      {domain.at(op.getA(), {e, l}), counts, divisors, any},
      domain.at(op.getOuts()[0], {e, l}), [&](Body &b, ValueRange in) {
        auto toFloat = [&](Value value) {
          return arith::SIToFPOp::create(b, b.getF32Type(), value);
        };
        Value share =
            divideOrZero(b, toFloat(getCounted(b, op, in[1])), toFloat(in[2]));
        Value moved =
            b.add(b.mul(b.f32(beta), in[0]), b.mul(b.f32(1.0 - beta), share));
        return b.select(in[3], moved, in[0]);
      });
  return updated.value;
}

Replacements mlir::moe::decompose(AdjacencyUpdateOp op, OpBuilder &builder) {
  using namespace adjacency;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Access counts = domain.filled({e, l}, builder.getI32Type(), 0);
  counts.value =
      foldIntoTable(op, builder, op.getOperands(), counts.value)->getResult(0);
  return SmallVector<Value>{buildNewGraph(domain, op, counts)};
}

Value mlir::moe::buildEmptyTables(AdjacencyUpdateOp op, OpBuilder &builder,
                                  OpFoldResult numParts) {
  using namespace adjacency;
  Domain domain(builder, op);
  int64_t part = domain.addDim(numParts);
  return domain.filled({part, e, l}, builder.getI32Type(), 0).value;
}

Operation *mlir::moe::foldIntoTable(AdjacencyUpdateOp op, OpBuilder &builder,
                                    ValueRange operands, Value table) {
  AdjacencyUpdateOp::Adaptor adaptor(operands, op);
  return CoSelectionsOp::create(
      builder, op.getLoc(), TypeRange{table.getType()}, adaptor.getIndices(),
      adaptor.getMask(), ValueRange{table});
}

Value mlir::moe::finishTables(AdjacencyUpdateOp op, OpBuilder &builder,
                              Value tables) {
  using namespace adjacency;
  Domain domain(builder, op);
  int64_t part =
      domain.addDim(linalg::createFoldedDimOp(builder, op.getLoc(), tables, 0));
  Type i64 = builder.getI64Type();
  Access counts = domain.reduce({domain.at(tables, {part, e, l})},
                                domain.filled({e, l}, i64, 0),
                                [&](Body &b, ValueRange in, Value acc) {
                                  return b.add(acc, b.castInt(in[0], i64));
                                });
  return buildNewGraph(domain, op, counts);
}

//===----------------------------------------------------------------------===//
// CoSelectionsOp
//===----------------------------------------------------------------------===//

/// selected_ne = whether the real token n selected expert e, however often.
static Access buildSelected(Domain &domain, CoSelectionsOp op) {
  using namespace adjacency;
  SmallVector<Access> ins{domain.at(op.getIndices(), {n, k})};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), {n}));
  return domain.reduce(
      ins, domain.filled({n, e}, false), [](Body &b, ValueRange in, Value acc) {
        Value hit = b.equal(in[0], b.castInt(b.iteration(e), in[0].getType()));
        return b.either(acc, in.size() == 1 ? hit : b.both(hit, in[1]));
      });
}

Replacements mlir::moe::decompose(CoSelectionsOp op, OpBuilder &builder) {
  using namespace adjacency;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Access selected = buildSelected(domain, op);
  // C_el += the number of tokens that selected both e and l.
  Access counts =
      domain.reduce({selected, domain.at(selected.value, {n, l})},
                    domain.at(op.getOuts()[0], {e, l}),
                    [](Body &b, ValueRange in, Value acc) {
                      return count(b, acc.getType(), acc, b.both(in[0], in[1]));
                    });
  return SmallVector<Value>{counts.value};
}
