//===- TopKKeys.h - Sortable keys and their networks ------------*- C++ -*-===//
//
// A key orders values as E1 to E5 say and then indices upwards, so that one
// unsigned comparison decides everything: NaN is below -inf, and 0, the key of
// no expert, below every key. 16-bit scores and the index share 32 bits; f32
// choice scores take 64.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKKEYS_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKKEYS_H

#include "Emit/ThreadBuilder.h"

namespace mlir::moe {

/// Keys of 64 bits: an f32 choice score, then the index inverted.
struct WideKeys {
  static Value make(ThreadBuilder &b, Value score, Value expert);
  static Value expertOf(ThreadBuilder &b, Value key);
  /// The score; 0 for a NaN.
  static Value scoreOf(ThreadBuilder &b, Value key);
  /// Whether the score is -inf.
  static Value isExcluded(ThreadBuilder &b, Value key);
  /// x as an unsigned integer of the same order (E1, E2, E3).
  static Value ordered(ThreadBuilder &b, Value x);
};

/// Keys of 32 bits: a score of 16 bits, then the index inverted.
class PackedKeys {
public:
  /// `type` is bf16 or f16.
  PackedKeys(ThreadBuilder &b, Type type) : b(b), type(type) {}

  /// Minus the two scores in a word, canonical: no -0, one NaN. The order of
  /// scores is that of falling values.
  Value negate(Value word);
  /// Keys' upper halves from a negated word.
  Value order(Value negated);
  /// The key of the lower or the upper half of an ordered word, for an expert
  /// that is a constant.
  Value make(Value orderedWord, bool upper, int64_t expert);
  Value expertOf(Value key);
  Value scoreOf(Value key);
  /// NaN if either half of `seen` or of the word is one; the others may change.
  Value mergeNaN(Value seen, Value negated);
  /// Whether a half of the word is a NaN.
  Value hasNaN(Value word);

private:
  Value assembly(StringRef text, ValueRange operands);

  ThreadBuilder &b;
  Type type;
};

/// Sorts `keys` downwards; their number is a power of two.
void sortKeys(ThreadBuilder &b, MutableArrayRef<Value> keys);
/// `kept` becomes the highest of both lists, sorted downwards like they are.
void keepHighest(ThreadBuilder &b, MutableArrayRef<Value> kept,
                 ArrayRef<Value> others);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKKEYS_H
