"""Calls that name a dim of a tensor without dims, as calls on a vector of one element.

torch takes 0 and -1 for dims of a number, as in `x.sum().softmax(0)`.
"""

import operator

import torch
from torch.fx import Graph, Node

from .._torch.core import OpOverload, pytree
from .registry import TABLE

aten = torch.ops.aten
# What makes or removes a dim serves numbers itself.
_OWN = {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default}


def scalars_as_vectors(graph: Graph) -> None:
    """Rewrites such calls in place."""
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and _names_dim_of_number(node):
            _rewrite(graph, node)


def _names_dim_of_number(node) -> bool:
    arguments = node.target._schema.arguments
    return (node.target in TABLE and node.target not in _OWN and bool(node.args)
            and _is_number(node.args[0]) and any(x.name in ("dim", "dims") for x in arguments)
            and all(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(node.meta.get("val"))))


def _is_number(value) -> bool:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 0


def _rewrite(graph, node) -> None:
    args, kwargs = pytree.tree_map_only(Node, _tensor_with_dims, (list(node.args), dict(node.kwargs)))
    with torch.no_grad():
        found = node.target(*args, **kwargs)
    results, shapes = pytree.tree_leaves(found), [list(x.shape) for x in pytree.tree_leaves(node.meta["val"])]
    if not all(list(x.shape) in (shape, [1, *shape]) for x, shape in zip(results, shapes, strict=True)):
        return  # such as a number that is taken several times
    with graph.inserting_before(node):
        vectors = {x: _viewed(graph, x, [1]) for x in node.all_input_nodes if _is_number(x)}
    node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: vectors.get(x, x))
    node.meta["val"] = found
    if isinstance(found, torch.Tensor):
        _restore(graph, node, shapes[0])
        return
    for user in list(node.users):
        if user.target is operator.getitem:
            user.meta["val"] = found[user.args[1]]
            _restore(graph, user, shapes[user.args[1]])


def _tensor_with_dims(node):
    tensor = node.meta["val"]
    return tensor.view([1]) if _is_number(node) else tensor


def _restore(graph, node, shape) -> None:
    """The users see the shape that the result had."""
    if len(node.meta["val"].shape) == len(shape):
        return
    with graph.inserting_after(node):
        seen = _viewed(graph, node, shape)
    node.replace_all_uses_with(seen, lambda user: user is not seen, propagate_meta=False)


def _viewed(graph, node, shape) -> Node:
    view = graph.call_function(aten.view.default, (node, shape))
    view.meta = {**node.meta, "val": node.meta["val"].view(shape)}
    return view
