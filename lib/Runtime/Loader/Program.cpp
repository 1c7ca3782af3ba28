//===- Program.cpp - Torch programs with their weights --------------------===//

#include "Functions.h"
#include "ProgramSizes.h"
#include "ProgramState.h"
#include "Weights.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>

namespace moe::runtime {
namespace {

class Program : public Function {
public:
  Program(const Json &description,
          std::vector<std::unique_ptr<Function>> functions,
          std::unique_ptr<MappedFile> weightsFile)
      : stored(std::move(weightsFile)) {
    name = description.at("function").string();
    for (auto &candidate : functions)
      if (candidate->getName() == name)
        function = std::move(candidate);
    if (!function)
      refuse("the manifest to have '" + name + "', found no such function");
    auto *onDevice = dynamic_cast<DeviceFunction *>(function.get());
    state.emplace(name, onDevice ? &onDevice->getDevice() : nullptr);
    readResults(description);
    programSizes.emplace(description, *function, "program.json");
    readArguments(description.at("arguments").array());
    if (onDevice)
      moveWeightsTo(onDevice->getDevice());
  }

  bool hasState() const override { return !state->isEmpty(); }

  void reset() const override {
    std::unique_lock<std::mutex> lock = state->acquire();
    state->reset();
  }

private:
  [[noreturn]] static void refuse(const std::string &expectation) {
    throw std::runtime_error("program.json: expected " + expectation);
  }

  /// Code for a CPU writes the next values of state into the arguments, and
  /// has no results for them.
  void readResults(const Json &description) {
    std::set<int64_t> updates;
    for (const Json &argument : description.at("arguments").array())
      if (const Json *updatedBy = argument.find("updated_by"))
        updates.insert(updatedBy->integer());
    bool isInPlace =
        std::ranges::any_of(function->getArguments(), &ValueType::isUpdated);
    for (const Json &shape : description.at("results").array()) {
      auto position = static_cast<int64_t>(places.size());
      if (isInPlace && updates.contains(position)) {
        places.push_back(std::nullopt);
        continue;
      }
      places.push_back(shapes.size());
      shapes.push_back(shape.array());
    }
    if (shapes.size() != function->getResults().size())
      refuse("an entry for each result of '" + name + "'");
    for (const Json &output : description.at("outputs").array()) {
      auto position = static_cast<uint64_t>(output.integer());
      if (position >= places.size() || !places[position])
        refuse("outputs among the " + std::to_string(places.size()) +
               " results of '" + name + "', found " +
               std::to_string(output.integer()));
      outputs.push_back(*places[position]);
      results.push_back(function->getResults()[outputs.back()]);
    }
  }

  /// Throws for inputs of sizes that the program was not compiled for.
  void checkSizes(std::span<const Tensor> all,
                  const ProgramSizes::Values &values) const {
    if (const auto *condition = programSizes->findUnmet(values))
      throw std::runtime_error(
          describe(*condition) + ", as the program was exported, found " +
          std::to_string(
              ProgramSizes::evaluate(Json(condition->size), values)) +
          "; export it with sizes that include this one, and compile that");
    if (auto mismatch = programSizes->findMismatch(all, values))
      throw std::runtime_error(
          describe(mismatch->argument) + ": expected dim " +
          std::to_string(mismatch->dim) + " to be " +
          std::to_string(mismatch->expected) +
          ", which follows from the inputs before, found " +
          std::to_string(all[mismatch->argument].shape[mismatch->dim]));
  }

  std::string describe(const ProgramSizes::Condition &condition) const {
    std::string rest =
        " " + condition.relation + " " + std::to_string(condition.number);
    const auto &symbols = programSizes->getNames();
    auto symbol = symbols.find(condition.size);
    if (symbol != symbols.end()) {
      const auto &[argument, dim] = symbol->second;
      return describe(argument) + ": expected dim " + std::to_string(dim) +
             rest;
    }
    std::string where;
    for (const auto &[name, place] : symbols)
      if (condition.size.find(name) != std::string::npos)
        where += (where.empty() ? "" : ", ") + name + " is dim " +
                 std::to_string(place.second) + " of " + describe(place.first);
    return "input sizes: expected " + condition.size + rest + " (" + where +
           ")";
  }

  std::string describe(size_t argument) const {
    size_t input =
        std::find(inputs.begin(), inputs.end(), argument) - inputs.begin();
    return input == inputs.size()
               ? "a weight of '" + name + "'"
               : "argument " + std::to_string(input) + " ('" + names[input] +
                     "') of '" + name + "'";
  }

  void readArguments(const Json::Array &list) {
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string &argument = list[i].at("name").string();
      const Json *updatedBy = list[i].find("updated_by");
      if (function->getArguments()[i].isUpdated && !updatedBy)
        refuse("'" + argument + "' to be state, as '" + name + "' updates it");
      if (list[i].at("kind").string() == "input") {
        if (updatedBy)
          refuse("state to be of kind \"state\", found the input '" + argument +
                 "' with an update");
        inputs.push_back(i);
        names.push_back(argument);
        arguments.push_back(function->getArguments()[i]);
        bound.emplace_back();
        continue;
      }
      if (updatedBy)
        bound.push_back(addState(i, static_cast<uint64_t>(updatedBy->integer()),
                                 findInitial(list[i]), argument));
      else
        bound.push_back(stored.findAligned(getStoredName(list[i])));
    }
  }

  /// Tied weights are stored once, under the name of the first.
  static const std::string &getStoredName(const Json &argument) {
    const Json *storedAs = argument.find("stored_as");
    return (storedAs ? *storedAs : argument.at("name")).string();
  }

  /// The first value of state; one of zeros is not stored.
  Tensor findInitial(const Json &argument) const {
    const Json *storedAs = argument.find("stored_as");
    if (storedAs && storedAs->isNull())
      return {};
    return stored.find(getStoredName(argument));
  }

  /// A buffer whose next value is a result that nobody else gets, or is written
  /// in its place; without data in the file it starts as zeros. Returns what it
  /// is, without a place.
  Tensor addState(size_t argument, uint64_t result, Tensor initial,
                  const std::string &buffer) {
    const ValueType &type = function->getArguments()[argument];
    std::optional<size_t> place;
    bool isState = result < places.size() && type.isTensor &&
                   !std::ranges::count(type.shape, -1);
    if (isState)
      place = places[result];
    if (isState && place)
      isState = !type.isUpdated && !state->isNext(*place) &&
                !std::ranges::count(outputs, *place) &&
                function->getResults()[*place].toString() == type.toString();
    else
      isState = isState && type.isUpdated;
    if (!isState)
      refuse("the next value of '" + buffer + "' to be a result of type " +
             type.toString() + " of its own, found result " +
             std::to_string(result));
    if (!initial.data && initial.dtype.empty())
      initial = Tensor{type.dtype, type.shape};
    if (initial.dtype != type.dtype || initial.shape != type.shape)
      refuse("the first value of '" + buffer + "' to be " + type.toString() +
             ", found another type in " + kWeightsFile);
    state->add(argument, place, initial, buffer);
    initial.data = nullptr;
    return initial;
  }

  /// Once, so that calls copy their inputs alone.
  void moveWeightsTo(GpuDevice &device) {
    weights.emplace(device);
    for (size_t i = 0; i < bound.size(); ++i)
      if (bound[i].data && function->getArguments()[i].isTensor) {
        weights->add(bound[i], "a weight of " + name, /*copied=*/true);
        bound[i] = weights->get().back();
      }
  }

  void copy(const Tensor &to, const Tensor &from) const {
    if (!to.isOnDevice && !from.isOnDevice)
      std::memcpy(to.data, from.data, getByteSize(from));
    else
      dynamic_cast<DeviceFunction &>(*function).getDevice().copy(
          to.data, from.data, getByteSize(from), nullptr);
  }

  std::vector<Tensor> bind(std::span<const Tensor> given) const {
    std::vector<Tensor> all = bound;
    for (size_t i = 0; i < inputs.size(); ++i)
      all[inputs[i]] = given[i];
    return all;
  }

  /// The shapes of all results of the function, whether the program returns
  /// them or not.
  std::vector<std::vector<int64_t>>
  computeAllShapes(std::span<const Tensor> all) const {
    ProgramSizes::Values values = programSizes->read(all);
    checkSizes(all, values);
    std::vector<std::vector<int64_t>> computed;
    for (const Json::Array &shape : shapes) {
      std::vector<int64_t> &sizes = computed.emplace_back();
      for (const Json &size : shape)
        sizes.push_back(ProgramSizes::evaluate(size, values));
      getNumElements(sizes); // Throws for a negative one.
    }
    return computed;
  }

  std::vector<std::vector<int64_t>>
  computeResultShapes(std::span<const Tensor> given) const override {
    std::vector<std::vector<int64_t>> all = computeAllShapes(bind(given));
    std::vector<std::vector<int64_t>> returned;
    returned.reserve(outputs.size());
    for (size_t output : outputs)
      returned.push_back(all.at(output));
    return returned;
  }

  void execute(std::span<const Tensor> given,
               std::span<const Tensor> returned) const override {
    std::unique_lock<std::mutex> lock;
    if (hasState())
      lock = state->acquire();
    std::vector<Tensor> all = bind(given);
    std::vector<std::vector<int64_t>> allShapes = computeAllShapes(all);
    std::vector<Array> unused;
    std::vector<Tensor> written;
    for (size_t i = 0; i < allShapes.size(); ++i) {
      auto first = std::find(outputs.begin(), outputs.end(), i);
      if (first != outputs.end()) {
        written.push_back(returned[first - outputs.begin()]);
        continue;
      }
      if (state->isNext(i)) {
        written.emplace_back();
        continue;
      }
      unused.emplace_back(function->getResults()[i].dtype, allShapes[i]);
      written.push_back(unused.back().tensor);
    }
    state->begin(all, written);
    function->run(all, written);
    state->end();
    // A result that is returned twice was written once.
    for (size_t i = 0; i < outputs.size(); ++i)
      if (returned[i].data != written[outputs[i]].data)
        copy(returned[i], written[outputs[i]]);
  }

  StoredTensors stored;
  std::optional<ProgramSizes> programSizes;
  /// Changes while calls run, which the function's users see as the model does.
  mutable std::optional<ProgramState> state;
  std::unique_ptr<Function> function;
  std::optional<StagedTensors> weights;
  /// One a parameter of the function; those of `inputs` are filled in a call.
  std::vector<Tensor> bound;
  std::vector<size_t> inputs, outputs;
  /// Of each result in program.json that of the function, if it has one.
  std::vector<std::optional<size_t>> places;
  /// Of the function's results.
  std::vector<Json::Array> shapes;
};

} // namespace

std::unique_ptr<Function>
makeProgram(const Json &description,
            std::vector<std::unique_ptr<Function>> functions,
            std::unique_ptr<MappedFile> weights) {
  return std::make_unique<Program>(description, std::move(functions),
                                   std::move(weights));
}

} // namespace moe::runtime
