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
#include <string>
#include <unordered_map>

namespace moe {

/// Objects of a class that have a list of layers, each with tensors among its
/// attributes, such as caches of keys and values.
struct LayeredTensors {
  nanobind::object type;
  /// The attribute that is the list.
  nanobind::object layers;
  nanobind::object layerType;
  /// Attributes of a layer: tensors, and values that are part of a call's form.
  nanobind::tuple tensors, values;
};

/// The calls of one compiled model for a CPU.
class GuardedCalls {
public:
  /// `innermostTransform` gives None outside of torch's transforms.
  GuardedCalls(nanobind::tuple tensorTypes, nanobind::object dtypeType,
               nanobind::object innermostTransform);
  ~GuardedCalls();

  /// Lets calls have arguments of another type.
  void addLayered(LayeredTensors layered);

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
    /// Pairs of a tensor that is given, one integer, and the most that it may
    /// be.
    std::vector<std::pair<nanobind::object, int64_t>> limits;
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
  nanobind::object innermostTransform;
  std::vector<LayeredTensors> layered;
  /// By the hash of the form; two forms of one hash take turns.
  std::unordered_map<uint64_t, std::shared_ptr<Call>> calls;
  /// The tensors of the last call's layered arguments, by their number.
  std::vector<CallForm::Tensor> known;
};

} // namespace moe

#endif // MOE_PYTHON_GUARDEDCALLS_H
