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
static constexpr size_t kMostWords = 8192;

//===----------------------------------------------------------------------===//
// Form
//===----------------------------------------------------------------------===//

/// The form of a model's call, with its storage.
class GuardedCalls::Form : public CallForm {
public:
  Form(const GuardedCalls &calls)
      : CallForm(calls.types, wordStorage, tensorStorage), calls(calls) {}

  /// False when the call is not plain. Never leaves an exception.
  bool read(PyObject *arguments, PyObject *keywords);

  /// The arguments that have layers, borrowed.
  std::vector<PyObject *> layered;

private:
  bool add(PyObject *argument);
  bool addLayered(PyObject *argument, const LayeredTensors &parts);
  bool addLayer(PyObject *layer, const LayeredTensors &parts);

  const GuardedCalls &calls;
  int64_t wordStorage[kMostWords];
  CallForm::Tensor tensorStorage[kMostTensors];
};

bool GuardedCalls::Form::read(PyObject *arguments, PyObject *keywords) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i)
    if (!add(PyTuple_GET_ITEM(arguments, i)))
      return false;
  PyObject *name, *value;
  for (Py_ssize_t next = 0; PyDict_Next(keywords, &next, &name, &value);)
    if (!addValue(name) || !add(value))
      return false;
  return true;
}

bool GuardedCalls::Form::add(PyObject *argument) {
  if (calls.types.isTensor(argument))
    return addTensor(argument);
  auto parts =
      std::ranges::find_if(calls.layered, [&](const LayeredTensors &layered) {
        return layered.type.ptr() ==
               reinterpret_cast<PyObject *>(Py_TYPE(argument));
      });
  return parts == calls.layered.end() ? addValue(argument)
                                      : addLayered(argument, *parts);
}

bool GuardedCalls::Form::addLayered(PyObject *argument,
                                    const LayeredTensors &parts) {
  PyObject *attributes = attributesOf(argument);
  PyObject *layers =
      attributes ? itemOf(attributes, parts.layers.ptr()) : nullptr;
  if (!layers || !PyList_CheckExact(layers) ||
      !addWord(reinterpret_cast<int64_t>(parts.type.ptr())) ||
      !addWord(PyList_GET_SIZE(layers)))
    return false;
  layered.push_back(argument);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(layers); ++i)
    if (!addLayer(PyList_GET_ITEM(layers, i), parts))
      return false;
  return true;
}

bool GuardedCalls::Form::addLayer(PyObject *layer,
                                  const LayeredTensors &parts) {
  if (reinterpret_cast<PyObject *>(Py_TYPE(layer)) != parts.layerType.ptr())
    return false;
  PyObject *attributes = attributesOf(layer);
  if (!attributes)
    return false;
  for (nb::handle name : parts.values) {
    PyObject *value = itemOf(attributes, name.ptr());
    // Nothing keeps a string of a layer for as long as the form.
    if (!value || PyUnicode_Check(value) || !addValue(value))
      return false;
  }
  for (nb::handle name : parts.tensors) {
    PyObject *value = itemOf(attributes, name.ptr());
    size_t number = tensors().size();
    if (!value || !calls.types.isTensor(value) ||
        !addTensor(value, number < calls.known.size() ? &calls.known[number]
                                                      : nullptr))
      return false;
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
  /// Keeps strings and dtypes of the form alive.
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
  /// The numbers of integers that are given, and the most that they may be.
  std::vector<std::pair<size_t, int64_t>> limits;
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
  for (const auto &[tensor, most] : found.limits) {
    std::optional<size_t> number = numberOf(tensor, form);
    dlpack::Tensor view;
    if (!number || !borrow(tensor, view) || view.type.code != dlpack::Int ||
        view.type.bits != 64 || view.rank > 1)
      return false;
    limits.emplace_back(*number, most);
  }
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
  for (auto [number, most] : limits)
    if (*static_cast<const int64_t *>(form.tensors()[number].data) > most)
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
  if (!prepared.run(addresses, results))
    return nullptr;
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
      PyList_SET_ITEM(list, i, object);
  }
  PyObject *value = failed ? nullptr : outputs.make(list, form.layered);
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
                           nb::object innermostTransform)
    : types(std::move(tensorTypes), std::move(dtypeType)),
      innermostTransform(std::move(innermostTransform)) {}

GuardedCalls::~GuardedCalls() = default;

void GuardedCalls::addLayered(LayeredTensors parts) {
  if (std::ranges::none_of(layered, [&](const LayeredTensors &other) {
        return other.type.is(parts.type);
      }))
    layered.push_back(std::move(parts));
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
  Form form(*this);
  auto call = std::make_shared<Call>();
  if (!form.read(arguments.ptr(), keywords.ptr()) ||
      !call->describe(form, found, types))
    return false;
  call->form.assign(form.words().begin(), form.words().end());
  call->owned = ownedValues(arguments, types);
  for (nb::handle values : {keywords.keys(), keywords.values()})
    for (nb::object &value : ownedValues(values, types))
      call->owned.push_back(std::move(value));
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
