"""Inputs that a program updates in place, updated at its end.

A layer with a cache writes tensors that other layers may read. Where each call
that writes an input makes a new tensor instead, and one copy at the end of the
program stores it, layers write nothing, so that equal ones can be folded.
"""

import torch
from torch.fx import Graph, Node

from .._torch.core import OpOverload
from .memory import origin, written


def defer_writes(graph: Graph) -> None:
    """Stores the updates of inputs at the end of the graph, as far as that changes no value."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    shown: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        memory = origin(node)
        if memory.op == "placeholder":
            shown.setdefault(memory, []).append(node)
    for memory, nodes in shown.items():
        writes = [node for node in nodes if any(x in nodes for x in written(node))]
        if writes and _can_defer(memory, nodes, writes, order):
            _defer(graph, memory, writes)


def _can_defer(memory, nodes, writes, order) -> bool:
    whole = {memory, *writes}
    if any(user.op == "output" or not _is_plain(user) for node in nodes for user in node.users):
        return False
    if not all(functional(node) and has_type_of(node, memory)
               and len(found := list(written(node))) == 1 and found[0] in whole for node in writes):
        return False
    for node in nodes:
        # A view made before a write shows it; one that is read no more after it need not.
        later = [order[w] for w in writes if order[w] > order[node]]
        if node not in whole and later and any(order[user] > min(later) for user in node.users):
            return False
    return True


def _is_plain(node) -> bool:
    return isinstance(node.target, OpOverload)


# Where they write nothing, their result is of bool, whatever they read.
_GIVE_BOOL = frozenset({"eq_", "ne_", "lt_", "le_", "gt_", "ge_", "logical_and_", "logical_or_",
                        "logical_xor_", "logical_not_"})


def functional(node):
    """The operator that gives a new tensor where this one writes its first argument."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name, overload = target._opname, target._overloadname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    found = getattr(packet, overload, None) if packet is not None else None
    # Some have a namesake for numbers.
    if found is None or str(found._schema.arguments[0].type) != "Tensor" or (
            name in _GIVE_BOOL and node.meta["val"].dtype is not torch.bool):
        return None
    return found


def has_type_of(one, other) -> bool:
    one, other = one.meta["val"], other.meta["val"]
    return one.dtype == other.dtype and list(map(str, one.shape)) == list(map(str, other.shape))


def _defer(graph, memory, writes) -> None:
    whole, latest = {memory, *writes}, memory
    for node in list(graph.nodes):
        if node is memory:
            continue
        for old in whole.intersection(node.all_input_nodes):
            node.replace_input_with(old, latest)
        if node in writes:
            node.target, latest = functional(node), node
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        store = graph.call_function(torch.ops.aten.copy_.default, (memory, latest))
    store.meta = {"val": memory.meta["val"]}
