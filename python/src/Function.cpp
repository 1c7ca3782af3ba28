//===- Function.cpp - Compiled functions as Python callables --------------===//
//
// Tensors come in two ways. Frameworks with DLPack's C exchange API (torch
// since 2.10) hand out a view by a C call; everything else (numpy, older
// frameworks) goes through nanobind's ndarray, which costs some microseconds
// for torch.
//
//===----------------------------------------------------------------------===//

#include "Function.h"

#include "Arrays.h"
#include "Tensors.h"
#include <nanobind/stl/string.h>

namespace nb = nanobind;
using namespace moe;

//===----------------------------------------------------------------------===//
// Types as text
//===----------------------------------------------------------------------===//

static std::string toString(dlpack::DataType type) {
  const char *names[] = {"i", "ui", "f", "opaque", "bf", "complex", "bool"};
  if (type.code == dlpack::Bool && type.bits == 8)
    return "i1";
  std::string name = type.code < std::size(names) ? names[type.code] : "type";
  return name + std::to_string(type.bits);
}

static std::string toString(const int64_t *shape, int64_t rank,
                            const std::string &element) {
  std::string text = "tensor<";
  for (int64_t i = 0; i < rank; ++i)
    text += (shape[i] < 0 ? "?" : std::to_string(shape[i])) + "x";
  return text + element + ">";
}

static std::string toString(const MoEValueType &type) {
  const char *element = infoOf(type.elementType).name;
  return type.isTensor ? toString(type.shape, type.rank, element) : element;
}

//===----------------------------------------------------------------------===//
// One argument
//===----------------------------------------------------------------------===//

namespace {
/// Where an argument stands, for messages.
struct Place {
  const Function &function;
  const MoEValueType &type;
  size_t index;

  std::string expected() const {
    return std::string("expected ") + (type.isResult ? "result" : "argument") +
           " " + std::to_string(index) + " of '" + function.name() + "' to be ";
  }
};
} // namespace

/// Views `object`, through nanobind when it has no exchange API; `keep` then
/// holds what the view points into.
static dlpack::Tensor borrow(nb::handle object, const Place &place,
                             std::vector<nb::ndarray<nb::ro>> &keep) {
  dlpack::Tensor tensor;
  if (const dlpack::ExchangeAPI *api = exchangeAPI(Py_TYPE(object.ptr()))) {
    if (api->borrow(object.ptr(), &tensor))
      throw nb::python_error();
    return tensor;
  }
  nb::ndarray<nb::ro> array;
  if (place.type.isResult) {
    nb::ndarray<> writable;
    if (nb::try_cast(object, writable))
      array = nb::ndarray<nb::ro>(writable);
  } else {
    nb::try_cast(object, array);
  }
  if (!array.is_valid())
    throw nb::type_error((place.expected() + toString(place.type) +
                          (place.type.isResult ? " that is writable" : "") +
                          ", found an object of type " +
                          nb::type_name(object.type()).c_str())
                             .c_str());
  tensor = viewOf(array);
  keep.push_back(std::move(array));
  return tensor;
}

static void check(const dlpack::Tensor &tensor, const Place &place) {
  const MoEValueType &type = place.type;
  const ElementInfo &element = infoOf(type.elementType);
  auto found = [&] {
    return ", found " +
           toString(tensor.shape, tensor.rank, toString(tensor.type));
  };
  if (!matches(tensor.type, element))
    throw nb::type_error((place.expected() + toString(type) + found()).c_str());
  bool shapeFits = tensor.rank == type.rank;
  for (int64_t i = 0; shapeFits && i < type.rank; ++i)
    shapeFits = type.shape[i] < 0 || type.shape[i] == tensor.shape[i];
  if (!shapeFits)
    throw nb::value_error(
        (place.expected() + toString(type) + found()).c_str());
  if (tensor.deviceType != dlpack::CPU)
    throw nb::value_error((place.expected() +
                           "on the CPU, found it on another device; use .cpu()")
                              .c_str());
  if (!isRowMajor(tensor))
    throw nb::value_error((place.expected() +
                           "contiguous, found other strides; use .contiguous()")
                              .c_str());
}

static void writeScalar(nb::handle object, const Place &place, int64_t *word) {
  const ElementInfo &element = infoOf(place.type.elementType);
  if (element.code == dlpack::Float) {
    double value = PyFloat_AsDouble(object.ptr());
    if (value == -1.0 && PyErr_Occurred())
      throw nb::python_error();
    if (element.bits == 64)
      *reinterpret_cast<double *>(word) = value;
    else
      *reinterpret_cast<float *>(word) = static_cast<float>(value);
    return;
  }
  nb::object number = nb::steal(PyNumber_Index(object.ptr()));
  if (!number.is_valid())
    throw nb::python_error();
  int overflow = 0;
  long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  bool isBool = place.type.elementType == MoEElementType_I1;
  int spare = 64 - element.bits;
  bool fits =
      isBool ? value == 0 || value == 1
             : (static_cast<int64_t>(static_cast<uint64_t>(value) << spare) >>
                spare) == value;
  if (overflow || !fits)
    throw nb::value_error((place.expected() + "a value of " + element.name +
                           ", found " + nb::str(number).c_str())
                              .c_str());
  // Little endian: the low bytes of the word are the value of any width.
  *word = value;
}

//===----------------------------------------------------------------------===//
// Function
//===----------------------------------------------------------------------===//

Function::Function(std::shared_ptr<MoEOpaqueExecutable> executable,
                   MoEFunction function)
    : entry(moeFunctionGetEntry(function)), function(function),
      executable(std::move(executable)) {
  for (size_t i = 0, n = moeFunctionGetNumValues(function); i < n; ++i) {
    MoEValueType type = moeFunctionGetValue(function, i);
    words += type.isTensor ? descriptorWords(type.rank) : 1;
    numArguments += !type.isResult;
    types.push_back(type);
  }
}

void Function::call(nb::args arguments) const {
  if (arguments.size() != types.size())
    throw nb::type_error(
        ("expected " + std::to_string(numArguments) + " arguments and " +
         std::to_string(types.size() - numArguments) + " result buffers for '" +
         name() + "', found " + std::to_string(arguments.size()) + " in all")
            .c_str());

  constexpr size_t kStackWords = 256;
  int64_t stack[kStackWords];
  std::vector<int64_t> heap;
  int64_t *next = stack;
  if (words + types.size() > kStackWords) {
    heap.resize(words + types.size());
    next = heap.data();
  }
  // The pointers first, then what they point to.
  void **values = reinterpret_cast<void **>(next);
  next += types.size();

  std::vector<nb::ndarray<nb::ro>> keep;
  for (size_t i = 0; i < types.size(); ++i) {
    const MoEValueType &type = types[i];
    Place place{*this, type, type.isResult ? i - numArguments : i};
    values[i] = next;
    if (!type.isTensor) {
      writeScalar(arguments[i], place, next++);
      continue;
    }
    dlpack::Tensor tensor = borrow(arguments[i], place, keep);
    check(tensor, place);
    writeDescriptor(firstElement(tensor), tensor.shape, tensor.rank, next);
    next += descriptorWords(tensor.rank);
  }
  int64_t status;
  {
    nb::gil_scoped_release release;
    status = moe_call(entry, values);
  }
  if (status) {
    raiseCallError(status);
    throw nb::python_error();
  }
}

void moe::raiseCallError(int64_t status) {
  if (status > 0) {
    PyErr_Format(PyExc_MemoryError,
                 "expected %lld bytes of memory for a kernel, found none free",
                 static_cast<long long>(status));
    return;
  }
  PyErr_SetString(status == MoECallError_Index ? PyExc_IndexError
                  : status == MoECallError_ZeroDivision
                      ? PyExc_ZeroDivisionError
                      : PyExc_RuntimeError,
                  moe_error());
}

std::string Function::name() const {
  MoEStringRef text = moeFunctionGetName(function);
  return {text.data, text.length};
}

std::string Function::signature() const {
  std::string text = name() + "(";
  for (size_t i = 0; i < types.size(); ++i) {
    if (i == numArguments)
      text += ") -> (";
    else if (i)
      text += ", ";
    text += toString(types[i]);
  }
  return text + ")";
}

nb::list Function::values(bool results) const {
  nb::list list;
  for (const MoEValueType &type : types) {
    if (type.isResult != results)
      continue;
    nb::object shape = nb::none();
    if (type.isTensor) {
      nb::list sizes;
      for (int64_t i = 0; i < type.rank; ++i)
        sizes.append(type.shape[i]);
      shape = nb::tuple(sizes);
    }
    list.append(nb::make_tuple(infoOf(type.elementType).name, shape));
  }
  return list;
}
