//===- WeightCodes.h - Codes of a packed weight, in registers ---*- C++ -*-===//
//
// A weight of 4, 6 or 8 bits lies in panels as unsigned bytes, four features of
// each column in a lane: a quad. A line of a panel has one quad, or two where a
// byte holds two codes; of 6 bits three lines have four. Quads become what a
// product multiplies: bytes, pairs of bf16, or numbers of f32.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_WEIGHTCODES_H
#define MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_WEIGHTCODES_H

#include "QuantizedRows.h"

namespace mlir::moe {

class WeightCodes {
public:
  WeightCodes(Emitter &e, GroupedLinearOp op, CodeProduct product)
      : e(e), op(op), product(product) {}

  /// The lines that so many quads take.
  int64_t getLines(int64_t quads) { return quads * getBits() / 8; }
  /// The quads that are loaded at once, of as few lines as hold them.
  int64_t getQuads() { return getBits() == 6 ? 4 : 8 / getBits(); }
  /// These quads of a vector of columns, from line `at` on.
  Values load(ValueRange at);
  /// What is multiplied with a quad of a row: as many vectors, all of one type,
  /// as `QuantizedRows::splat` has numbers.
  Values expand(Value quad);
  int64_t getNumExpanded();
  /// Whether the bytes in memory are already what is multiplied.
  bool isExpanded() { return product == CodeProduct::Bytes && getBits() == 8; }

  /// Whether products of bytes are added up in words of 16 bits; and so many
  /// quads of them fit, 1 where sums are not in words.
  bool sumsWords() {
    return product == CodeProduct::Bytes && !e.target.int8Dot;
  }
  int64_t getQuadsOfSum();
  /// sum + products of a vector that `expand` gives with one of a row. Sums in
  /// words may be null, for none.
  Value multiplyAdd(Value codes, Value features, Value sum);

  /// The code that stands for 0, without zeros, in what `expand` gives.
  double getZero();
  /// Whether a block needs the sum of its features.
  bool hasZero() { return op.getZeros() || getZero() != 0.0; }
  /// What codes are a multiple of.
  double getUnit();

private:
  int64_t getBits() { return op.getCodeBits(); }
  Value loadLine(ValueRange at);
  Values splitHalves(Value line);
  Values loadSixBits(ValueRange at);
  /// Whether codes become numbers around 0: f32 has a sign, other than what the
  /// instructions for bytes and pairs take. With zeros codes are their bytes.
  bool areSigned() {
    return product == CodeProduct::Floats && !op.getZeros() &&
           getFormat() != WeightFormat::Fp8E4M3;
  }
  /// Whether codes of 8 bits become pairs by a table of their bytes.
  bool areLookedUp() {
    return product == CodeProduct::Pairs && e.target.byteTable;
  }
  Values expandUnsigned(Value quad);
  Values expandBytePairs(Value quad);
  Values expandSigned(Value quad);
  Value widenFloat8(Value bytes);
  Values expandFloat8(Value quad);
  Values lookUpPairs(Value bytes, Value signs,
                     function_ref<float(int)> getMagnitude);
  Values lookUpFloat8(Value quad);
  Values lookUpInt8(Value quad);
  WeightFormat getFormat();
  Value shift(Value vector, int64_t bits);
  Value mask(Value vector, uint32_t bits);

  Emitter &e;
  GroupedLinearOp op;
  const CodeProduct product;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_WEIGHTCODES_H
