//===- CallForm.cpp - What tells calls of one function apart --------------===//
//
// Forms are on the way of every call: this uses CPython's C API, allocates
// nothing and looks at each argument once.
//
//===----------------------------------------------------------------------===//

#include "CallForm.h"

#include <algorithm>
#include <cstring>

namespace nb = nanobind;
using namespace moe;

TorchTypes::TorchTypes(nb::tuple tensors, nb::object dtype)
    : dtype(reinterpret_cast<PyTypeObject *>(dtype.ptr())) {
  for (nb::handle object : tensors) {
    auto *type = reinterpret_cast<PyTypeObject *>(object.ptr());
    const dlpack::ExchangeAPI *api = exchangeAPI(type);
    if (api && api->import)
      this->tensors.emplace_back(type, api);
  }
}

const dlpack::ExchangeAPI *TorchTypes::api(PyObject *object) const {
  for (auto [type, api] : tensors)
    if (type == Py_TYPE(object))
      return api;
  return nullptr;
}

bool TorchTypes::borrow(PyObject *object, dlpack::Tensor &tensor) const {
  const dlpack::ExchangeAPI *api = this->api(object);
  if (!api)
    return false;
  if (!api->borrow(object, &tensor))
    return true;
  // Sparse, quantized: the long way tells what is wrong with it.
  PyErr_Clear();
  return false;
}

bool moe::isNegated(PyObject *tensor) {
  static PyObject *const name = PyUnicode_InternFromString("is_neg");
  PyObject *result = PyObject_CallMethodObjArgs(tensor, name, nullptr);
  PyErr_Clear();
  Py_XDECREF(result);
  return result != Py_False;
}

namespace {
enum Kind : int64_t { None, Bool, Int, Float, Object, Tensor };
} // namespace

bool CallForm::addWord(int64_t word) {
  if (!hasRoom(1))
    return false;
  storage[size++] = word;
  return true;
}

bool CallForm::addTensor(PyObject *argument, const Tensor *known) {
  dlpack::Tensor tensor;
  if (numTensors == tensorStorage.size() || !types.borrow(argument, tensor))
    return false;
  exchange = types.api(argument);
  void *data = firstElement(tensor);
  if (tensor.deviceType != dlpack::CPU || !isRowMajor(tensor) ||
      !hasRoom(2 + tensor.rank))
    return false;
  bool isKnown = known && known->object == argument && known->data == data;
  if (!isKnown && isNegated(argument))
    return false;
  tensorStorage[numTensors++] = {argument, data};
  uint32_t type;
  static_assert(sizeof(type) == sizeof(tensor.type));
  std::memcpy(&type, &tensor.type, sizeof(type));
  storage[size++] = Kind::Tensor | static_cast<int64_t>(tensor.rank) << 8;
  storage[size++] = type;
  for (int32_t i = 0; i < tensor.rank; ++i)
    storage[size++] = tensor.shape[i];
  return true;
}

/// Strings and dtypes count by their address: dtypes are singletons, equal
/// interned strings are one object, and who keeps a form keeps them alive.
bool CallForm::addValue(PyObject *value) {
  if (!hasRoom(2))
    return false;
  auto add = [&](Kind kind, int64_t word) {
    storage[size++] = kind;
    storage[size++] = word;
    return true;
  };
  if (value == Py_None)
    return add(Kind::None, 0);
  if (PyBool_Check(value))
    return add(Kind::Bool, value == Py_True);
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    return add(Kind::Int, PyLong_AsLongLongAndOverflow(value, &overflow)) &&
           !overflow;
  }
  if (PyFloat_CheckExact(value)) {
    double number = PyFloat_AsDouble(value);
    int64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return add(Kind::Float, bits);
  }
  if (PyUnicode_CheckExact(value)) {
    Py_INCREF(value);
    PyUnicode_InternInPlace(&value);
    add(Kind::Object, reinterpret_cast<int64_t>(value));
    Py_DECREF(value);
    return true;
  }
  return Py_TYPE(value) == types.dtype &&
         add(Kind::Object, reinterpret_cast<int64_t>(value));
}

uint64_t CallForm::hash() const {
  uint64_t hash = size;
  for (int64_t word : words()) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return hash;
}

bool CallForm::equals(std::span<const int64_t> other) const {
  return std::ranges::equal(words(), other);
}

std::vector<nb::object> moe::ownedValues(nb::handle arguments,
                                         const TorchTypes &types) {
  std::vector<nb::object> owned;
  for (nb::handle argument : arguments) {
    PyObject *object = argument.inc_ref().ptr();
    bool isString = PyUnicode_CheckExact(object);
    if (isString)
      PyUnicode_InternInPlace(&object);
    nb::object value = nb::steal(object);
    if (isString || Py_TYPE(object) == types.dtype)
      owned.push_back(std::move(value));
  }
  return owned;
}
