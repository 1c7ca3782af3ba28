//===- ProgramSizes.h - The sizes that a torch program serves ---*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_PROGRAMSIZES_H
#define MOE_LIB_RUNTIME_LOADER_PROGRAMSIZES_H

#include "Json.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace moe::runtime {

/// The open sizes of a torch program: names that stand for sizes of arguments,
/// what the names have to fulfil, and the sizes of all arguments as texts.
class ProgramSizes {
public:
  using Values = std::map<std::string, int64_t>;

  /// `size`, an arithmetic text over the names, has the relation to the number.
  struct Condition {
    std::string size, relation;
    int64_t number;
  };

  /// A size of an argument that is another than follows from the others.
  struct Mismatch {
    size_t argument, dim;
    int64_t expected;
  };

  /// Reads "symbols", "conditions" and the "shape" of each of the "arguments"
  /// that a file of the artifact describes. Throws std::runtime_error where
  /// they do not fit to the function.
  ProgramSizes(const Json &description, const Function &function,
               const std::string &file);

  /// The values of the names for these arguments.
  Values read(std::span<const Tensor> arguments) const;
  /// The first condition that does not hold; null if all do.
  const Condition *findUnmet(const Values &values) const;
  std::optional<Mismatch> findMismatch(std::span<const Tensor> arguments,
                                       const Values &values) const;

  /// Whether a text is an integer, or each name in it is one of the names.
  bool isKnown(const Json &size) const;
  /// The value of an integer or a text.
  static int64_t evaluate(const Json &size, const Values &values);

  /// Which size of which argument a name stands for.
  const std::map<std::string, std::pair<size_t, size_t>> &getNames() const {
    return names;
  }

private:
  void readNames(const Json::Object &places, const Function &function);
  void readConditions(const Json::Array &list, const Function &function);
  bool isOfNames(const std::string &size) const;

  std::string file;
  std::map<std::string, std::pair<size_t, size_t>> names;
  std::vector<Condition> conditions;
  std::vector<Json::Array> shapes;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_PROGRAMSIZES_H
