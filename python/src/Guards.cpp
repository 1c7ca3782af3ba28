//===- Guards.cpp - The guards of compiled models in Python ---------------===//

#include "Guards.h"

#include "GuardedCalls.h"
#include "Operands.h"
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using namespace moe;

/// Models may hold what is compiled of them, which CPython's collector is to
/// see. An object that is not yet, or no longer, one of ours holds nothing.
template <typename Guard>
static int traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Guard>(self)->traverse(visit, arg)
                              : 0;
}

static int clearModelGuard(PyObject *self) {
  nb::inst_ptr<ModelGuard>(self)->expect({}, {}, {}, {}, {}, {});
  return 0;
}

static int clearGuardedCalls(PyObject *self) {
  nb::inst_ptr<GuardedCalls>(self)->forget();
  return 0;
}

/// GuardedCalls::run for CPython: nanobind's own calls take longer than it.
static PyObject *run(PyObject *self, PyObject *const *arguments,
                     Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(arguments[0]) ||
      !PyDict_CheckExact(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple and a dict");
    return nullptr;
  }
  return nb::inst_ptr<GuardedCalls>(self)->run(arguments[0], arguments[1]);
}

static nb::object runOf(nb::handle calls) {
  static PyMethodDef method = {
      "run", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(run)),
      METH_FASTCALL,
      "The program and the outputs of a call with these arguments and "
      "keywords; NotImplemented where no earlier call says how."};
  return nb::steal(PyCFunction_New(&method, calls.ptr()));
}

static std::vector<GuardedCalls::Found::Limit> limitsOf(nb::list limits) {
  std::vector<GuardedCalls::Found::Limit> list;
  for (nb::handle limit : limits)
    list.push_back({nb::borrow(limit[0]), nb::cast<int64_t>(limit[1]),
                    nb::cast<std::optional<size_t>>(limit[2])});
  return list;
}

static std::vector<GuardedCalls::Found::Counter> countersOf(nb::list counters) {
  std::vector<GuardedCalls::Found::Counter> list;
  for (nb::handle counter : counters)
    list.push_back({nb::cast<size_t>(counter[0]), nb::cast<int64_t>(counter[1]),
                    nb::cast<int64_t>(counter[2]),
                    nb::cast<int64_t>(counter[3])});
  return list;
}

static Outputs outputsOf(nb::list leaves, nb::object form) {
  std::vector<Outputs::Leaf> list;
  for (nb::handle leaf : leaves) {
    auto kind = nb::cast<std::string_view>(leaf[0]);
    if (kind == "constant")
      list.push_back({Outputs::Leaf::Constant, 0, nb::borrow(leaf[1])});
    else
      list.push_back(
          {kind == "result" ? Outputs::Leaf::Result : Outputs::Leaf::Argument,
           nb::cast<size_t>(leaf[1])});
  }
  return {std::move(list), std::move(form)};
}

void moe::bindGuards(nb::module_ &m) {
  static PyType_Slot modelGuardSlots[] = {
      {Py_tp_traverse, reinterpret_cast<void *>(traverse<ModelGuard>)},
      {Py_tp_clear, reinterpret_cast<void *>(clearModelGuard)},
      {0, nullptr}};
  static PyType_Slot guardedCallsSlots[] = {
      {Py_tp_traverse, reinterpret_cast<void *>(traverse<GuardedCalls>)},
      {Py_tp_clear, reinterpret_cast<void *>(clearGuardedCalls)},
      {0, nullptr}};

  nb::class_<ModelGuard>(m, "ModelGuard", nb::type_slots(modelGuardSlots),
                         "Whether a model is as it was traced.")
      .def(nb::init<nb::dict>(), "contents"_a)
      .def("expect", &ModelGuard::expect, "items"_a, "sizes"_a, "objects"_a,
           "absent"_a, "tied"_a, "weights"_a,
           "Takes the model for what flat tuples say it is: items (container, "
           "key, object), sizes (container, size), objects (object, type, "
           "attributes), absent (dict, key), tied (dict, key, dict, key), "
           "weights (dict, key).")
      .def("holds", &ModelGuard::holds, "Whether all of it is so.");

  nb::class_<OperandConditions>(m, "OperandConditions",
                                "What a program asks of each of its operands.")
      .def(nb::init<>())
      .def("add", &OperandConditions::add, "sample"_a, "shape"_a,
           "contiguous"_a,
           "Adds the next operand: of the sample's dtype; -1 is any size.")
      .def("first_unmet", &OperandConditions::firstUnmet, "operands"_a,
           "positions"_a,
           "The first of these positions at which an operand does not meet its "
           "condition, and what: 'dtype', 'rank', 'shape', 'strides' or "
           "'memory'.");

  m.def("aliasing_pair", &aliasingPair, "operands"_a, "updated"_a,
        "The positions of an updated tensor or array and of another one that "
        "share memory; None if there are none.");

  nb::class_<GuardedCalls>(m, "GuardedCalls", nb::type_slots(guardedCallsSlots),
                           "Calls of a compiled model like earlier ones.")
      .def(nb::init<nb::tuple, nb::object, nb::object, nb::object>(),
           "tensor_types"_a, "dtype_type"_a, "device_type"_a,
           "innermost_transform"_a)
      .def(
          "add_part",
          [](GuardedCalls &self, nb::object type, nb::tuple counters) {
            nb::list interned;
            for (nb::handle name : counters) {
              PyObject *object = name.inc_ref().ptr();
              PyUnicode_InternInPlace(&object);
              interned.append(nb::steal(object));
            }
            self.addPart({std::move(type), nb::tuple(interned)});
          },
          "type"_a, "counters"_a,
          "Lets calls have objects of a type whose attributes are part of a "
          "call, of which integers by these names are counters.")
      .def(
          "remember",
          [](GuardedCalls &self, nb::tuple arguments, nb::dict keywords,
             nb::object program, const Function &function, nb::object guard,
             nb::list operands, std::vector<size_t> inputs,
             std::vector<size_t> updated,
             std::vector<std::pair<size_t, size_t>> weights, nb::list results,
             nb::list limits, nb::list counters, nb::list leaves,
             nb::object form) {
            return self.remember(
                std::move(arguments), std::move(keywords),
                {std::move(program), &function, std::move(guard),
                 std::move(operands), std::move(inputs), std::move(updated),
                 std::move(weights), std::move(results), limitsOf(limits),
                 countersOf(counters), outputsOf(leaves, std::move(form))});
          },
          "args"_a, "kwargs"_a, nb::kw_only(), "program"_a, "function"_a,
          "guard"_a, "operands"_a, "inputs"_a, "updated"_a, "weights"_a,
          "results"_a, "limits"_a, "counters"_a, "leaves"_a, "form"_a.none(),
          "Remembers what a call needed: operands, of which some are given, "
          "some updated, and some, in pairs with a number, weights of the "
          "guard; results (None for those that update an operand); limits "
          "(given integer, the most that it may be, the number of a counter "
          "that is the most instead, or None); counters (operand, least, most, "
          "what a call adds); leaves ('result', number), "
          "('argument', number) or ('constant', object) of the outputs, and "
          "their form: None for one leaf, tuple, list, (subclass of "
          "OrderedDict, items, attributes) or a function of the leaves.")
      .def("forget", &GuardedCalls::forget, "Forgets all calls.")
      .def_prop_ro("run", &runOf);
}
