"""Reads calls of a torch graph by the schemas of their operators.

A pattern names the arguments that it understands; where a call gives any other
one, the pattern does not match. So an `alpha`, a `dtype` or a `keepdim` that
nobody thought of keeps a router as it is, instead of changing what it computes.
Nothing else that matches looks at `node.args`.
"""

import operator
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Node

from .._torch.core import OpOverload

# Where and how a result lies in memory: nothing of its values.
PLACES = frozenset({"memory_format", "non_blocking", "copy", "layout", "pin_memory", "device",
                    "implicit"})


def is_call(node: object, *targets: OpOverload) -> bool:
    """Whether the node calls one of the operators, whatever its arguments are."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def read(node: Any, targets: Collection[OpOverload], *names: str) -> Any:
    """The arguments `names` of a call of one of `targets`, and its first one as `source`.

    None where the node is another call, or gives an argument beside these that is
    not the schema's default. A name that an operator does not have reads as None.
    """
    if not is_call(node, *targets):
        return None
    found = dict.fromkeys(names)
    for position, parameter in enumerate(node.target._schema.arguments):
        given = _given(node, position, parameter)
        if position == 0:
            found["source"] = given
        if parameter.name in names:
            found[parameter.name] = given
        elif position and parameter.name not in PLACES and not _is_default(given, parameter):
            return None
    if not _is_on_one_device(node, found["source"]):
        return None
    return SimpleNamespace(**found)


def is_assertion(node: object) -> bool:
    """Whether the node only checks what tracing knows anyway."""
    return is_call(node, torch.ops.aten._assert_tensor_metadata.default)


def item(node: object, position: int) -> Node | None:
    """The call whose result `position` the node is; else None."""
    if isinstance(node, Node) and node.target is operator.getitem and node.args[1] == position:
        return node.args[0]
    return None


def source(node: Node) -> Any:
    """The first argument of a call: what a view, a cast or a copy is made of."""
    parameters = getattr(getattr(node.target, "_schema", None), "arguments", None)
    if parameters:
        return _given(node, 0, parameters[0])
    return node.args[0] if node.args else None


def arguments_given(node: Node) -> dict[str, Any]:
    """The arguments that are no tensors and not the schema's defaults, by their names."""
    schema = getattr(node.target, "_schema", None)
    found = {}
    for position, parameter in enumerate(schema.arguments if schema else ()):
        given = _given(node, position, parameter)
        if parameter.name not in PLACES and not isinstance(given, Node) \
                and not _is_default(given, parameter):
            found[parameter.name] = given
    return found


def _given(node, position, parameter):
    if position < len(node.args) and not parameter.kwarg_only:
        return node.args[position]
    if parameter.name in node.kwargs:
        return node.kwargs[parameter.name]
    return parameter.default_value if parameter.has_default_value() else None


def _is_default(given, parameter) -> bool:
    if isinstance(given, Node):
        return False
    if not parameter.has_default_value():
        return given is None
    default = parameter.default_value
    if isinstance(given, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(given) == list(default)
    return given == default


def _is_on_one_device(node, origin) -> bool:
    values = [value(x) for x in (node, origin) if isinstance(x, Node)]
    return len({v.device for v in values if isinstance(v, torch.Tensor)}) <= 1


def value(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def dtype(node: Node) -> torch.dtype:
    return value(node).dtype
