//===- ModelGuard.h - Whether a model is as it was traced -------*- C++ -*-===//
//
// A compiled model is called with a model beside it, whose Python code may have
// changed since it was traced: its attributes, modules, hooks, classes, and the
// tensors that it has for weights. Both ways of a call ask this one object.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_MODELGUARD_H
#define MOE_PYTHON_MODELGUARD_H

#include "WatchedDicts.h"
#include <nanobind/nanobind.h>
#include <span>
#include <vector>

namespace moe {

/// What a dict has under a key, or a list at an index, borrowed; null if
/// nothing. Never leaves an exception.
PyObject *itemOf(PyObject *container, PyObject *key);

/// The dictionary of an object's attributes, to which the object has a
/// reference; null if it has none. Never leaves an exception.
PyObject *attributesOf(PyObject *object);

/// A tuple, and its items side by side, which it owns.
struct FlatTuple {
  FlatTuple() = default;
  explicit FlatTuple(nanobind::tuple tuple);

  nanobind::tuple tuple;
  std::vector<PyObject *> items;
};

/// What a model holds, by the identity of objects. Comparing runs no code of
/// Python.
class ModelGuard {
public:
  /// `contents` has, of classes of tensors that stand for another tensor, the
  /// name of the attribute which is that tensor.
  explicit ModelGuard(nanobind::dict contents)
      : contents(std::move(contents)) {}

  /// Takes the model for what these say it is, as flat tuples of
  ///   items    (container, key, object): a dict has this very object under the
  ///            key, a list at the index
  ///   sizes    (container, size): a dict or list has so many items
  ///   objects  (object, type, dict): an object is of the type, with this
  ///            dictionary of attributes
  ///   absent   (dict, key): nothing, or None, is under the key
  ///   tied     (dict, key, dict, key): both have the same object
  ///   weights  (dict, key): where the weights are
  void expect(nanobind::tuple items, nanobind::tuple sizes,
              nanobind::tuple objects, nanobind::tuple absent,
              nanobind::tuple tied, nanobind::tuple weights);

  /// True if all of it holds; `getWeights` are those of now.
  bool holds();

  struct Weight {
    PyObject *holder;
    PyTypeObject *type;
    /// What kernels read; null where there is none. Not owned, as a weight that
    /// the model lets go of is to be freed.
    PyObject *tensor;
  };
  std::span<const Weight> getWeights() const { return weights; }

  int traverse(visitproc visit, void *arg) const;

private:
  bool holdAll() const;
  bool holdLists() const;
  bool holdObjects() const;
  void watch();
  void findWeights();

  nanobind::dict contents;
  FlatTuple items, sizes, objects, absent, tied, places;
  std::vector<PyObject *const *> listItems, listSizes;
  std::vector<Weight> weights;
  WatchedDicts dicts;
  /// Whether all held when `dicts` were last looked into.
  bool held = false;
};

} // namespace moe

#endif // MOE_PYTHON_MODELGUARD_H
