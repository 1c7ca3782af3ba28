//===- DecoderProgram.cpp - One way in which a decoder runs ---------------===//

#include "DecoderProgram.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace moe::runtime {

/// How much larger a size is than the counter that it says: torch takes the
/// sizes 0 and 1 for cases of their own.
static constexpr int64_t kSmallestSize = 2;
/// Far from where sums of sizes leave 64 bits.
static constexpr int64_t kLargestNumber = std::numeric_limits<int32_t>::max();

size_t DecoderTensors::find(const std::string &name) const {
  auto found = numbers.find(name);
  if (found == numbers.end())
    throw std::runtime_error(std::string(kDecoderFile) +
                             ": expected a tensor of the cache, found '" +
                             name + "'");
  return found->second;
}

DecoderProgram::DecoderProgram(const Json &description,
                               std::unique_ptr<Function> code,
                               StoredTensors &weights,
                               const DecoderTensors &tensors,
                               const DecoderState &initial, int64_t sequences)
    : function(std::move(code)), sizes(description, *function, kDecoderFile),
      form(description.at("form").integer()),
      nextForm(description.at("next_form").integer()) {
  readArguments(description.at("arguments").array(), weights, tensors, initial,
                sequences);
  readResults(description.find("makes"), tensors, sequences);
  readChanges(description.at("changes").array(), initial);
}

void DecoderProgram::refuse(const std::string &expectation) const {
  throw std::runtime_error(std::string(kDecoderFile) + ": '" +
                           function->getName() + "': expected " + expectation);
}

void DecoderProgram::readArguments(const Json::Array &list,
                                   StoredTensors &weights,
                                   const DecoderTensors &tensors,
                                   const DecoderState &initial,
                                   int64_t sequences) {
  arguments.resize(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string &kind = list[i].at("kind").string();
    if (function->getArguments()[i].isUpdated && kind != "state")
      refuse("argument " + std::to_string(i) +
             ", which it updates, to be of kind \"state\", found \"" + kind +
             "\"");
    if (kind == "weight") {
      addWeight(i, list[i],
                weights.findAligned(list[i].at("stored_as").string()));
    } else if (kind == "state") {
      addState(i, tensors.find(list[i].at("name").string()), tensors);
    } else if (kind == "counter") {
      addCounters(i, list[i].at("counters").array(), initial);
    } else if (kind == "ids") {
      addIds(i, sequences);
    } else {
      refuse("an argument that is a weight, state, a counter or ids, found \"" +
             kind + "\"");
    }
  }
  if (!idsArgument)
    refuse("an argument for ids, found none");
}

void DecoderProgram::addWeight(size_t argument, const Json &description,
                               const Tensor &value) {
  const ValueType &type = function->getArguments()[argument];
  if (!type.isTensor || value.dtype != type.dtype ||
      !std::ranges::equal(value.shape, type.shape))
    refuse("weight '" + description.at("name").string() + "' to be " +
           type.toString() + ", found another type");
  arguments[argument] = value;
}

void DecoderProgram::addState(size_t argument, size_t tensor,
                              const DecoderTensors &tensors) {
  const ValueType &type = function->getArguments()[argument];
  const StateTensor &value = tensors.list[tensor];
  const std::vector<int64_t> &shape = value.getFirstShape();
  bool fits = tensors.made.contains(tensor)
                  ? shape.size() == type.shape.size()
                  : std::ranges::equal(shape, type.shape);
  if (!type.isTensor || value.getType() != type.dtype || !fits)
    refuse("state '" + value.getName() + "' to be " + type.toString() +
           ", found another type");
  arguments[argument].dtype = type.dtype;
  stateArguments.emplace_back(argument, tensor);
}

void DecoderProgram::addCounters(size_t argument, const Json::Array &list,
                                 const DecoderState &initial) {
  const ValueType &type = function->getArguments()[argument];
  if (!type.isTensor || type.shape.size() != 2 || type.shape[1] != 0)
    refuse("an empty tensor for counters, found " + type.toString());
  CounterArgument entry = {argument, {}};
  for (const Json &counter : list) {
    entry.counters.push_back(static_cast<size_t>(counter.integer()));
    if (entry.counters.back() >= initial.counters.size())
      refuse("one of " + std::to_string(initial.counters.size()) +
             " counters, found number " + std::to_string(counter.integer()));
  }
  if (entry.counters.empty())
    refuse("a counter for argument " + std::to_string(argument) +
           ", found none");
  arguments[argument].dtype = type.dtype;
  counterArguments.push_back(std::move(entry));
}

void DecoderProgram::addIds(size_t argument, int64_t sequences) {
  const ValueType &type = function->getArguments()[argument];
  bool isOfIds = type.isTensor && type.dtype == "i64" &&
                 type.shape.size() == 2 &&
                 (type.shape[0] == sequences || type.shape[0] == -1);
  if (!isOfIds || idsArgument)
    refuse("one argument for ids i64[" + std::to_string(sequences) +
           ", ?], found " + type.toString());
  idsArgument = argument;
}

void DecoderProgram::readResults(const Json *list,
                                 const DecoderTensors &tensors,
                                 int64_t sequences) {
  const std::vector<ValueType> &results = function->getResults();
  size_t count = list ? list->array().size() : 0;
  bool isOfLogits =
      results.size() == 1 + count && results[0].isTensor &&
      results[0].dtype == "f32" && results[0].shape.size() == 2 &&
      (results[0].shape[0] == sequences || results[0].shape[0] == -1) &&
      results[0].shape[1] > 0;
  if (!isOfLogits)
    refuse("logits f32[" + std::to_string(sequences) + ", words] and " +
           std::to_string(count) + " tensors of the cache as results, found " +
           std::to_string(results.size()) + " results" +
           (results.empty() ? "" : ", the first " + results[0].toString()));
  for (size_t i = 0; i < count; ++i) {
    const Json &entry = list->array()[i];
    const ValueType &type = results[i + 1];
    Made result = {tensors.find(entry.at("name").string()),
                   entry.at("shape").array()};
    const StateTensor &tensor = tensors.list[result.tensor];
    if (!type.isTensor || tensor.getType() != type.dtype ||
        result.shape.size() != type.shape.size() ||
        tensor.getFirstShape().size() != type.shape.size() ||
        !std::ranges::all_of(result.shape, [&](const Json &size) {
          return sizes.isKnown(size);
        }))
      refuse("a result for '" + tensor.getName() +
             "' of its type and of sizes that follow from those of arguments, "
             "found " +
             type.toString());
    if (std::ranges::count(made, result.tensor, &Made::tensor))
      refuse("each tensor of the cache once among its results, found '" +
             tensor.getName() + "' again");
    made.push_back(std::move(result));
  }
}

void DecoderProgram::readChanges(const Json::Array &list,
                                 const DecoderState &initial) {
  for (const Json &change : list) {
    auto counter = static_cast<size_t>(change.array(2)[0].integer());
    const Json &value = change.array(2)[1];
    if (counter >= initial.counters.size() || !sizes.isKnown(value))
      refuse("changes of its " + std::to_string(initial.counters.size()) +
             " counters by sizes of its arguments, found others");
    changes.emplace_back(counter, value);
  }
}

bool DecoderProgram::bind(Tensor ids, const DecoderState &state) {
  if (state.form != form)
    return false;
  for (const auto &[argument, counters] : counterArguments) {
    int64_t value = state.counters[counters[0]];
    if (!std::ranges::all_of(counters, [&](size_t counter) {
          return state.counters[counter] == value;
        }))
      return false;
    arguments[argument].shape = {value + kSmallestSize, 0};
  }
  for (auto [argument, tensor] : stateArguments)
    arguments[argument].shape = state.shapes[tensor];
  arguments[*idsArgument] = std::move(ids);
  ProgramSizes::Values values = sizes.read(arguments);
  return !sizes.findUnmet(values) && !sizes.findMismatch(arguments, values);
}

DecoderState DecoderProgram::computeNext(const DecoderState &state) const {
  DecoderState next = state;
  next.form = nextForm;
  ProgramSizes::Values values = sizes.read(arguments);
  auto compute = [&](const Json &size, const char *what) {
    int64_t value = ProgramSizes::evaluate(size, values);
    if (value < 0 || value > kLargestNumber)
      refuse(std::string(what) + " of at least 0 after a call, found " +
             std::to_string(value));
    return value;
  };
  for (const auto &[counter, value] : changes)
    next.counters[counter] = compute(value, "counters");
  for (const auto &[tensor, shape] : made) {
    next.shapes[tensor].clear();
    for (const Json &size : shape)
      next.shapes[tensor].push_back(compute(size, "sizes"));
  }
  return next;
}

void DecoderProgram::run(const Tensor &logits,
                         std::vector<StateTensor> &tensors,
                         const DecoderState &next) {
  for (auto [argument, tensor] : stateArguments)
    arguments[argument].data = tensors[tensor].getValue().data;
  std::vector<std::vector<int64_t>> shapes =
      function->getResultShapes(arguments);
  std::vector<Tensor> results = {logits};
  for (size_t i = 0; i < made.size(); ++i) {
    StateTensor &tensor = tensors[made[i].tensor];
    // Before there is memory for it.
    if (shapes[i + 1] != next.shapes[made[i].tensor])
      refuse("sizes of '" + tensor.getName() +
             "' after a call that are those of result " +
             std::to_string(i + 1) + ", found other ones");
    results.push_back(tensor.prepare(shapes[i + 1]));
  }
  function->run(arguments, results);
  for (const Made &result : made)
    tensors[result.tensor].accept();
}

bool DecoderProgram::uses(size_t tensor) const {
  return std::ranges::count(made, tensor, &Made::tensor) ||
         std::ranges::any_of(stateArguments, [&](const auto &argument) {
           return argument.second == tensor;
         });
}

int64_t DecoderProgram::getNumWords() const {
  return function->getResults()[0].shape[1];
}

} // namespace moe::runtime
