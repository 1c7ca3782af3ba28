//===- SortableKeys.h - Integers with the order of floats -------*- C++ -*-===//
//
// Selections and sorts compare an integer in place of an f32:
//
//   +inf         0x7f800000
//   +0, -0       0x00000000     equal (E2)
//   -inf         0x807fffff
//   NaN          0x80000001     below -inf (E3)
//   no score     0x80000000     below all of them
//
// For comparisons of unsigned integers the sign is the other one, so that no
// score is 0.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_UTILS_SORTABLEKEYS_H
#define MOE_DIALECT_MOE_UTILS_SORTABLEKEYS_H

#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

#include <limits>

namespace mlir::moe {

/// The key of no score: below every one.
inline constexpr int32_t kEmptyKey = std::numeric_limits<int32_t>::min();
/// The key of NaN.
inline constexpr int32_t kNaNKey = kEmptyKey + 1;

/// How keys are compared.
enum class KeyOrder { Signed, Unsigned };

/// The key of an f32, or of each lane of a vector, as an i32.
Value toSortableKey(ArithmeticBuilder &b, Value score,
                    KeyOrder order = KeyOrder::Signed);

/// The score of a key: NaN for that of NaN, and for that of none.
Value fromSortableKey(ArithmeticBuilder &b, Value key,
                      KeyOrder order = KeyOrder::Signed);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_UTILS_SORTABLEKEYS_H
