//===- Dispersion.cpp - moe.mad_dispersion on vectors ---------------------===//
//
// Matches moe.mad_dispersion on buffers with contiguous rows. Columns are cut
// into slabs, which are independent and run in parallel; inside a slab rows
// are read in order, twice: once for the means, once for the deviations from
// them. Sums live in a table of one row a cluster and are kept in f64, so that
// a large common offset costs no accuracy and the fixed order of the tokens is
// the only thing that decides the bits.
//
// The pairwise measure adds |h_n - h_m| over the pairs of a cluster, which is
// quadratic in the cluster's size.
//
//===----------------------------------------------------------------------===//

#include "Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

/// Columns of a slab: the table of 64 clusters is 128 KiB.
static constexpr int64_t kSlabColumns = 256;

namespace {
class DispersionKernel {
public:
  DispersionKernel(Emitter &e, MadDispersionOp op) : e(e), op(op) {}
  void emit();

private:
  Value readCluster(Value token);
  void countClusters();
  void emitSlab(Value firstColumn);
  void clearTable();
  void forEachToken(function_ref<void(Value token, Value cluster)> body);
  void
  forEachVector(function_ref<void(Value local, Value column, Value mask)> body);
  void addToTable(Value cluster, Value local, Value vector);
  void writeTable(Value memref, function_ref<Value(Value count)> divisor);
  void addDeviations(Value token, Value cluster);
  void addPairs(Value token, Value cluster);

  Value loadRow(Value token, Value column, Value mask) {
    return e.loadFloats(op.getH(), {token, column}, mask);
  }
  VectorType doubles() { return e.vectorOf(e.getF64Type()); }

  Emitter &e;
  MadDispersionOp op;
  Value numTokens, numColumns, numClusters;
  Value spread, mean, count;
  /// f64 sums of the slab at hand.
  Value table, firstColumn, endColumn;
};
} // namespace

/// The cluster of a token, -1 for none.
Value DispersionKernel::readCluster(Value token) {
  Value cluster = e.toIndex(e.load(op.getAssign(), {token}));
  // As an unsigned number a negative one is large.
  Value isCluster = e.compare(arith::CmpIPredicate::ult, cluster, numClusters);
  if (Value mask = op.getMask())
    isCluster = e.both(isCluster, e.load(mask, {token}));
  return e.select(isCluster, cluster, e.index(-1));
}

/// The clusters' sizes.
void DispersionKernel::countClusters() {
  e.loop(e.index(0), numClusters, 1, [&](Value cluster) {
    e.store(e.constantInt(e.getI32Type(), 0), count, {cluster});
  });
  forEachToken([&](Value, Value cluster) {
    Value one = e.constantInt(e.getI32Type(), 1);
    e.store(e.add(e.load(count, {cluster}), one), count, {cluster});
  });
}

void DispersionKernel::forEachToken(function_ref<void(Value, Value)> body) {
  e.loop(e.index(0), numTokens, 1, [&](Value token) {
    Value cluster = readCluster(token);
    e.ifThen(e.compare(arith::CmpIPredicate::sge, cluster, e.index(0)),
             [&] { body(token, cluster); });
  });
}

/// Calls `body` for each vector of the slab's columns: its offset in the slab,
/// its column, and the lanes that are columns.
void DispersionKernel::forEachVector(
    function_ref<void(Value, Value, Value)> body) {
  Value width = e.sub(endColumn, firstColumn);
  Value rest = arith::RemSIOp::create(e, width, e.index(e.width));
  Value wholeEnd = e.sub(width, rest);
  e.loop(e.index(0), wholeEnd, e.width,
         [&](Value local) { body(local, e.add(firstColumn, local), Value()); });
  Value hasRest = e.compare(arith::CmpIPredicate::ne, rest, e.index(0));
  e.ifThen(hasRest, [&] {
    body(wholeEnd, e.add(firstColumn, wholeEnd), e.firstLanes(rest));
  });
}

void DispersionKernel::clearTable() {
  e.loop(e.index(0), numClusters, 1, [&](Value cluster) {
    forEachVector([&](Value local, Value, Value) {
      e.storeVector(e.constant(doubles(), 0.0), table, {cluster, local});
    });
  });
}

void DispersionKernel::addToTable(Value cluster, Value local, Value vector) {
  Value sum = e.loadVector(table, {cluster, local});
  Value wide = arith::ExtFOp::create(e, doubles(), vector);
  e.storeVector(e.add(sum, wide), table, {cluster, local});
}

/// Writes table / divisor(count), 0 for an empty cluster (E14).
void DispersionKernel::writeTable(Value memref,
                                  function_ref<Value(Value)> divisor) {
  e.loop(e.index(0), numClusters, 1, [&](Value cluster) {
    Value size = e.load(count, {cluster});
    Value isEmpty = e.compare(arith::CmpIPredicate::eq, size,
                              e.constantInt(e.getI32Type(), 0));
    Value wide = arith::SIToFPOp::create(e, e.getF64Type(), size);
    Value by = e.splat(divisor(wide));
    forEachVector([&](Value local, Value column, Value mask) {
      Value sum = e.loadVector(table, {cluster, local});
      Value value = arith::TruncFOp::create(e, e.floats(), e.div(sum, by));
      e.storeVector(e.select(isEmpty, e.f32(0.0), value), memref,
                    {cluster, column}, mask);
    });
  });
}

/// |h - mean| or its square, added for one token.
void DispersionKernel::addDeviations(Value token, Value cluster) {
  forEachVector([&](Value local, Value column, Value mask) {
    Value centre = e.loadFloats(mean, {cluster, column}, mask);
    Value deviation = e.sub(loadRow(token, column, mask), centre);
    deviation = op.getMeasure() == DispersionMeasure::Variance
                    ? e.mul(deviation, deviation)
                    : e.abs(deviation);
    addToTable(cluster, local, deviation);
  });
}

/// |h_n - h_m| of one token n with every earlier token m of its cluster. The
/// pair (m, n) counts as much, hence twice.
void DispersionKernel::addPairs(Value token, Value cluster) {
  e.loop(e.index(0), token, 1, [&](Value other) {
    Value isSame =
        e.compare(arith::CmpIPredicate::eq, readCluster(other), cluster);
    e.ifThen(isSame, [&] {
      forEachVector([&](Value local, Value column, Value mask) {
        Value distance = e.abs(
            e.sub(loadRow(token, column, mask), loadRow(other, column, mask)));
        addToTable(cluster, local, e.add(distance, distance));
      });
    });
  });
}

void DispersionKernel::emitSlab(Value slab) {
  firstColumn = e.mul(slab, e.index(kSlabColumns));
  endColumn = e.minIndex(e.add(firstColumn, e.index(kSlabColumns)), numColumns);
  auto type = cast<MemRefType>(spread.getType());
  e.withScratch(type.isDynamicDim(0), [&] {
    table = e.scratch({getSize(e, spread, 0), e.getIndexAttr(kSlabColumns)},
                      e.getF64Type());
    clearTable();
    forEachToken([&](Value token, Value cluster) {
      forEachVector([&](Value local, Value column, Value mask) {
        addToTable(cluster, local, loadRow(token, column, mask));
      });
    });
    writeTable(mean, [](Value size) { return size; });
    clearTable();
    bool isPairwise = op.getMeasure() == DispersionMeasure::Pairwise;
    forEachToken([&](Value token, Value cluster) {
      isPairwise ? addPairs(token, cluster) : addDeviations(token, cluster);
    });
    writeTable(spread, [&](Value size) {
      return isPairwise ? e.mul(size, size) : size;
    });
  });
}

void DispersionKernel::emit() {
  spread = op.getOuts()[0];
  mean = op.getOuts()[1];
  count = op.getOuts()[2];
  numTokens = e.dim(op.getH(), 0);
  numColumns = e.dim(op.getH(), 1);
  numClusters = e.dim(spread, 0);
  countClusters();
  Value numSlabs =
      arith::CeilDivSIOp::create(e, numColumns, e.index(kSlabColumns));
  e.parallel(numSlabs, [&](Value slab) { emitSlab(slab); });
}

namespace {
/// moe.mad_dispersion on buffers -> two passes over the rows.
struct MadDispersionToVector : OpRewritePattern<MadDispersionOp> {
  MadDispersionToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(MadDispersionOp op,
                                PatternRewriter &rewriter) const override {
    if (failed(matchContiguousBuffers(op, rewriter)))
      return failure();
    Emitter emitter(op.getLoc(), rewriter, options);
    DispersionKernel(emitter, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateDispersionToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options) {
  patterns.add<MadDispersionToVector>(patterns.getContext(), options);
}
