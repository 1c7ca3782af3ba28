//===- DecoderProgram.h - One way in which a decoder runs -------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_DECODERPROGRAM_H
#define MOE_LIB_RUNTIME_LOADER_DECODERPROGRAM_H

#include "ProgramSizes.h"
#include "Weights.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace moe::runtime {

constexpr const char *kDecoderFile = "decoder.json";

/// What a cache is at a time, beside the values of its tensors.
struct DecoderState {
  /// A number for all flags and texts that the cache keeps.
  int64_t form = 0;
  /// Integers that grow with the tokens.
  std::vector<int64_t> counters;
};

/// Code for some numbers of tokens, on a cache in some states. Its arguments
/// are weights, tensors of the cache, which it updates in place, counters as
/// the sizes of empty tensors, and ids.
class DecoderProgram {
public:
  /// `state` are the tensors of the cache by name. Throws std::runtime_error
  /// where the description does not fit to the function or to the decoder.
  DecoderProgram(const Json &description, std::unique_ptr<Function> code,
                 StoredTensors &weights,
                 const std::map<std::string, Tensor> &state,
                 const DecoderState &initial, int64_t sequences);

  /// Prepares a call with ids [sequences, tokens]; false where the program does
  /// not serve it in this state.
  bool bind(Tensor ids, const DecoderState &state);
  /// What the state is after the call that was prepared.
  DecoderState computeNext(const DecoderState &state) const;
  /// The call that was prepared.
  void run(const Tensor &logits) const;

  int64_t getNumWords() const;
  /// Whether the tensor, which has memory, is among its arguments.
  bool uses(const Tensor &tensor) const;

private:
  /// An argument whose first size says the counters, which are equal.
  struct CounterArgument {
    size_t argument;
    std::vector<size_t> counters;
  };

  [[noreturn]] void refuse(const std::string &expectation) const;
  void readArguments(const Json::Array &list, StoredTensors &weights,
                     const std::map<std::string, Tensor> &state,
                     const DecoderState &initial, int64_t sequences);
  void addBound(size_t argument, const Json &description, const Tensor &value,
                bool isState);
  void addCounters(size_t argument, const Json::Array &list,
                   const DecoderState &initial);
  void addIds(size_t argument, int64_t sequences);
  void readResult(int64_t sequences) const;
  void readChanges(const Json::Array &list, const DecoderState &initial);

  std::unique_ptr<Function> function;
  ProgramSizes sizes;
  /// Those of ids and counters are filled by `bind`.
  std::vector<Tensor> arguments;
  std::optional<size_t> idsArgument;
  std::vector<CounterArgument> counterArguments;
  int64_t form, nextForm;
  /// Counters that change, and what they are then, over the names of sizes.
  std::vector<std::pair<size_t, Json>> changes;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_DECODERPROGRAM_H
