//===- MoEStructured.h - What all structured ops share ----------*- C++ -*-===//
//
// The parts of a structured op that follow from its dims and maps: effects,
// result sizes, and the verification that shapes agree.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOESTRUCTURED_H
#define MOE_DIALECT_MOE_IR_MOESTRUCTURED_H

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Builds the indexing maps of an op, one an operand, in operand order.
class MapsBuilder {
public:
  /// Stands in a list of dims for a dim of size 1 that is broadcast.
  static constexpr int64_t kBroadcast = -1;

  MapsBuilder(MLIRContext *context, unsigned numDims)
      : context(context), numDims(numDims) {}

  /// Adds the map of `operand`, unless it is an absent optional one.
  MapsBuilder &add(Value operand, ArrayRef<int64_t> dims = {});
  /// Adds the map of `operand`: dims 0..n-1, then `dims`.
  MapsBuilder &addWithLeading(Value operand, int64_t numLeading,
                              ArrayRef<int64_t> dims);
  ArrayAttr get() const { return Builder(context).getAffineMapArrayAttr(maps); }

private:
  MLIRContext *context;
  unsigned numDims;
  SmallVector<AffineMap> maps;
};

/// The dims of a `[b or 1, h or 1, i, j]` bias, where a size of 1 is broadcast.
SmallVector<int64_t> getBiasDims(Value bias, int64_t b, int64_t h, int64_t i,
                                 int64_t j);

/// The dims of values: `[b, j, e]` where all heads share them, `[b, h, j, e]`
/// where each has its own.
SmallVector<int64_t> getValueDims(Value values, int64_t b, int64_t h, int64_t j,
                                  int64_t e);
/// Whether values have a dim of heads.
bool areValuesPerHead(Value values);

/// The kinds of element that a destination may have.
enum class OutElement { F32, I32, ExpertIndex, Activation };

/// Verifies what holds for every structured op: tensors and buffers are not
/// mixed, one destination a result, destinations have the element types
/// `outs`, sizes fit, each operand has the rank of its map, and dims of
/// different operands agree.
LogicalResult verifyStructured(Operation *op, ArrayRef<OutElement> outs);

/// Appends the effects of `op`: inputs that are buffers are read, outputs that
/// are buffers are written, and read where the op accumulates; tensors have
/// none.
void getStructuredEffects(
    DestinationStyleOpInterface op,
    SmallVectorImpl<SideEffects::EffectInstance<MemoryEffects::Effect>>
        &effects);

/// A result has the size of the destination it is tied to.
LogicalResult reifyFromInits(DestinationStyleOpInterface op, OpBuilder &builder,
                             ReifiedRankedShapedTypeDims &shapes);

/// The operand and position where the size of `dim` can be read, or failure
/// for a dim that no operand spans.
FailureOr<std::pair<OpOperand *, unsigned>> findDim(MoEStructuredOpInterface op,
                                                    unsigned dim);

/// The static size of `dim`, or ShapedType::kDynamic.
int64_t getStaticDimSize(MoEStructuredOpInterface op, unsigned dim);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_MOESTRUCTURED_H
