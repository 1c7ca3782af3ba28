"""The dialect `moe` in MLIR's Python package: a class and a builder for each op.

    from mlir import ir
    from mlir.dialects import moe

    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)

Import it before the first `ir.Context`: contexts made later know the dialect, `register_dialect`
adds it to an earlier one. Builders take the types of the results first, as those of all ops with
destinations do; attributes of enums are written as in IR (`kind="logits"`) or as members of the
enum (`moe.ScoreKind.Logits`). The passes and pipelines of moe-mlir are registered, too:
`PassManager.parse("builtin.module(moe-to-cpu)")`.

This process has MLIR's own libraries, and `moe_mlir` has others: let them exchange IR as text.
"""

import ctypes
import sys
from pathlib import Path

if "moe_mlir._moe" in sys.modules:
    raise ImportError("expected to be the only MLIR of the process, found the compiler of moe_mlir "
                      "already loaded; use mlir and moe_mlir in separate processes and exchange IR "
                      "as text")

from .. import _mlir_libs, ir  # noqa: E402
from ._moe_enum_gen import *  # noqa: E402, F403
from ._moe_ops_gen import *  # noqa: E402, F403
from ._moe_ops_gen import _Dialect  # noqa: E402, F401

_library = ctypes.CDLL(str(Path(__file__).absolute().parent / "libmoe_dialect.so"))
_library.moeRegisterDialect.argtypes = [ctypes.c_void_p]
_library.moeRegisterDialect.restype = None


def _pointer(of) -> int:
    """The pointer in an object of MLIR's: a struct of one, which C passes as the pointer itself."""
    python = ctypes.pythonapi
    python.PyCapsule_GetName.argtypes = [ctypes.py_object]
    python.PyCapsule_GetName.restype = ctypes.c_char_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    capsule = of._CAPIPtr
    return python.PyCapsule_GetPointer(capsule, python.PyCapsule_GetName(capsule))


def register_dialect(context: ir.Context) -> None:
    """Lets a context that exists already know the dialect."""
    registry = ir.DialectRegistry()
    _library.moeRegisterDialect(_pointer(registry))
    context.append_dialect_registry(registry)
    context.dialects["moe"]  # loads it


# What each new context gets.
_library.moeRegisterDialect(_pointer(_mlir_libs.get_dialect_registry()))
_library.moeRegisterPasses()
