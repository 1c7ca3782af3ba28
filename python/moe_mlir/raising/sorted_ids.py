"""The order of assignments by their experts, where a model sorts the ids of experts.

    _, order = sort(flatten(ids))      ->      order = token_rows(dispatch(view(ids, [-1, 1]))[0])

Ids are small whole numbers, which are counted instead of compared. Of equal ones the first comes
first, where torch promises an order for `stable` alone.
"""

import operator

import torch
from torch.fx import Graph, Node

from .. import experts, ops  # noqa: F401  registers torch.ops.moe.*
from ..graph.arguments import bind_arguments
from .calls import call
from .patterns import VIEWS, aten, results, through, users
from .reading import is_call, item, read, value

moe = torch.ops.moe
_SORTS = (aten.sort.default, aten.sort.stable)
_SELECTIONS = (moe.topk_renorm.default, moe.grouped_topk.default)


def raise_sorted_ids(graph: Graph) -> int:
    """Raises sorts of the ids of a moe op, of which the order alone is read; returns how many."""
    raised = 0
    for sort in list(graph.nodes):
        ids = _ids_of(sort)
        count = None if ids is None else _experts_of(through(ids, _FLAT))
        if count is None:
            continue
        with graph.inserting_before(sort):
            rows = call(graph, aten.reshape.default, (ids, [-1, 1]), sort)
            plan = call(graph, moe.dispatch.default, (rows, count, *[None] * 6, 1), sort)
            slots = call(graph, operator.getitem, (plan, 0), sort)
            order = call(graph, moe.token_rows.default, (slots,), sort)
        for node in results(sort, 1):
            node.replace_all_uses_with(order)
        raised += 1
    if raised:
        graph.eliminate_dead_code()
    return raised


_FLAT = VIEWS | {aten.flatten.using_ints, aten.clone.default, aten.contiguous.default}


def _ids_of(sort: Node) -> Node | None:
    """What a call sorts upwards, where it is flat and its values are not read."""
    found = read(sort, _SORTS, "dim", "descending", "stable")
    if found is None or found.descending or value(found.source).dim() != 1 \
            or any(users(node) for node in results(sort, 0)):
        return None
    return found.source


def _experts_of(ids: Node) -> int | None:
    """The number of experts that the ids are below, as those of a selection are."""
    selection = item(ids, 1)
    if not is_call(selection, *_SELECTIONS):
        return None
    given = vars(bind_arguments(selection))
    # Ids that are given may be anything, and a token that is masked has -1.
    if any(given.get(name) is not None for name in ("forced", "mask", "num_valid")):
        return None
    count = value(given["scores"]).shape[-1]
    return count if isinstance(count, int) else None
