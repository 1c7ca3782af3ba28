//===- SoftmaxMixPairGradients.cpp - Pairs in both of their roles ---------===//

#include "SoftmaxMixPairGradients.h"

using namespace mlir;
using namespace mlir::moe;

PairGradients::PairGradients(Emitter &e, KernelBuffers &buffers,
                             int64_t blockRows, GradientRole &asQuery,
                             GradientRole &asKey, PairSplits &splits,
                             const ScaledQueries &queries, bool hasMask)
    : e(e), asQuery(asQuery), asKey(asKey), splits(splits), queries(queries),
      hasMask(hasMask) {
  OpFoldResult rows = e.getIndexAttr(blockRows),
               columns = e.getIndexAttr(splits.blockColumns);
  weights = buffers.allocate({rows, columns});
  keyWeights = buffers.allocate({rows, columns});
  gradients = buffers.allocate({rows, columns});
}

//===----------------------------------------------------------------------===//
// A group of rows and a block of columns
//===----------------------------------------------------------------------===//

/// Which rows of a group a role has gradients of: of masked ones, whose
/// features may be NaN, it has none; null where there are no such rows.
Values PairGradients::findAlive(GradientRole &role, const Group &group) {
  Values alive(kGroupRows);
  if (hasMask)
    for (auto [isReal, token] : llvm::zip_equal(alive, group.tokens))
      isReal = role.isRowReal(token);
  return alive;
}

void PairGradients::forEachVector(
    function_ref<void(int64_t slot, int64_t vector, Values place)> body) {
  for (int64_t slot = 0; slot < kGroupRows; ++slot)
    for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
      body(slot, vector, {e.index(slot), e.index(vector * e.width)});
}

void PairGradients::buildWeights(GradientRole &role, const Group &group,
                                 const Tile &products, Value weights,
                                 ArrayRef<Value> alive) {
  for (auto [slot, token] : llvm::enumerate(group.tokens))
    role.buildWeights(slot, token, token, group.firstColumn, products[slot],
                      group.packedLevels, weights, alive[slot]);
}

/// Writes p of one role to `weights` and its part of t to the gradients, or
/// adds it there.
void PairGradients::addRole(GradientRole &role, const Group &group,
                            const Tile &products, Value weights, bool adds) {
  Values alive = findAlive(role, group);
  buildWeights(role, group, products, weights, alive);
  Tile values =
      multiplyTile(e, role.rows.values, group.tokens, role.packedValues);
  forEachVector([&](int64_t slot, int64_t vector, Values place) {
    Value dx = role.center(group.tokens[slot], vector, values[slot][vector]);
    dx = e.mul(e.loadVector(weights, place), dx);
    if (alive[slot])
      dx = e.select(alive[slot], dx, e.f32(0.0));
    if (adds)
      dx = e.add(e.loadVector(group.gradients, place), dx);
    e.storeVector(dx, group.gradients, place);
  });
}

/// The same for both roles at once, which share their weights.
void PairGradients::addBothRoles(const Group &group, const Tile &products,
                                 Value weights) {
  Values alive = findAlive(asQuery, group);
  buildWeights(asQuery, group, products, weights, alive);
  auto multiply = [&](GradientRole &role) {
    return multiplyTile(e, role.rows.values, group.tokens, role.packedValues);
  };
  Tile values = multiply(asQuery);
  forEachVector([&](int64_t slot, int64_t vector, Values place) {
    e.storeVector(
        asQuery.center(group.tokens[slot], vector, values[slot][vector]),
        group.gradients, place);
  });
  values = multiply(asKey);
  forEachVector([&](int64_t slot, int64_t vector, Values place) {
    Value dx = asKey.center(group.tokens[slot], vector, values[slot][vector]);
    dx = e.add(e.loadVector(group.gradients, place), dx);
    dx = e.mul(e.loadVector(weights, place), dx);
    if (alive[slot])
      dx = e.select(alive[slot], dx, e.f32(0.0));
    e.storeVector(dx, group.gradients, place);
  });
}

void PairGradients::clearGroup(Value tile) {
  forEachVector([&](int64_t, int64_t, Values place) {
    e.storeVector(e.f32(0.0), tile, place);
  });
}

/// Adds a role where it has visible pairs.
void PairGradients::addVisibleRole(GradientRole &role, const Group &group,
                                   const Tile &products, Value weights,
                                   bool adds) {
  Value visible =
      isTileVisible(e, role.logits.rule, group.first, group.firstColumn);
  if (!visible)
    return addRole(role, group, products, weights, adds);
  e.ifElse(
      visible, TypeRange(),
      [&]() -> Values {
        return addRole(role, group, products, weights, adds), Values();
      },
      [&]() -> Values {
        clearGroup(weights);
        if (!adds)
          clearGroup(group.gradients);
        return {};
      });
}

void PairGradients::emitGroup(
    Value firstRow, Value slot, Value firstColumn, Value packedLevels,
    function_ref<Tile(ArrayRef<Value> tokens)> getProducts) {
  Group group{e.add(firstRow, slot), firstColumn, packedLevels, {}, {}};
  // Slots behind the last row repeat it; nobody reads their sums.
  group.tokens = clampRows(e, group.first, kGroupRows, splits.numTokens);
  group.gradients = sliceFrom(e, gradients, slot);
  Tile products = getProducts(group.tokens);
  auto addEach = [&] {
    addVisibleRole(asQuery, group, products, sliceFrom(e, weights, slot),
                   /*adds=*/false);
    addVisibleRole(asKey, group, products, sliceFrom(e, keyWeights, slot),
                   /*adds=*/true);
    return Values();
  };
  if (!queries.isShared)
    return void(addEach());
  auto addBoth = [&] {
    addBothRoles(group, products, sliceFrom(e, weights, slot));
    return Values();
  };
  e.ifElse(queries.isShared, TypeRange(), addBoth, addEach);
}

//===----------------------------------------------------------------------===//
// A block of rows and a block of columns
//===----------------------------------------------------------------------===//

Value PairGradients::getKeyWeights() {
  return queries.isShared ? e.select(queries.isShared, weights, keyWeights)
                          : keyWeights;
}

void PairGradients::clearBehind(Value numRows) {
  Value last = e.sub(numRows, e.index(1));
  Value end = e.sub(e.add(last, e.index(kGroupRows)), e.rest(last, kGroupRows));
  e.loop(numRows, end, 1, [&](Value slot) {
    for (Value tile : {getKeyWeights(), gradients})
      for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
        e.storeVector(e.f32(0.0), tile, {slot, e.index(vector * e.width)});
  });
}

/// to[column, row] = from[row, column] for a vector of rows of a block's own
/// columns and a vector of columns.
void PairGradients::transposeTile(Value from, Value to, Value firstSlot,
                                  Value row, Value column) {
  Values lines;
  for (int64_t lane = 0; lane < e.width; ++lane)
    lines.push_back(e.loadVector(
        from, {e.add(e.add(firstSlot, row), e.index(lane)), column}));
  for (auto [lane, line] : llvm::enumerate(transposeLanes(e, lines)))
    e.storeVector(line, to,
                  {e.add(e.add(firstSlot, column), e.index(lane)), row});
}

void PairGradients::mirror(Value firstSlot) {
  Value zero = e.index(0), keys = getKeyWeights();
  e.loop(zero, e.index(splits.blockColumns), e.width, [&](Value column) {
    e.loop(zero, column, e.width, [&](Value row) {
      transposeTile(gradients, gradients, firstSlot, row, column);
      transposeTile(weights, keys, firstSlot, row, column);
    });
  });
}
