"""The table from ATen and moe operators to the functions that import them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from .._torch.core import OpOverload
from ..graph.arguments import bind_arguments

# (context, node, arguments) -> the value of the node, or values, as `Context` holds them.
Import = Callable[..., Any]

TABLE: dict[OpOverload, Import] = {}
# What a function need not read of its operator's arguments.
_IMPLIED: dict[OpOverload, frozenset[str]] = {}
# The operators that also take complex tensors.
COMPLEX: set[OpOverload] = set()
# The operators that also take uint8: their functions tell "ui8" from "i8".
UNSIGNED: set[OpOverload] = set()


class Unsupported(Exception):
    """This use of an operator cannot be imported; the message says why."""


# Where a result lies, and what its type says.
_IN_RESULT = frozenset({"memory_format", "non_blocking", "copy", "layout", "pin_memory", "device",
                        "implicit", "dtype", "keepdim", "size"})


def imports(*operators: OpOverload, complex: bool = False, unsigned: bool = False,
            implied: Iterable[str] = ()) -> Callable[[Import], Import]:
    """Registers `function(context, node, arguments)` for the operators.

    `arguments` has one attribute for each argument of the operator's schema,
    under the schema's name, with the schema's defaults filled in. A use that gives
    an argument which the function does not read is an error; `implied` names those
    that it need not read, because the result's type says them, or because they
    matter to gradients alone. `complex`: the function also serves complex tensors,
    `[.., 2]` to it. `unsigned`: it serves uint8, too.
    """
    def register(function):
        for operator in operators:
            if operator in TABLE:
                raise ValueError(f"operator {operator} is registered twice")
            TABLE[operator] = function
            _IMPLIED[operator] = _IN_RESULT.union(implied)
            if complex:
                COMPLEX.add(operator)
            if unsigned:
                UNSIGNED.add(operator)
        return function
    return register


class Arguments:
    """The bound arguments of a call, which know what was read of them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._read: set[str] = set()
        self._bound = vars(bind_arguments(node))

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._bound:
            raise AttributeError(name)
        self._read.add(name)
        return self._bound[name]

    def check_read(self) -> None:
        """Raises Unsupported where the call says more than was read of it."""
        for parameter in self._node.target._schema.arguments:
            name = parameter.name
            given = self._bound[name]
            if name in self._read or name in _IMPLIED[self._node.target] \
                    or parameter.has_default_value() and not isinstance(given, Node) \
                    and given == parameter.default_value:
                continue
            # Of a number and a tensor that is used in its place, the tensor counts.
            if given is not None and self._bound.get(f"{name}_value") is None:
                raise Unsupported(f"argument '{name}' = {given}")
