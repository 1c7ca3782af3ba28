"""What a traced forward depends on beside its inputs: the numbers, weights and layers of a module.

A graph holds the numbers that the code read while it was traced. They are read again at each
call, so that a router whose `top_k` changes, or that gets an adapter, is traced anew.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from .model_code import code_of

# What torch itself keeps in every module.
_TORCHS = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NUMBERS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class NotTraceable(Exception):
    """Why no graph stands for a forward, in words."""


class ModuleState:
    """The state of one module and of the layers in it that a method calls.

    Raises:
        NotTraceable: the method reads an object that may change without being seen.
    """

    def __init__(self, module: torch.nn.Module, method: str = "forward") -> None:
        self.method = method
        # A forward may call all its layers; another method has those that it names.
        called = code_of(type(module), method).names if method != "forward" else None
        self._layers = [(name, layer) for name, layer in module.named_modules()
                        if not name or called is None or name.partition(".")[0] in called]
        self._readers: list[tuple[dict, Callable]] = []
        self._objects: list[tuple[dict, str, object]] = []
        self._children = [(m._modules, dict(m._modules)) for _, m in self._layers if m._modules]
        self._kinds = [(m, type(m)) for _, m in self._layers]
        self._inner = [vars(m) for name, m in self._layers if name]
        self._weights: list[tuple[dict, str]] = []
        layout = []
        for name, layer in self._layers:
            read = self._watch(name, layer)
            tensors = [(place, key) for place in ("_parameters", "_buffers")
                       for key in vars(layer)[place]]
            self._weights += [(vars(layer)[place], key) for place, key in tensors]
            layout.append((name, type(layer), getattr(type(layer), self._method_of(name)), read,
                           tuple(tensors)))
        # Equal for the routers of all layers of a model.
        self.layout = tuple(layout)

    def _method_of(self, path) -> str:
        """The method of a layer that runs, by the layer's path."""
        return "forward" if path else self.method

    def _watch(self, path, layer) -> tuple:
        """Notes what the layer's code reads; returns the names of numbers, and what is called."""
        code = code_of(type(layer), self._method_of(path))
        read, names, called = code.names, ["training"], []
        for name, value in vars(layer).items():
            if name in _TORCHS or name not in read:
                continue
            if is_number(value):
                names.append(name)
            elif callable(value) and isinstance(value, Hashable):
                self._objects.append((vars(layer), name, value))
                called.append((name, value))
            elif _is_configuration(value):
                self._objects.append((vars(layer), name, value))
                called.append((name, *self._watch_configuration(value, read)))
            else:
                raise NotTraceable(f"its forward reads '{name}', an object of "
                                   f"{type(value).__name__}, which may change between calls")
        self._readers.append((vars(layer), operator.itemgetter(*names)))
        for place, name in code.globals:
            self._objects.append((place, name, place.get(name)))
            called.append((name, place.get(name)))
        return (*names, *called)

    def _watch_configuration(self, config, read) -> list[str]:
        names = [name for name, value in vars(config).items()
                 if name in read and is_number(value)]
        if names:
            self._readers.append((vars(config), operator.itemgetter(*names)))
        return names

    def is_current(self) -> bool:
        """Whether the module still has the layers, classes and objects that it had."""
        for layer, kind in self._kinds:
            if type(layer) is not kind:
                return False  # by a parametrization, or as packing does
        for now, before in self._children:
            if now != before:
                return False
        for place, name, value in self._objects:
            if place.get(name) is not value:
                return False
        return True

    def has_hooks(self) -> bool:
        """Whether layers inside do more than their forward when they are called."""
        for layer in self._inner:
            if "forward" in layer or any(layer[hooks] for hooks in _HOOKS):
                return True
        return False

    def add_numbers(self, key: list) -> None:
        """Appends what the forward reads that is no tensor, as it is now."""
        for place, read in self._readers:
            key.append(read(place))

    def weights(self) -> list[torch.Tensor | None]:
        """The parameters and buffers, as they are now, in the order of the graph's inputs."""
        return [place[name] for place, name in self._weights]

    def copy_with(self, weights: Sequence[torch.Tensor | None]) -> dict[str, Any]:
        """The module and its layers by name, with other tensors in place of the weights.

        What a forward writes stays in the copy.
        """
        copies: dict[str, Any] = {}
        rest = iter(weights)
        for path, layer in self._layers:
            copy = copies[path] = object.__new__(type(layer))
            values = {name: value for name, value in vars(layer).items()
                      if name not in ("forward", "_old_forward", "_hf_hook", self.method)}
            values["_modules"] = dict(layer._modules)
            for place in ("_parameters", "_buffers"):
                values[place] = {name: next(rest) for name in values[place]}
            vars(copy).update(values)
            if path:
                owner, _, name = path.rpartition(".")
                copies[owner]._modules[name] = copy
        return copies

    def written_in(self, copies: Mapping[str, Any], weights: Sequence[torch.Tensor | None]) -> str:
        """The attribute that a run of the copy set to another object; empty if none."""
        rest = iter(weights)
        for path, layer in self._layers:
            before, after = vars(layer), vars(copies[path])
            expected = {name: before.get(name) for name in after if name not in _TORCHS}
            expected |= {name: next(rest) for place in ("_parameters", "_buffers")
                         for name in before[place]}
            expected |= {name: copies.get(f"{path}.{name}" if path else name, inner)
                         for name, inner in layer._modules.items()}
            found = {**{name: after[name] for name in after if name not in _TORCHS},
                     **after["_parameters"], **after["_buffers"], **after["_modules"]}
            for name, value in found.items():
                if name not in expected or value is not expected[name]:
                    return f"{path}.{name}" if path else name
        return ""


def is_number(value: object) -> bool:
    """Whether a value may be part of a key: two that are equal lead to one graph."""
    if isinstance(value, tuple):
        return all(map(is_number, value))
    return isinstance(value, _NUMBERS)


def _is_configuration(value) -> bool:
    return type(value).__name__.endswith("Config") and hasattr(value, "__dict__")


def is_plain(tensor: object) -> bool:
    """Whether a tensor is nothing but memory: no subclass such as those of distributed torch."""
    kind = type(tensor)
    return kind is torch.nn.Parameter or kind is torch.Tensor
