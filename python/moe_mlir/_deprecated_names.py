"""Modules that have another name now.

The old names still import, with a DeprecationWarning, and `python -m` still
runs those that have a command, without one. Some are in another package now,
which need not be installed.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from typing import Any

# Old name below moe_mlir -> new one below moe_mlir.
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
# What is in another package now, with all modules below it: old name -> whole new one.
SPLIT_OFF = {name: f"moe_mlir_bench.{name}" for name in ("bench", "demo", "gpu_check", "models")}


def new_name(name: str) -> str | None:
    """The whole name that a module has now whose old one, below moe_mlir, is `name`."""
    top, dot, rest = name.partition(".")
    if top in SPLIT_OFF:
        return SPLIT_OFF[top] + dot + rest
    return f"{__package__}.{MOVED[name]}" if name in MOVED else None


def _assert_installed(old: str, new: str) -> None:
    package = new.partition(".")[0]
    if package != __package__ and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"expected the package {package}, which {old} is part of now, found none; "
            f"`pip install {package.replace('_', '-')}`", name=package)


def import_moved(name: str, stacklevel: int = 2) -> types.ModuleType:
    """The module that had a name; the warning is for the caller, or whom `stacklevel` says.

    Raises:
        ModuleNotFoundError: the package that has it now is not installed.
    """
    old, new = f"{__package__}.{name}", new_name(name)
    assert new is not None
    _assert_installed(old, new)
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel + 1)
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
        package, _, name = fullname.partition(".")
        if package != __package__ or new_name(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=fullname)

    def exec_module(self, module: types.ModuleType) -> None:
        old = module.__name__
        name = old.partition(".")[2]
        new = import_moved(name)
        if hasattr(new, name):
            module.__class__ = _CallableModule
            module.__dict__.update({k: v for k, v in vars(new).items() if k != "__name__"})
        else:
            sys.modules[old] = new

    def get_code(self, fullname: str) -> types.CodeType:
        """What `python -m` runs."""
        new = new_name(fullname.partition(".")[2])
        assert new is not None
        _assert_installed(fullname, new)
        return compile(f"import runpy; runpy.run_module({new!r}, run_name='__main__', "
                       "alter_sys=True)", new, "exec")


# First: of what was split off, folders of compiled files may have stayed in a source tree.
sys.meta_path.insert(0, _Finder())
