"""Calls that write in place, as calls that give new tensors."""

import operator

import torch
from torch.fx import Graph, Node

from .._torch.core import OpOverload
from .defer_writes import functional, has_type_of
from .memory import makes_memory, shown, written

aten = torch.ops.aten
# Views of a part -> the operators that give a tensor with another part.
_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
# Views of all elements in another order of dims -> what undoes them.
_OPPOSITES = {aten.view.default: aten.view.default, aten.transpose.int: aten.transpose.int,
              aten.t.default: aten.t.default, aten.unsqueeze.default: aten.squeeze.dim}


def make_functional(graph: Graph) -> dict[Node, Node] | None:
    """Rewrites the graph without writes in place, where that changes no value.

    Returns:
        The inputs that the graph updates, with the nodes of their new values; None, with the
        graph as it was, where a view of a kind that has no opposite shows a write.
    """
    _erase_detaching(graph)
    memory = _Memory(graph)
    if not all(map(memory.can_rewrite, memory.writes)):
        return None
    return memory.rewrite(graph)


def _erase_detaching(graph):
    """`detach_` says that it writes, and changes no number."""
    for node in [node for node in graph.nodes if node.target is aten.detach_.default]:
        node.replace_all_uses_with(node.args[0], propagate_meta=False)
        graph.erase_node(node)


class _Memory:
    """Which nodes of a graph show which memory.

    Attributes:
        writes: the calls that write in place.
    """

    def __init__(self, graph: Graph):
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        # The node that made the memory which a node may show.
        self._made_by: dict[Node, Node] = {}
        for node in graph.nodes:
            self._made_by[node] = self._maker(node)
        self.writes = {node for node in graph.nodes if any(True for _ in written(node))}
        # The nodes that show all of a memory, in its type.
        self._whole: dict[Node, Node] = {}
        self._showing: dict[Node, list[Node]] = {}
        for node, maker in self._made_by.items():
            self._showing.setdefault(maker, []).append(node)
            if node is maker or (_is_same_tensor(node) and node.args[0] in self._whole) or (
                    node in self.writes and next(written(node)) in self._whole
                    and has_type_of(node, maker)):
                self._whole[node] = maker

    def _maker(self, node) -> Node:
        """That of its argument, or itself; of calls with several results the item."""
        if makes_memory(node) or (node.target is operator.getitem and makes_memory(node.args[0])):
            return node
        argument = shown(node)
        if not isinstance(argument, Node) or _dtype(argument) != _dtype(node):
            return node
        return self._made_by[argument]

    def can_rewrite(self, write) -> bool:
        """Whether all that shows the write can read its result instead."""
        found = list(written(write))
        if len(found) != 1 or functional(write) is None or not has_type_of(write, found[0]) \
                or self._parts(found[0]) is None:
            return False
        # A view made before a write shows it, where it is read after that.
        return all(all(map(_is_known, node.users)) and (node in self._whole or not self._is_read_around(
            node, write)) for node in self._showing[self._made_by[write]])

    def _is_read_around(self, node, write) -> bool:
        place = self._order[write]
        return self._order[node] < place and any(self._order[user] > place for user in node.users)

    def _parts(self, node) -> list[Node] | None:
        """The views by which the node shows a part of a memory, the last first."""
        parts = []
        while node not in self._whole:
            if node.target not in _SCATTERS and not _has_opposite(node):
                return None
            parts.append(node)
            node = node.args[0]
        return parts

    def rewrite(self, graph) -> dict[Node, Node]:
        """Writes the graph without writes; returns new values of inputs."""
        parts = {node: self._parts(next(written(node))) for node in self.writes}
        latest: dict[Node, Node] = {}
        for node in list(graph.nodes):
            for old in node.all_input_nodes:
                new = latest.get(self._whole.get(old), old)
                if new is not old:
                    node.replace_input_with(old, new)
            if node in self.writes:
                node.target = functional(node)
                latest[self._made_by[node]] = _scatter(graph, node, parts[node])
        return {memory: value for memory, value in latest.items() if memory.op == "placeholder"}


def _has_opposite(view) -> bool:
    """Whether another view of the whole undoes it; sizes of views are numbers, not nodes."""
    return view.target in _OPPOSITES and (view.target is not aten.view.default or all(
        isinstance(size, int) for size in view.args[0].meta["val"].shape))


def _scatter(graph, value, parts) -> Node:
    """The whole of which a part has a new value."""
    for part in parts:
        whole = part.args[0]
        with graph.inserting_after(value):
            if part.target in _SCATTERS:
                value = graph.call_function(
                    _SCATTERS[part.target], (whole, value, *part.args[1:]), dict(part.kwargs))
            else:
                args = (list(whole.meta["val"].shape),) if part.target is aten.view.default \
                    else part.args[1:]
                value = graph.call_function(_OPPOSITES[part.target], (value, *args))
        value.meta = {**part.meta, "val": whole.meta["val"]}
    return value


def _dtype(node):
    return getattr(node.meta.get("val"), "dtype", None)


_SAME = {aten.alias.default, aten.detach.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout}


def _is_same_tensor(node) -> bool:
    """Whether the result shows all of the memory that its argument shows, in the same type."""
    if node.target not in _SAME or not has_type_of(node, node.args[0]):
        return False
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args))
    given.update(node.kwargs)
    return not given.get("copy") and given.get("memory_format") is None \
        and node.meta["val"].device == node.args[0].meta["val"].device


def _is_known(user) -> bool:
    return isinstance(user.target, OpOverload) or user.target is operator.getitem or user.op == "output"
