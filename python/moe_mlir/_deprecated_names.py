"""Modules that have another name now.

The old names still import, with a DeprecationWarning, and `python -m` still
runs those that have a command, without one.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

# Old name -> new one, both below moe_mlir.
MOVED = {
    "aot": "frontends.aot",
    "backend": "frontends.dynamo",
    "cache": "compiler.cache",
    "chips": "compiler.chips",
    "compile": "compiled.model",
    "compiled_model": "compiled.model",
    "compiled_program": "compiled.program",
    "completion_command": "cli.completion",
    "crash_report": "compiler.crash_report",
    "doctor": "cli.doctor",
    "environment_report": "cli.doctor",
    "explain_command": "cli.explain",
    "export": "frontends.export",
    "fx": "raising",
    "inductor": "frontends.inductor",
    "jit": "compiler.jit",
    "launch": "gpu.launch",
    "phases": "compiler.phases",
    "reproduce": "compiler.crash_report",
    "runtime": "compiler.jit",
    "simulate": "sim.simulation",
    "sizes": "gpu.sizes",
    "triton_check": "cli.check",
    "tune": "cli.tune",
}


def import_moved(name: str, stacklevel: int = 2) -> types.ModuleType:
    """The module that had a name; the warning is for the caller, or whom `stacklevel` says."""
    new = f"{__package__}.{MOVED[name]}"
    warnings.warn(f"{__package__}.{name} is now {new}", DeprecationWarning, stacklevel + 1)
    return importlib.import_module(new)


class _CallableModule(types.ModuleType):
    """A module under the name of a public function.

    Python binds a module to its package once it is imported, so that it takes
    the function's place there.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*arguments, **options)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __package__ or name not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=fullname)

    def exec_module(self, module: types.ModuleType) -> None:
        old = module.__name__
        name = old.rpartition(".")[2]
        new = import_moved(name)
        if hasattr(new, name):
            module.__class__ = _CallableModule
            module.__dict__.update({k: v for k, v in vars(new).items() if k != "__name__"})
        else:
            sys.modules[old] = new

    def get_code(self, fullname: str) -> types.CodeType:
        """What `python -m` runs."""
        new = f"{__package__}.{MOVED[fullname.rpartition('.')[2]]}"
        return compile(f"import runpy; runpy.run_module({new!r}, run_name='__main__', "
                       "alter_sys=True)", new, "exec")


sys.meta_path.append(_Finder())
