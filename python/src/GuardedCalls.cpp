//===- GuardedCalls.cpp - Calls of a compiled model like earlier ones -----===//

#include "GuardedCalls.h"

#include "Operands.h"
#include "PreparedCall.h"
#include <algorithm>

namespace nb = nanobind;
using namespace moe;

/// Calls of so many forms are known; past that, all are forgotten.
static constexpr size_t kMostForms = 256;
/// Of one call; one of more is looked at each time.
static constexpr size_t kMostTensors = 1024;
static constexpr size_t kMostWords = 16384;

//===----------------------------------------------------------------------===//
// Form
//===----------------------------------------------------------------------===//

/// The form of a model's call, with its storage.
class GuardedCalls::Form : public CallForm {
public:
  /// `owned` takes what keeps the addresses of names and strings valid.
  Form(const GuardedCalls &calls, std::vector<nb::object> *owned = nullptr)
      : CallForm(calls.types, wordStorage, tensorStorage), calls(calls),
        owned(owned) {}

  /// False when the call is not plain. Never leaves an exception.
  bool read(PyObject *arguments, PyObject *keywords);

  /// Adds to each counter. False with a Python exception.
  bool count(std::span<const int64_t> steps) const;

  /// The arguments that have parts, borrowed.
  std::vector<PyObject *> withParts;
  /// Of each counter its value; those of one value are one.
  std::vector<int64_t> counters;

private:
  /// Owned, as code runs without the GIL between reading and counting.
  struct Place {
    nb::object attributes, name;
    size_t counter;
  };

  bool add(PyObject *argument);
  bool addPart(PyObject *object, const PartKind &kind);
  bool addInside(PyObject *value);
  bool addCounter(PyObject *attributes, PyObject *name, PyObject *value);
  bool addName(PyObject *name);
  const PartKind *kindOf(PyObject *object) const;

  const GuardedCalls &calls;
  std::vector<nb::object> *owned;
  std::vector<Place> places;
  int64_t wordStorage[kMostWords];
  CallForm::Tensor tensorStorage[kMostTensors];
};

namespace {
/// What tells kinds of things apart among a form's words, beside those of
/// CallForm.
enum Mark : int64_t { Part = 1 << 16, Dict, List, Device, Counter };
} // namespace

bool GuardedCalls::Form::read(PyObject *arguments, PyObject *keywords) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments); ++i)
    if (!add(PyTuple_GetItem(arguments, i)))
      return false;
  PyObject *name, *value;
  for (Py_ssize_t next = 0; PyDict_Next(keywords, &next, &name, &value);)
    if (!addName(name) || !add(value))
      return false;
  return true;
}

bool GuardedCalls::Form::add(PyObject *argument) {
  if (calls.types.isTensor(argument))
    return addTensor(argument);
  const PartKind *kind = kindOf(argument);
  if (!kind)
    return addInside(argument);
  withParts.push_back(argument);
  return addPart(argument, *kind);
}

const PartKind *GuardedCalls::Form::kindOf(PyObject *object) const {
  auto *type = reinterpret_cast<PyObject *>(Py_TYPE(object));
  auto kind = std::ranges::find_if(
      calls.kinds, [&](const PartKind &one) { return one.type.is(type); });
  return kind == calls.kinds.end() ? nullptr : &*kind;
}

bool GuardedCalls::Form::addPart(PyObject *object, const PartKind &kind) {
  PyObject *attributes = attributesOf(object);
  if (!attributes || !addWord(Mark::Part) ||
      !addWord(reinterpret_cast<int64_t>(kind.type.ptr())) ||
      !addWord(PyDict_Size(attributes)))
    return false;
  PyObject *name, *value;
  for (Py_ssize_t next = 0; PyDict_Next(attributes, &next, &name, &value);) {
    if (!addName(name))
      return false;
    bool isCounter = false;
    if (PyLong_CheckExact(value))
      for (nb::handle counter : kind.counters)
        isCounter |= counter.ptr() == name;
    if (isCounter ? !addCounter(attributes, name, value) : !addInside(value))
      return false;
  }
  return true;
}

/// Names of attributes and keywords are interned: each is one object.
bool GuardedCalls::Form::addName(PyObject *name) {
  if (owned)
    owned->push_back(nb::borrow(name));
  return addWord(reinterpret_cast<int64_t>(name));
}

bool GuardedCalls::Form::addInside(PyObject *value) {
  if (calls.types.isTensor(value)) {
    size_t number = tensors().size();
    return addTensor(value, number < calls.known.size() ? &calls.known[number]
                                                        : nullptr);
  }
  if (const PartKind *kind = kindOf(value))
    return addPart(value, *kind);
  if (PyList_CheckExact(value)) {
    if (!addWord(Mark::List) || !addWord(PyList_Size(value)))
      return false;
    for (Py_ssize_t i = 0; i < PyList_Size(value); ++i)
      if (!addInside(PyList_GetItem(value, i)))
        return false;
    return true;
  }
  if (PyDict_CheckExact(value)) {
    if (!addWord(Mark::Dict) || !addWord(PyDict_Size(value)))
      return false;
    PyObject *key, *inner;
    for (Py_ssize_t next = 0; PyDict_Next(value, &next, &key, &inner);)
      if (!addInside(key) || !addInside(inner))
        return false;
    return true;
  }
  if (reinterpret_cast<PyObject *>(Py_TYPE(value)) == calls.deviceType.ptr()) {
    // Of type and index, which are small numbers.
    Py_hash_t hash = PyObject_Hash(value);
    return addWord(Mark::Device) && addWord(hash);
  }
  if (owned &&
      (PyUnicode_CheckExact(value) || Py_TYPE(value) == calls.types.dtype)) {
    PyObject *object = Py_NewRef(value);
    if (PyUnicode_CheckExact(value))
      PyUnicode_InternInPlace(&object);
    owned->push_back(nb::steal(object));
  }
  return addValue(value);
}

bool GuardedCalls::Form::addCounter(PyObject *attributes, PyObject *name,
                                    PyObject *value) {
  int overflow = 0;
  int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow)
    return false;
  size_t counter = std::ranges::find(counters, number) - counters.begin();
  if (counter == counters.size())
    counters.push_back(number);
  places.push_back({nb::borrow(attributes), nb::borrow(name), counter});
  return addWord(Mark::Counter) && addWord(counter);
}

bool GuardedCalls::Form::count(std::span<const int64_t> steps) const {
  for (const Place &place : places) {
    PyObject *value =
        PyLong_FromLongLong(counters[place.counter] + steps[place.counter]);
    // In the place of another value, which moves none of those to come.
    if (!value ||
        PyDict_SetItem(place.attributes.ptr(), place.name.ptr(), value)) {
      Py_XDECREF(value);
      return false;
    }
    Py_DECREF(value);
  }
  return true;
}

//===----------------------------------------------------------------------===//
// Call
//===----------------------------------------------------------------------===//

/// How to run calls of one form.
class GuardedCalls::Call {
public:
  bool describe(const Form &form, const Found &found, const TorchTypes &types);

  /// Whether the conditions hold; fills in where the operands lie.
  bool fits(const Form &form, const TorchTypes &types,
            std::span<void *> addresses);
  /// Null with a Python exception.
  PyObject *run(const Form &form, std::span<void *const> addresses) const;

  size_t getNumOperands() const { return operands.size(); }
  int traverse(visitproc visit, void *arg) const;

  std::vector<int64_t> form;
  /// Keeps names, strings and dtypes of the form alive.
  std::vector<nb::object> owned;

private:
  struct Operand {
    enum Source { Given, Weight, Constant };

    OperandCondition condition;
    Source source;
    /// Among what is given, or among the weights.
    size_t number = 0;
    nb::object constant = {};
    /// Of a weight, as it was last found not to be negated.
    CallForm::Tensor known = {};
  };

  bool describeOperand(const Form &form, nb::handle object, Operand &operand);
  bool check(Operand &operand, PyObject *object, const TorchTypes &types,
             void *&address);
  PyObject *makeOutputs(const Form &form,
                        std::span<dlpack::ManagedTensor *> tensors) const;

  nb::object program, guard;
  Outputs outputs;
  const dlpack::ExchangeAPI *api = nullptr;
  PreparedCall prepared;
  std::vector<Operand> operands;
  /// Whether each result of the function is an operand that is updated.
  std::vector<bool> isUpdate;
  /// The number of an integer that is given, and the most that it may be: a
  /// number, or what a counter is.
  struct Limit {
    size_t number;
    int64_t most;
    std::optional<size_t> counter;
  };
  std::vector<Limit> limits;
  std::vector<Found::Counter> counters;
  std::vector<int64_t> steps;
  bool updates = false;
  UpdatedMemory memory;
};

/// The number of a tensor among those that are given; none if it is not there.
/// One that is there twice says nothing of calls with two tensors.
static std::optional<size_t> numberOf(nb::handle object, const CallForm &form) {
  std::span given = form.tensors();
  auto isObject = [&](const CallForm::Tensor &tensor) {
    return tensor.object == object.ptr();
  };
  if (std::ranges::count_if(given, isObject) != 1)
    return std::nullopt;
  return std::ranges::find_if(given, isObject) - given.begin();
}

static bool borrow(nb::handle object, dlpack::Tensor &tensor) {
  const dlpack::ExchangeAPI *api = exchangeAPI(Py_TYPE(object.ptr()));
  if (api && api->import && !api->borrow(object.ptr(), &tensor) &&
      tensor.deviceType == dlpack::CPU && isRowMajor(tensor))
    return true;
  PyErr_Clear();
  return false;
}

bool GuardedCalls::Call::describe(const Form &form, const Found &found,
                                  const TorchTypes &types) {
  for (nb::handle object : found.operands) {
    dlpack::Tensor tensor;
    if (!types.isTensor(object.ptr()) || !borrow(object, tensor))
      return false;
    prepared.addOperand(tensor);
    operands.push_back({OperandCondition::exactly(tensor), Operand::Constant, 0,
                        nb::borrow(object)});
  }
  for (size_t position : found.inputs) {
    std::optional<size_t> number = numberOf(found.operands[position], form);
    if (!number)
      return false;
    operands[position].source = Operand::Given;
    operands[position].number = *number;
  }
  for (auto [position, number] : found.weights) {
    operands[position].source = Operand::Weight;
    operands[position].number = number;
  }
  std::vector<UpdatedMemory::Operand> places;
  for (Operand &operand : operands) {
    if (operand.source != Operand::Constant)
      operand.constant.reset();
    size_t bytes = (operand.condition.type.bits + 7) / 8;
    for (int64_t size : operand.condition.shape)
      bytes *= size;
    places.push_back({bytes, false, operand.source == Operand::Given});
  }
  for (size_t position : found.updated)
    places[position].isUpdated = true, places[position].moves = false;
  updates = !found.updated.empty();
  memory = UpdatedMemory(std::move(places));

  for (nb::handle result : found.results) {
    isUpdate.push_back(result.is_none());
    dlpack::Tensor tensor;
    if (result.is_none())
      continue;
    if (!borrow(result, tensor))
      return false;
    api = exchangeAPI(Py_TYPE(result.ptr()));
    prepared.addResult(tensor.type, {tensor.shape, tensor.shape + tensor.rank});
  }
  for (const Found::Limit &limit : found.limits) {
    std::optional<size_t> number = numberOf(limit.tensor, form);
    dlpack::Tensor view;
    if (!number || !borrow(limit.tensor, view) ||
        view.type.code != dlpack::Int || view.type.bits != 64 ||
        view.rank > 1 ||
        (limit.counter && *limit.counter >= form.counters.size()))
      return false;
    limits.push_back({*number, limit.most, limit.counter});
  }
  if (found.counters.size() != form.counters.size())
    return false;
  counters = found.counters;
  steps.reserve(counters.size());
  for (const Found::Counter &counter : counters)
    steps.push_back(counter.step);
  prepared.setFunction(*found.function);
  program = found.program;
  guard = found.guard;
  outputs = found.outputs;
  return true;
}

bool GuardedCalls::Call::fits(const Form &form, const TorchTypes &types,
                              std::span<void *> addresses) {
  auto *model = nb::inst_ptr<ModelGuard>(guard);
  if (!model->holds())
    return false;
  for (const Limit &limit : limits) {
    int64_t most = limit.counter ? form.counters[*limit.counter] : limit.most;
    if (*static_cast<const int64_t *>(form.tensors()[limit.number].data) > most)
      return false;
  }
  for (size_t i = 0; i < counters.size(); ++i)
    if (form.counters[i] < counters[i].least ||
        form.counters[i] > counters[i].most)
      return false;
  for (size_t i = 0; i < operands.size(); ++i) {
    Operand &operand = operands[i];
    if (operand.source == Operand::Given) {
      addresses[i] = form.tensors()[operand.number].data;
      continue;
    }
    PyObject *object = operand.source == Operand::Constant
                           ? operand.constant.ptr()
                           : model->getWeights()[operand.number].tensor;
    if (!object || !check(operand, object, types, addresses[i]))
      return false;
  }
  return !updates || memory.isDisjoint(addresses);
}

/// Weights may have been changed in place, whoever holds them.
bool GuardedCalls::Call::check(Operand &operand, PyObject *object,
                               const TorchTypes &types, void *&address) {
  dlpack::Tensor tensor;
  if (!types.borrow(object, tensor) || tensor.deviceType != dlpack::CPU ||
      !operand.condition.unmet(tensor).empty())
    return false;
  address = firstElement(tensor);
  if (operand.known.object == object && operand.known.data == address)
    return true;
  if (isNegated(object))
    return false;
  operand.known = {object, address};
  return true;
}

PyObject *GuardedCalls::Call::run(const Form &form,
                                  std::span<void *const> addresses) const {
  std::vector<dlpack::ManagedTensor *> results(prepared.getNumResults());
  std::vector<PreparedCall::Size> sizes;
  sizes.reserve(counters.size());
  for (size_t i = 0; i < counters.size(); ++i)
    sizes.push_back({counters[i].operand, form.counters[i] + kSmallestSize});
  if (!prepared.run(addresses, results, sizes))
    return nullptr;
  if (!form.count(steps)) {
    for (dlpack::ManagedTensor *result : results)
      result->deleter(result);
    return nullptr;
  }
  PyObject *value = makeOutputs(form, results);
  if (!value)
    return nullptr;
  PyObject *pair = PyTuple_Pack(2, program.ptr(), value);
  Py_DECREF(value);
  return pair;
}

/// `tensors` are used up.
PyObject *GuardedCalls::Call::makeOutputs(
    const Form &form, std::span<dlpack::ManagedTensor *> tensors) const {
  PyObject *list = PyList_New(isUpdate.size());
  size_t next = 0;
  bool failed = !list;
  for (size_t i = 0; i < isUpdate.size(); ++i) {
    PyObject *object = nullptr;
    if (isUpdate[i])
      object = Py_NewRef(Py_None);
    else if (failed)
      tensors[next]->deleter(tensors[next]), ++next;
    else
      failed = !(object = importTensor(api, tensors[next++]));
    if (list && object)
      PyList_SetItem(list, i, object);
  }
  PyObject *value = failed ? nullptr : outputs.make(list, form.withParts);
  Py_XDECREF(list);
  return value;
}

int GuardedCalls::Call::traverse(visitproc visit, void *arg) const {
  Py_VISIT(program.ptr());
  Py_VISIT(guard.ptr());
  for (const Operand &operand : operands)
    Py_VISIT(operand.constant.ptr());
  return outputs.traverse(visit, arg);
}

//===----------------------------------------------------------------------===//
// GuardedCalls
//===----------------------------------------------------------------------===//

GuardedCalls::GuardedCalls(nb::tuple tensorTypes, nb::object dtypeType,
                           nb::object deviceType, nb::object innermostTransform)
    : types(std::move(tensorTypes), std::move(dtypeType)),
      deviceType(std::move(deviceType)),
      innermostTransform(std::move(innermostTransform)) {}

GuardedCalls::~GuardedCalls() = default;

void GuardedCalls::addPart(PartKind kind) {
  auto known = std::ranges::find_if(
      kinds, [&](const PartKind &other) { return other.type.is(kind.type); });
  if (known == kinds.end())
    kinds.push_back(std::move(kind));
  else
    *known = std::move(kind);
}

PyObject *GuardedCalls::run(PyObject *arguments, PyObject *keywords) {
  PyObject *transform = PyObject_CallNoArgs(innermostTransform.ptr());
  if (!transform)
    return nullptr;
  bool isTransformed = transform != Py_None;
  Py_DECREF(transform);
  if (isTransformed || calls.empty())
    return Py_NewRef(Py_NotImplemented);
  Form form(*this);
  if (!form.read(arguments, keywords))
    return Py_NewRef(Py_NotImplemented);
  auto found = calls.find(form.hash());
  if (found == calls.end() || !form.equals(found->second->form))
    return Py_NewRef(Py_NotImplemented);
  // Another thread may forget it meanwhile.
  std::shared_ptr<Call> call = found->second;
  std::vector<void *> addresses(call->getNumOperands());
  if (!call->fits(form, types, addresses)) {
    // The long way says what does not hold, or finds another program.
    if (found = calls.find(form.hash());
        found != calls.end() && found->second == call)
      calls.erase(found);
    return Py_NewRef(Py_NotImplemented);
  }
  known.assign(form.tensors().begin(), form.tensors().end());
  return call->run(form, addresses);
}

bool GuardedCalls::remember(nb::tuple arguments, nb::dict keywords,
                            const Found &found) {
  auto call = std::make_shared<Call>();
  Form form(*this, &call->owned);
  if (!form.read(arguments.ptr(), keywords.ptr()) ||
      !call->describe(form, found, types))
    return false;
  call->form.assign(form.words().begin(), form.words().end());
  if (calls.size() >= kMostForms)
    calls.clear();
  calls[form.hash()] = std::move(call);
  return true;
}

int GuardedCalls::traverse(visitproc visit, void *arg) const {
  for (const auto &[hash, call] : calls)
    if (int result = call->traverse(visit, arg))
      return result;
  return 0;
}
