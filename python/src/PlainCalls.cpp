//===- PlainCalls.cpp - Calls of an op, remembered by their form ----------===//
//
// `replay` is on the way of every call of an op, some of which take less than a
// microsecond: it uses CPython's C API, allocates nothing but results and looks
// at each argument once.
//
//===----------------------------------------------------------------------===//

#include "PlainCalls.h"

#include "Tensors.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>

namespace nb = nanobind;
using namespace moe;

/// More forms than this are forgotten, all at once. Token counts are part of a
/// form; those that vary most are large and make calls long.
static constexpr size_t kMostForms = 256;
static constexpr size_t kMostArguments = 32;
static constexpr size_t kMostWords = 192;
static constexpr size_t kMostRank = 8;

template <typename Range, typename Value>
static bool contains(const Range &range, const Value &value) {
  return std::find(std::begin(range), std::end(range), value) !=
         std::end(range);
}

//===----------------------------------------------------------------------===//
// Form
//===----------------------------------------------------------------------===//

/// What tells calls of one kernel apart, as words, and where the tensors are.
struct PlainCalls::Form {
  enum Kind : int64_t { None, Bool, Int, Float, Object, Tensor };

  int64_t words[kMostWords];
  size_t size = 0;
  /// Of the tensors, by the place of the argument.
  void *data[kMostArguments];
  const dlpack::ExchangeAPI *api = nullptr;

  /// False when the call is not plain. Never leaves an exception.
  bool read(PyObject *const *arguments, Py_ssize_t count,
            const PlainCalls &calls, bool grad);
  uint64_t hash() const;

private:
  bool readTensor(PyObject *argument, size_t place, bool grad);
  bool readValue(PyObject *argument, const PlainCalls &calls);
  void add(int64_t kind, int64_t value) {
    words[size++] = kind;
    words[size++] = value;
  }
};

bool PlainCalls::Form::read(PyObject *const *arguments, Py_ssize_t count,
                            const PlainCalls &calls, bool grad) {
  if (count > static_cast<Py_ssize_t>(kMostArguments))
    return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (size + 3 + kMostRank > kMostWords)
      return false;
    data[i] = nullptr;
    bool isTensor = contains(calls.tensorTypes, Py_TYPE(arguments[i]));
    if (!(isTensor ? readTensor(arguments[i], i, grad)
                   : readValue(arguments[i], calls)))
      return false;
  }
  return api;
}

/// Takes `value`. Never leaves an exception.
static bool isFalse(PyObject *value) {
  bool result = value == Py_False;
  PyErr_Clear();
  Py_XDECREF(value);
  return result;
}

bool PlainCalls::Form::readTensor(PyObject *argument, size_t place, bool grad) {
  static PyObject *const requiresGrad =
      PyUnicode_InternFromString("requires_grad");
  static PyObject *const isNegated = PyUnicode_InternFromString("is_neg");
  if (grad && !isFalse(PyObject_GetAttr(argument, requiresGrad)))
    return false;
  // Views of complex numbers may be negated without that their memory is.
  if (!isFalse(PyObject_CallMethodNoArgs(argument, isNegated)))
    return false;
  api = exchangeAPI(Py_TYPE(argument));
  if (!api || !api->import)
    return false;
  dlpack::Tensor tensor;
  if (api->borrow(argument, &tensor)) {
    // Sparse, quantized: the op tells what is wrong with it.
    PyErr_Clear();
    return false;
  }
  if (tensor.deviceType != dlpack::CPU ||
      tensor.rank > static_cast<int32_t>(kMostRank) || !isRowMajor(tensor))
    return false;
  data[place] = firstElement(tensor);
  // An argument that is another one's memory is so in every call of the form,
  // which lets `remember` find arguments by their memory.
  size_t alias = std::find(data, data + place, data[place]) - data;
  uint32_t type;
  static_assert(sizeof(type) == sizeof(tensor.type));
  std::memcpy(&type, &tensor.type, sizeof(type));
  add(Tensor | tensor.rank << 8 | static_cast<int64_t>(alias) << 16, type);
  for (int32_t i = 0; i < tensor.rank; ++i)
    words[size++] = tensor.shape[i];
  return true;
}

/// Strings and dtypes count by their address: dtypes are singletons, equal
/// interned strings are one object, and forms keep theirs alive.
bool PlainCalls::Form::readValue(PyObject *argument, const PlainCalls &calls) {
  if (argument == Py_None) {
    add(None, 0);
  } else if (PyBool_Check(argument)) {
    add(Bool, argument == Py_True);
  } else if (PyLong_CheckExact(argument)) {
    int overflow = 0;
    add(Int, PyLong_AsLongLongAndOverflow(argument, &overflow));
    return !overflow;
  } else if (PyFloat_CheckExact(argument)) {
    double value = PyFloat_AS_DOUBLE(argument);
    int64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    add(Float, bits);
  } else if (PyUnicode_CheckExact(argument)) {
    Py_INCREF(argument);
    PyUnicode_InternInPlace(&argument);
    add(Object, reinterpret_cast<int64_t>(argument));
    Py_DECREF(argument);
  } else if (Py_TYPE(argument) == calls.dtypeType) {
    add(Object, reinterpret_cast<int64_t>(argument));
  } else {
    return false;
  }
  return true;
}

uint64_t PlainCalls::Form::hash() const {
  uint64_t hash = size;
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<uint64_t>(words[i])) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return hash;
}

//===----------------------------------------------------------------------===//
// Call
//===----------------------------------------------------------------------===//

/// What a call of one form does; one that is not to be replayed has no entry.
struct PlainCalls::Call {
  struct Operand {
    size_t place, header;
  };
  /// What a call allocates; nothing that the kernel gets is without a header.
  struct Buffer {
    std::optional<size_t> header;
    dlpack::DataType type;
    std::vector<int64_t> shape;
  };

  std::vector<int64_t> form;
  /// Keeps strings and dtypes of the form alive.
  std::vector<nb::object> held;
  std::shared_ptr<MoEOpaqueExecutable> code;
  MoEPackedFunction entry = nullptr;
  /// Descriptors of operands, then of buffers, without their addresses.
  std::vector<int64_t> descriptors;
  std::vector<Operand> operands;
  std::vector<Buffer> buffers;
  std::vector<size_t> returned;
  bool returnsTuple = false;

  bool describe(const std::vector<dlpack::Tensor> &arguments,
                const Function &function,
                const std::vector<dlpack::Tensor> &tensors, nb::object results);
  PyObject *run(const Form &form) const;

private:
  bool allocate(dlpack::ManagedTensor **tensors) const;
  PyObject *take(const dlpack::ExchangeAPI *api,
                 dlpack::ManagedTensor **tensors) const;
};

static void setAddress(int64_t *header, void *data) {
  *reinterpret_cast<MoETensorHeader *>(header) = {data, data, 0};
}

PyObject *PlainCalls::Call::run(const Form &form) const {
  dlpack::ManagedTensor *results[kMostArguments];
  if (!allocate(results))
    return nullptr;
  int64_t words[kMostWords];
  void *values[2 * kMostArguments];
  std::copy(descriptors.begin(), descriptors.end(), words);
  size_t next = 0;
  for (const Operand &operand : operands) {
    setAddress(words + operand.header, form.data[operand.place]);
    values[next++] = words + operand.header;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!buffers[i].header)
      continue;
    setAddress(words + *buffers[i].header, firstElement(results[i]->tensor));
    values[next++] = words + *buffers[i].header;
  }
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = moe_call(entry, values);
  Py_END_ALLOW_THREADS;
  if (status) {
    for (size_t i = 0; i < buffers.size(); ++i)
      results[i]->deleter(results[i]);
    raiseCallError(status);
    return nullptr;
  }
  return take(form.api, results);
}

namespace {
/// A result: what torch gets to know of it and, behind, its elements. One block
/// is less work than a tensor of torch's allocator, and its view for us.
struct Result {
  dlpack::ManagedTensor managed;
  int64_t sizes[kMostRank], strides[kMostRank];

  static Result *make(const std::vector<int64_t> &shape, dlpack::DataType type);
};
} // namespace

/// What torch's own tensors are aligned to.
static constexpr size_t kAlignment = 64;

Result *Result::make(const std::vector<int64_t> &shape, dlpack::DataType type) {
  int64_t elements = 1, rank = shape.size();
  void *block = nullptr;
  for (int64_t size : shape)
    elements *= size;
  size_t bytes = elements * ((type.bits + 7) / 8);
  if (!(block = std::malloc(sizeof(Result) + kAlignment + bytes)))
    return nullptr;
  auto *result = static_cast<Result *>(block);
  auto end = reinterpret_cast<uintptr_t>(result + 1);
  void *data = reinterpret_cast<void *>((end + kAlignment - 1) & -kAlignment);
  for (int64_t i = rank, stride = 1; i-- > 0; stride *= shape[i]) {
    result->sizes[i] = shape[i];
    result->strides[i] = stride;
  }
  result->managed = {1,
                     0,
                     /*context=*/nullptr,
                     [](dlpack::ManagedTensor *self) { std::free(self); },
                     /*flags=*/0,
                     {data, dlpack::CPU, /*deviceId=*/0,
                      static_cast<int32_t>(rank), type, result->sizes,
                      result->strides, /*byteOffset=*/0}};
  return result;
}

bool PlainCalls::Call::allocate(dlpack::ManagedTensor **tensors) const {
  for (size_t i = 0; i < buffers.size(); ++i) {
    Result *result = Result::make(buffers[i].shape, buffers[i].type);
    if (!result) {
      while (i-- > 0)
        tensors[i]->deleter(tensors[i]);
      PyErr_NoMemory();
      return false;
    }
    tensors[i] = &result->managed;
  }
  return true;
}

/// The results as the op returns them; `tensors` are used up.
PyObject *PlainCalls::Call::take(const dlpack::ExchangeAPI *api,
                                 dlpack::ManagedTensor **tensors) const {
  PyObject *objects[kMostArguments] = {};
  bool failed = false;
  for (size_t i = 0; i < buffers.size(); ++i) {
    bool isReturned = contains(returned, i);
    void *object = nullptr;
    if (failed || !isReturned)
      tensors[i]->deleter(tensors[i]);
    else if (api->import(tensors[i], &object))
      failed = true;
    objects[i] = static_cast<PyObject *>(object);
  }
  PyObject *result = nullptr;
  if (!failed && !returnsTuple)
    return objects[returned.front()];
  if (!failed && (result = PyTuple_New(returned.size()))) {
    for (size_t i = 0; i < returned.size(); ++i)
      PyTuple_SET_ITEM(result, i, objects[returned[i]]);
    return result;
  }
  for (PyObject *object : objects)
    Py_XDECREF(object);
  return nullptr;
}

/// The tensors of a sequence; other objects have a rank of -1, which no tensor
/// matches.
static std::vector<dlpack::Tensor> viewsOf(nb::handle sequence) {
  std::vector<dlpack::Tensor> views;
  for (nb::handle object : sequence) {
    dlpack::Tensor &view = views.emplace_back();
    const dlpack::ExchangeAPI *api = exchangeAPI(Py_TYPE(object.ptr()));
    if (!api || api->borrow(object.ptr(), &view)) {
      PyErr_Clear();
      view.rank = -1;
    }
  }
  return views;
}

static int64_t sizeOf(const dlpack::Tensor &tensor) {
  return std::accumulate(tensor.shape, tensor.shape + tensor.rank, int64_t{1},
                         std::multiplies<>());
}

/// Do both hold the same elements in the same order, at most in other shapes?
/// Tensors without elements cannot be told apart.
static bool isSame(const dlpack::Tensor &a, const dlpack::Tensor &b) {
  return a.rank >= 0 && b.rank >= 0 && firstElement(a) == firstElement(b) &&
         !std::memcmp(&a.type, &b.type, sizeof(a.type)) &&
         sizeOf(a) == sizeOf(b) && sizeOf(a) && isRowMajor(a) && isRowMajor(b);
}

/// The place of a tensor that is the same, or the number of tensors.
static size_t findSame(const dlpack::Tensor &tensor,
                       std::span<const dlpack::Tensor> tensors) {
  return std::find_if(tensors.begin(), tensors.end(),
                      [&](const dlpack::Tensor &other) {
                        return isSame(tensor, other);
                      }) -
         tensors.begin();
}

/// Learns from one run: `function` was called with `tensors`, and the op
/// returned `results`. False when the op did anything else to its arguments or
/// results than to see them in another shape.
bool PlainCalls::Call::describe(const std::vector<dlpack::Tensor> &arguments,
                                const Function &function,
                                const std::vector<dlpack::Tensor> &tensors,
                                nb::object results) {
  const std::vector<MoEValueType> &types = function.getTypes();
  returnsTuple = PyTuple_CheckExact(results.ptr());
  std::vector<dlpack::Tensor> outside =
      viewsOf(returnsTuple ? results : nb::make_tuple(results));
  if (tensors.size() != types.size() || types.size() > kMostArguments ||
      outside.empty())
    return false;

  for (size_t i = 0; i < types.size(); ++i) {
    const dlpack::Tensor &tensor = tensors[i];
    if (tensor.rank < 0 ||
        descriptors.size() + descriptorWords(tensor.rank) > kMostWords)
      return false;
    size_t header = descriptors.size();
    descriptors.resize(header + descriptorWords(tensor.rank));
    writeDescriptor(nullptr, tensor.shape, tensor.rank, &descriptors[header]);
    if (!types[i].isResult) {
      size_t place = findSame(tensor, arguments);
      if (place == arguments.size())
        return false;
      operands.push_back({place, header});
      continue;
    }
    // One that is not returned keeps its own shape.
    size_t place = findSame(tensor, outside);
    const dlpack::Tensor &seen =
        place == outside.size() ? tensor : outside[place];
    buffers.push_back(
        {header, tensor.type, {seen.shape, seen.shape + seen.rank}});
  }
  std::span written = std::span(tensors).subspan(operands.size());
  for (const dlpack::Tensor &result : outside) {
    size_t place = findSame(result, written);
    if (place == written.size()) {
      // An op has a tensor without elements in the place of a gradient that
      // does not exist. Whoever made it, another one is as good.
      if (result.rank < 0 || sizeOf(result) || buffers.size() == kMostArguments)
        return false;
      place = buffers.size();
      buffers.push_back({/*header=*/std::nullopt,
                         result.type,
                         {result.shape, result.shape + result.rank}});
    } else if (contains(returned, place)) {
      return false;
    }
    returned.push_back(place);
  }
  code = function.getCode();
  entry = function.getEntry();
  return true;
}

//===----------------------------------------------------------------------===//
// PlainCalls
//===----------------------------------------------------------------------===//

PlainCalls::PlainCalls(nb::tuple tensorTypes, nb::object dtypeType,
                       nb::tuple modes, nb::object isGradEnabled)
    : dtypeType(reinterpret_cast<PyTypeObject *>(dtypeType.ptr())),
      isGradEnabled(std::move(isGradEnabled)) {
  for (nb::handle mode : modes)
    this->modes.push_back(nb::borrow(mode));
  // Torch's types live as long as the process.
  for (nb::handle type : tensorTypes)
    this->tensorTypes.push_back(reinterpret_cast<PyTypeObject *>(type.ptr()));
}

PlainCalls::~PlainCalls() = default;

/// Calls a function without arguments; -1 with an exception.
static int isTrue(nb::handle function) {
  PyObject *result = PyObject_CallNoArgs(function.ptr());
  int value = result ? PyObject_IsTrue(result) : -1;
  Py_XDECREF(result);
  return value;
}

PyObject *PlainCalls::replay(PyObject *const *arguments, Py_ssize_t count) {
  for (nb::handle mode : modes)
    if (int active = isTrue(mode))
      return active < 0 ? nullptr : Py_NewRef(Py_None);
  int grad = isTrue(isGradEnabled);
  if (grad < 0)
    return nullptr;
  Form form;
  if (!form.read(arguments, count, *this, grad))
    return Py_NewRef(Py_None);
  auto known = calls.find(form.hash());
  if (known == calls.end() ||
      !std::equal(form.words, form.words + form.size,
                  known->second->form.begin(), known->second->form.end()))
    return Py_NewRef(Py_False);
  // Another thread may forget it while the kernel runs.
  std::shared_ptr<Call> call = known->second;
  return call->entry ? call->run(form) : Py_NewRef(Py_None);
}

void PlainCalls::remember(nb::tuple arguments, const Function *function,
                          nb::list tensors, nb::object results) {
  std::vector<PyObject *> list(nb::len(arguments));
  for (size_t i = 0; i < list.size(); ++i)
    list[i] = nb::handle(arguments[i]).ptr();
  Form form;
  if (!form.read(list.data(), list.size(), *this, /*grad=*/false))
    throw nb::value_error("expected the arguments of a plain call");

  auto call = std::make_shared<Call>();
  if (function &&
      !call->describe(viewsOf(arguments), *function, viewsOf(tensors), results))
    *call = Call();
  call->form.assign(form.words, form.words + form.size);
  for (PyObject *argument : list) {
    Py_INCREF(argument);
    if (PyUnicode_CheckExact(argument))
      PyUnicode_InternInPlace(&argument);
    nb::object owned = nb::steal(argument);
    if (PyUnicode_CheckExact(argument) || Py_TYPE(argument) == dtypeType)
      call->held.push_back(std::move(owned));
  }
  if (calls.size() >= kMostForms)
    calls.clear();
  calls[form.hash()] = std::move(call);
}
