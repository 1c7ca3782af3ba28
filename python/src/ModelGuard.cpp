//===- ModelGuard.cpp - Whether a model is as it was traced ---------------===//
//
// References are borrowed throughout: the tuples keep what is looked at, and
// comparing is by identity, so that no code of Python runs in between.
//
//===----------------------------------------------------------------------===//

#include "ModelGuard.h"

#include <algorithm>
#include <unordered_set>

namespace nb = nanobind;
using namespace moe;

//===----------------------------------------------------------------------===//
// Containers
//===----------------------------------------------------------------------===//

static Py_ssize_t sizeOf(PyObject *container) {
  return PyDict_Check(container)   ? PyDict_Size(container)
         : PyList_Check(container) ? PyList_Size(container)
                                   : -1;
}

PyObject *moe::itemOf(PyObject *container, PyObject *key) {
  if (PyDict_Check(container)) {
    PyObject *item = PyDict_GetItemWithError(container, key);
    if (!item)
      PyErr_Clear();
    return item;
  }
  if (!PyList_Check(container) || !PyLong_Check(key))
    return nullptr;
  Py_ssize_t index = PyLong_AsSsize_t(key);
  if (index < 0 || index >= PyList_Size(container)) {
    PyErr_Clear();
    return nullptr;
  }
  return PyList_GetItem(container, index);
}

PyObject *moe::attributesOf(PyObject *object) {
  PyObject *dict = PyObject_GenericGetDict(object, nullptr);
  if (!dict)
    PyErr_Clear();
  Py_XDECREF(dict);
  return dict;
}

FlatTuple::FlatTuple(nb::tuple tuple) : tuple(std::move(tuple)) {
  for (nb::handle item : this->tuple)
    items.push_back(item.ptr());
}

/// Calls `visit` with the entries of a flat tuple, `width` at a time, until one
/// is false.
template <size_t width, typename Visit>
static bool each(const FlatTuple &flat, Visit visit) {
  for (size_t i = 0; i + width <= flat.items.size(); i += width)
    if (!visit(flat.items.data() + i))
      return false;
  return true;
}

static bool holdsItem(PyObject *const *entry) {
  return itemOf(entry[0], entry[1]) == entry[2];
}

static bool holdsSize(PyObject *const *entry) {
  return sizeOf(entry[0]) == PyLong_AsSsize_t(entry[1]);
}

//===----------------------------------------------------------------------===//
// ModelGuard
//===----------------------------------------------------------------------===//

void ModelGuard::expect(nb::tuple items, nb::tuple sizes, nb::tuple objects,
                        nb::tuple absent, nb::tuple tied, nb::tuple weights) {
  // Before the tuples go that keep what is watched.
  dicts.clear();
  held = false;
  this->items = FlatTuple(std::move(items));
  this->sizes = FlatTuple(std::move(sizes));
  this->objects = FlatTuple(std::move(objects));
  this->absent = FlatTuple(std::move(absent));
  this->tied = FlatTuple(std::move(tied));
  places = FlatTuple(std::move(weights));
}

bool ModelGuard::holds() {
  if (held && holdObjects() && dicts.areUnwritten() && holdLists() &&
      std::all_of(weights.begin(), weights.end(), [](const Weight &weight) {
        return !weight.holder || Py_TYPE(weight.holder) == weight.type;
      }))
    return true;
  held = holdAll();
  if (held) {
    watch();
    findWeights();
  }
  return held;
}

bool ModelGuard::holdAll() const {
  return each<3>(items, holdsItem) && each<2>(sizes, holdsSize) &&
         holdObjects() &&
         each<2>(absent,
                 [](PyObject *const *entry) {
                   PyObject *item = itemOf(entry[0], entry[1]);
                   return !item || item == Py_None;
                 }) &&
         each<4>(tied, [](PyObject *const *entry) {
           PyObject *item = itemOf(entry[0], entry[1]);
           return item && item == itemOf(entry[2], entry[3]);
         });
}

/// Lists cannot be watched.
bool ModelGuard::holdLists() const {
  return std::all_of(listItems.begin(), listItems.end(), holdsItem) &&
         std::all_of(listSizes.begin(), listSizes.end(), holdsSize);
}

bool ModelGuard::holdObjects() const {
  return each<3>(objects, [](PyObject *const *entry) {
    return reinterpret_cast<PyObject *>(Py_TYPE(entry[0])) == entry[1] &&
           attributesOf(entry[0]) == entry[2];
  });
}

/// Watches every dictionary that was looked into.
void ModelGuard::watch() {
  dicts.clear();
  listItems.clear();
  listSizes.clear();
  std::unordered_set<PyObject *> seen;
  auto see = [&](PyObject *container) {
    if (!PyDict_Check(container))
      return false;
    if (seen.insert(container).second)
      dicts.add(container);
    return true;
  };
  each<3>(items, [&](PyObject *const *entry) {
    if (!see(entry[0]))
      listItems.push_back(entry);
    return true;
  });
  each<2>(sizes, [&](PyObject *const *entry) {
    if (!see(entry[0]))
      listSizes.push_back(entry);
    return true;
  });
  each<3>(objects, [&](PyObject *const *entry) {
    see(entry[2]);
    return true;
  });
  for (const FlatTuple *pairs : {&absent, &tied, &places})
    each<2>(*pairs, [&](PyObject *const *entry) {
      see(entry[0]);
      return true;
    });
}

/// The tensors of the weights. One that stands for another has it among its
/// attributes, which are watched as well.
void ModelGuard::findWeights() {
  weights.clear();
  each<2>(places, [&](PyObject *const *entry) {
    Weight &weight = weights.emplace_back();
    weight = {itemOf(entry[0], entry[1]), nullptr, nullptr};
    if (!weight.holder)
      return true;
    weight.type = Py_TYPE(weight.holder);
    weight.tensor = weight.holder;
    PyObject *name =
        itemOf(contents.ptr(), reinterpret_cast<PyObject *>(weight.type));
    if (!name)
      return true;
    PyObject *attributes = attributesOf(weight.holder);
    weight.tensor = attributes ? itemOf(attributes, name) : nullptr;
    if (attributes)
      dicts.add(attributes);
    return true;
  });
}

//===----------------------------------------------------------------------===//
// CPython's collector
//===----------------------------------------------------------------------===//

/// Models may hold what is compiled of them.
int ModelGuard::traverse(visitproc visit, void *arg) const {
  Py_VISIT(contents.ptr());
  for (const FlatTuple *flat :
       {&items, &sizes, &objects, &absent, &tied, &places})
    Py_VISIT(flat->tuple.ptr());
  return 0;
}
