//===- CallForm.h - What tells calls of one function apart ------*- C++ -*-===//
//
// What Python does around compiled code (checking arguments, choosing the code,
// allocating results) depends on nothing but the form of what is given: dtypes,
// shapes, and values that are no tensors. Calls of one form are done alike.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_CALLFORM_H
#define MOE_PYTHON_CALLFORM_H

#include "Tensors.h"
#include <nanobind/nanobind.h>
#include <span>
#include <vector>

namespace moe {

/// Torch's own types, which live as long as the process. A plain tensor is of
/// one of these classes; subclasses may mean something else by their memory.
class TorchTypes {
public:
  TorchTypes(nanobind::tuple tensors, nanobind::object dtype);
  bool isTensor(PyObject *object) const { return api(object); }
  /// How to view an object that is a plain tensor; null for others.
  const dlpack::ExchangeAPI *api(PyObject *object) const;
  /// Views a plain tensor. False, without an exception, for other objects and
  /// for tensors without memory of their own.
  bool borrow(PyObject *object, dlpack::Tensor &tensor) const;

  PyTypeObject *dtype;

private:
  std::vector<std::pair<PyTypeObject *, const dlpack::ExchangeAPI *>> tensors;
};

/// Whether a tensor is a view that is to be read as negated. Its memory does
/// not say so.
bool isNegated(PyObject *tensor);

/// A form, as words, and the tensors that were given, in storage of the caller.
class CallForm {
public:
  struct Tensor {
    PyObject *object;
    void *data;
  };

  CallForm(const TorchTypes &types, std::span<int64_t> words,
           std::span<Tensor> tensors)
      : types(types), storage(words), tensorStorage(tensors) {}

  /// Each adds what it is given. False when a call with it is not plain, or the
  /// storage is full. Never leaves an exception.

  /// A contiguous tensor on the CPU. One that is `known` has been found not to
  /// be negated.
  bool addTensor(PyObject *tensor, const Tensor *known = nullptr);
  /// None, a number, a string or a dtype.
  bool addValue(PyObject *value);
  bool addWord(int64_t word);

  std::span<const int64_t> words() const { return storage.first(size); }
  std::span<const Tensor> tensors() const {
    return tensorStorage.first(numTensors);
  }
  /// How torch makes tensors of ours; null where no tensor was given.
  const dlpack::ExchangeAPI *api() const { return exchange; }
  uint64_t hash() const;
  bool equals(std::span<const int64_t> other) const;

private:
  bool hasRoom(size_t more) const { return size + more <= storage.size(); }

  const TorchTypes &types;
  std::span<int64_t> storage;
  std::span<Tensor> tensorStorage;
  size_t size = 0, numTensors = 0;
  const dlpack::ExchangeAPI *exchange = nullptr;
};

/// What keeps the addresses in a form's words valid: of these arguments the
/// strings, interned, and the dtypes.
std::vector<nanobind::object> ownedValues(nanobind::handle arguments,
                                          const TorchTypes &types);

} // namespace moe

#endif // MOE_PYTHON_CALLFORM_H
