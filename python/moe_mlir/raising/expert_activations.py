"""What is done to the features of an experts' layer, moved into the layer.

    h = grouped_linear(x[rows], w, b, offsets)        z = grouped_linear(x, w, b, offsets, rows,
    z = silu(h[:, :f]) * h[:, f:]                                        activation="silu", ...)
    y = grouped_linear(z, ..)                         y = grouped_linear(z, ..)

Which function it is, is found by the formula that its nodes leave (`experts/activation_detection.py`),
which may be those of any level of decomposition.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from ..experts.activation_detection import find_activation
from ..experts.symbolic_features import evaluate
from ..graph.arguments import bind_arguments
from ..ops._expert_activation import ExpertActivation
from .calls import call
from .memory import written
from .patterns import CASTS, aten, is_number, users
from .reading import dtype, is_assertion, is_call, read, source, value

moe = torch.ops.moe
# More is another computation than an activation.
_MOST_NODES = 40


def fuse_activations(graph: Graph) -> int:
    """Fuses what lies between two layers, and the gather in front of them; returns how many."""
    layers = [n for n in graph.nodes if is_call(n, moe.grouped_linear.default)]
    return sum(map(_read_rows, layers)) + sum(_fuse(graph, layer) for layer in layers)


def _fuse(graph: Graph, last: Node) -> bool:
    """Moves what `last` reads into the layer before it, if nobody else reads that."""
    made = source(last)
    between = _between(made)
    if between is None:
        return False
    first, nodes = between
    features = value(first).shape[1]
    if not isinstance(features, int) or not _is_plain(first) or dtype(made) != dtype(first):
        return False
    if any(True for node in nodes for _ in written(node)):
        return False
    given = _values_of_numbers(nodes)
    numbers = [*_numbers(nodes), *given.values()]
    activation = find_activation(lambda z: _run({first: z, **given}, nodes), features, numbers,
                                 numbers, dtype(first))
    if activation is None or activation.width(features) != value(made).shape[1]:
        return False
    layer = bind_arguments(first)
    with graph.inserting_before(first):
        fused = call(graph, moe.grouped_linear.default,
                     (layer.x, layer.w, layer.bias, layer.offsets, layer.rows, layer.transposed,
                      *activation.options), first)
    last.replace_input_with(made, fused)
    for node in (first, *nodes):
        for check in filter(is_assertion, list(node.users)):
            graph.erase_node(check)
    return True


def _is_plain(layer: Node) -> bool:
    return ExpertActivation.of(bind_arguments(layer)).is_identity


def _between(made: Node) -> tuple[Node, list[Node]] | None:
    """The layer that `made` is computed from alone, and the nodes in between, in order."""
    first: Node | None = None
    found: set[Node] = set()
    rest = [made]
    while rest:
        node = rest.pop()
        if is_call(node, moe.grouped_linear.default):
            if first not in (None, node):
                return None
            first = node
        elif node not in found and not _is_known_number(node):
            if node.op != "call_function" or len(found) == _MOST_NODES or not node.all_input_nodes:
                return None
            found.add(node)
            rest += node.all_input_nodes
    if first is None or not found:
        return None
    inside = [u for node in (first, *found - {made}) for u in users(node)]
    if any(u not in found for u in inside) or len(users(made)) != 1:
        return None
    return first, [node for node in first.graph.nodes if node in found]


def _is_known_number(node: Node) -> bool:
    """Whether the node is a number of the model that Dynamo left open, but has seen."""
    return isinstance(value(node), torch.SymFloat) and value(node).node.has_hint()


def _values_of_numbers(nodes: list[Node]) -> dict[Node, float]:
    """The numbers that the nodes read, each of which is from now on a condition of the graph."""
    read_by = dict.fromkeys(x for node in nodes for x in node.all_input_nodes)
    return {x: float(value(x)) for x in read_by if _is_known_number(x)}


def _numbers(nodes) -> list[float]:
    return [float(x) for node in nodes for x in (*node.args, *node.kwargs.values())
            if is_number(x)]


def _run(values: dict[Node, Any], nodes: list[Node]) -> Any:
    """What the nodes make of these values."""
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        values[node] = evaluate(node.target, args, dict(kwargs))
    return values[nodes[-1]]


def _read_rows(layer: Node) -> bool:
    """x[tokens] in front of a layer becomes the rows that the layer reads of x."""
    x = source(layer)
    while read(x, CASTS, "dtype", "other") and dtype(x) == dtype(source(x)):
        x = source(x)
    gather = read(x, {aten.index.Tensor}, "indices")
    if gather is None or bind_arguments(layer).rows is not None or len(gather.indices) != 1:
        return False
    rows = gather.indices[0]
    if not is_call(rows, moe.token_rows.default):
        return False
    layer.update_arg(0, gather.source)
    args = list(layer.args) + [None] * (5 - len(layer.args))
    args[4] = rows
    layer.args = tuple(args)
    return True
