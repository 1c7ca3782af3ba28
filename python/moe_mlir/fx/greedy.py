"""Routers that select without a top-k: an argmax, or a chain of masked maxima.

    F8  p = softmax(z); expert = argmax p; gate = max p                    (Switch)
    F9  z_1 = z masked where (max z - z) / max(|z|, max z) > c; expert 1 = argmax z,
        gate 1 = softmax(z_1)[expert 1]; again on z without expert 1    (sparse mixer)

Both are top-1 selections. The mask of F9 never covers the largest score, whose
distance to itself is 0, so that its softmax has its maximum at the argmax.
"""

import torch
from torch.fx import Node

from .patterns import (SAME, argument, aten, dtype, exactly, filled_with, is_call, is_last_dim,
                       item, masked, softmax_input)
from .site import Site, name_of

_SCATTERS = (aten.scatter.value, aten.scatter_.value)
_CLAMPS = (aten.clamp.Tensor, aten.clamp_min.Tensor, aten.maximum.default)


def find_greedy(graph) -> list[Site]:
    sites, open_rounds = [], {}
    for node in list(graph.nodes):
        if softmax_input(node) is None:
            continue
        site = _match_argmax(node) or _match_round(node)
        if site is None:
            continue
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
        anchor = indices[0] if item(indices[0], 1) is None else indices[0].args[0]
        site = Site(anchor, values[0], indices[0], form="F8", score="softmax")
        site.gates, site.base = values[0], scores
        if exactly(scores) is softmax and dtype(softmax) == torch.float32:
            site.scores = exactly(softmax_input(softmax))
        else:
            site.kind, site.scores = "probs", scores
            site.leave(f"the softmax, which is rounded to {name_of(dtype(scores))}")
        site.rounds = [(scores, indices, values)]
        return site
    return None


def _extremes(scores: Node):
    """The nodes that hold the position, and those that hold the value, of the largest."""
    indices, values = [], []
    for user in scores.users:
        if is_call(user, aten.argmax.default) and argument(user, 1, "dim") is not None \
                and is_last_dim(scores, argument(user, 1, "dim")):
            indices.append(user)
        elif is_call(user, aten.amax.default) and is_last_dim(scores, argument(user, 1, "dim", [])):
            values.append(user)
        elif is_call(user, aten.max.dim) and is_last_dim(scores, user.args[1]):
            values += [u for u in user.users if item(u, 0) is user]
            indices += [u for u in user.users if item(u, 1) is user]
    return indices, values


# ---- F9 -----------------------------------------------------------------------


def _match_round(softmax: Node):
    """One top-1 selection of a sparse mixer."""
    logits = softmax_input(softmax)
    parts = masked(exactly(logits))
    if parts is None:
        return None
    base, mask, fill, drops = parts
    largest = _largest_of_distances(mask) if drops and fill == -torch.inf else None
    if largest is None or largest.args[0] is not base:
        return None
    gathers = [u for u in softmax.users if is_call(u, aten.gather.default)
               and is_last_dim(softmax, u.args[1]) and item(argument(u, 2, "index"), 1) is largest]
    if len(gathers) != 1:
        return None
    index = argument(gathers[0], 2, "index")
    site = Site(largest, gathers[0], index, form="F9", score="softmax")
    site.scores, site.gates, site.base = exactly(logits), gathers[0], base
    site.rounds = [(softmax, [index], gathers)]
    return site


def _largest_of_distances(mask: Node):
    """The max over experts that the mask compares with: (max - z) / factor > c, c >= 0."""
    if not is_call(mask, aten.gt.Scalar) or not isinstance(mask.args[1], (int, float)) \
            or mask.args[1] < 0:
        return None
    quotient = mask.args[0]
    if not is_call(quotient, aten.div.Tensor) or not is_call(quotient.args[0], aten.sub.Tensor):
        return None
    largest = item(quotient.args[0].args[0], 0)
    if not is_call(largest, aten.max.dim) or not argument(largest, 2, "keepdim", False) \
            or not is_last_dim(largest.args[0], largest.args[1]):
        return None
    subtracted = quotient.args[0].args[1]
    before = largest.args[0]
    while is_call(before, *_SCATTERS) and filled_with(before.args[3]) == -torch.inf:
        before = before.args[0]
    # The distance is taken from the scores themselves, selected or not.
    return largest if subtracted in (largest.args[0], before) else None


def _without_selected(round_) -> list[Node]:
    """The scores without the expert that the round selected."""
    _, indices, _ = round_
    return [u for index in indices for u in index.users
            if is_call(u, *_SCATTERS) and u.args[2] is index
            and filled_with(u.args[3]) == -torch.inf]
