//===- WatchedDicts.cpp - Whether dictionaries were written ---------------===//
//
// The GIL protects everything here.
//
//===----------------------------------------------------------------------===//

#include "WatchedDicts.h"

#include <algorithm>
#include <dlfcn.h>
#include <unordered_map>

using namespace moe;

//===----------------------------------------------------------------------===//
// CPython 3.11: versions
//===----------------------------------------------------------------------===//

static bool haveVersions() { return Py_Version >> 16 == 0x030B; }

/// Of a dictionary of CPython 3.11, whose layout will not change any more.
static uint64_t versionOf(PyObject *dict) {
  struct Dict {
    PyObject head;
    Py_ssize_t used;
    uint64_t version;
  };
  return reinterpret_cast<Dict *>(dict)->version;
}

//===----------------------------------------------------------------------===//
// CPython 3.12 and newer: watchers
//===----------------------------------------------------------------------===//

/// Whoever watches a dictionary; more than one compiled model may.
static std::unordered_multimap<PyObject *, bool *> &watches() {
  static std::unordered_multimap<PyObject *, bool *> map;
  return map;
}

/// What CPython calls before a watched dictionary changes.
static int noteWrite(int /*event*/, PyObject *dict, PyObject *, PyObject *) {
  auto [begin, end] = watches().equal_range(dict);
  for (auto watch = begin; watch != end; ++watch)
    *watch->second = true;
  return 0;
}

template <typename Function>
static Function *findInCPython(const char *name) {
  return reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, name));
}

/// The number of our watcher, of which a process has eight; -1 if all are
/// taken, or CPython has none.
static int addWatcher() {
  auto *add = findInCPython<int(decltype(noteWrite) *)>("PyDict_AddWatcher");
  int number = add ? add(noteWrite) : -1;
  if (number < 0)
    PyErr_Clear();
  return number;
}

/// Calls `PyDict_Watch` or `PyDict_Unwatch`; false if it failed.
static bool callWatcher(const char *name, int watcher, PyObject *dict) {
  auto *function = findInCPython<int(int, PyObject *)>(name);
  if (function && !function(watcher, dict))
    return true;
  PyErr_Clear();
  return false;
}

/// Whether the watcher is told of an attribute that is set. CPython 3.13.0
/// keeps attributes beside the dictionary, and writes them there without a
/// word.
static bool isToldOfAttributes(int watcher) {
  auto *typeOfTypes = reinterpret_cast<PyObject *>(&PyType_Type);
  PyObject *type = PyObject_CallFunction(typeOfTypes, "s(){}", "Watched");
  PyObject *object = type ? PyObject_CallNoArgs(type) : nullptr;
  PyObject *dict = nullptr;
  if (object && !PyObject_SetAttrString(object, "attribute", Py_None))
    dict = PyObject_GenericGetDict(object, nullptr);
  bool written = false;
  if (dict && callWatcher("PyDict_Watch", watcher, dict)) {
    auto watch = watches().emplace(dict, &written);
    PyObject_SetAttrString(object, "attribute", Py_True);
    watches().erase(watch);
    callWatcher("PyDict_Unwatch", watcher, dict);
  }
  PyErr_Clear();
  for (PyObject *made : {dict, object, type})
    Py_XDECREF(made);
  return written;
}

/// The number of our watcher; -1 where there is none that is told of all.
static int watcher() {
  static const int number = [] {
    int number = addWatcher();
    return number >= 0 && isToldOfAttributes(number) ? number : -1;
  }();
  return number;
}

//===----------------------------------------------------------------------===//
// WatchedDicts
//===----------------------------------------------------------------------===//

void WatchedDicts::add(PyObject *dict) {
  if (haveVersions()) {
    dicts.emplace_back(dict, versionOf(dict));
    return;
  }
  if (watcher() < 0 || !callWatcher("PyDict_Watch", watcher(), dict)) {
    written = true;
    return;
  }
  auto [begin, end] = watches().equal_range(dict);
  if (std::any_of(begin, end,
                  [&](const auto &watch) { return watch.second == &written; }))
    return;
  dicts.emplace_back(dict, 0);
  watches().emplace(dict, &written);
}

void WatchedDicts::clear() {
  if (!haveVersions())
    for (auto [dict, version] : dicts) {
      auto [begin, end] = watches().equal_range(dict);
      watches().erase(std::find_if(begin, end, [&](const auto &watch) {
        return watch.second == &written;
      }));
      if (!watches().contains(dict))
        callWatcher("PyDict_Unwatch", watcher(), dict);
    }
  dicts.clear();
  written = false;
}

bool WatchedDicts::areUnwritten() const {
  return !written && (!haveVersions() ||
                      std::all_of(dicts.begin(), dicts.end(), [](auto &entry) {
                        return versionOf(entry.first) == entry.second;
                      }));
}
