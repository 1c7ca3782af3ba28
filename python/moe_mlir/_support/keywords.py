"""Keywords that have another name now: the old ones still work, with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed(names: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Lets a function be called by the old names of its arguments; `names` is old -> new.

    >>> @renamed({"p": "probs"})
    ... def twice(probs):
    ...     return 2 * probs
    >>> twice(p=1)          # warns: moe_mlir.twice(p=) is now moe_mlir.twice(probs=)
    2
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def either(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name in names:
                    return function(*args, **with_new_names(called, kwargs, names))
            return function(*args, **kwargs)

        return either

    return decorate


def with_new_names(
    function: str, given: Mapping[str, Any], names: Mapping[str, str], stacklevel: int = 2
) -> Any:
    """Keywords under their new names; warns of old ones.

    Raises:
        TypeError: an argument is given by both names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        new = names.get(name, name)
        if new in found or (new != name and new in given):
            raise TypeError(f"{function}: expected '{new}' once, found it as '{name}' as well")
        if new != name and not torch.compiler.is_compiling():
            warnings.warn(
                f"moe_mlir.{function}({name}=) is now moe_mlir.{function}({new}=)",
                DeprecationWarning, stacklevel + 1)
        found[new] = value
    return found
