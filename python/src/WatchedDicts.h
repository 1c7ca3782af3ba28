//===- WatchedDicts.h - Whether dictionaries were written -------*- C++ -*-===//
//
// A model holds some hundred dictionaries, which a call must find as they were.
// To look into each of them takes longer than many a kernel, so that CPython is
// asked whether anything was written: by the version that a dict has up
// to 3.11, by a watcher since 3.12.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_WATCHEDDICTS_H
#define MOE_PYTHON_WATCHEDDICTS_H

#include <Python.h>
#include <cstdint>
#include <utility>
#include <vector>

namespace moe {

/// A set of dictionaries, which whoever has this object keeps alive.
class WatchedDicts {
public:
  WatchedDicts() = default;
  WatchedDicts(const WatchedDicts &) = delete;
  WatchedDicts &operator=(const WatchedDicts &) = delete;
  ~WatchedDicts() { clear(); }

  /// Watches a dictionary from now on, which may be there already.
  void add(PyObject *dict);
  void clear();

  /// True if no dictionary was written since it was added. Where CPython does
  /// not say, false.
  bool areUnwritten() const;

private:
#if PY_VERSION_HEX >= 0x030C0000
  friend int noteWrite(PyDict_WatchEvent, PyObject *dict, PyObject *,
                       PyObject *);
  std::vector<PyObject *> dicts;
  bool written = false;
#else
  std::vector<std::pair<PyDictObject *, uint64_t>> dicts;
#endif
};

} // namespace moe

#endif // MOE_PYTHON_WATCHEDDICTS_H
