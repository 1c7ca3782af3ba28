"""Writes calls into torch graphs."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from .reading import value

Match = TypeVar("Match")


def call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], like: Node) -> Node:
    """A call with its fake value, at the insertion point, described as `like`."""
    node = graph.call_function(target, args)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "seq_nr"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    inputs = torch.fx.node.map_arg(args, value)
    key = "val" if "val" in like.meta else "example_value"
    fake_mode = _fake_mode(like)
    with fake_mode:
        node.meta[key] = target(*inputs)
    return node


def rewrite_matches(graph: Graph, match: Callable[[Node], Match | None],
                    rewrite: Callable[[Graph, Match], None]) -> int:
    """Finds what `match` makes of the nodes of a graph, then rewrites all of it; returns how many."""
    found = [one for one in map(match, graph.nodes) if one is not None]
    for one in found:
        rewrite(graph, one)
    if found:
        graph.eliminate_dead_code()
    return len(found)


def _fake_mode(node: Node):
    for x in [node, *node.all_input_nodes]:
        tensors = value(x)
        for tensor in tensors if isinstance(tensors, (tuple, list)) else [tensors]:
            if hasattr(tensor, "fake_mode"):
                return tensor.fake_mode
    raise ValueError(f"node '{node}' has no fake value; trace the graph with fake tensors")
