"""Routers that select without a top-k: an argmax, or a chain of masked maxima.

    F8  p = softmax(z); expert = argmax p; gate = max p                    (Switch)
    F9  z_1 = z masked where (max z - z) / max(|z|, max z) > c; expert 1 = argmax z,
        gate 1 = softmax(z_1)[expert 1]; again on z without expert 1    (sparse mixer)

Both are top-1 selections. torch promises that an argmax is the first of equal
values, so that F8 selects from the probabilities as the model rounds them. The mask of F9 never covers the largest score, whose
distance to itself is 0, so that its softmax has its maximum at the argmax.
"""

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from ..ops._check import ACTIVATIONS
from .patterns import (
    SAME,
    aten,
    exactly,
    filled_with,
    is_last_dim,
    is_number,
    item,
    masked_alone,
    results,
    softmax_input,
)
from .reading import dtype, is_call, read, source
from .site import Site, name_of
from .words import call_in_words

_SCATTERS = (aten.scatter.value, aten.scatter_.value)
_LARGEST = (aten.argmax.default, aten.amax.default, aten.max.dim)


def find_greedy(graph: Graph) -> list[Site]:
    sites: list[Site] = []
    open_rounds: dict[Node, Site] = {}
    for node in list(graph.nodes):
        if softmax_input(node) is None:
            continue
        site = _match_argmax(node) or _match_round(node)
        if site is None:
            continue
        if dtype(site.scores) not in ACTIVATIONS:
            site.reject(f"scores are {name_of(dtype(site.scores))}, not f32, bf16 or f16")
        previous = open_rounds.pop(site.source, None) if site.form == "F9" else None
        if previous is not None:
            previous.rounds += site.rounds
            previous.k += 1
            site = previous
        else:
            sites.append(site)
        if site.form == "F9":
            for scatter in _without_selected(site.rounds[-1]):
                open_rounds[scatter] = site
    return sites


# ---- F8 -----------------------------------------------------------------------


def _match_argmax(softmax: Node):
    """A distribution whose largest element and its position are both used."""
    for scores in [softmax, *(u for u in softmax.users if is_call(u, *SAME))]:
        indices, values = _extremes(scores)
        if not indices or not values:
            continue
        anchor = indices[0] if item(indices[0], 1) is None else item(indices[0], 1)
        site = Site(anchor, values[0], indices[0], form="F8", score="softmax")
        site.gates, site.base = values[0], scores
        # Of equal probabilities an argmax is the first, and unequal logits may have equal ones.
        site.kind, site.scores = "probs", scores
        site.leave(f"the softmax, which is rounded to {name_of(dtype(scores))}")
        site.rounds = [(scores, indices, values)]
        return site
    return None


def _extremes(scores: Node):
    """The nodes that hold the position, and those that hold the value, of the largest."""
    indices, values = [], []
    for user in scores.users:
        call = read(user, _LARGEST, "dim", "keepdim")
        if call is None or call.source is not scores or call.dim is None \
                or not is_last_dim(scores, call.dim):
            continue
        if is_call(user, aten.argmax.default):
            indices.append(user)
        elif is_call(user, aten.amax.default):
            values.append(user)
        else:
            values += results(user, 0)
            indices += results(user, 1)
    return indices, values


# ---- F9 -----------------------------------------------------------------------


def _match_round(softmax: Node):
    """One top-1 selection of a sparse mixer."""
    logits = softmax_input(softmax)
    parts = masked_alone(exactly(logits))
    if parts is None:
        return None
    base, mask, fill, drops = parts
    largest = _largest_of_distances(mask) if drops and fill == -torch.inf else None
    if largest is None or source(largest) is not base:
        return None
    gathers = [u for u in softmax.users if _gathers_at(u, softmax, largest)]
    if len(gathers) != 1:
        return None
    index = read(gathers[0], {aten.gather.default}, "dim", "index").index
    site = Site(largest, gathers[0], index, form="F9", score="softmax")
    site.scores, site.gates, site.base = exactly(logits), gathers[0], base
    site.rounds = [(softmax, [index], gathers)]
    return site


def _gathers_at(node: Node, softmax: Node, largest: Node) -> bool:
    """Whether the node is the softmax where the scores are largest."""
    gather = read(node, {aten.gather.default}, "dim", "index")
    return gather is not None and gather.source is softmax and is_last_dim(softmax, gather.dim) \
        and item(gather.index, 1) is largest


def _largest_of_distances(mask: Node):
    """The max over experts that the mask compares with: (max - z) / factor > c, c >= 0."""
    compared = read(mask, {aten.gt.Scalar}, "other")
    if compared is None or not is_number(compared.other) or compared.other < 0:
        return None
    quotient = read(compared.source, {aten.div.Tensor}, "other")
    distance = quotient and read(quotient.source, {aten.sub.Tensor}, "other")
    largest = distance and item(distance.source, 0)
    call = read(largest, {aten.max.dim}, "dim", "keepdim")
    if call is None or not call.keepdim or not is_last_dim(call.source, call.dim):
        return None
    # The distance is taken from the scores themselves, selected or not.
    return largest if distance.other in (call.source, _before_scatters(call.source)) else None


def _before_scatters(node: Node) -> Node:
    """The scores before selected experts were taken out."""
    while (scatter := _taking_out(node)) is not None:
        node = scatter.source
    return node


def _taking_out(node: Node):
    """The scatter that puts -inf in the places of selected experts."""
    scatter = read(node, _SCATTERS, "dim", "index", "value")
    taken = scatter is not None and filled_with(scatter.value) == -torch.inf \
        and is_last_dim(node, scatter.dim)
    return scatter if taken else None


def _without_selected(round_) -> list[Node]:
    """The scores without the expert that the round selected."""
    _, indices, _ = round_
    return [u for index in indices for u in index.users
            if (taken := _taking_out(u)) is not None and taken.index is index]


# ---- selections that are no site ---------------------------------------------------

_POSITIONS = (aten.argmax.default, aten.max.dim)
_SORTS = (aten.sort.default, aten.sort.stable)


def selected_by(sites: Iterable[Site]) -> set[Node]:
    """The calls that the sites are made of."""
    indices = [node for site in sites for round_ in site.rounds for node in round_[1]]
    return {site.anchor for site in sites} | {item(node, 1) or node for node in indices}


def other_selection(node: Node) -> Site | None:
    """An argmax or a sort over the last dimension of floating scores, with why it is kept."""
    call = read(node, (*_POSITIONS, *_SORTS), "dim", "keepdim", "descending", "stable")
    if call is None or call.dim is None or not dtype(call.source).is_floating_point \
            or not is_last_dim(call.source, call.dim):
        return None
    if is_call(node, aten.argmax.default) or results(node, 1):
        sorts = is_call(node, *_SORTS)
        site = Site(node, k=0 if sorts else 1, form="sort" if sorts else "argmax")
        site.scores = site.base = call.source
        expected = "torch.topk instead" if sorts else \
            "the position and the value of the largest of a softmax, or torch.topk with k = 1,"
        article = "a" if sorts else "an"
        site.reject(f"{article} {site.form} of {call_in_words(call.source)}; expected {expected} for a "
                    "router")
        return site
    return None
