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
static constexpr int64_t kLargestCounter = std::numeric_limits<int32_t>::max();

DecoderProgram::DecoderProgram(const Json &description,
                               std::unique_ptr<Function> code,
                               StoredTensors &weights,
                               const std::map<std::string, Tensor> &state,
                               const DecoderState &initial, int64_t sequences)
    : function(std::move(code)), sizes(description, *function, kDecoderFile),
      form(description.at("form").integer()),
      nextForm(description.at("next_form").integer()) {
  readArguments(description.at("arguments").array(), weights, state, initial,
                sequences);
  readResult(sequences);
  readChanges(description.at("changes").array(), initial);
}

void DecoderProgram::refuse(const std::string &expectation) const {
  throw std::runtime_error(std::string(kDecoderFile) + ": '" +
                           function->getName() + "': expected " + expectation);
}

void DecoderProgram::readArguments(const Json::Array &list,
                                   StoredTensors &weights,
                                   const std::map<std::string, Tensor> &state,
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
      addBound(i, list[i],
               weights.findAligned(list[i].at("stored_as").string()), false);
    } else if (kind == "state") {
      auto tensor = state.find(list[i].at("name").string());
      if (tensor == state.end())
        refuse("a tensor of the cache, found '" + list[i].at("name").string() +
               "'");
      addBound(i, list[i], tensor->second, true);
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

void DecoderProgram::addBound(size_t argument, const Json &description,
                              const Tensor &value, bool isState) {
  const ValueType &type = function->getArguments()[argument];
  if (!type.isTensor || value.dtype != type.dtype ||
      !std::ranges::equal(value.shape, type.shape))
    refuse(std::string(isState ? "state '" : "weight '") +
           description.at("name").string() + "' to be " + type.toString() +
           ", found another type");
  arguments[argument] = value;
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

void DecoderProgram::readResult(int64_t sequences) const {
  const std::vector<ValueType> &results = function->getResults();
  bool isOfLogits =
      results.size() == 1 && results[0].isTensor && results[0].dtype == "f32" &&
      results[0].shape.size() == 2 &&
      (results[0].shape[0] == sequences || results[0].shape[0] == -1) &&
      results[0].shape[1] > 0;
  if (!isOfLogits)
    refuse("one result, logits f32[" + std::to_string(sequences) +
           ", words], found " +
           (results.empty() ? "none" : results[0].toString()));
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
  arguments[*idsArgument] = std::move(ids);
  ProgramSizes::Values values = sizes.read(arguments);
  return !sizes.findUnmet(values) && !sizes.findMismatch(arguments, values);
}

DecoderState DecoderProgram::computeNext(const DecoderState &state) const {
  DecoderState next = state;
  next.form = nextForm;
  ProgramSizes::Values values = sizes.read(arguments);
  for (const auto &[counter, value] : changes) {
    next.counters[counter] = ProgramSizes::evaluate(value, values);
    if (next.counters[counter] < 0 || next.counters[counter] > kLargestCounter)
      refuse("counters of at least 0 after a call, found " +
             std::to_string(next.counters[counter]));
  }
  return next;
}

void DecoderProgram::run(const Tensor &logits) const {
  function->run(arguments, {&logits, 1});
}

bool DecoderProgram::uses(const Tensor &tensor) const {
  return std::ranges::any_of(arguments, [&](const Tensor &argument) {
    return argument.data == tensor.data;
  });
}

int64_t DecoderProgram::getNumWords() const {
  return function->getResults()[0].shape[1];
}

} // namespace moe::runtime
