//===- ElementBytes.h - The size of an element in memory --------*- C++ -*-===//

#ifndef MOE_SUPPORT_ELEMENTBYTES_H
#define MOE_SUPPORT_ELEMENTBYTES_H

#include "mlir/IR/Types.h"

namespace mlir::moe {

/// The bytes that an element takes in a buffer. An i1 takes a byte; an index,
/// and what is no number, takes 8.
inline int64_t getElementBytes(Type element) {
  return element.isIntOrFloat() ? (element.getIntOrFloatBitWidth() + 7) / 8 : 8;
}

} // namespace mlir::moe

#endif // MOE_SUPPORT_ELEMENTBYTES_H
