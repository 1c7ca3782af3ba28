//===- TopKKernel.h - Parts of moe.topk_renorm on vectors -------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_SELECTION_TOPKKERNEL_H
#define MOE_LIB_CONVERSION_MOETOCPU_SELECTION_TOPKKERNEL_H

#include "Emit/Emitter.h"

#include "MoE/Dialect/MoE/IR/ChoiceOrder.h"
#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"
#include "MoE/Dialect/MoE/Utils/SortableKeys.h"

namespace mlir::moe {

/// Above this many places the list moves from registers to a stack buffer.
inline constexpr int64_t kMaxRegisterPlaces = 16;

/// Up to that many experts the keys of a whole row are staged on the stack.
inline constexpr int64_t kMaxRowExperts = 8192;

/// Up to that many experts a filter comes in front of the list.
inline constexpr int64_t kMaxFilterExperts = 1024;

/// `max`, or 0 for a row without support, so that -inf - max stays -inf.
inline Value getShift(Emitter &e, Value max) {
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, max, e.negInfinity());
  return e.select(isEmpty, e.f32(0.0), max);
}

//===----------------------------------------------------------------------===//
// Lanes
//===----------------------------------------------------------------------===//

/// The lanes of `mask`, moved to the front.
Value compressLanes(Emitter &e, Value vector, Value mask);

/// How many lanes of `mask` are set, as an i32.
Value countLanes(Emitter &e, Value mask);

//===----------------------------------------------------------------------===//
// Places
//===----------------------------------------------------------------------===//

/// One of the k places: a constant where they are unrolled.
struct Place {
  int64_t constant = 0;
  Value dynamic;
  Value get(Emitter &e) const { return dynamic ? dynamic : e.index(constant); }
};

/// A vector a place, in registers or in a buffer.
class Places {
public:
  Places() = default;
  Places(Emitter &e, int64_t count, Type type) {
    if (count <= kMaxRegisterPlaces)
      registers.resize(count);
    else
      buffer = e.scratch({e.getIndexAttr(count)}, type);
  }
  explicit Places(ValueRange values) : registers(values) {}

  Value get(Emitter &e, Place place) const {
    return buffer ? e.load(buffer, {place.get(e)}) : registers[place.constant];
  }
  void set(Emitter &e, Place place, Value value) {
    if (buffer)
      e.store(value, buffer, {place.get(e)});
    else
      registers[place.constant] = value;
  }
  bool areRegisters() const { return !buffer; }
  ArrayRef<Value> getRegisters() const { return registers; }

private:
  Values registers;
  Value buffer;
};

/// The sorted list of the best keys of each lane, and whose they are.
struct BestList {
  Places keys, experts;
};

/// What is known about the whole row of each lane.
struct RowStats {
  Value hasNaN;
  Value max;
  /// sum_e exp(x_e - max), where a softmax over all experts is needed.
  Value sumExp;
};

/// Where a block of tokens lies.
struct TokenBlock {
  /// Index of the first token.
  Value first;
  /// The token of each lane; in a partial block the last token again.
  Values rows;
  /// Lanes that hold a token; null where all do for sure.
  Value exists;
  /// Tokens further on, whose scores are fetched already; none for the last
  /// block.
  Values ahead;
};

class TopKKernel {
public:
  TopKKernel(Emitter &e, TopKRenormOp op)
      : e(e), op(op), function(op.getScoreFunction()), k(op.getNumSelected()),
        renorm(op.getRenorm()), eps(op.getEps().convertToDouble()),
        isForced(static_cast<bool>(op.getForced())),
        isStaged(!isForced && (op.getSelectBias() || op.getNGroup() > 1)),
        isByRow(!isForced && !isStaged && k > kMaxRegisterPlaces &&
                op.getNumExperts() <= kMaxRowExperts &&
                !ShapedType::isDynamic(op.getNumExperts())),
        isFiltered(!isForced && !isStaged && paysToFilter()) {}

  void emit();

private:
  void emitRows(ValueRange leading);
  int64_t getFetchDistance();
  TokenBlock getPartialBlock(Value first);
  void emitBlock(TokenBlock block);

  // Reading.
  Value loadChunk(const TokenBlock &block, Value column, Value mask,
                  Values &columns);
  Values forEachExpert(
      const TokenBlock &block, ValueRange carried,
      function_ref<Values(Value expert, Value exists, Value x, ValueRange)>
          body,
      bool isFirstPass = false);
  Values forEachPlace(ValueRange carried,
                      function_ref<Values(Place, ValueRange)> body);
  Value gatherScores(const TokenBlock &block, Value experts, Value valid);
  Value getTokenMask(const TokenBlock &block);

  // Selecting.
  Values insert(ValueRange list, Value key, Value expert);
  BestList makeBestList();
  BestList select(const TokenBlock &block, RowStats &stats);
  BestList selectByRow(const TokenBlock &block, RowStats &stats);
  BestList selectFiltered(const TokenBlock &block, RowStats &stats);
  Values enterTransposed(
      Value scoreLists, Value expertLists, Value end, Value lastLane,
      ValueRange list,
      function_ref<Values(Value entry, Value scores, Value experts, ValueRange)>
          enter);
  bool paysToFilter();
  BestList selectStaged(RowStats &stats);
  Values loadForced(const TokenBlock &block, Place place);
  BestList readForced(const TokenBlock &block);
  Places getIds(const TokenBlock &block, BestList &best);
  void stageChoice(const TokenBlock &block, RowStats &stats);
  RowStats computeStats(const TokenBlock &block);
  Value sumExp(const TokenBlock &block, Value max);

  // Weighing.
  bool needsRowSum() const {
    return function == ScoreFunction::Softmax &&
           (!renorm || eps != 0.0 || (isStaged && !isOrderedByGivenScores(op)));
  }
  /// softmax over the selected of ln s, which needs no eps and divides no 0/0.
  bool weighsInLogSpace() const {
    return renorm && eps == 0.0 && hasLogScore(function);
  }
  Value applyScore(Value x, const RowStats &stats);
  Places computeGates(const TokenBlock &block, BestList &best,
                      const RowStats &stats);
  Value normalise(Value weight, Value sum);

  // Writing.
  void writeResults(const TokenBlock &block, Places &gates, Places &ids);
  void writeInterleaved(const TokenBlock &block, Value rows, Places &places);

  Emitter &e;
  TopKRenormOp op;
  const ScoreFunction function;
  const int64_t k;
  const bool renorm;
  const double eps;
  const bool isForced;
  /// Whether keys of the choice scores are staged in `stage` before the
  /// selection.
  const bool isStaged;
  /// Whether experts are selected a token at a time (TopKRowSelect.cpp).
  const bool isByRow;
  /// Whether most experts are dropped before the list (TopKFilter.cpp).
  const bool isFiltered;

  // 2-D views of the rows at hand.
  Value scores, forced, mask, gates, indices;
  /// Rows from this one on are padding; null where there is no num_valid.
  Value validEnd;
  Value numTokens, numExperts;
  Value stage;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_SELECTION_TOPKKERNEL_H
