//===- PlainCalls.h - Calls of an op, remembered by their form --*- C++ -*-===//
//
// What an op in Python does around its kernel (checking arguments, choosing the
// kernel, allocating results) depends on nothing but the form of its arguments:
// dtypes, shapes and values that are no tensors. So a call of a known form
// needs only a look at that form, then allocations and the kernel.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_PLAINCALLS_H
#define MOE_PYTHON_PLAINCALLS_H

#include "CallForm.h"
#include "Function.h"
#include <unordered_map>

namespace moe {

/// The calls of one op. A call is plain when its tensors are contiguous CPU
/// tensors of torch's own classes that need no gradient, its other arguments
/// are numbers, strings, dtypes or None, and torch is in no mode that wants to
/// see the call.
class PlainCalls {
public:
  /// `modes` are callables: a true result of any means that no call is plain.
  PlainCalls(nanobind::tuple tensorTypes, nanobind::object dtypeType,
             nanobind::tuple modes, nanobind::object isGradEnabled);
  ~PlainCalls();

  /// The results of a call whose form is known. None: call the op, it is no
  /// plain call or one that does more than to run a kernel. False: a form that
  /// `remember` wants to hear of. Null with a Python exception.
  PyObject *replay(PyObject *const *arguments, Py_ssize_t count);

  /// Remembers what a call of this form did: it ran `function` once, on
  /// `tensors`, and returned `results`, a tensor or a tuple. Without a
  /// function, or where the call did more than that, the form is not replayed.
  void remember(nanobind::tuple arguments, const Function *function,
                nanobind::list tensors, nanobind::object results);

private:
  struct Form;
  struct Call;

  TorchTypes types;
  std::vector<nanobind::object> modes;
  nanobind::object isGradEnabled;
  /// By the hash of the form; two forms of one hash take turns.
  std::unordered_map<uint64_t, std::shared_ptr<Call>> calls;
};

} // namespace moe

#endif // MOE_PYTHON_PLAINCALLS_H
