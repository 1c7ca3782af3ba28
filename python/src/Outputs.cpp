//===- Outputs.cpp - The outputs of a model from results ------------------===//

#include "Outputs.h"

namespace nb = nanobind;
using namespace moe;

Outputs::Outputs(std::vector<Leaf> leaves, nb::object form)
    : leaves(std::move(leaves)), form(std::move(form)) {}

/// Fills in a new tuple or list.
static PyObject *filled(PyObject *sequence, std::span<PyObject *const> leaves) {
  for (size_t i = 0; sequence && i < leaves.size(); ++i) {
    PyObject *leaf = Py_NewRef(leaves[i]);
    if (PyTuple_Check(sequence))
      PyTuple_SetItem(sequence, i, leaf);
    else
      PyList_SetItem(sequence, i, leaf);
  }
  return sequence;
}

PyObject *Outputs::make(PyObject *results,
                        std::span<PyObject *const> arguments) const {
  std::vector<PyObject *> values;
  values.reserve(leaves.size());
  for (const Leaf &leaf : leaves)
    values.push_back(leaf.source == Leaf::Result
                         ? PyList_GetItem(results, leaf.number)
                     : leaf.source == Leaf::Argument ? arguments[leaf.number]
                                                     : leaf.constant.ptr());
  if (form.is_none())
    return Py_NewRef(values.front());
  if (form.is(reinterpret_cast<PyObject *>(&PyTuple_Type)))
    return filled(PyTuple_New(values.size()), values);
  if (PyTuple_Check(form.ptr()))
    return makeMapping(values);
  PyObject *list = filled(PyList_New(values.size()), values);
  if (!list || form.is(reinterpret_cast<PyObject *>(&PyList_Type)))
    return list;
  PyObject *made = PyObject_CallFunctionObjArgs(form.ptr(), list, nullptr);
  Py_DECREF(list);
  return made;
}

/// `OrderedDict.__setitem__`, past those of classes derived from it; null with
/// a Python exception.
static objobjargproc setItemOfOrderedDict() {
  static const objobjargproc setItem = [] {
    nb::object type = nb::steal(PyImport_ImportModule("collections"));
    if (type)
      type = nb::steal(PyObject_GetAttrString(type.ptr(), "OrderedDict"));
    return !type ? nullptr
                 : reinterpret_cast<objobjargproc>(PyType_GetSlot(
                       reinterpret_cast<PyTypeObject *>(type.ptr()),
                       Py_mp_ass_subscript));
  }();
  return setItem;
}

PyObject *Outputs::makeMapping(std::span<PyObject *const> values) const {
  auto *type = reinterpret_cast<PyTypeObject *>(PyTuple_GetItem(form.ptr(), 0));
  PyObject *items = PyTuple_GetItem(form.ptr(), 1);
  PyObject *attributes = PyTuple_GetItem(form.ptr(), 2);
  nb::object none = nb::steal(PyTuple_New(0));
  if (!none)
    return nullptr;
  auto create = reinterpret_cast<newfunc>(PyType_GetSlot(type, Py_tp_new));
  nb::object made = nb::steal(create(type, none.ptr(), nullptr));
  objobjargproc setItem = setItemOfOrderedDict();
  if (!made || !setItem)
    return nullptr;
  PyObject *name, *number;
  for (Py_ssize_t next = 0; PyDict_Next(items, &next, &name, &number);)
    if (setItem(made.ptr(), name, values[PyLong_AsSize_t(number)]))
      return nullptr;
  nb::object dict = nb::steal(PyObject_GenericGetDict(made.ptr(), nullptr));
  if (!dict)
    return nullptr;
  for (Py_ssize_t next = 0; PyDict_Next(attributes, &next, &name, &number);)
    if (PyDict_SetItem(dict.ptr(), name,
                       number == Py_None ? Py_None
                                         : values[PyLong_AsSize_t(number)]))
      return nullptr;
  return made.release().ptr();
}

int Outputs::traverse(visitproc visit, void *arg) const {
  for (const Leaf &leaf : leaves)
    Py_VISIT(leaf.constant.ptr());
  Py_VISIT(form.ptr());
  return 0;
}
