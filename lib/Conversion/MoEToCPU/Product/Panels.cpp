//===- Panels.cpp - The right operand as panels of columns ----------------===//

#include "Panels.h"

using namespace mlir;
using namespace mlir::moe;

RhsPanels::RhsPanels(const ProductProblem &problem, const PanelGroup &group)
    : problem(problem), e(problem.e) {
  if (problem.rhs.layout == RhsLayout::Panels)
    return;
  const int64_t shape[] = {group.mostPanels, problem.getPackedKsOfChain(),
                           group.numVectors * e.width};
  if (problem.usesTiles)
    std::tie(packed, elements) = e.scratchPairs(shape);
  else
    packed = e.scratch(getAsIndexOpFoldResult(e.getContext(), shape),
                       problem.getPackedType());
}

Panel RhsPanels::get(const PanelGroup &group, Value slot, Value k) const {
  const PanelShape &shape = problem.shape;
  int64_t numVectors = group.numVectors;
  Value column =
      e.add(group.column, e.mul(slot, e.index(shape.getNumColumns())));
  Panel panel{column, k, slot, numVectors, Values(numVectors), packed, {}};
  if (group.hasTail)
    panel.masks = shape.getMasks(column, numVectors);
  if (packed) {
    panel.at = [=, this](Value packedK, int64_t vector) {
      return Values{slot, packedK, e.index(vector * e.width)};
    };
    return panel;
  }
  Value first = arith::DivSIOp::create(e, k, e.index(problem.getRhsKPack()));
  panel.memref = problem.rhs.memref;
  panel.at = [=, this](Value packedK, int64_t vector) {
    return problem.rhs.at(e.add(first, packedK),
                          problem.shape.getColumn(column, numVectors, vector));
  };
  return panel;
}

void RhsPanels::pack(const Panel &panel, Value count) const {
  switch (problem.rhs.layout) {
  case RhsLayout::NContiguous:
    return packNContiguous(panel, count);
  case RhsLayout::KContiguous:
    return packKContiguous(panel, count);
  case RhsLayout::Panels:
    return; // which are read where they lie
  }
}

//===----------------------------------------------------------------------===//
// Pairs of bf16
//===----------------------------------------------------------------------===//

/// Vectors of two ks each as two of f32: a bf16 is the upper half of one.
std::pair<Value, Value> RhsPanels::splitPairs(Value pairs) const {
  Value low = arith::ShLIOp::create(e, pairs, e.i32(16));
  Value high = arith::AndIOp::create(e, pairs, e.i32(0xffff0000));
  return {e.bitcast(low, e.getF32Type()), e.bitcast(high, e.getF32Type())};
}

/// A block of pairs, if they are any, as two vectors of f32 each.
Values RhsPanels::splitBlock(ValueRange block) const {
  if (!getElementType(problem.rhs.memref).isBF16() || problem.usesBf16Dot)
    return Values(block);
  Values split;
  for (Value pairs : block) {
    auto [low, high] = splitPairs(pairs);
    split.append({low, high});
  }
  return split;
}

/// A pair is one index of the buffer, and two of what lies as panels.
TileSource RhsPanels::getTile(const Panel &panel, int64_t vector) const {
  Value memref = elements;
  if (!packed)
    memref = memref::CollapseShapeOp::create(
        e, panel.memref, ArrayRef<ReassociationIndices>{{0}, {1}, {2}, {3, 4}});
  return {memref, [=, this](Value packedK) {
            Values at = panel.at(packedK, vector);
            if (!packed)
              at.pop_back();
            at.back() = e.mul(at.back(), e.index(2));
            return at;
          }};
}

SmallVector<Values> RhsPanels::loadColumns(const Panel &panel,
                                           Value packedK) const {
  Type element = getElementType(panel.memref);
  SmallVector<Values> columns(problem.usesBf16Dot ? 1 : problem.getRhsKPack());
  for (int64_t vector = 0; vector < panel.numVectors; ++vector) {
    Values at = panel.at(packedK, vector);
    if (!element.isBF16()) {
      columns[0].push_back(element.isF16() ? e.loadFloats(panel.memref, at)
                                           : e.loadVector(panel.memref, at));
      continue;
    }
    Value pairs = e.loadPairs(panel.memref, at);
    if (problem.usesBf16Dot) {
      columns[0].push_back(pairs);
      continue;
    }
    auto [low, high] = splitPairs(pairs);
    columns[0].push_back(low);
    columns[1].push_back(high);
  }
  return columns;
}

//===----------------------------------------------------------------------===//
// From columns that lie side by side
//===----------------------------------------------------------------------===//

void RhsPanels::packNContiguous(const Panel &panel, Value count) const {
  const ProductRhs &rhs = problem.rhs;
  auto load = [&](Value k, int64_t vector) {
    Value column =
        problem.shape.getColumn(panel.column, panel.numVectors, vector);
    k = e.add(panel.k, k);
    Value floats =
        e.loadFloats(rhs.memref, rhs.at(k, column), panel.masks[vector]);
    if (rhs.isMissing)
      floats = e.select(rhs.isMissing(k), e.f32(0.0), floats);
    return floats;
  };
  if (!problem.usesBf16Dot) {
    e.loop(e.index(0), count, 1, [&](Value k) {
      for (int64_t vector = 0; vector < panel.numVectors; ++vector)
        e.storeVector(load(k, vector), panel.memref, panel.at(k, vector));
    });
    return;
  }
  // The upper halves of two f32 are what they were as bf16.
  Value last = e.sub(count, e.index(1));
  Value numPairs = arith::CeilDivSIOp::create(e, count, e.index(2));
  e.loop(e.index(0), numPairs, 1, [&](Value pair) {
    Value first = e.mul(pair, e.index(2)), second = e.add(first, e.index(1));
    Value exists = e.compare(arith::CmpIPredicate::sle, second, last);
    second = e.minSigned(second, last);
    for (int64_t vector = 0; vector < panel.numVectors; ++vector) {
      Value low = e.bitcast(load(first, vector), e.getI32Type());
      Value high = e.bitcast(load(second, vector), e.getI32Type());
      high = e.select(exists, high, e.i32(0));
      low = arith::ShRUIOp::create(e, low, e.i32(16));
      e.storeVector(arith::OrIOp::create(e, low, high), panel.memref,
                    panel.at(pair, vector));
    }
  });
}

//===----------------------------------------------------------------------===//
// From ks that lie side by side
//===----------------------------------------------------------------------===//

void RhsPanels::forEachBlock(
    Value count, function_ref<void(Value first, Value rest)> body) const {
  int64_t size = problem.getLaneKPack() * e.width;
  Value rest = e.rest(count, size), wholeEnd = e.sub(count, rest);
  e.loop(e.index(0), wholeEnd, size,
         [&](Value first) { body(first, Value()); });
  std::optional<int64_t> constant = getConstantIntValue(rest);
  if (!constant || *constant != 0)
    e.ifThen(e.compare(arith::CmpIPredicate::ne, rest, e.index(0)),
             [&] { body(wholeEnd, rest); });
}

Values RhsPanels::loadBlock(const Panel &panel, Value offset, Value first,
                            Value rest) const {
  const ProductRhs &rhs = problem.rhs;
  Type element = getElementType(rhs.memref);
  auto [column, last] =
      problem.shape.getColumnAt(panel.column, panel.numVectors, offset);
  Values lanes;
  for (int64_t lane = 0; lane < e.width; ++lane) {
    Value position = e.add(column, e.index(lane));
    if (panel.masks.front())
      position = e.minSigned(position, last);
    Values at = rhs.at(e.add(panel.k, first), position);
    if (!element.isBF16()) {
      lanes.push_back(
          e.loadFloats(rhs.memref, at, rest ? e.firstLanes(rest) : Value()));
      continue;
    }
    lanes.push_back(e.loadPairs(rhs.memref, at, rest));
  }
  return splitBlock(transposeLanes(e, lanes));
}

void RhsPanels::storeBlock(const Panel &panel, ValueRange block, Value packedK,
                           Value offset, Value rest) const {
  int64_t kPack = problem.usesBf16Dot ? 2 : 1;
  for (auto [number, columns] : llvm::enumerate(block)) {
    auto store = [&] {
      e.storeVector(columns, packed,
                    {panel.slot, e.add(packedK, e.index(number)), offset});
    };
    if (rest)
      e.ifThen(
          e.compare(arith::CmpIPredicate::slt, e.index(kPack * number), rest),
          store);
    else
      store();
  }
}

Value RhsPanels::loadOfBlock(Value packedK) const {
  Value zero = e.index(0);
  return e.loadVector(packed, {zero, packedK, zero});
}

void RhsPanels::packKContiguous(const Panel &panel, Value count) const {
  e.loop(e.index(0), e.index(panel.numVectors * e.width), e.width,
         [&](Value offset) {
           forEachBlock(count, [&](Value first, Value rest) {
             storeBlock(panel, loadBlock(panel, offset, first, rest),
                        problem.toPackedK(first), offset, rest);
           });
         });
}

/// Four lanes from memory: f32, or pairs of bf16.
static Value loadLanes(Emitter &e, Value memref, ValueRange at) {
  Type element = getElementType(memref);
  int64_t size = element.isBF16() ? 8 : 4;
  Value lanes =
      vector::LoadOp::create(e, VectorType::get({size}, element), memref, at);
  if (element.isBF16())
    return vector::BitCastOp::create(e, VectorType::get({4}, e.getI32Type()),
                                     lanes);
  return element.isF32() ? lanes
                         : Value(arith::ExtFOp::create(
                               e, VectorType::get({4}, e.getF32Type()), lanes));
}

/// A vector has the four lanes of one column, and behind them those of the
/// fourth column after it: half of the shuffles are part of loads.
Values RhsPanels::loadFourLanes(const Panel &panel, int64_t vector,
                                Value first) const {
  auto [column, last] = problem.shape.getColumnAt(
      panel.column, panel.numVectors, e.index(vector * e.width));
  auto load = [&](int64_t lane) {
    Value position = e.add(column, e.index(lane));
    if (panel.masks.front())
      position = e.minSigned(position, last);
    return loadLanes(e, problem.rhs.memref,
                     problem.rhs.at(e.add(panel.k, first), position));
  };
  Values rows;
  for (int64_t lane = 0; lane < 4; ++lane) {
    Value row = load(lane);
    if (e.width == 8)
      row = vector::ShuffleOp::create(
          e, row, load(lane + 4), llvm::to_vector(llvm::seq<int64_t>(0, 8)));
    rows.push_back(row);
  }
  return splitBlock(transposeInGroups(e, rows));
}
