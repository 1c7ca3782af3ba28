//===- GuardedCalls.h - Calls of a compiled model like earlier ones -*- C++
//-*-//
//
// To find the program of a call, bind its arguments, compare sizes and look
// weights up by name takes as long as a small model computes. A call of the
// form of an earlier one, of a model that is as it was, needs none of it.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_GUARDEDCALLS_H
#define MOE_PYTHON_GUARDEDCALLS_H

#include "CallForm.h"
#include "Function.h"
#include "ModelGuard.h"
#include "Outputs.h"
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace moe {

/// Objects of a class whose attributes belong to a call, such as caches and
/// their layers: tensors, values, and dictionaries, lists and further such
/// objects with them.
struct PartKind {
  nanobind::object type;
  /// The names of attributes that are integers which differ from call to call.
  nanobind::tuple counters;
};

/// The calls of one compiled model for a CPU.
class GuardedCalls {
public:
  /// What the size that says a counter is larger by; as SMALLEST_SIZE of
  /// _transformers/cache_state.py.
  static constexpr int64_t kSmallestSize = 2;

  /// `innermostTransform` gives None outside of torch's transforms.
  GuardedCalls(nanobind::tuple tensorTypes, nanobind::object dtypeType,
               nanobind::object deviceType,
               nanobind::object innermostTransform);
  ~GuardedCalls();

  /// Lets calls have arguments with parts of another type.
  void addPart(PartKind kind);

  /// The program that ran and its outputs, as a tuple; NotImplemented where no
  /// earlier call says how. Null with a Python exception.
  PyObject *run(PyObject *arguments, PyObject *keywords);

  /// What one call of this form was found to need.
  struct Found {
    /// What `run` returns beside the outputs.
    nanobind::object program;
    const Function *function;
    nanobind::object guard;
    nanobind::list operands;
    /// Positions of operands: those that are given, those that are updated, and
    /// pairs with the number among the guard's weights.
    std::vector<size_t> inputs, updated;
    std::vector<std::pair<size_t, size_t>> weights;
    /// Tensors like those that a call allocates; None for an updated operand.
    nanobind::list results;
    struct Limit {
      /// One that is given, of one integer.
      nanobind::object tensor;
      /// What it may be at most; what a counter is, if there is its number.
      int64_t most;
      std::optional<size_t> counter;
    };
    std::vector<Limit> limits;
    /// Counters of one value are one; in the order in which a call has them.
    struct Counter {
      /// The operand whose first size says it, less `kSmallestSize`.
      size_t operand;
      /// The values for which the program runs, and what a call adds.
      int64_t least, most, step;
    };
    std::vector<Counter> counters;
    Outputs outputs;
  };

  /// Remembers a call. False where the next one like it needs another look.
  bool remember(nanobind::tuple arguments, nanobind::dict keywords,
                const Found &found);
  void forget() { calls.clear(); }

  int traverse(visitproc visit, void *arg) const;

private:
  class Form;
  class Call;

  TorchTypes types;
  nanobind::object deviceType;
  nanobind::object innermostTransform;
  std::vector<PartKind> kinds;
  /// By the hash of the form; two forms of one hash take turns.
  std::unordered_map<uint64_t, std::shared_ptr<Call>> calls;
  /// The tensors of the last call's parts, by their number.
  std::vector<CallForm::Tensor> known;
};

} // namespace moe

#endif // MOE_PYTHON_GUARDEDCALLS_H
