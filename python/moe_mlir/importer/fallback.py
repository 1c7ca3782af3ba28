"""Operators without an entry in the table, written as what torch itself decomposes them to.

What no entry serves is slow then, rather than refused. A call is replaced only where all that
its decomposition consists of has an entry: otherwise the error names the operator of the model.
"""

import operator
from collections import Counter

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .._support.log import logger
from .._torch.core import OpOverload, pytree
from .registry import TABLE
from .scalars import scalars_as_vectors


def decompose_missing(program: torch.export.ExportedProgram) -> None:
    """Replaces the calls of operators that have no entry, in place, where torch knows how."""
    graph, done, kept = program.graph, Counter[str](), Counter[str]()
    for node in [n for n in graph.nodes if _is_missing(n)]:
        body = _body(node)
        if body is None or not _replace(node, body):
            kept[str(node.target)] += 1
        else:
            done[str(node.target)] += 1
    scalars_as_vectors(graph)
    for what, names in (("decomposed", done), ("found no decomposition of", kept)):
        if names:
            logger("compile").debug("%s operators without an entry: %s", what, ", ".join(
                f"{name} ({count})" for name, count in sorted(names.items())))


def _group_norm(x, weight, bias, batch, channels, places, groups, eps):
    """torch's decomposition ends in operators of its own compiler."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(batch, groups, -1).to(wide)
    mean = rows.mean(-1, keepdim=True)
    rstd = (rows.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    result = ((rows - mean) * rstd).reshape(x.shape)
    for factor, apply in ((weight, torch.mul), (bias, torch.add)):
        if factor is not None:
            result = apply(result, factor.reshape(-1, *[1] * (x.dim() - 2)))
    return result.to(x.dtype), mean.squeeze(-1).to(x.dtype), rstd.squeeze(-1).to(x.dtype)


def _masked_scatter(x, mask, source):
    """The source's elements one after the other, each at the next place that the mask has."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    chosen = mask.expand(shape).reshape(-1)
    places = (chosen.cumsum(0) - 1).clamp(min=0)
    values = source.reshape(-1)[places].reshape(shape)
    return torch.where(mask, values, x)


_OWN = {torch.ops.aten.native_group_norm.default: _group_norm,
        torch.ops.aten.masked_scatter.default: _masked_scatter}


def _is_missing(node: Node) -> bool:
    return (isinstance(node.target, OpOverload) and node.target not in TABLE
            and any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(node.meta.get("val"))))


def _body(node: Node) -> Graph | None:
    """The call's decomposition as a graph of operators that have entries, or None."""
    from .._torch.decompositions import decompositions
    if node.target not in decompositions and node.target not in _OWN:
        return None
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(x for x in leaves if isinstance(x, Node)))

    def call(*values):
        value = dict(zip(inputs, values))
        args, kwargs = pytree.tree_unflatten(
            [value[x] if isinstance(x, Node) else x for x in leaves], spec)
        return node.target(*args, **kwargs)
    table = {op: function for op, function in {**decompositions, **_OWN}.items()
             if op not in TABLE}
    try:
        with torch.no_grad():
            graph = make_fx(call, decomposition_table=table)(*(x.meta["val"] for x in inputs)).graph
    except Exception as error:  # what torch's functions raise where a size decides is theirs
        logger("compile").debug("cannot decompose %s: %s", node.target, error)
        return None
    return graph if all(map(_has_entry, graph.nodes)) and _is_same(graph, node) else None


def _has_entry(node: Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function" or "val" not in node.meta:
        return False  # a constant tensor, which the program has no name for
    return (node.target in TABLE or node.target is operator.getitem
            or not any(isinstance(x, torch.Tensor)
                       for x in pytree.tree_leaves(node.meta.get("val"))))


def _is_same(graph: Graph, node: Node) -> bool:
    """Whether the graph gives tensors of the types and sizes that the call gives."""
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    given = [x.meta["val"] if isinstance(x, Node) else x for x in pytree.tree_leaves(result)]
    wanted = pytree.tree_leaves(node.meta["val"])
    return len(given) == len(wanted) and all(
        isinstance(x, torch.Tensor) and x.dtype == y.dtype and x.dim() == y.dim()
        and all(a is b or str(a) == str(b) for a, b in zip(x.shape, y.shape))
        for x, y in zip(given, wanted))


def _replace(node: Node, body: Graph) -> bool:
    """Writes the body in front of the call, and its results in the place of the call's."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    value = dict(zip((n for n in body.nodes if n.op == "placeholder"),
                     dict.fromkeys(x for x in leaves if isinstance(x, Node))))
    pieces = [user for user in node.users if user.target is operator.getitem]
    result = next(n for n in body.nodes if n.op == "output").args[0]
    if isinstance(result, (tuple, list)) and len(pieces) != len(node.users):
        return False
    with node.graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "call_function":
                value[inner] = node.graph.node_copy(inner, value.__getitem__)
                # The line of the model, for errors and for layers that are equal.
                value[inner].meta = {**node.meta, "val": inner.meta["val"]}
    if isinstance(result, Node):
        node.replace_all_uses_with(value[result])
    else:
        for piece in pieces:
            piece.replace_all_uses_with(value[result[piece.args[1]]])
            node.graph.erase_node(piece)
    node.graph.erase_node(node)
    return True
