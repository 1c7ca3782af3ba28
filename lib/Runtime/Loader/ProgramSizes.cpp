//===- ProgramSizes.cpp - The sizes that a torch program serves -----------===//

#include "ProgramSizes.h"

#include "Sizes.h"

#include <algorithm>
#include <regex>
#include <stdexcept>

namespace moe::runtime {
namespace {

using Relation = bool (*)(int64_t, int64_t);

const std::map<std::string, Relation> &getRelations() {
  static const std::map<std::string, Relation> relations = {
      {"==", [](int64_t a, int64_t b) { return a == b; }},
      {"!=", [](int64_t a, int64_t b) { return a != b; }},
      {"<", [](int64_t a, int64_t b) { return a < b; }},
      {"<=", [](int64_t a, int64_t b) { return a <= b; }},
      {">", [](int64_t a, int64_t b) { return a > b; }},
      {">=", [](int64_t a, int64_t b) { return a >= b; }}};
  return relations;
}

} // namespace

ProgramSizes::ProgramSizes(const Json &description, const Function &function,
                           const std::string &file)
    : file(file) {
  const Json::Array &arguments = description.at("arguments").array();
  if (arguments.size() != function.getArguments().size())
    throw std::runtime_error(file +
                             ": expected an entry for each argument of '" +
                             function.getName() + "'");
  for (size_t i = 0; i < arguments.size(); ++i)
    shapes.push_back(arguments[i].at("shape").array(
        function.getArguments()[i].shape.size()));
  readNames(description.at("symbols").object(), function);
  readConditions(description.at("conditions").array(), function);
}

void ProgramSizes::readNames(const Json::Object &places,
                             const Function &function) {
  for (const auto &[name, place] : places) {
    auto argument = static_cast<size_t>(place.array(2)[0].integer());
    auto dim = static_cast<size_t>(place.array(2)[1].integer());
    if (argument >= function.getArguments().size() ||
        dim >= function.getArguments()[argument].shape.size())
      throw std::runtime_error(file + ": expected '" + name +
                               "' to stand for a size of an argument of '" +
                               function.getName() + "'");
    names[name] = {argument, dim};
  }
}

void ProgramSizes::readConditions(const Json::Array &list,
                                  const Function &function) {
  for (const Json &condition : list) {
    const Json::Array &parts = condition.array(3);
    const std::string &size = parts[0].string();
    if (!isOfNames(size) || !getRelations().count(parts[1].string()))
      throw std::runtime_error(
          file +
          ": expected conditions such as [\"s0\", \">=\", 2] of the symbols "
          "of '" +
          function.getName() + "', found one of '" + size + "' and '" +
          parts[1].string() + "'");
    conditions.push_back({size, parts[1].string(), parts[2].integer()});
  }
}

bool ProgramSizes::isOfNames(const std::string &size) const {
  static const std::regex word("[A-Za-z_][A-Za-z_0-9]*");
  return std::all_of(std::sregex_iterator(size.begin(), size.end(), word),
                     std::sregex_iterator(), [&](const std::smatch &match) {
                       return match.str() == "max" || match.str() == "min" ||
                              names.count(match.str());
                     });
}

bool ProgramSizes::isKnown(const Json &size) const {
  return size.isInteger() || isOfNames(size.string());
}

int64_t ProgramSizes::evaluate(const Json &size, const Values &values) {
  return size.isInteger() ? size.integer()
                          : evaluateSizeText(size.string(), values);
}

ProgramSizes::Values
ProgramSizes::read(std::span<const Tensor> arguments) const {
  Values values;
  for (const auto &[name, place] : names)
    values[name] = arguments[place.first].shape.at(place.second);
  return values;
}

const ProgramSizes::Condition *
ProgramSizes::findUnmet(const Values &values) const {
  for (const Condition &condition : conditions)
    if (!getRelations().at(condition.relation)(
            evaluateSizeText(condition.size, values), condition.number))
      return &condition;
  return nullptr;
}

std::optional<ProgramSizes::Mismatch>
ProgramSizes::findMismatch(std::span<const Tensor> arguments,
                           const Values &values) const {
  for (size_t i = 0; i < shapes.size(); ++i)
    for (size_t dim = 0; dim < shapes[i].size(); ++dim)
      if (int64_t expected = evaluate(shapes[i][dim], values);
          arguments[i].shape.at(dim) != expected)
        return Mismatch{i, dim, expected};
  return std::nullopt;
}

} // namespace moe::runtime
