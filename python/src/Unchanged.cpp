//===- Unchanged.cpp - Whether objects hold what they held ----------------===//
//
// References are borrowed throughout: the tuples keep what is looked at, and
// comparing is by identity, so that no code of Python runs in between.
//
//===----------------------------------------------------------------------===//

#include "Unchanged.h"

static Py_ssize_t sizeOf(PyObject *container) {
  return PyDict_Check(container)   ? PyDict_GET_SIZE(container)
         : PyList_Check(container) ? PyList_GET_SIZE(container)
                                   : -1;
}

/// What a container has under a key; null if nothing. Never leaves an
/// exception.
static PyObject *itemOf(PyObject *container, PyObject *key) {
  if (PyDict_Check(container)) {
    PyObject *item = PyDict_GetItemWithError(container, key);
    if (!item)
      PyErr_Clear();
    return item;
  }
  if (!PyList_Check(container) || !PyLong_Check(key))
    return nullptr;
  Py_ssize_t index = PyLong_AsSsize_t(key);
  if (index < 0 || index >= PyList_GET_SIZE(container)) {
    PyErr_Clear();
    return nullptr;
  }
  return PyList_GET_ITEM(container, index);
}

static bool holdItems(PyObject *items) {
  for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(items); i += 3)
    if (itemOf(PyTuple_GET_ITEM(items, i), PyTuple_GET_ITEM(items, i + 1)) !=
        PyTuple_GET_ITEM(items, i + 2))
      return false;
  return true;
}

static bool holdSizes(PyObject *sizes) {
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(sizes); i += 2)
    if (sizeOf(PyTuple_GET_ITEM(sizes, i)) !=
        PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i + 1)))
      return false;
  return true;
}

static bool holdObjects(PyObject *objects) {
  for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(objects); i += 3) {
    PyObject *object = PyTuple_GET_ITEM(objects, i);
    if (reinterpret_cast<PyObject *>(Py_TYPE(object)) !=
        PyTuple_GET_ITEM(objects, i + 1))
      return false;
    PyObject *dict = PyObject_GenericGetDict(object, nullptr);
    if (!dict) {
      PyErr_Clear();
      return false;
    }
    // The object has a reference as well.
    Py_DECREF(dict);
    if (dict != PyTuple_GET_ITEM(objects, i + 2))
      return false;
  }
  return true;
}

PyObject *moe::isUnchanged(PyObject *, PyObject *const *arguments,
                           Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(arguments[0]) ||
      !PyTuple_Check(arguments[1]) || !PyTuple_Check(arguments[2])) {
    PyErr_SetString(PyExc_TypeError, "expected three tuples");
    return nullptr;
  }
  bool holds = holdItems(arguments[0]) && holdSizes(arguments[1]) &&
               holdObjects(arguments[2]);
  if (PyErr_Occurred())
    return nullptr;
  return PyBool_FromLong(holds);
}
