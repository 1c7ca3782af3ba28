//===- Module.cpp - The Python module moe_mlir._moe -----------------------===//
//
// A thin layer over the C API. MLIR's headers need -fno-rtti and nanobind needs
// RTTI, so no file here includes MLIR.
//
//===----------------------------------------------------------------------===//

#include "Function.h"
#include "Guards.h"
#include "MoE/Runtime/Parallel.h"
#include "Panels.h"
#include "PlainCalls.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using moe::Function;
using moe::PlainCalls;

//===----------------------------------------------------------------------===//
// Text, bytes and errors
//===----------------------------------------------------------------------===//

static MoEStringRef ref(std::string_view text) {
  return {text.data(), text.size()};
}

static std::string toString(MoEStringRef text) {
  return {text.data, text.length};
}

/// Takes the result of a C function as a string.
static std::string take(MoEBytes bytes) {
  std::string text = toString(moeBytesGet(bytes));
  moeBytesDestroy(bytes);
  return text;
}

static nb::bytes takeBytes(MoEBytes bytes) {
  MoEStringRef data = moeBytesGet(bytes);
  nb::bytes result(data.data, data.length);
  moeBytesDestroy(bytes);
  return result;
}

/// Appends what the compiler remarked while it made `bytes` to a Python list.
static void appendRemarks(MoEBytes bytes, nb::object remarks) {
  if (remarks.is_none())
    return;
  for (size_t i = 0, n = moeBytesGetNumRemarks(bytes); i < n; ++i)
    nb::cast<nb::list>(remarks).append(
        nb::str(toString(moeBytesGetRemark(bytes, i)).c_str()));
}

/// moe_mlir._moe.MoeError, a ValueError with the list `diagnostics`.
static PyObject *errorType = nullptr;

[[noreturn]] static void raise(const std::vector<std::string> &diagnostics) {
  std::string message;
  for (const std::string &text : diagnostics)
    message += (message.empty() ? "" : "\n") + text;
  nb::object error = nb::handle(errorType)(message);
  error.attr("diagnostics") = diagnostics;
  PyErr_SetObject(errorType, error.ptr());
  throw nb::python_error();
}

/// Runs `call` without the GIL and raises what it returns.
template <typename Call>
static void run(Call call) {
  MoEError error;
  {
    nb::gil_scoped_release release;
    error = call();
  }
  if (!error)
    return;
  std::vector<std::string> diagnostics;
  for (size_t i = 0, n = moeErrorGetNumDiagnostics(error); i < n; ++i)
    diagnostics.push_back(toString(moeErrorGetDiagnostic(error, i)));
  moeErrorDestroy(error);
  raise(diagnostics);
}

//===----------------------------------------------------------------------===//
// Classes
//===----------------------------------------------------------------------===//

namespace {
class Module {
public:
  static Module parse(std::string_view text, std::string_view filename) {
    Module result;
    run([&] {
      return moeModuleParse(ref(text), ref(filename), false, &result.module);
    });
    return result;
  }

  Module(Module &&other) : module(std::exchange(other.module, nullptr)) {}
  ~Module() {
    if (module)
      moeModuleDestroy(module);
  }

  std::string text(bool debugInfo) const {
    return take(moeModulePrint(module, debugInfo));
  }
  nb::bytes bytecode() const { return takeBytes(moeModuleBytecode(module)); }
  void runPipeline(std::string_view pipeline) {
    run([&] { return moeModuleRun(module, ref(pipeline)); });
  }
  void setKernelConfig(std::string_view op, std::string_view config) {
    run([&] { return moeModuleSetKernelConfig(module, ref(op), ref(config)); });
  }
  Module clone() const {
    Module result;
    run([&] { return moeModuleClone(module, &result.module); });
    return result;
  }
  std::vector<std::string> remarks() const {
    std::vector<std::string> list;
    for (size_t i = 0, n = moeModuleGetNumRemarks(module); i < n; ++i)
      list.push_back(toString(moeModuleGetRemark(module, i)));
    return list;
  }

private:
  Module() = default;
  MoEModule module = nullptr;
};

class Executable {
public:
  explicit Executable(nb::bytes object) {
    std::string_view bytes(object.c_str(), object.size());
    MoEExecutable loaded = nullptr;
    run([&] { return moeExecutableLoad(ref(bytes), &loaded); });
    executable.reset(loaded, moeExecutableDestroy);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> list;
    for (size_t i = 0, n = moeExecutableGetNumFunctions(executable.get());
         i < n; ++i)
      list.push_back(toString(
          moeFunctionGetName(moeExecutableGetFunction(executable.get(), i))));
    return list;
  }

  Function function(const std::string &name) const {
    std::string known;
    std::vector<std::string> all = names();
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i] == name)
        return {executable, moeExecutableGetFunction(executable.get(), i)};
      known += (i ? ", '" : "'") + all[i] + "'";
    }
    raise({"expected the name of a compiled function, one of " + known +
           ", found '" + name + "'"});
  }

private:
  std::shared_ptr<MoEOpaqueExecutable> executable;
};
} // namespace

//===----------------------------------------------------------------------===//
// Functions
//===----------------------------------------------------------------------===//

static nb::bytes compileObject(std::string_view text, std::string_view pipeline,
                               std::string_view dumpDir,
                               std::string_view filename, std::string_view cpu,
                               nb::object remarks) {
  MoEBytes object = nullptr;
  run([&] {
    return moeCompileObject(ref(text), ref(filename), ref(pipeline), ref(cpu),
                            ref(dumpDir), &object);
  });
  appendRemarks(object, remarks);
  return takeBytes(object);
}

static std::string compilePTX(std::string_view text, std::string_view chip,
                              std::string_view dumpDir,
                              std::string_view filename, nb::object remarks) {
  MoEBytes ptx = nullptr;
  run([&] {
    return moeCompilePTX(ref(text), ref(filename), ref(chip), ref(dumpDir),
                         &ptx);
  });
  appendRemarks(ptx, remarks);
  return take(ptx);
}

static std::string compileKernels(std::string_view text, std::string_view chip,
                                  std::string_view dumpDir,
                                  std::string_view filename,
                                  nb::object remarks) {
  MoEBytes kernels = nullptr;
  run([&] {
    return moeCompileKernels(ref(text), ref(filename), ref(chip), ref(dumpDir),
                             &kernels);
  });
  appendRemarks(kernels, remarks);
  return take(kernels);
}

static nb::bytes assembleCubin(std::string_view ptx, std::string_view chip) {
  MoEBytes cubin = nullptr;
  run([&] { return moeAssembleCubin(ref(ptx), ref(chip), &cubin); });
  return takeBytes(cubin);
}

/// PlainCalls::replay for CPython: nanobind's own calls take longer than it.
static PyObject *replay(PyObject *self, PyObject *const *arguments,
                        Py_ssize_t count) {
  return nb::inst_ptr<PlainCalls>(self)->replay(arguments, count);
}

static nb::object replayOf(nb::handle calls) {
  static PyMethodDef method = {
      "replay", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(replay)),
      METH_FASTCALL,
      "The results of a call of a known form; None for a call that is not "
      "plain, False for one to remember."};
  return nb::steal(PyCFunction_New(&method, calls.ptr()));
}

/// Two copies of LLVM in a process corrupt each other's type identities; the
/// usual second one is upstream's `mlir` package.
static void requireOneLLVM() {
  nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (modules.contains("mlir._mlir_libs"))
    throw nb::import_error(
        "expected to be the only LLVM of the process, found upstream's Python "
        "bindings ('mlir') already imported; use moe_mlir and mlir in separate "
        "processes and exchange IR as text");
}

NB_MODULE(_moe, m) {
  requireOneLLVM();
  m.doc() = "The moe-mlir compiler: IR text in, machine code out.";
  // Executables held in module globals outlive nanobind's check at exit.
  nb::set_leak_warnings(false);

  errorType = PyErr_NewExceptionWithDoc(
      "moe_mlir._moe.MoeError",
      "A diagnostic of the compiler. `diagnostics` lists them one by one, each "
      "'file:line:col: error: ...' with its notes on further lines.",
      PyExc_ValueError, nullptr);
  m.attr("MoeError") = nb::handle(errorType);

  nb::class_<Module>(m, "Module", "A module of MLIR, in a context of its own.")
      .def_static("parse", &Module::parse, "text"_a, "filename"_a = "-",
                  "Parses and verifies MLIR text.")
      .def("text", &Module::text, "debug_info"_a = false,
           "The module as MLIR text, with locations if `debug_info`.")
      .def("bytecode", &Module::bytecode, "The module as MLIR bytecode.")
      .def("run", &Module::runPipeline, "pipeline"_a,
           "Runs a pass pipeline in place: 'moe-to-cpu', "
           "'builtin.module(cse,canonicalize)'. After a failure the module may "
           "be half lowered.")
      .def("set_kernel_config", &Module::setKernelConfig, "op"_a, "config"_a,
           "Asks for a kernel, '<schedule = mma>' say, for all ops of a name, "
           "'softmax_mix' say, that ask for none themselves.")
      .def("clone", &Module::clone, "An independent copy.")
      .def_prop_ro("remarks", &Module::remarks,
                   "Warnings and remarks of the last parse or run.")
      .def("__str__", [](const Module &self) { return self.text(false); });

  nb::class_<Function>(m, "Function", "A compiled function.")
      .def("__call__", &Function::call,
           "Takes the arguments, then one buffer for each result, which it "
           "fills. Tensors are CPU tensors of torch or anything with DLPack or "
           "the buffer protocol, contiguous, of the signature's dtype and "
           "shape; they are not copied.")
      .def_prop_ro("name", &Function::name)
      .def_prop_ro("signature", &Function::signature)
      .def_prop_ro(
          "arguments", [](const Function &self) { return self.values(false); },
          "Pairs of dtype and shape; -1 is any size, a scalar has None.")
      .def_prop_ro("results",
                   [](const Function &self) { return self.values(true); })
      .def("__repr__", [](const Function &self) {
        return "<compiled " + self.signature() + ">";
      });

  nb::class_<PlainCalls>(m, "PlainCalls",
                         "Calls of an op on plain tensors, by their form.")
      .def(nb::init<nb::tuple, nb::object, nb::tuple, nb::object>(),
           "tensor_types"_a, "dtype_type"_a, "modes"_a, "is_grad_enabled"_a)
      .def("remember", &PlainCalls::remember, "arguments"_a,
           "function"_a.none(), "tensors"_a, "results"_a,
           "Remembers what a call of this form did.")
      .def_prop_ro("replay", &replayOf);

  moe::bindGuards(m);
  moe::bindPanels(m);

  nb::class_<Executable>(
      m, "Executable", "An object of compile_object, linked into the process.")
      .def(nb::init<nb::bytes>(), "object"_a)
      .def("function", &Executable::function, "name"_a)
      .def_prop_ro("functions", &Executable::names);

  m.def(
      "compile_object", &compileObject, "text"_a, "pipeline"_a = "moe-to-cpu",
      "dump_dir"_a = "", "filename"_a = "-", "cpu"_a = "native",
      "remarks"_a = nb::none(),
      "Compiles MLIR text to an ELF object for this machine's CPU, or for "
      "another one of its architecture. With `dump_dir`, writes the IR after "
      "every pass there. Appends warnings and remarks to the list `remarks`.");
  m.def("compile_ptx", &compilePTX, "text"_a, "chip"_a, "dump_dir"_a = "",
        "filename"_a = "-", "remarks"_a = nb::none(),
        "Compiles MLIR text to PTX for an NVIDIA chip.");
  m.def("compile_kernels", &compileKernels, "text"_a, "chip"_a,
        "dump_dir"_a = "", "filename"_a = "-", "remarks"_a = nb::none(),
        "Compiles MLIR text for an NVIDIA chip: JSON of the PTX and of how to "
        "launch its kernels.");
  m.def("assemble_cubin", &assembleCubin, "ptx"_a, "chip"_a,
        "Assembles PTX with ptxas.");
  m.def("known_chips", [] { return take(moeKnownChips()); });
  m.def(
      "find_ptxas", [] { return take(moeFindPtxas()); },
      "The path of ptxas, empty when there is none.");
  m.def("llvm_version", &moeLLVMVersion);
  m.def(
      "host_cpu",
      [] {
        return std::pair(take(moeHostCPUName()), take(moeHostCPUFeatures()));
      },
      "The name and the features of this machine's CPU.");
  m.def(
      "code_features",
      [](std::string_view cpu) { return take(moeCodeFeatures(ref(cpu))); },
      "cpu"_a,
      "The features that code for a named CPU relies on, empty for an unknown "
      "name.");
  m.def(
      "describe_cpu",
      [](std::string_view cpu) { return take(moeDescribeCPU(ref(cpu))); },
      "cpu"_a,
      "What kernels for a named CPU follow, empty for an unknown name.");
  m.def(
      "cpu_pipeline",
      [](std::string_view cpu, std::string_view tuning) {
        MoEBytes pipeline = nullptr;
        run([&] { return moeCPUPipeline(ref(cpu), ref(tuning), &pipeline); });
        return take(pipeline);
      },
      "cpu"_a, "tuning"_a = "",
      "The pipeline 'moe-to-cpu' with the options for a named CPU, and with "
      "the "
      "measured ones of the text of a tuning table.");
  m.def("set_num_threads", &moe_set_num_threads, "threads"_a,
        "The most threads a kernel may use; 0 follows OpenMP, and so torch.");
  m.def("get_num_threads", &moe_get_num_threads);
}
