"""What a model's code reads that is no weight: modules, classes, attributes, hooks.

A trace holds for a model as it was. A call looks whether it still is, in two steps: the native
`ModelGuard` tells in a microsecond or two whether everything that was looked at is the very same
object; only where it is not is the model described again, and compared by value.

Contents of attributes are followed into lists, dictionaries and configurations. What is not
seen is in docs/Limits.md.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import torch

from .._torch.core import MARKS_OF_COMPILE, ScriptFunction

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device,
              torch.Size, torch.layout, torch.memory_format)
_CALLABLES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type,
              functools.partial, ScriptFunction)
# Of what torch.nn.Module keeps in a module: read by name, or no part of a forward.
_OF_TORCH = (frozenset(vars(torch.nn.Module())) - {"training"}) | MARKS_OF_COMPILE
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DEEPEST = 4


class Difference(NamedTuple):
    """An attribute, by its path in the model, and what it was and is."""

    path: str
    was: object
    found: object

    def __str__(self):
        return f"{self.path} = {_text(self.found)} instead of {_text(self.was)}"


class ModelForm:
    """A model as it was when this was made.

    `places` says so by the identity of objects, for `ModelGuard.expect`: items, sizes, objects.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self._take(_Description(model))

    def _take(self, description):
        self._values = description.values
        self.places = description.places()

    def difference(self) -> Difference | None:
        """The first thing that is no longer as it was; if there is none, `places` are those of now."""
        now = _Description(self.model)
        for path in (*self._values, *(p for p in now.values if p not in self._values)):
            was, found = self._values.get(path, _ABSENT), now.values.get(path, _ABSENT)
            if not same_constant(was, found):
                return Difference(path, was, found)
        self._take(now)
        return None

    def __getstate__(self):
        # Objects of a copy are others, so that its form is taken anew; it is what this one was.
        return self.model, self.difference() is None

    def __setstate__(self, state):
        self.model, held = state
        self._take(_Description(self.model))
        if not held:
            self._values = {"": _ABSENT}


class _Absent:
    """In the place of an attribute that a model does not have."""

    def __repr__(self):
        return "nothing"

    def __reduce__(self):
        return "_ABSENT"


_ABSENT = _Absent()


class _Description:
    """What is to be compared: by value, by path; and by identity."""

    def __init__(self, model):
        self.values: dict[str, Any] = {}
        self._items: list = []
        self._sizes: list = []
        self._objects: list = []
        self._paths: dict[int, str] = {}
        self._visit(model, "")

    def places(self) -> tuple[tuple, tuple, tuple]:
        return tuple(self._items), tuple(self._sizes), tuple(self._objects)

    def _visit(self, module, path):
        if id(module) in self._paths:
            self.values[path] = ("the module", self._paths[id(module)])
            return
        self._paths[id(module)] = path
        self.values[path] = type(module)
        attributes = vars(module)
        self._objects += (module, type(module), attributes)
        self._sizes += (attributes, len(attributes))
        for name in _HOOKS:
            self._hold(attributes, name)
            self._each(attributes[name], f"{path}.{name}")
        for kind in ("_parameters", "_buffers"):
            self._hold(attributes, kind)
            self._optional(attributes[kind], path)
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                self._value(attributes, name, value, f"{path}.{name}", 0)
        self._hold(attributes, "_modules")
        self._sizes += (attributes["_modules"], len(attributes["_modules"]))
        for name, child in attributes["_modules"].items():
            self._items += (attributes["_modules"], name, child)
            if child is None:
                self.values[f"{path}.{name}"] = None
            else:
                self._visit(child, f"{path}.{name}".lstrip("."))

    def _hold(self, container, key):
        self._items += (container, key, container[key])

    def _each(self, hooks, path):
        self._sizes += (hooks, len(hooks))
        for key in hooks:
            self._hold(hooks, key)
        if hooks:
            self.values[path] = tuple(hooks.values())

    def _optional(self, tensors, path):
        """The names of tensors, and which are None: a forward may ask for that."""
        self._sizes += (tensors, len(tensors))
        for name, tensor in tensors.items():
            self.values[f"{path}.{name}"] = None if tensor is None else torch.Tensor
            if tensor is None:
                self._hold(tensors, name)

    def _value(self, container, key, value, path, depth):
        """An attribute, or what is in a container. Tensors are read at each call."""
        if isinstance(value, torch.Tensor):
            self.values[path] = torch.Tensor
            return
        self._items += (container, key, value)
        if isinstance(value, (*_CONSTANTS, *_CALLABLES)):
            self.values[path] = value
        elif isinstance(value, torch.nn.Module) or depth == _DEEPEST:
            self.values[path] = type(value)
        elif isinstance(value, (list, dict)):
            self.values[path] = (type(value), len(value))
            self._sizes += (value, len(value))
            for k, v in value.items() if isinstance(value, dict) else enumerate(value):
                self._value(value, k, v, f"{path}[{k!r}]", depth + 1)
        elif isinstance(value, (tuple, set, frozenset)):
            constant = all(isinstance(x, _CONSTANTS) for x in value)
            self.values[path] = value if constant else (type(value), len(value))
        elif _is_configuration(value) and id(value) not in self._paths:
            self._paths[id(value)] = path
            attributes = vars(value)
            self.values[path] = type(value)
            self._objects += (value, type(value), attributes)
            self._sizes += (attributes, len(attributes))
            for name, one in attributes.items():
                self._value(attributes, name, one, f"{path}.{name}", depth + 1)
        else:
            self.values[path] = type(value)


def _is_configuration(value) -> bool:
    """Whether its attributes are settings, as those of transformers' configurations."""
    name = type(value).__name__
    return hasattr(value, "__dict__") and (
        isinstance(value, types.SimpleNamespace) or (
            name.endswith("Config") and name != "GenerationConfig") or (
            dataclasses.is_dataclass(value) and not isinstance(value, type)))


def same_constant(old: object, new: object) -> bool:
    """Whether a number, flag or text is what it was; True is not 1, and -0.0 is not 0.0."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, (float, complex)):
        return repr(old) == repr(new)
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(same_constant, old, new))
    if isinstance(old, functools.partial) and isinstance(new, functools.partial):
        return False
    try:
        return bool(old == new)
    except Exception:  # noqa: BLE001  objects of others compare as they like
        return False


def _text(value) -> str:
    if isinstance(value, type):
        return f"a {value.__name__}"
    return repr(value)[:80]


__all__ = ["Difference", "ModelForm", "same_constant"]
