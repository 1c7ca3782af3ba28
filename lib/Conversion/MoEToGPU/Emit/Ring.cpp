//===- Ring.cpp - Where producers and consumers meet ----------------------===//

#include "Ring.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Slots
//===----------------------------------------------------------------------===//

void Ring::initBarriers(WarpgroupBuilder &b, int64_t numEmptying) const {
  for (int64_t slot = 0; slot < slots; ++slot) {
    b.initBarrier(getFull(b, b.i32(slot)), numFilling);
    b.initBarrier(getEmpty(b, b.i32(slot)), numEmptying);
  }
}

void Ring::waitForEmpty(WarpgroupBuilder &b, Value use) const {
  Value parity = getParity(b, use);
  b.waitFor(getEmpty(b, use), b.op<arith::XOrIOp>(parity, b.i32(1)));
}

void Ring::waitForFull(WarpgroupBuilder &b, Value use) const {
  b.waitFor(getFull(b, use), getParity(b, use));
  b.fenceProducts();
}

void Ring::release(WarpgroupBuilder &b, Value use, Value lane) const {
  b.syncWarp();
  b.arrive(getEmpty(b, use),
           b.compare(arith::CmpIPredicate::eq, lane, b.i32(0)));
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

static SmallVector<Value> addAll(WarpBuilder &b, ArrayRef<Value> sums,
                                 ArrayRef<Value> terms) {
  return llvm::map_to_vector(llvm::zip_equal(sums, terms), [&](auto pair) {
    return b.add(std::get<0>(pair), std::get<1>(pair));
  });
}

SmallVector<Value> RingProducts::multiply(Value use, int64_t count,
                                          ValueRange totals,
                                          GetProducts getProducts) const {
  SmallVector<Value> sums(totals), part;
  auto finish = [&](Value ownUse, int64_t pending) {
    if (isExact)
      part = b.waitForProducts(part, pending);
    else if (pending > 0)
      b.waitForProducts({}, pending);
    else
      sums = b.waitForProducts(sums, pending);
    ring.release(b, ownUse, lane);
    if (isExact)
      sums = sums.empty() ? part : addAll(b, sums, part);
  };
  Value lastUse;
  for (int64_t i = 0; i < count; ++i) {
    ring.waitForFull(b, use);
    SmallVector<Value> started = b.startProducts(
        getProducts(use, i), isExact ? ValueRange() : ValueRange(sums), columns,
        element);
    if (!isExact)
      sums = started;
    if (i > 0)
      finish(lastUse, /*pending=*/1);
    part = started;
    lastUse = use;
    use = b.add(use, b.i32(1));
  }
  finish(lastUse, /*pending=*/0);
  return sums;
}
