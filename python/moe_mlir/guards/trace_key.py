"""All that a trace of a model depends on, as a digest that another process finds again.

A trace runs Python: a model's code, what that calls, and the settings that it reads. `trace_key`
walks over all of it: objects by their attributes, functions by their byte code and by what the names
in it stand for, classes by the methods of such names. So an edit of a file, a function that was put
in the place of another, an entry of a registry, or a flag of a configuration gives another digest.

Of parameters and buffers it takes the form, not the numbers. Code of Python's library, of torch and
of installed packages other than transformers and that of the model is fixed: it is known by its
version or file, and by whether functions of others are in the place of its own. What the walk does
not know, it refuses (`NoKey`): such a model is traced each time.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import glob
import hashlib
import itertools
import logging
import os
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from .._torch.core import (
    MARKS_OF_COMPILE,
    DisableTorchFunctionSubclass,
    OpOverload,
    OpOverloadPacket,
    has_global_hooks,
    is_namespace_of_ops,
    is_plain_class,
    modes_in_use,
    settings_of_process,
)

# Larger constants of a model's code are not read for a digest.
_MOST_OF_CONSTANT = 1 << 20
# Known by their versions.
_BASE = frozenset({*sys.stdlib_module_names, "torch", "numpy", "moe_mlir"}) - {"__main__"}
# Of transformers what downloads, logs and trains: it keeps numbers of the process.
_NOT_OF_FORWARDS = re.compile(r"[\\/]transformers[\\/](utils[\\/](hub|logging)\.py|loss[\\/])")
# Where somebody may have put a function of his own.
_MODULES_OF_TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.functional", "torch._tensor",
                     "torch.linalg", "torch.special", "torch.fft")
# Types whose objects are what their text says.
_PLAIN = frozenset({
    type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes, range,
    torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size,
    types.GenericAlias, types.UnionType, OpOverload, OpOverloadPacket})
# Types whose objects a trace may hold, and none of which says what it computes.
_OPAQUE = (logging.Logger, itertools.count, type(threading.Lock()), type(threading.RLock()),
           threading.Thread, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
           weakref.WeakSet, torch.Generator, os._Environ, types.GetSetDescriptorType,
           types.MemberDescriptorType)
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
             types.MethodWrapperType, types.ClassMethodDescriptorType)
# Namespaces of operators whose code is torch's or ours, or in `transformers`.
_OPS = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor _inductor_test _native _quantized aten c10d "
    "c10d_functional debug_mode_ops debugprims export flex_lib fsdp higher_order inductor mkl mkldnn "
    "mkldnn_prepacked moe onednn onnx onnx_symbolic prepacked prim prims profiler quantized rngprims "
    "sparse streams symm_mem transformers xnnpack".split())
# Attributes that say nothing of what a model computes: a hash in GenerationConfig, the loan of a
# packed weight.
_OF_PROCESS = MARKS_OF_COMPILE | {"_original_object_hash", "loan"}
_LONGEST_WAY = 6
_DEEPEST = 3
_OF_CLASSES = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __abstractmethods__ "
    "_abc_impl __slots__ __slotnames__ __firstlineno__ __static_attributes__ __annotate_func__ "
    "__annotations_cache__ __annotate__ __type_params__ __orig_bases__ __parameters__".split())


class NoKey(Exception):
    """Why there is no digest."""


def trace_key(*roots: Any) -> str:
    """The digest of models and other objects, and of what their code can read.

    Raises:
        NoKey: something of it cannot be told from something else.
    """
    return _Walk(roots).digest()


class _Walk:
    """A walk over objects in an order that does not depend on the process.

    Each object gets a number when it is first met; its entry in the digest names the numbers of
    those that it holds. Names in byte code are looked up in all modules and classes that were met,
    so the walk ends when there are neither new objects nor new names.
    """

    def __init__(self, roots):
        self._sha = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        # Objects whose numbers are given must not go: another one would have their address.
        self._held: list[Any] = []
        # The number of the object that holds it.
        self._owners: list[int] = []
        self._current = -1
        self._open: collections.deque[Any] = collections.deque()
        self._names: dict[str, None] = {}
        # Modules and classes that are not fixed, with the names that were looked up.
        self._scopes: dict[int, tuple[Any, dict[str, Any], int]] = {}
        self._storages: dict[int, int] = {}
        # Installed packages whose code is walked over.
        self._walked = {"transformers"}.union(
            type(module).__module__.partition(".")[0] for root in roots
            if isinstance(root, torch.nn.Module) for module in root.modules()) - _BASE
        self._fixed_files: dict[str, bool] = {}
        self._weights = {id(tensor) for root in roots if isinstance(root, torch.nn.Module)
                         for tensor in itertools.chain(root.parameters(), root.buffers())}
        if modes_in_use() or has_global_hooks():
            raise NoKey("a mode of torch in use, or a hook for all modules")
        self._write(*_versions(), *settings_of_process(), *_environment())
        self._numbers_of(sys.modules[name] for name in _MODULES_OF_TORCH)
        self._write("roots", *map(self._number, roots))

    def digest(self) -> str:
        while self._open or self._look_up():
            while self._open:
                try:
                    self._describe(self._open.popleft())
                except NoKey as reason:
                    raise NoKey(f"{reason}: {self._way_to(self._current)}") from None
        others = [name for name in self._names if name not in _OPS
                  and is_namespace_of_ops(vars(torch.ops).get(name))]
        if others:  # code in Python that no module may hold
            raise NoKey(f"operators of the library {others[0]}")
        # Variables of the environment that some code names.
        self._write("environment", sorted((n, os.environ[n]) for n in self._names if n in os.environ))
        return self._sha.hexdigest()

    # ---- what is written -------------------------------------------------------

    def _write(self, *parts) -> None:
        data = repr(parts).encode("utf-8", "backslashreplace")
        self._sha.update(len(data).to_bytes(8, "little"))
        self._sha.update(data)

    def _number(self, value) -> int | str | tuple:
        """What an entry names an object by: plain ones and tuples by themselves, others by a number."""
        if type(value) in _PLAIN:
            return type(value).__name__, repr(value)
        if type(value) is tuple:  # of equal ones Python may make one
            return "tuple", *map(self._number, value)
        if type(value) is frozenset:
            return "frozenset", *self._of_set(value)
        number = self._numbers.get(id(value))
        if number is None and (text := _plain_text(value)):
            return text
        if number is None:
            number = self._numbers[id(value)] = len(self._held)
            self._held.append(value)
            self._open.append(value)
            self._owners.append(self._current)
        return number

    def _way_to(self, number) -> str:
        """What holds what holds .. an object."""
        way: list[str] = []
        while number >= 0 and len(way) < _LONGEST_WAY:
            value = self._held[number]
            way.append(getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
                       or type(value).__name__)
            number = self._owners[number]
        return " of ".join(way)

    def _numbers_of(self, values: Iterable[Any]) -> list:
        return [self._number(value) for value in values]

    # ---- names -----------------------------------------------------------------

    def _add_names(self, code: types.CodeType) -> None:
        for name in itertools.chain(code.co_names, (c for c in code.co_consts if isinstance(c, str))):
            if name.isidentifier():
                self._names.setdefault(name)

    def _add_scope(self, owner, namespace) -> None:
        self._scopes.setdefault(id(owner), (owner, namespace, 0))

    def _look_up(self) -> bool:
        """Looks for all names in all scopes where that was not done; whether there were any."""
        names, is_new = list(self._names), False
        for key, (owner, namespace, known) in list(self._scopes.items()):
            if known == len(names):
                continue
            is_new = True
            self._scopes[key] = owner, namespace, len(names)
            found = [name for name in names[known:] if name in namespace and name not in _OF_CLASSES]
            if found:
                self._current = self._numbers[key]
                self._write("names", self._number(owner),
                            [(name, self._number(namespace[name])) for name in found])
        return is_new

    # ---- kinds of objects ------------------------------------------------------

    def _describe(self, value) -> None:
        number = self._current = self._numbers[id(value)]
        if isinstance(value, torch.Tensor):
            self._write(number, *self._tensor(value))
        elif isinstance(value, types.ModuleType):
            self._write(number, "module", value.__name__)
            self._module(value)
        elif isinstance(value, type):
            self._write(number, *self._class(value))
        elif isinstance(value, types.FunctionType):
            self._write(number, *self._function(value))
        elif isinstance(value, types.CodeType):
            self._write(number, *self._code(value))
        elif isinstance(value, types.MappingProxyType):
            self._write(number, *self._container(value, itertools.chain(*value.items())))
        elif isinstance(value, dict):
            # Not by methods of its own, which may make what it holds.
            self._write(number, *self._container(value, itertools.chain(*dict.items(value))))
        elif isinstance(value, (list, tuple, collections.deque)):
            self._write(number, *self._container(value, value))
        elif isinstance(value, (set, frozenset)):
            self._write(number, type(value).__name__, self._of_set(value))
        else:
            self._write(number, *self._object(value))

    def _container(self, value, inner) -> list:
        kind = type(value)
        return [kind.__name__ if _is_in_c(kind) else self._number(kind), self._numbers_of(inner),
                *self._attributes(value)]

    def _of_set(self, value) -> list:
        """What a set holds, whose own order depends on the process."""
        return self._numbers_of(sorted(value, key=_name_in_set))

    def _object(self, value) -> list:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return ["enum", self._number(kind), value.name]
        if isinstance(value, _BUILT_IN):
            owner = getattr(value, "__self__", None)
            return ["built in", value.__qualname__, str(getattr(value, "__module__", "")),
                    *([] if isinstance(owner, (types.ModuleType, type(None))) else [self._number(owner)])]
        if isinstance(value, types.MethodType):
            return ["method", *self._numbers_of((value.__func__, value.__self__))]
        if isinstance(value, (staticmethod, classmethod)):
            return [kind.__name__, self._number(value.__func__)]
        if isinstance(value, property):
            return ["property", *self._numbers_of((value.fget, value.fset, value.fdel))]
        if isinstance(value, functools.partial):
            return ["partial", *self._numbers_of((value.func, value.args, value.keywords)),
                    *self._attributes(value)]
        if isinstance(value, numpy.generic):
            return [_name(kind), value.item()]
        if isinstance(value, re.Pattern):
            return ["pattern", value.pattern, value.flags]
        if isinstance(value, contextvars.ContextVar):
            return ["context", value.name, self._number(value.get(None))]
        if isinstance(value, threading.local):
            return ["of the thread", self._number(dict(vars(value)))]
        if isinstance(value, types.GeneratorType):
            return ["generator", *self._numbers_of((value.gi_code,))]
        if isinstance(value, types.CellType):
            return ["cell", *(self._numbers_of([value.cell_contents]) if _is_full(value) else [])]
        if isinstance(value, functools._lru_cache_wrapper):
            return ["cached", self._number(value.__wrapped__)]
        if isinstance(value, _OPAQUE) or kind is object or (_is_in_c(kind) and hasattr(kind, "__get__")):
            return ["opaque", _name(kind)]
        if self._is_fixed(kind) and kind.__module__.partition(".")[0] == "typing":
            return ["typing", repr(value)]
        if not hasattr(value, "__dict__") and not _slots(kind) and _is_in_c(kind):
            raise NoKey(f"a {_name(kind)}")
        return ["object", self._number(kind), *self._attributes(value)]

    def _attributes(self, value) -> list:
        """What an object holds, by name."""
        held = {**getattr(value, "__dict__", {}),
                **{name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}}
        return [(name, self._number(x)) for name, x in held.items() if name not in _OF_PROCESS]

    def _tensor(self, tensor) -> list:
        """A parameter or buffer, whose values compiled code reads; of a constant, these, too."""
        if tensor.layout is not torch.strided or not is_plain_class(type(tensor)):
            raise NoKey(f"a {_name(type(tensor))} of layout {tensor.layout}")
        with DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            number = self._storages.setdefault(storage._cdata, len(self._storages))
            if id(tensor) in self._weights:
                # The panels of a packed one.
                self._weights.update(id(x) for x in vars(tensor).values() if isinstance(x, torch.Tensor))
            form = ["tensor", self._number(type(tensor)), tensor.dtype, tuple(tensor.shape),
                    tensor.stride(), tensor.storage_offset(), number, str(tensor.device),
                    tensor.requires_grad, *self._attributes(tensor)]
            return form if id(tensor) in self._weights else [*form, _values(tensor)]

    # ---- code ------------------------------------------------------------------

    def _function(self, function) -> list:
        name = ["function", function.__module__, function.__qualname__]
        inner = [function.__defaults__, function.__kwdefaults__, function.__closure__,
                 {name: x for name, x in vars(function).items() if not name.startswith("_torchdynamo")}]
        if self._is_fixed_code(function.__code__):
            # Two lambdas of a file have one name.
            place = function.__code__.co_firstlineno, function.__code__.co_linetable
            return [*name, "fixed", *place, _file_of(function.__module__), *self._numbers_of(inner)]
        return [*name, *self._numbers_of((function.__code__, *inner)),
                *self._globals(function.__code__, function.__globals__)]

    def _code(self, code) -> list:
        self._add_names(code)
        inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
        plain = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
        return ["code", code.co_code, code.co_names, code.co_flags, code.co_argcount,
                code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames, code.co_freevars,
                code.co_cellvars, getattr(code, "co_exceptiontable", b""),
                self._numbers_of((*plain, *inner))]

    def _globals(self, code, scope) -> list:
        """What the names of a function, and of those inside of it, stand for."""
        codes, found = [code], dict[str, Any]()
        while codes:
            one = codes.pop()
            codes += [c for c in one.co_consts if isinstance(c, types.CodeType)]
            found.update((name, self._number(scope[name])) for name in one.co_names if name in scope)
        return sorted(found.items(), key=str)

    def _class(self, kind) -> list:
        name = ["class", kind.__module__, kind.__qualname__]
        if self._is_fixed(kind):
            self._write(*name, *self._foreign_in(vars(kind), kind.__module__))
            return [*name, "fixed", _file_of(kind.__module__)]
        scope = vars(kind)
        called = {n for base in kind.__mro__ if self._is_fixed(base) and base is not object
                  for n in vars(base)}
        always = [n for n in scope if (n in called or n.startswith("__")) and n not in _OF_CLASSES]
        self._add_scope(kind, scope)
        return [*name, self._numbers_of((type(kind), *kind.__mro__[1:])), _file_of(kind.__module__),
                [(n, self._number(scope[n])) for n in always]]

    def _module(self, module) -> None:
        if self._is_fixed_name(module.__name__):
            self._write("in", module.__name__, *self._foreign_in(vars(module), module.__name__))
        else:
            self._write("file", _file_of(module.__name__))
            self._add_scope(module, vars(module))

    def _foreign_in(self, scope, owner: str) -> list:
        """What somebody put in the place of a function or class of a fixed package, or an alias."""
        package = owner.partition(".")[0]
        values = [(name, value.__func__ if type(value) in (staticmethod, classmethod) else value)
                  for name, value in list(scope.items())]
        return [(name, self._number(value)) for name, value in values
                if callable(value) and not self._is_at_home(name, value, package)]

    def _is_at_home(self, name, value, package) -> bool:
        if not isinstance(value, (type, types.FunctionType, *_BUILT_IN)):
            return type(value).__module__.partition(".")[0] == package
        module = getattr(value, "__module__", None) or package
        return value.__name__ == name and module.partition(".")[0] == package and (
            type(value) is not types.FunctionType or self._is_fixed_code(value.__code__))

    # ---- what is fixed ---------------------------------------------------------

    def _is_fixed_code(self, code) -> bool:
        name = code.co_filename
        if name not in self._fixed_files:
            self._fixed_files[name] = self._is_fixed_file(name)
        return self._fixed_files[name]

    def _is_fixed_file(self, name) -> bool:
        if name.startswith("<frozen ") or _NOT_OF_FORWARDS.search(name):
            return True
        package = _package_of(name)
        return package is not None and package not in self._walked

    def _is_fixed_name(self, module: str) -> bool:
        package = module.partition(".")[0]
        if package in _BASE:
            return True
        path = getattr(sys.modules.get(package), "__file__", None)
        return path is not None and self._is_fixed_file(path)

    def _is_fixed(self, kind: type) -> bool:
        return _is_in_c(kind) or self._is_fixed_name(kind.__module__)


def _name_in_set(value) -> str:
    """A text that tells an object from others in a set, in every process."""
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (type, types.FunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_name_in_set, value))})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    raise NoKey(f"a set with a {_name(type(value))}")


def _plain_text(value, depth: int = 0) -> str:
    """A list or dictionary of plain values as they are, by whomever else it is held; empty if it has
    others."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if depth > _DEEPEST or kind not in (list, tuple, dict, collections.OrderedDict):
        return ""
    inner = [x for pair in value.items() for x in pair] if isinstance(value, dict) else value
    texts = [_plain_text(x, depth + 1) for x in inner]
    return f"{kind.__name__}({', '.join(texts)})" if all(texts) else ""


def _values(tensor) -> bytes:
    """The digest of a constant, which code may read while it is traced."""
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > _MOST_OF_CONSTANT:
        raise NoKey(f"a constant of shape {list(tensor.shape)} on {tensor.device}, no parameter or buffer")
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.tolist())).digest()


@functools.cache
def _folders() -> list[tuple[str, str | None]]:
    """Folders of code, and the package in each; None where a folder has one a package."""
    import moe_mlir

    paths: dict[str, str | None] = {
        os.path.dirname(str(package.__file__)): package.__name__ for package in (torch, numpy, moe_mlir)}
    paths |= {sysconfig.get_path(kind): None for kind in ("purelib", "platlib")}
    paths |= {sysconfig.get_path(kind): "stdlib" for kind in ("stdlib", "platstdlib")}
    return [(path.rstrip(os.sep) + os.sep, package) for path, package in paths.items()]


@functools.cache
def _package_of(path: str) -> str | None:
    """The installed package that a file belongs to; None for a file of the user's."""
    for folder, package in _folders():
        if path.startswith(folder):
            return package or path.removeprefix(folder).partition(os.sep)[0].partition(".")[0]
    return None


def _is_in_c(kind: type) -> bool:
    """Whether a type has no code in Python."""
    return not kind.__flags__ & _HEAP_TYPE or kind.__module__ == "builtins"


# Py_TPFLAGS_HEAPTYPE
_HEAP_TYPE = 1 << 9


def _slots(kind) -> list[str]:
    found = (getattr(base, "__slots__", ()) for base in kind.__mro__ if not _is_in_c(base))
    return [name for names in found for name in ([names] if isinstance(names, str) else names)
            if name not in ("__dict__", "__weakref__")]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_full(cell) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _file_of(module: str | None) -> tuple:
    """A file as it is now: a method whose name is put together is looked up nowhere else."""
    name = module or ""
    if name.partition(".")[0] in _BASE:
        return ()
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        raise NoKey(f"code of '{module}', which is in no file")
    status = os.stat(path)
    return os.path.basename(path), status.st_size, status.st_mtime_ns


@functools.cache
def _versions() -> tuple:
    import moe_mlir

    sources = hashlib.sha256()
    folder = os.path.dirname(moe_mlir.__file__)
    for path in sorted(glob.glob(os.path.join(folder, "**", "*.py"), recursive=True)):
        with open(path, "rb") as file:
            sources.update(file.read())
    return ("1", sys.version, torch.__version__, torch.version.git_version, numpy.__version__,
            sources.hexdigest())


# Ours that say where things are stored and what is told, not what is compiled.
_OF_CACHES_AND_LOGS = ("MOE_MLIR_CACHE", "MOE_MLIR_LOGS", "MOE_MLIR_PROGRESS", "MOE_MLIR_DUMP_DIR",
                       "MOE_MLIR_REPRODUCER_DIR", "MOE_MLIR_SEED")


def _environment() -> list:
    """Our variables that code which is traced may read."""
    return sorted((name, value) for name, value in os.environ.items()
                  if name.startswith("MOE_MLIR_") and not name.startswith(_OF_CACHES_AND_LOGS))


__all__ = ["NoKey", "trace_key"]
