"""A layer of experts between dispatch and combine, as one call of `moe.run_experts`.

    slots, offsets, _ = dispatch(idx, E)
    h = grouped_linear(x, w_in, b_in, offsets, token_rows(slots), activation=..)
    y = combine(grouped_linear(h, w_out, b_out, offsets), gates, slots)

becomes `run_experts(x, gates, idx, w_in, b_in, w_out, b_out, activation=..)`. The
one op keeps nothing for a backward, which computes the features between the
layers again: it is for graphs that are not trained.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from .. import experts  # noqa: F401  registers torch.ops.moe.run_experts
from ..graph.arguments import bind_arguments
from ..ops._expert_activation import ExpertActivation
from .calls import call
from .patterns import aten, only_user, same_shape, same_sizes
from .reading import is_call, item, read, source, value

moe = torch.ops.moe


def join_experts(graph: Graph) -> int:
    """Joins the layers of which the first has the activation; returns how many."""
    joined = sum(map(_join, [n for n in graph.nodes if is_call(n, moe.combine.default)]))
    if joined:
        graph.eliminate_dead_code()
    return joined


def _join(combine: Node) -> bool:
    added = read(combine, {moe.combine.default}, "gates", "slots")
    last = added and _layer(added.source)
    first = last and _layer(last.x)
    plan = item(added.slots, 0) if first else None
    sorted_by = read(plan, {moe.dispatch.default}, "num_experts", "alignment")
    if sorted_by is None or not _follows(first, last, plan, added.slots):
        return False
    idx = sorted_by.source
    same_tokens = same_shape(added.gates, idx) and same_sizes(first.x, idx, slice(0, 1))
    if value(idx).dim() != 2 or not same_tokens or sorted_by.alignment != 1 \
            or value(first.w).shape[0] != sorted_by.num_experts:
        return False
    graph = combine.graph
    with graph.inserting_before(combine):
        w_out = last.w if last.transposed == first.transposed else \
            call(graph, aten.transpose.int, (last.w, 1, 2), combine)
        y = call(graph, moe.run_experts.default,
                 (first.x, added.gates, idx, first.w, first.bias, w_out, last.bias,
                  first.transposed, *ExpertActivation.of(first).options), combine)
    combine.replace_all_uses_with(y)
    return True


def _layer(node: Node) -> Any:
    """The arguments of a layer of experts whose rows one call reads; None for another node."""
    if not is_call(node, moe.grouped_linear.default) or only_user(node) is None:
        return None
    return bind_arguments(node)


def _follows(first: Any, last: Any, plan: Node, slots: Node) -> bool:
    """Whether the layers read the tokens of the plan's rows, one behind the other."""
    return (is_call(first.rows, moe.token_rows.default) and source(first.rows) is slots
            and last.rows is None and ExpertActivation.of(last).is_identity
            and first.offsets is last.offsets and item(first.offsets, 1) is plan)
