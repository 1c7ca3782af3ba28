"""Gates of experts that other numbers have chosen.

    F10  topk of any numbers, gates gathered from other scores at its ids
    F11  experts of a token's id, from a table of integers              (hash routing)

The gates are a score function of logits at these ids, before or behind the gather, and are
renormalised and scaled as in any other router. The op takes the ids as they are, and what they
are selected from is selected from as it is: a bias on logits, dropped groups that are filled with
0, scores of another layer. Shared experts may stand behind the selected ones, with gates that sum
to one with theirs:

    l = logsigmoid(cat([gather(z[:, :E], ids), z[:, E:]])); gates = exp(l - logsumexp(l))
"""

from collections.abc import Collection, Iterator

import torch
from torch.fx import Graph, Node

from ..ops._check import ACTIVATIONS
from .gates import fold_gates
from .patterns import (
    CASTS,
    VIEWS,
    aten,
    exactly,
    is_last_dim,
    is_probability,
    log_sigmoid_input,
    log_sum_input,
    only_user,
    same_sizes,
    score_of,
    through,
    users,
)
from .reading import dtype, is_call, read, source, value
from .site import Site, name_of

_LOOK_UPS = (aten.index.Tensor, aten.embedding.default, aten.index_select.default)


def match_forced(site: Site) -> Site | None:
    """The top-k of a site that is not recognised, with gates from other scores at its ids."""
    selection = read(site.anchor, {aten.topk.default}, "k", "dim", "largest", "sorted")
    if site.indices is None or not selection.largest \
            or not is_last_dim(site.source, selection.dim) or not isinstance(site.k, int) \
            or site.num_experts < site.k or dtype(site.source) not in ACTIVATIONS:
        return None
    for gather in _gathers(site.indices):
        found = Site(site.anchor, site.values, site.indices, site.k, inner=site.inner)
        if _weigh(found, gather, site.indices):
            found.form = "F10"
            return found
    return None


def find_by_table(graph: Graph, known: Collection[Node]) -> Iterator[Site]:
    """Routers whose experts a table names by the ids of tokens; not where the gates are `known`."""
    for ids in graph.nodes:
        if not _is_of_table(ids):
            continue
        for gather in _gathers(ids):
            site = Site(gather, k=value(ids).shape[-1])
            if gather not in known and isinstance(site.k, int) and site.k <= site.num_experts \
                    and _weigh(site, gather, ids):
                site.form = "F11"
                yield site


def _is_of_table(ids: Node) -> bool:
    """Whether the node holds whole numbers that are looked up in a table of the model's."""
    if not isinstance(value(ids), torch.Tensor) or dtype(ids) != torch.int64:
        return False
    found = through(ids, CASTS | VIEWS)
    if not is_call(found, *_LOOK_UPS):
        return False
    table = through(source(found), CASTS)
    return isinstance(table, Node) and table.op in ("placeholder", "get_attr") \
        and value(table).dim() == 2 and not dtype(table).is_floating_point


def _gathers(ids: Node) -> list[Node]:
    """The calls that gather along the last dim at these ids."""
    found = [(user, read(user, {aten.gather.default}, "dim", "index")) for user in users(ids)]
    return [user for user, gather in found if gather is not None and gather.index is ids
            and is_last_dim(gather.source, gather.dim)
            and same_sizes(gather.source, ids, slice(0, -1))]


def _weigh(site: Site, gather: Node, ids: Node) -> bool:
    """Fills in what becomes of the scores at the ids; whether it is a router's."""
    site.forced, site.base = ids, source(gather)
    if value(site.base).shape[-1] != site.num_experts:
        return False
    if _match_shared(site, gather):
        return True
    base = exactly(site.base)
    score = exactly(through(base, VIEWS))
    found = score_of(score) if value(score).shape[-1] == site.num_experts else None
    if found is not None and dtype(score) == torch.float32:
        site.score, site.scores = found[0], exactly(found[1])
    elif found is not None or site.selects and is_probability(base):
        site.score, site.kind, site.scores = "probs", "probs", base
        if found is not None:
            site.leave(f"the {found[0]}, which is computed in {name_of(dtype(score))}")
    else:
        site.scores = base
    fold_gates(site, gather)
    return site.score != "none" and not site.dense


def _match_shared(site: Site, gather: Node) -> bool:
    """Gates of the selected and of shared experts that sum to one."""
    joined = read(only_user(gather), {aten.cat.default}, "tensors", "dim")
    if joined is None or len(joined.tensors) != 2 or joined.tensors[0] is not gather:
        return False
    both = only_user(gather)
    parts = [_columns(x) for x in (site.base, joined.tensors[1])]
    scores = parts[0][0]
    if not is_last_dim(both, joined.dim) or scores is not parts[1][0] \
            or parts[0][1:] != (0, site.num_experts) \
            or parts[1][1:] != (site.num_experts, value(scores).shape[-1]) \
            or dtype(scores) != torch.float32:
        return False
    gates = _share_of(both)
    if gates is None:
        return False
    site.shared = value(scores).shape[-1] - site.num_experts
    site.score, site.scores, site.base, site.renorm = "sigmoid", scores, scores, True
    fold_gates(site, gates)
    return True


def _columns(node: Node):
    """(tensor, first, end): the node is these columns of the tensor; itself where it is no slice."""
    call = read(node, {aten.slice.Tensor}, "dim", "start", "end")
    if call is None or not is_last_dim(node, call.dim):
        return node, 0, value(node).shape[-1]
    first, end, _ = slice(call.start, call.end).indices(value(call.source).shape[-1])
    return call.source, first, end


# A sigmoid's logarithm and the sum of exponentials are some twenty calls where they are decomposed.
_MOST_CALLS = 32


def _share_of(node: Node) -> Node | None:
    """exp(l - logsumexp l) over the last dim, with l = logsigmoid of the node: its sigmoids,
    divided by their sum."""
    queue, seen = [node], {node}
    while queue and len(seen) < _MOST_CALLS:
        for user in users(queue.pop(0)):
            if user in seen:
                continue
            seen.add(user)
            queue.append(user)
            power = read(user, {aten.exp.default})
            shifted = power and read(power.source, {aten.sub.Tensor}, "other")
            if shifted and log_sigmoid_input(shifted.source) is node \
                    and log_sum_input(shifted.other) is shifted.source:
                return user
    return None
