//===- PlainCalls.cpp - Calls of an op, remembered by their form ----------===//
//
// `replay` is on the way of every call of an op, some of which take less than a
// microsecond: it uses CPython's C API, allocates nothing but results and looks
// at each argument once.
//
//===----------------------------------------------------------------------===//

#include "PlainCalls.h"

#include "CallForm.h"
#include "PreparedCall.h"
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>

namespace nb = nanobind;
using namespace moe;

/// More forms than this are forgotten, all at once. Token counts are part of a
/// form; those that vary most are large and make calls long.
static constexpr size_t kMostForms = 256;
static constexpr size_t kMostArguments = 32;
static constexpr size_t kMostWords = 192;

template <typename Range, typename Value>
static bool contains(const Range &range, const Value &value) {
  return std::find(std::begin(range), std::end(range), value) !=
         std::end(range);
}

//===----------------------------------------------------------------------===//
// Form
//===----------------------------------------------------------------------===//

/// The form of an op's call, with its storage.
struct PlainCalls::Form {
  explicit Form(const TorchTypes &types) : form(types, words, tensors) {}

  /// False when the call is not plain. Never leaves an exception.
  bool read(std::span<PyObject *const> arguments, const TorchTypes &types,
            bool grad);

  int64_t words[kMostWords];
  CallForm::Tensor tensors[kMostArguments];
  CallForm form;
};

static bool requiresGrad(PyObject *tensor) {
  static PyObject *const name = PyUnicode_InternFromString("requires_grad");
  PyObject *result = PyObject_GetAttr(tensor, name);
  PyErr_Clear();
  Py_XDECREF(result);
  return result != Py_False;
}

bool PlainCalls::Form::read(std::span<PyObject *const> arguments,
                            const TorchTypes &types, bool grad) {
  for (PyObject *argument : arguments) {
    if (!types.isTensor(argument)) {
      if (!form.addValue(argument))
        return false;
      continue;
    }
    if ((grad && requiresGrad(argument)) || !form.addTensor(argument))
      return false;
    // An argument that is another one's memory is so in every call of the form,
    // which lets `remember` find arguments by their memory.
    std::span given = form.tensors();
    auto alias =
        std::ranges::find(given, given.back().data, &CallForm::Tensor::data);
    if (!form.addWord(alias - given.begin()))
      return false;
  }
  return form.api();
}

//===----------------------------------------------------------------------===//
// Call
//===----------------------------------------------------------------------===//

/// What a call of one form does; one that is not to be replayed has no
/// function.
struct PlainCalls::Call {
  std::vector<int64_t> form;
  /// Keeps strings and dtypes of the form alive.
  std::vector<nb::object> owned;
  PreparedCall prepared;
  /// Of the operands, the number among the tensors that are given.
  std::vector<size_t> operands;
  /// Of what the op returns, the number among the results.
  std::vector<size_t> returned;
  bool returnsTuple = false;

  bool describe(const std::vector<dlpack::Tensor> &given,
                const Function &function,
                const std::vector<dlpack::Tensor> &tensors, nb::object results);
  PyObject *run(const CallForm &form) const;

private:
  PyObject *take(const dlpack::ExchangeAPI *api,
                 std::span<dlpack::ManagedTensor *> tensors) const;
};

PyObject *PlainCalls::Call::run(const CallForm &form) const {
  void *addresses[kMostArguments];
  for (size_t i = 0; i < operands.size(); ++i)
    addresses[i] = form.tensors()[operands[i]].data;
  dlpack::ManagedTensor *results[kMostArguments];
  if (!prepared.run({addresses, operands.size()}, results))
    return nullptr;
  return take(form.api(), {results, prepared.getNumResults()});
}

/// The results as the op returns them; `tensors` are used up.
PyObject *
PlainCalls::Call::take(const dlpack::ExchangeAPI *api,
                       std::span<dlpack::ManagedTensor *> tensors) const {
  PyObject *objects[kMostArguments] = {};
  bool failed = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (failed || !contains(returned, i))
      tensors[i]->deleter(tensors[i]);
    else
      failed = !(objects[i] = importTensor(api, tensors[i]));
  }
  PyObject *result = nullptr;
  if (!failed && !returnsTuple)
    return objects[returned.front()];
  if (!failed && (result = PyTuple_New(returned.size()))) {
    for (size_t i = 0; i < returned.size(); ++i)
      PyTuple_SetItem(result, i, objects[returned[i]]);
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

static std::vector<int64_t> shapeOf(const dlpack::Tensor &tensor) {
  return {tensor.shape, tensor.shape + tensor.rank};
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
bool PlainCalls::Call::describe(const std::vector<dlpack::Tensor> &given,
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
    if (tensor.rank < 0)
      return false;
    if (!types[i].isResult) {
      operands.push_back(findSame(tensor, given));
      if (operands.back() == given.size())
        return false;
      prepared.addOperand(tensor);
      continue;
    }
    // One that is not returned keeps its own shape.
    size_t place = findSame(tensor, outside);
    const dlpack::Tensor &seen =
        place == outside.size() ? tensor : outside[place];
    prepared.addResult(tensor.type, shapeOf(seen));
  }
  std::span written = std::span(tensors).subspan(operands.size());
  for (const dlpack::Tensor &result : outside) {
    size_t place = findSame(result, written);
    if (place == written.size()) {
      // An op has a tensor without elements in the place of a gradient that
      // does not exist. Whoever made it, another one is as good.
      if (result.rank < 0 || sizeOf(result) ||
          prepared.getNumResults() == kMostArguments)
        return false;
      place = prepared.getNumResults();
      prepared.addResult(result.type, shapeOf(result), /*passed=*/false);
    } else if (contains(returned, place)) {
      return false;
    }
    returned.push_back(place);
  }
  prepared.setFunction(function);
  return true;
}

//===----------------------------------------------------------------------===//
// PlainCalls
//===----------------------------------------------------------------------===//

PlainCalls::PlainCalls(nb::tuple tensorTypes, nb::object dtypeType,
                       nb::tuple modes, nb::object isGradEnabled)
    : types(std::move(tensorTypes), std::move(dtypeType)),
      isGradEnabled(std::move(isGradEnabled)) {
  for (nb::handle mode : modes)
    this->modes.push_back(nb::borrow(mode));
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
  Form form(types);
  if (!form.read({arguments, static_cast<size_t>(count)}, types, grad))
    return Py_NewRef(Py_None);
  auto known = calls.find(form.form.hash());
  if (known == calls.end() || !form.form.equals(known->second->form))
    return Py_NewRef(Py_False);
  // Another thread may forget it while the kernel runs.
  std::shared_ptr<Call> call = known->second;
  return call->prepared ? call->run(form.form) : Py_NewRef(Py_None);
}

void PlainCalls::remember(nb::tuple arguments, const Function *function,
                          nb::list tensors, nb::object results) {
  std::vector<PyObject *> list(nb::len(arguments));
  for (size_t i = 0; i < list.size(); ++i)
    list[i] = nb::handle(arguments[i]).ptr();
  Form form(types);
  if (!form.read(list, types, /*grad=*/false))
    throw nb::value_error("expected the arguments of a plain call");

  nb::list given;
  for (const CallForm::Tensor &tensor : form.form.tensors())
    given.append(nb::handle(tensor.object));
  auto call = std::make_shared<Call>();
  if (function &&
      !call->describe(viewsOf(given), *function, viewsOf(tensors), results))
    *call = Call();
  call->form.assign(form.form.words().begin(), form.form.words().end());
  call->owned = ownedValues(arguments, types);
  if (calls.size() >= kMostForms)
    calls.clear();
  calls[form.form.hash()] = std::move(call);
}
