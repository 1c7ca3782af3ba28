//===- Arrays.h - Arrays of any framework -----------------------*- C++ -*-===//

#ifndef MOE_PYTHON_ARRAYS_H
#define MOE_PYTHON_ARRAYS_H

#include "DLPack.h"
#include <nanobind/ndarray.h>

namespace moe {

/// Views an array for as long as it lives.
inline dlpack::Tensor viewOf(const nanobind::ndarray<nanobind::ro> &array) {
  nanobind::dlpack::dtype type = array.dtype();
  return {const_cast<void *>(array.data()),
          array.device_type(),
          array.device_id(),
          static_cast<int32_t>(array.ndim()),
          {type.code, type.bits, type.lanes},
          array.shape_ptr(),
          array.stride_ptr(),
          /*byteOffset=*/0};
}

} // namespace moe

#endif // MOE_PYTHON_ARRAYS_H
