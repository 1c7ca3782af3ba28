//===- DecoderProgram.h - One way in which a decoder runs -------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_DECODERPROGRAM_H
#define MOE_LIB_RUNTIME_LOADER_DECODERPROGRAM_H

#include "DecoderState.h"
#include "ProgramSizes.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace moe::runtime {

/// The tensors of a cache.
struct DecoderTensors {
  size_t find(const std::string &name) const;

  std::vector<StateTensor> list;
  std::map<std::string, size_t> numbers;
  /// Those that programs make anew, which have other sizes in each call.
  std::set<size_t> made;
};

/// Code for some numbers of tokens, on a cache in some states. Its arguments
/// are weights, tensors of the cache, some of which it updates in place,
/// counters as the sizes of empty tensors, and ids. It gives logits, and
/// tensors for the cache.
class DecoderProgram {
public:
  /// Throws std::runtime_error where the description does not fit to the
  /// function or to the decoder.
  DecoderProgram(const Json &description, std::unique_ptr<Function> code,
                 StoredTensors &weights, const DecoderTensors &tensors,
                 const DecoderState &initial, int64_t sequences);

  /// Prepares a call with ids [sequences, tokens]; false where the program does
  /// not serve it in this state.
  bool bind(Tensor ids, const DecoderState &state);
  /// What the state is after the call that was prepared.
  DecoderState computeNext(const DecoderState &state) const;
  /// The call that was prepared, which leads to the state `next`.
  void run(const Tensor &logits, std::vector<StateTensor> &tensors,
           const DecoderState &next);

  int64_t getNumWords() const;
  /// Whether the tensor of this number is among its arguments or results.
  bool uses(size_t tensor) const;

private:
  /// An argument whose first size says the counters, which are equal.
  struct CounterArgument {
    size_t argument;
    std::vector<size_t> counters;
  };

  [[noreturn]] void refuse(const std::string &expectation) const;
  void readArguments(const Json::Array &list, StoredTensors &weights,
                     const DecoderTensors &tensors, const DecoderState &initial,
                     int64_t sequences);
  void addWeight(size_t argument, const Json &description, const Tensor &value);
  void addState(size_t argument, size_t tensor, const DecoderTensors &tensors);
  void addCounters(size_t argument, const Json::Array &list,
                   const DecoderState &initial);
  void addIds(size_t argument, int64_t sequences);
  void readResults(const Json *list, const DecoderTensors &tensors,
                   int64_t sequences);
  void readChanges(const Json::Array &list, const DecoderState &initial);

  std::unique_ptr<Function> function;
  ProgramSizes sizes;
  /// A result that becomes the tensor of this number, with its sizes over the
  /// names of sizes.
  struct Made {
    size_t tensor;
    Json::Array shape;
  };

  /// Those of ids, counters and state are filled by `bind` and `run`.
  std::vector<Tensor> arguments;
  /// Arguments with the numbers of the tensors that they are.
  std::vector<std::pair<size_t, size_t>> stateArguments;
  std::vector<Made> made;
  std::optional<size_t> idsArgument;
  std::vector<CounterArgument> counterArguments;
  int64_t form, nextForm;
  /// Counters that change, and what they are then, over the names of sizes.
  std::vector<std::pair<size_t, Json>> changes;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_DECODERPROGRAM_H
