"""Layers that a model repeats: the same calls on other weights, imported once.

A model of 48 equal layers becomes one function that is called 48 times, so that
compiling it costs as much as compiling one layer. Layers are found by the
modules that made their nodes (`model.layers.7`) and are equal if their nodes
are: the same operators on the same shapes, wired in the same way. Nothing about
the modules themselves is trusted.
"""

import re
from dataclasses import dataclass

import torch
from torch.fx import Node

from .locations import module_path

# Below this many equal layers a call costs fusion and saves little.
_FEWEST = 3
_INDEXED = re.compile(r"(?:[A-Za-z_]\w*\.)+\d+(?=\.|$)")


@dataclass
class Segment:
    """The nodes of one layer, what they read from outside, and what is read of them."""

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]

    def signature(self) -> tuple:
        number = {node: ("input", i) for i, node in enumerate(self.inputs)}
        number |= {node: ("local", i) for i, node in enumerate(self.nodes)}

        def name(node):
            return number.get(node) or ("size", str(node.meta.get("val", node.name)))
        calls = [(str(node.target), repr(torch.fx.node.map_arg(node.args, name)),
                  repr(torch.fx.node.map_arg(node.kwargs, name)), _type(node))
                 for node in self.nodes]
        return (tuple(calls), tuple(map(_type, self.inputs)),
                tuple(number[node] for node in self.outputs))


def find_repeats(graph: torch.fx.Graph, fewest: int = _FEWEST) -> dict[Node, list[Segment]]:
    """For the first node of every layer that is there `fewest` times, its group: equal layers in order."""
    groups: dict[tuple, list[Segment]] = {}
    for segment in _segments(graph):
        groups.setdefault(segment.signature(), []).append(segment)
    return {segment.nodes[0]: group for group in groups.values() if len(group) >= fewest
            for segment in group}


def _segments(graph):
    """Runs of tensor nodes of one layer that no other node interrupts."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and _is_tensors(n.meta.get("val"))]
    runs: list[tuple[str | None, list[Node]]] = []
    seen = set[str]()
    for node in nodes:
        key = layer_path(node)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    counts: dict[str | None, int] = {}
    for key, _ in runs:
        counts[key] = counts.get(key, 0) + 1
    for key, members in runs:
        if key is not None and counts[key] == 1 and key not in seen:
            seen.add(key)
            yield _close(members)


def layer_path(node: Node) -> str | None:
    """The path of the outermost numbered module that made the node, such as `layers.7`."""
    found = _INDEXED.match(module_path(node))
    return found.group() if found else None


def _close(nodes) -> Segment:
    inside = set(nodes)
    inputs = dict.fromkeys(x for node in nodes for x in node.all_input_nodes
                           if x not in inside and isinstance(x.meta.get("val"), torch.Tensor))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return Segment(nodes, list(inputs), outputs)


def _is_tensors(val) -> bool:
    if isinstance(val, (tuple, list)):
        return any(_is_tensors(v) for v in val)
    return isinstance(val, torch.Tensor)


def _type(node) -> str:
    val = node.meta["val"]
    values = val if isinstance(val, (tuple, list)) else [val]
    return "; ".join(f"{getattr(v, 'dtype', '')}{list(getattr(v, 'shape', []))}" for v in values)


def sizes_of(segment: Segment) -> list:
    """The symbols that the sizes of the segment are made of."""
    symbols = set()
    for node in (*segment.inputs, *segment.nodes):
        for x in (node, *node.all_input_nodes):
            val = x.meta.get("val")
            for v in val if isinstance(val, (tuple, list)) else [val]:
                sizes = v.shape if isinstance(v, torch.Tensor) else [v]
                for size in sizes:
                    if isinstance(size, torch.SymInt):
                        symbols |= size.node.expr.free_symbols
    return sorted(symbols, key=str)
