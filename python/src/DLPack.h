//===- DLPack.h - The part of DLPack's ABI that is read here ----*- C++ -*-===//
//
// Layouts of DLPack 1.x (github.com/dmlc/dlpack, include/dlpack/dlpack.h), only
// the types that borrowing and making a tensor need. Major version 1 keeps them
// as they are.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_DLPACK_H
#define MOE_PYTHON_DLPACK_H

#include <cstdint>

namespace moe::dlpack {

enum DeviceType : int32_t { CPU = 1 };
enum TypeCode : uint8_t { Int = 0, UInt = 1, Float = 2, BFloat = 4, Bool = 6 };

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void *data;
  int32_t deviceType;
  int32_t deviceId;
  int32_t rank;
  DataType type;
  const int64_t *shape;
  /// In elements; null means row-major.
  const int64_t *strides;
  uint64_t byteOffset;
};

/// A tensor with an owner. It ends in `deleter`, or in `import`, which takes
/// it.
struct ManagedTensor {
  uint32_t major, minor;
  void *context;
  void (*deleter)(ManagedTensor *self);
  uint64_t flags;
  Tensor tensor;
};

/// `type(t).__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api":
/// C functions for tensors of that type, which avoid the Python protocol.
struct ExchangeAPI {
  uint32_t major, minor;
  const ExchangeAPI *previous;
  void *allocate;
  void *exportManaged;
  /// Makes a Python object of a tensor. 0, or -1 with a Python exception.
  int (*import)(ManagedTensor *tensor, void **out);
  /// Fills in a view that is valid until the caller returns to Python. 0, or -1
  /// with a Python exception. May be null.
  int (*borrow)(void *object, Tensor *out);
  void *currentStream;
};

} // namespace moe::dlpack

#endif // MOE_PYTHON_DLPACK_H
