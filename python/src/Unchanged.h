//===- Unchanged.h - Whether objects hold what they held --------*- C++ -*-===//
//
// A compiled model is called with a model beside it, whose Python code may have
// changed since it was traced: its attributes, modules, hooks, classes. A look
// at some hundred places is on the way of every call.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_UNCHANGED_H
#define MOE_PYTHON_UNCHANGED_H

#include <Python.h>

namespace moe {

/// True if all of these hold, given as three tuples. Null with a Python
/// exception when they are anything else than
///   (container, key, value, ..)   a dict has this very object under the key,
///   or
///                                 a list at the index
///   (container, size, ..)         a dict or list has so many items
///   (object, type, dict, ..)      an object is of the type, with the
///                                 dictionary of attributes
PyObject *isUnchanged(PyObject *, PyObject *const *arguments, Py_ssize_t count);

} // namespace moe

#endif // MOE_PYTHON_UNCHANGED_H
