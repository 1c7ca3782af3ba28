//===- WatchedDicts.cpp - Whether dictionaries were written ---------------===//
//
// The GIL protects everything here.
//
//===----------------------------------------------------------------------===//

#include "WatchedDicts.h"

#include <algorithm>
#include <unordered_map>

using namespace moe;

#if PY_VERSION_HEX >= 0x030C0000

/// Whoever watches a dictionary; more than one compiled model may.
static std::unordered_multimap<PyObject *, bool *> &watches() {
  static std::unordered_multimap<PyObject *, bool *> map;
  return map;
}

namespace moe {
/// What CPython calls before a watched dictionary changes.
int noteWrite(PyDict_WatchEvent, PyObject *dict, PyObject *, PyObject *) {
  auto [begin, end] = watches().equal_range(dict);
  for (auto watch = begin; watch != end; ++watch)
    *watch->second = true;
  return 0;
}
} // namespace moe

/// The number of our watcher, of which a process has eight; -1 if all are
/// taken.
static int watcher() {
  static const int number = [] {
    int number = PyDict_AddWatcher(noteWrite);
    if (number < 0)
      PyErr_Clear();
    return number;
  }();
  return number;
}

void WatchedDicts::add(PyObject *dict) {
  if (watcher() < 0 || PyDict_Watch(watcher(), dict)) {
    PyErr_Clear();
    written = true;
    return;
  }
  auto [begin, end] = watches().equal_range(dict);
  if (std::any_of(begin, end,
                  [&](const auto &watch) { return watch.second == &written; }))
    return;
  dicts.push_back(dict);
  watches().emplace(dict, &written);
}

void WatchedDicts::clear() {
  for (PyObject *dict : dicts) {
    auto [begin, end] = watches().equal_range(dict);
    watches().erase(std::find_if(begin, end, [&](const auto &watch) {
      return watch.second == &written;
    }));
    if (!watches().contains(dict) && PyDict_Unwatch(watcher(), dict))
      PyErr_Clear();
  }
  dicts.clear();
  written = false;
}

bool WatchedDicts::areUnwritten() const { return !written; }

#else

void WatchedDicts::add(PyObject *dict) {
  auto *written = reinterpret_cast<PyDictObject *>(dict);
  dicts.emplace_back(written, written->ma_version_tag);
}

void WatchedDicts::clear() { dicts.clear(); }

bool WatchedDicts::areUnwritten() const {
  return std::all_of(dicts.begin(), dicts.end(), [](const auto &entry) {
    return entry.first->ma_version_tag == entry.second;
  });
}

#endif
