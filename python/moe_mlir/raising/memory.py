"""Which memory the nodes of a torch graph show and write."""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch.fx import Graph, Node

from .._torch.core import OpOverload, is_composite
from .reading import is_assertion, source


def origin(node: Node, is_inside: Callable[[Node], bool] = lambda node: True) -> Node:
    """The node whose memory this one may show, as far as nodes are inside."""
    while is_inside(node) and not makes_memory(node):
        argument = shown(node)
        if not isinstance(argument, Node):
            break
        node = argument
    return node


def shown(node):
    """The argument whose memory the result shows: that which the schema ties to it, or the first."""
    schema = getattr(node.target, "_schema", None)
    arguments, results = (schema.arguments, schema.returns) if schema else ((), ())
    for result in results:
        for position, argument in enumerate(arguments):
            if result.alias_info and argument.alias_info \
                    and result.alias_info.before_set & argument.alias_info.before_set:
                return node.args[position] if position < len(node.args) \
                    else node.kwargs.get(argument.name)
    return source(node) if node.op == "call_function" else None


# Composites whose results are never their arguments.
_NEW = {torch.ops.aten.linear.default, torch.ops.aten.matmul.default, torch.ops.aten.einsum.default,
        torch.ops.aten.softmax.int}


def makes_memory(node) -> bool:
    """A composite such as contiguous or reshape may return its argument without saying so."""
    target = node.target
    return target in _NEW or isinstance(target, OpOverload) and not (
        any(result.alias_info for result in target._schema.returns)
        or is_composite(target))


def written(node: Node) -> Iterator[Node]:
    """What the call writes in place."""
    if node.target is torch.ops.aten.detach_.default:
        return  # says that it writes, and changes no number
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            in_order = position < len(node.args)
            value = node.args[position] if in_order else node.kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, (tuple, list)) else [value])
                        if isinstance(x, Node))


class Writes:
    """The calls of a graph that write in place, for questions about parts of the graph."""

    def __init__(self, graph: Graph) -> None:
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._by_memory: dict[Node, list] = {}
        for node in graph.nodes:
            for target in written(node):
                self._by_memory.setdefault(origin(target), []).append(node)

    def disturb(self, results: Collection[Node], inputs: Collection[Node],
                folded: Collection[Node] = ()) -> bool:
        """Whether the part of the graph between `inputs` and `results` cannot be one call.

        It cannot where anything that the part reads or makes is written before
        the part is through, by another than the `folded` calls, which go with it;
        or where memory that a folded call writes is seen from outside of the part.
        """
        if not self._by_memory:
            return False
        part = between(inputs, results)
        last = max((self._order[node] for node in results if node in self._order), default=-1)
        for node in part:
            for write in self._by_memory.get(origin(node), ()):
                if write not in folded and self._order[node] < self._order[write] < last:
                    return True
        return any(self._is_seen(target, part, results)
                   for write in folded for target in written(write))

    def _is_seen(self, target, part, results) -> bool:
        """Whether a call that stays reads the memory, which nobody will have written.

        What it reads through a result is the result of the one call.
        """
        memory = origin(target)
        return any(user not in part and not is_assertion(user)
                   for node in self._order if node not in results
                   and origin(node, lambda shown: shown not in results) is memory
                   for user in node.users)


# Calls that take the type or the shape alone of the argument at this position.
_TAKEN_FOR_ITS_KIND = {
    torch.ops.aten.type_as.default: 1, torch.ops.aten.expand_as.default: 1,
    torch.ops.aten.view_as.default: 1, torch.ops.aten.empty_like.default: 0,
    torch.ops.aten.zeros_like.default: 0, torch.ops.aten.ones_like.default: 0,
    torch.ops.aten.full_like.default: 0}


def _operands(node) -> list:
    """The arguments whose numbers the call reads."""
    position = _TAKEN_FOR_ITS_KIND.get(node.target)
    if position is None or position >= len(node.args):
        return node.all_input_nodes
    rest = (*node.args[:position], *node.args[position + 1:], *node.kwargs.values())
    return [argument for argument in rest if isinstance(argument, Node)]


def between(inputs: Iterable[Node], results: Iterable[Node]) -> set[Node]:
    """The nodes whose numbers the results are computed from, up to the inputs, with both."""
    part, queue = set(inputs), list(results)
    while queue:
        node = queue.pop()
        if node not in part:
            part.add(node)
            queue.extend(_operands(node))
    return part


def is_read_elsewhere(node: Node, result: Node) -> bool:
    """Whether calls that the result is not computed from read the node, or what is made of it."""
    part, queue = between([], [result]), [node]
    while queue:
        node = queue.pop()
        if node is result:
            continue
        if any(user not in part and not is_assertion(user) for user in node.users):
            return True
        queue.extend(user for user in node.users if user in part)
    return False
