"""What the code of a module's forward reads and calls, as far as its bytecode tells.

Followed are methods of the module's class and functions of the same library, so that a selection
in `self.route(..)` or in a helper beside the class is found as one in the forward itself.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Where classes of models live: transformers, and code that came with a checkpoint.
_SOURCES = ("transformers.models.", "transformers_modules.")


@dataclass(frozen=True)
class ModelCode:
    """The names in the code of a class's forward, or of another of its methods.

    `names` are attributes, functions and strings, `variables` its own; `own_gradients`
    says that it uses a torch.autograd.Function, which a graph of operators does not hold.
    `globals` are the variables of its files that hold a number now.
    """

    names: frozenset[str]
    variables: frozenset[str]
    own_gradients: bool
    globals: tuple[tuple[dict[str, Any], str], ...]


_CODES: dict[Any, ModelCode] = {}


def is_model_class(kind: type) -> bool:
    """Whether a class is of a model of transformers or of code that came with a checkpoint."""
    return kind.__module__.startswith(_SOURCES)


def code_of(kind: Any, method: str = "forward") -> ModelCode:
    """The code that a method of a class of modules runs."""
    if (kind, method) not in _CODES:
        functions = list(_reached(kind, method))
        codes = [code for function in functions for code in _codes(function.__code__)]
        names = {name for code in codes for name in (
            *code.co_names, *(x for x in code.co_consts if isinstance(x, str)))}
        variables = {name for code in codes for name in code.co_varnames}
        _CODES[kind, method] = ModelCode(frozenset(names), frozenset(variables),
                                         any(map(_names_autograd, functions)),
                                         tuple(_numbers_of_files(functions)))
    return _CODES[kind, method]


def own_methods(kind: type) -> list[str]:
    """The methods of a class of a model that are written in it, and not in torch."""
    return [name for name, value in vars(kind).items()
            if isinstance(value, types.FunctionType) and not name.startswith("__")]


def _reached(kind, method) -> Iterator[types.FunctionType]:
    """The method and the functions that it may call, each once."""
    queue: list[Any] = [vars(parent)[method] for parent in kind.__mro__
                        if parent is not torch.nn.Module and method in vars(parent)]
    seen = set()
    while queue:
        function = _plain(queue.pop(0))
        if function is None or function in seen:
            continue
        seen.add(function)
        yield function
        for code in _codes(function.__code__):
            for name in code.co_names:
                queue += _methods(kind, name)
                queue += _functions(function, name)


def _plain(function) -> types.FunctionType | None:
    """The Python function beneath decorators, static and class methods, and properties."""
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function) if callable(function) else None
    return function if isinstance(function, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _methods(kind, name) -> list[Callable]:
    return [vars(parent)[name] for parent in kind.__mro__
            if is_model_class(parent) and name in vars(parent)]


def _functions(function, name) -> list[Callable]:
    found = function.__globals__.get(name)
    known = isinstance(found, types.FunctionType) and found.__module__.startswith(_SOURCES)
    return [found] if known and is_model_source(function) else []


def is_model_source(function: types.FunctionType) -> bool:
    return function.__module__.startswith(_SOURCES)


def _numbers_of_files(functions) -> Iterator[tuple[dict[str, Any], str]]:
    for function in filter(is_model_source, functions):
        for code in _codes(function.__code__):
            yield from ((function.__globals__, name) for name in code.co_names
                        if isinstance(function.__globals__.get(name), (int, float, str)))


def _names_autograd(function) -> bool:
    values = (function.__globals__.get(name) for code in _codes(function.__code__)
              for name in code.co_names)
    return is_model_source(function) and any(
        isinstance(x, type) and issubclass(x, torch.autograd.Function) for x in values)
