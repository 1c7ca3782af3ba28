//===- Dispersion.cpp - moe.mad_dispersion on vectors ---------------------===//
//
// Matches moe.mad_dispersion on buffers with contiguous rows. Tokens are sorted
// by cluster first, by counting; then each pair of a cluster and a slab of
// columns is independent, and pairs run in parallel. A pair reads its part of
// the cluster's rows twice, once for the mean and once for the deviations from
// it, with all sums in registers; the second time it lies in the cache. A row's
// part of a slab is too short for the hardware to see what comes next, so each
// pass fetches half of what the next pair reads.
//
// Four rows are added in f32, as (a + b) + (c + d), and then to a sum in f64,
// so that a large common offset costs no accuracy. The order of a cluster's
// tokens alone decides the bits.
//
// The pairwise measure adds |h_n - h_m| over the pairs of a cluster, which is
// quadratic in the cluster's size.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Rows that are added before they go into a sum.
static constexpr int64_t kRowsInF32 = 4;

namespace {
/// What the next pair reads: `column`s of the tokens that stand `shift` further
/// in the sorted order.
struct NextPair {
  Value shift, column;
};

/// The tokens of clusters, sorted by cluster.
class ClusterOrder {
public:
  /// `count` gets the clusters' sizes.
  ClusterOrder(Emitter &e, MadDispersionOp op, Value numTokens,
               Value numClusters, Value count)
      : e(e), op(op), numTokens(numTokens), numClusters(numClusters),
        count(count) {}

  void sort();
  void free();
  /// Where a cluster begins in the order; the token at a position of it.
  Value getBegin(Value cluster) { return e.toIndex(e.load(starts, {cluster})); }
  Value getToken(Value position) {
    return e.toIndex(e.load(order, {position}));
  }

  Value numPlaced;

private:
  Value readCluster(Value token);
  void forEachToken(function_ref<void(Value token, Value cluster)> body);
  void countClusters();
  void sortTokens();
  Value number(int64_t value) { return e.constantInt(e.getI32Type(), value); }

  Emitter &e;
  MadDispersionOp op;
  const Value numTokens, numClusters, count;
  Value order, starts;
};

class DispersionKernel {
public:
  DispersionKernel(Emitter &e, MadDispersionOp op)
      : e(e), op(op), slabVectors(e.target.vectorRegisters / 4) {}
  void emit();

private:
  // A cluster and some columns.
  void emitPair(Value cluster, Value piece);
  NextPair findNext(Value cluster, Value piece);
  void fetchRow(NextPair next, Value position, int64_t firstVector,
                int64_t numVectors);
  void emitColumns(Value cluster, Value firstColumn, int64_t numVectors,
                   Value lastMask, std::optional<NextPair> next = {});
  void divideAndStore(ValueRange sums, Value divisor, Value isEmpty,
                      Value memref, Value cluster, Value firstColumn,
                      Value lastMask);

  // Sums over the rows of a cluster.
  Values loadRow(Value position, Value firstColumn, int64_t numVectors,
                 Value lastMask);
  Values addRows(Value begin, Value end, ValueRange sums,
                 function_ref<Values(Value position)> getRow);
  Values sumDeviations(Value begin, Value end, ValueRange means,
                       function_ref<Values(Value position)> getRow);
  Values sumPairs(Value begin, Value end, int64_t numVectors,
                  function_ref<Values(Value position)> getRow);

  VectorType doubles() { return e.vectorOf(e.getF64Type()); }

  Emitter &e;
  MadDispersionOp op;
  /// Vectors of a slab: their sums in f64 fill half of the registers.
  const int64_t slabVectors;
  Value numColumns, numWhole;
  Value spread, mean, count;
  std::optional<ClusterOrder> order;
};
} // namespace

//===----------------------------------------------------------------------===//
// Sorting
//===----------------------------------------------------------------------===//

/// The cluster of a token, -1 for none.
Value ClusterOrder::readCluster(Value token) {
  Value cluster = e.toIndex(e.load(op.getAssign(), {token}));
  // As an unsigned number a negative one is large.
  Value isCluster = e.compare(arith::CmpIPredicate::ult, cluster, numClusters);
  if (Value mask = op.getMask())
    isCluster = e.both(isCluster, e.load(mask, {token}));
  return e.select(isCluster, cluster, e.index(-1));
}

void ClusterOrder::forEachToken(function_ref<void(Value, Value)> body) {
  e.loop(e.index(0), numTokens, 1, [&](Value token) {
    Value cluster = readCluster(token);
    e.ifThen(e.compare(arith::CmpIPredicate::sge, cluster, e.index(0)),
             [&] { body(token, cluster); });
  });
}

/// The clusters' sizes.
void ClusterOrder::countClusters() {
  e.loop(e.index(0), numClusters, 1,
         [&](Value cluster) { e.store(number(0), count, {cluster}); });
  forEachToken([&](Value, Value cluster) {
    e.store(e.add(e.load(count, {cluster}), number(1)), count, {cluster});
  });
}

/// Stable, so that the tokens of a cluster keep their order. While tokens are
/// placed, `starts` holds where the next one of a cluster goes.
void ClusterOrder::sortTokens() {
  Values placed = e.loop(e.index(0), numClusters, 1, {number(0)},
                         [&](Value cluster, ValueRange next) -> Values {
                           e.store(next[0], starts, {cluster});
                           return {e.add(next[0], e.load(count, {cluster}))};
                         });
  numPlaced = e.toIndex(placed[0]);
  forEachToken([&](Value token, Value cluster) {
    Value place = e.load(starts, {cluster});
    e.store(e.castInt(token, e.getI32Type()), order, {e.toIndex(place)});
    e.store(e.add(place, number(1)), starts, {cluster});
  });
  e.loop(e.index(0), numClusters, 1, [&](Value cluster) {
    Value size = e.load(count, {cluster});
    e.store(e.sub(e.load(starts, {cluster}), size), starts, {cluster});
  });
}

void ClusterOrder::sort() {
  auto allocate = [&](Value size) -> Value {
    return memref::AllocOp::create(
        e, MemRefType::get({ShapedType::kDynamic}, e.getI32Type()), size,
        e.getI64IntegerAttr(64));
  };
  order = allocate(numTokens);
  starts = allocate(numClusters);
  countClusters();
  sortTokens();
}

void ClusterOrder::free() {
  memref::DeallocOp::create(e, starts);
  memref::DeallocOp::create(e, order);
}

//===----------------------------------------------------------------------===//
// Sums over the rows of a cluster
//===----------------------------------------------------------------------===//

/// Vectors of the row at a position of the sorted order.
Values DispersionKernel::loadRow(Value position, Value firstColumn,
                                 int64_t numVectors, Value lastMask) {
  Value token = order->getToken(position);
  Values row;
  for (int64_t i = 0; i < numVectors; ++i)
    row.push_back(e.loadFloats(
        op.getH(), {token, e.add(firstColumn, e.index(i * e.width))},
        i + 1 == numVectors ? lastMask : Value()));
  return row;
}

/// sums + the rows at positions begin..end.
Values DispersionKernel::addRows(Value begin, Value end, ValueRange sums,
                                 function_ref<Values(Value)> getRow) {
  auto addWide = [&](ValueRange carried, ArrayRef<Value> terms) {
    Values next;
    for (auto [sum, term] : llvm::zip_equal(carried, terms))
      next.push_back(e.add(sum, arith::ExtFOp::create(e, doubles(), term)));
    return next;
  };
  Value rest = e.rest(e.sub(end, begin), kRowsInF32);
  Value wholeEnd = e.sub(end, rest);
  Values state =
      e.loop(begin, wholeEnd, kRowsInF32, sums,
             [&](Value position, ValueRange carried) {
               SmallVector<Values> rows;
               for (int64_t i = 0; i < kRowsInF32; ++i)
                 rows.push_back(getRow(e.add(position, e.index(i))));
               Values terms;
               for (size_t v = 0; v < carried.size(); ++v)
                 terms.push_back(e.add(e.add(rows[0][v], rows[1][v]),
                                       e.add(rows[2][v], rows[3][v])));
               return addWide(carried, terms);
             });
  return e.loop(wholeEnd, end, 1, state,
                [&](Value position, ValueRange carried) {
                  return addWide(carried, getRow(position));
                });
}

/// The sums of |h - mean| or its square.
Values DispersionKernel::sumDeviations(Value begin, Value end, ValueRange means,
                                       function_ref<Values(Value)> getRow) {
  bool isSquared = op.getMeasure() == DispersionMeasure::Variance;
  Values zeros(means.size(), e.constant(doubles(), 0.0));
  return addRows(begin, end, zeros, [&](Value position) {
    Values deviations;
    for (auto [x, centre] : llvm::zip_equal(getRow(position), means)) {
      Value deviation = e.sub(x, centre);
      deviations.push_back(isSquared ? e.mul(deviation, deviation)
                                     : e.abs(deviation));
    }
    return deviations;
  });
}

/// Twice the sums of |h_n - h_m| over the pairs of a token n and an earlier m:
/// the pair (m, n) counts as much.
Values DispersionKernel::sumPairs(Value begin, Value end, int64_t numVectors,
                                  function_ref<Values(Value)> getRow) {
  Values zeros(numVectors, e.constant(doubles(), 0.0));
  Values sums =
      e.loop(begin, end, 1, zeros, [&](Value position, ValueRange carried) {
        Values own = getRow(position);
        return addRows(begin, position, carried, [&](Value earlier) {
          Values distances;
          for (auto [x, y] : llvm::zip_equal(own, getRow(earlier)))
            distances.push_back(e.abs(e.sub(x, y)));
          return distances;
        });
      });
  for (Value &sum : sums)
    sum = e.add(sum, sum);
  return sums;
}

//===----------------------------------------------------------------------===//
// A cluster and some columns
//===----------------------------------------------------------------------===//

/// Writes sums / divisor, 0 for an empty cluster (E14).
void DispersionKernel::divideAndStore(ValueRange sums, Value divisor,
                                      Value isEmpty, Value memref,
                                      Value cluster, Value firstColumn,
                                      Value lastMask) {
  Value by = e.splat(divisor);
  for (auto [i, sum] : llvm::enumerate(sums)) {
    Value value = arith::TruncFOp::create(e, e.floats(), e.div(sum, by));
    e.storeVector(e.select(isEmpty, e.f32(0.0), value), memref,
                  {cluster, e.add(firstColumn, e.index(i * e.width))},
                  i + 1 == sums.size() ? lastMask : Value());
  }
}

void DispersionKernel::emitColumns(Value cluster, Value firstColumn,
                                   int64_t numVectors, Value lastMask,
                                   std::optional<NextPair> next) {
  Value size = e.load(count, {cluster});
  Value begin = order->getBegin(cluster);
  Value end = e.add(begin, e.toIndex(size));
  Value isEmpty = e.compare(arith::CmpIPredicate::eq, size,
                            e.constantInt(e.getI32Type(), 0));
  Value divisor = arith::SIToFPOp::create(e, e.getF64Type(), size);
  // Pass 0 is the one for the mean.
  int64_t pass = 0, half = numVectors / 2;
  auto getRow = [&](Value position) {
    if (next)
      fetchRow(*next, position, pass * half, half);
    return loadRow(position, firstColumn, numVectors, lastMask);
  };
  Values zeros(numVectors, e.constant(doubles(), 0.0));
  divideAndStore(addRows(begin, end, zeros, getRow), divisor, isEmpty, mean,
                 cluster, firstColumn, lastMask);
  pass = 1;
  if (op.getMeasure() == DispersionMeasure::Pairwise)
    return divideAndStore(sumPairs(begin, end, numVectors, getRow),
                          e.mul(divisor, divisor), isEmpty, spread, cluster,
                          firstColumn, lastMask);
  Values means;
  for (int64_t i = 0; i < numVectors; ++i)
    means.push_back(
        e.loadFloats(mean, {cluster, e.add(firstColumn, e.index(i * e.width))},
                     i + 1 == numVectors ? lastMask : Value()));
  divideAndStore(sumDeviations(begin, end, means, getRow), divisor, isEmpty,
                 spread, cluster, firstColumn, lastMask);
}

NextPair DispersionKernel::findNext(Value cluster, Value piece) {
  Value after = e.add(piece, e.index(1));
  Value isLast = e.compare(arith::CmpIPredicate::sge, after, numWhole);
  Value size = e.toIndex(e.load(count, {cluster}));
  return {e.select(isLast, size, e.index(0)),
          e.select(isLast, e.index(0),
                   e.mul(after, e.index(slabVectors * e.width)))};
}

void DispersionKernel::fetchRow(NextPair next, Value position,
                                int64_t firstVector, int64_t numVectors) {
  Value last = e.sub(order->numPlaced, e.index(1));
  Value token = order->getToken(e.minSigned(e.add(position, next.shift), last));
  for (int64_t i = 0; i < numVectors; ++i)
    memref::PrefetchOp::create(
        e, op.getH(),
        ValueRange{token,
                   e.add(next.column, e.index((firstVector + i) * e.width))},
        /*isWrite=*/false, /*localityHint=*/2, /*isDataCache=*/true);
}

/// Piece `piece` of the columns: a slab, or behind the last slab the rest.
void DispersionKernel::emitPair(Value cluster, Value piece) {
  int64_t slab = slabVectors * e.width;
  int64_t size = cast<MemRefType>(spread.getType()).getDimSize(1);
  Value isWhole = e.compare(arith::CmpIPredicate::slt, piece, numWhole);
  Value first = e.mul(piece, e.index(slab));
  e.ifThen(isWhole, [&] {
    emitColumns(cluster, first, slabVectors, Value(), findNext(cluster, piece));
  });
  if (!ShapedType::isDynamic(size) && size % slab == 0)
    return;
  Value isRest = e.compare(arith::CmpIPredicate::sge, piece, numWhole);
  e.ifThen(isRest, [&] {
    if (!ShapedType::isDynamic(size)) {
      int64_t rest = size % slab, numVectors = llvm::divideCeil(rest, e.width);
      Value mask;
      if (int64_t last = rest % e.width)
        mask = e.firstLanes(e.index(last));
      return emitColumns(cluster, first, numVectors, mask);
    }
    e.loop(first, numColumns, e.width, [&](Value column) {
      emitColumns(cluster, column, 1, e.firstLanes(e.sub(numColumns, column)));
    });
  });
}

void DispersionKernel::emit() {
  spread = op.getOuts()[0];
  mean = op.getOuts()[1];
  count = op.getOuts()[2];
  Value numTokens = e.dim(op.getH(), 0);
  numColumns = e.dim(op.getH(), 1);
  Value numClusters = e.dim(spread, 0);
  order.emplace(e, op, numTokens, numClusters, count);
  order->sort();
  Value slab = e.index(slabVectors * e.width);
  numWhole = arith::DivSIOp::create(e, numColumns, slab);
  Value numPieces = arith::CeilDivSIOp::create(e, numColumns, slab);
  e.parallel(e.mul(numClusters, numPieces), [&](Value pair) {
    emitPair(arith::DivSIOp::create(e, pair, numPieces),
             arith::RemSIOp::create(e, pair, numPieces));
  });
  order->free();
}

void mlir::moe::populateDispersionToCPUPatterns(RewritePatternSet &patterns,
                                                const CPUTarget &options) {
  patterns.add<KernelPattern<MadDispersionOp, DispersionKernel>>(
      patterns.getContext(), options);
}
