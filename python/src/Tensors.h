//===- Tensors.h - Tensors of Python as kernels see them --------*- C++ -*-===//

#ifndef MOE_PYTHON_TENSORS_H
#define MOE_PYTHON_TENSORS_H

#include "DLPack.h"
#include "MoE-c/Compiler.h"
#include <Python.h>
#include <cstddef>

namespace moe {

struct ElementInfo {
  const char *name;
  dlpack::TypeCode code;
  uint8_t bits;
};

const ElementInfo &infoOf(MoEElementType type);

/// Integers are signless in the IR, so unsigned tensors fit as well.
bool matches(dlpack::DataType found, const ElementInfo &expected);

/// The exchange API of a type, or null where it has none that can borrow.
const dlpack::ExchangeAPI *exchangeAPI(PyTypeObject *type);

/// Makes a tensor of Python, which takes over `tensor`, also where it fails:
/// then null with a Python exception.
PyObject *importTensor(const dlpack::ExchangeAPI *api,
                       dlpack::ManagedTensor *tensor);

bool isRowMajor(const dlpack::Tensor &tensor);

inline void *firstElement(const dlpack::Tensor &tensor) {
  return static_cast<char *>(tensor.data) + tensor.byteOffset;
}

/// Words of the descriptor of a tensor.
inline size_t descriptorWords(int64_t rank) { return 3 + 2 * rank; }

/// Writes the row-major descriptor of a tensor.
void writeDescriptor(void *data, const int64_t *shape, int64_t rank,
                     int64_t *words);

} // namespace moe

#endif // MOE_PYTHON_TENSORS_H
