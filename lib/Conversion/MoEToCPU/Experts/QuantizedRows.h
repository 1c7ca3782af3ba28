//===- QuantizedRows.h - Rows as products with codes read them --*- C++ -*-===//
//
// Rows of x are copied once for all columns of an expert's weight: rounded to
// integers if the op asks for it, in the order in which the codes of a weight
// come out of its bytes, and with the sum of each block of features. As a
// weight is scale (code - zero), a block of a sum is
//
//   scale (sum of x code - zero sum of x)
//
// so that codes stay unsigned and a zero costs one multiply-add a block.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_QUANTIZEDROWS_H
#define MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_QUANTIZEDROWS_H

#include "Emit/Emitter.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// How four codes of a lane are multiplied with four features of a row: as
/// bytes by one instruction, as two pairs of integers of 16 bits, as two pairs
/// of bf16, or one by one as f32.
enum class CodeProduct { Bytes, Words, Pairs, Floats };

/// Whether products are those of integers.
inline bool areIntegers(CodeProduct product) {
  return product == CodeProduct::Bytes || product == CodeProduct::Words;
}

CodeProduct getCodeProduct(const CPUTarget &target, GroupedLinearOp op);

class QuantizedRows {
public:
  QuantizedRows(Emitter &e, GroupedLinearOp op);

  const CodeProduct product;
  /// The features of x, of a block of them, and blocks.
  const int64_t numK, blockSize, numBlocks;

  /// Makes the buffers, where each thread has its own.
  void allocate();
  /// As many rows as stay in the second cache beside a panel.
  int64_t getMostRows() const { return mostRows; }
  /// Copies row `source` of x as row `number`.
  void pack(Value source, Value number) const;

  /// The features of rows as they were copied, one row behind the other.
  Value getFeatures() const { return features; }
  /// Features `4 quad` to `4 quad + 3` of a row in every lane, as the product
  /// takes them: as bytes, as two pairs of features 0 and 2, and 1 and 3, or as
  /// four numbers; number `i` of these.
  Value splat(Value row, Value quad, int64_t i) const;
  /// The sum of the features of a block, in every lane.
  Value splatSum(Value row, Value block) const;
  /// What the integers of a block stand for, in every lane; null where features
  /// are themselves.
  Value splatScale(Value row, Value block) const;

private:
  void packBlock(Value source, Value number, Value block) const;
  Value round(Value floats, Value inverse) const;
  void storeFeatures(Value floats, Value number, Value k) const;

  Emitter &e;
  Value x;
  const bool areRounded;
  int64_t mostRows;
  Value features, sums, scales;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_QUANTIZEDROWS_H
