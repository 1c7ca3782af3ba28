"""Writes a graph as one Python function, with the shortest way to each operator.

At the few tokens of a decoding step a router's time is that of its calls, not of its numbers:
torch.fx looks operators up by name at each call, and enters moe ops through the dispatcher.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops._library import direct_call
from ..raising.patterns import VIEWS, aten, same_shape
from ..raising.reading import dtype, is_call, source, value

_SHORT = {
    aten.linear.default: torch.nn.functional.linear,
    aten.reshape.default: torch.Tensor.reshape,
    aten.view.default: torch.Tensor.view,
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.to.dtype: torch.Tensor.to,
    aten.sigmoid.default: torch.sigmoid,
    operator.getitem: operator.getitem,
}


def drop_idle_calls(graph: Graph) -> None:
    """Takes out casts and views whose result is their argument; a view is returned as one."""
    for node in graph.nodes:
        is_returned = any(user.op == "output" for user in node.users)
        if _is_idle_cast(node) or is_call(node, *VIEWS) and not is_returned \
                and same_shape(node, source(node)):
            node.replace_all_uses_with(source(node))
            graph.erase_node(node)


def _is_idle_cast(node) -> bool:
    """Whether torch gives the argument itself."""
    return is_call(node, aten.to.dtype, aten.type_as.default) and len(node.args) == 2 \
        and not node.kwargs and dtype(source(node)) == dtype(node) \
        and value(source(node)).device == value(node).device


def as_function(graph: Graph) -> Callable[..., Any]:
    """The graph as `run(*inputs)`; attributes of the graph's module are bound in it."""
    scope: dict[str, Any] = {}
    names: dict[Node, str] = {}

    def text(x) -> str:
        if isinstance(x, Node):
            return names[x]
        if isinstance(x, (list, tuple)):
            inner = "".join(f"{text(y)}, " for y in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner})"
        return bind(x)

    def bind(x) -> str:
        scope[name := f"c{len(scope)}"] = x
        return name
    inputs, lines = [], []
    for node in graph.nodes:
        name = names[node] = f"v{len(names)}"
        if node.op == "placeholder":
            inputs.append(name)
        elif node.op == "get_attr":
            names[node] = bind(getattr(graph.owning_module, node.target))
        elif node.op == "output":
            lines.append(f"return {text(node.args[0])}")
        elif node.target is operator.getitem and isinstance(node.args[1], int):
            lines.append(f"{name} = {text(node.args[0])}[{node.args[1]}]")
        else:
            given = [text(x) for x in node.args]
            given += [f"{key}={text(x)}" for key, x in node.kwargs.items()]
            lines.append(f"{name} = {bind(_shortest(node))}({', '.join(given)})")
    body = "\n    ".join(lines)
    exec(f"def run({', '.join(inputs)}):\n    {body}\n", scope)
    return scope["run"]


def _shortest(node: Node) -> Callable[..., Any]:
    target: Any = node.target
    if target in _SHORT and not node.kwargs:
        return _SHORT[target]
    return direct_call(target) or target
