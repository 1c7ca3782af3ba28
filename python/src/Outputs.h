//===- Outputs.h - The outputs of a model from results ----------*- C++ -*-===//

#ifndef MOE_PYTHON_OUTPUTS_H
#define MOE_PYTHON_OUTPUTS_H

#include <nanobind/nanobind.h>
#include <span>
#include <vector>

namespace moe {

/// How a model's outputs are made of the results of its code.
class Outputs {
public:
  /// Where an output is: a result of the code, an argument with parts, or what
  /// it was in the call that is remembered.
  struct Leaf {
    enum Source { Result, Argument, Constant };
    Source source;
    size_t number = 0;
    nanobind::object constant = {};
  };

  Outputs() = default;
  /// `form` is None where the one leaf is the output; `tuple` or `list`; a
  /// tuple (type, names of items, attributes) of a subclass of OrderedDict
  /// that holds the leaves under these names, and has each attribute, a name
  /// with the number of a leaf or None; or a function of the list of leaves.
  Outputs(std::vector<Leaf> leaves, nanobind::object form);

  /// A new reference; null with a Python exception.
  PyObject *make(PyObject *results, std::span<PyObject *const> arguments) const;

  int traverse(visitproc visit, void *arg) const;

private:
  PyObject *makeMapping(std::span<PyObject *const> leaves) const;

  std::vector<Leaf> leaves;
  nanobind::object form;
};

} // namespace moe

#endif // MOE_PYTHON_OUTPUTS_H
