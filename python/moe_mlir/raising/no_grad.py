"""Regions of a graph without gradients, written as results that are detached.

A router may select under `torch.no_grad()` and gather its gates outside of it. One op makes
both, and must not lie in the region: its gates have a gradient.

A call may return its argument itself, such as `x.float()` of float32: then it has the gradient of
its argument, and a trace names later uses of `x` by the call.
"""

import operator

import torch
from torch.fx import Graph, Node

from .._torch.core import set_grad_enabled
from .memory import written
from .patterns import aten, same_shape
from .reading import read, source, value

_MAY_RETURN_ITS_ARGUMENT = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default,
    aten.contiguous.default, aten.dropout.default, aten.flatten.using_ints}


def fold_no_grad(graph: Graph) -> None:
    """Detaches what such regions hand on, and removes their bounds; not where one writes in place."""
    inside = nodes_without_gradients(graph)
    if not inside or any(next(written(node), None) is not None for node in inside):
        return
    for node in list(graph.nodes):
        if node.op == "output" or node not in inside:
            for origin in node.all_input_nodes:
                returned = _returned(origin)
                if origin in inside and returned not in inside:
                    node.replace_input_with(origin, returned)
                elif origin in inside and _has_gradient(origin):
                    node.replace_input_with(origin, _detached(graph, origin))
    for bound in _bounds(graph):
        graph.erase_node(bound)


def nodes_without_gradients(graph: Graph) -> set[Node]:
    """The calls of a graph between `no_grad` and its end; none where the whole graph has none."""
    if not any(map(_enables, _bounds(graph))):
        return set()
    inside: set[Node] = set()
    enabled = True
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            enabled = _enables(node)
        elif node.op == "call_function" and (
                not enabled or node.target is operator.getitem and source(node) in inside):
            inside.add(node)
    return inside


def _bounds(graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=set_grad_enabled)


def _enables(bound) -> bool:
    return bound.args == (True,)


def _returned(node) -> Node:
    """The argument that the call returns, and the call where that makes a tensor."""
    while (given := read(node, _MAY_RETURN_ITS_ARGUMENT, "dtype", "layout", "device", "other", "copy",
                         "p", "train", "start_dim", "end_dim")) is not None \
            and not given.copy and not (given.train and given.p) and _lies_alike(node, given.source):
        node = given.source
    return node


def _lies_alike(a: Node, b: Node) -> bool:
    """Whether both have one type, device, shape and strides."""
    x, y = value(a), value(b)
    return x.dtype == y.dtype and x.device == y.device and same_shape(a, b) \
        and list(map(str, x.stride())) == list(map(str, y.stride()))


def _has_gradient(node) -> bool:
    return isinstance(value(node), torch.Tensor) and value(node).is_floating_point()


def _detached(graph, node) -> Node:
    found = next((user for user in node.users if user.target is aten.detach.default), None)
    if found is not None:
        return found
    with graph.inserting_after(node):
        result = graph.call_function(aten.detach.default, (node,))
    result.meta = dict(node.meta)
    return result
