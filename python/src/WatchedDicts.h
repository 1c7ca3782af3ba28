//===- WatchedDicts.h - Whether dictionaries were written -------*- C++ -*-===//
//
// A model holds some hundred dictionaries, which a call must find as they were.
// To look into each of them takes longer than many a kernel, so that CPython is
// asked whether anything was written: by the version that a dict has in 3.11,
// by a watcher since 3.12. Neither is in the stable interface for which this
// module is compiled, so that which of them there is turns out when it runs.
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
  /// With the version of each, where dictionaries have one.
  std::vector<std::pair<PyObject *, uint64_t>> dicts;
  /// Set by the watcher.
  bool written = false;
};

} // namespace moe

#endif // MOE_PYTHON_WATCHEDDICTS_H
