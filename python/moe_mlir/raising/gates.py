"""From a selection down to the gates: what becomes of the selected scores.

A gather of the unbiased scores, a score function that is applied late, a
renormalisation and a scale belong to the op, as long as they are computed in
float32. The first step that rounds to 16 bits ends the op, whose result is then
rounded once, at the same place as the model's.
"""

import torch
from torch.fx import Node

from .patterns import (
    CASTS,
    VIEWS,
    aten,
    exactly,
    filled_with,
    is_exact_cast,
    is_last_dim,
    is_number,
    only_user,
    renormalisation,
    same_shape,
    scaled,
    score_above,
    softmax_of,
    through,
    users,
)
from .reading import dtype, is_call, read
from .site import Site, name_of

_IN_PLACE = (aten.div_.Tensor, aten.mul_.Tensor, aten.scatter_.src, aten.scatter_.value)
_SCATTERS = (aten.scatter.src, aten.scatter_.src)


def match_gates(site: Site) -> None:
    node = _selected(site)
    if node is not None:
        fold_gates(site, node)


def fold_gates(site: Site, node: Node) -> None:
    """Takes what is computed of the selected scores `node` into the op, as far as it may."""
    selected = node
    if site.score == "none" and site.kind == "logits":
        node = _match_late_score(site, node)
    site.gates = node
    if node is not selected and dtype(node).itemsize < 4:
        return  # a score that is rounded, whatever it is cast to afterwards
    if not site.dense:
        _fold_renormalisation(site)
        _fold_scale(site)
    _fold_cast(site)


def _selected(site):
    """The selected scores: gathered from the unbiased ones, or the selection's values."""
    for user in site.indices.users if site.indices is not None else ():
        gather = read(user, {aten.gather.default}, "dim", "index")
        if gather and gather.index is site.indices and _is_base(site, gather.source) \
                and is_last_dim(gather.source, gather.dim):
            return user
    if site.bias is not None and site.values is not None:
        site.reject("the gates contain the bias of the selection")
    return site.values


def _is_base(site, node: Node) -> bool:
    """Whether the node has the scores that are selected from, before the bias; views may differ."""
    node = exactly(node)
    return node is site.base or same_shape(node, site.base) and (
        exactly(through(node, VIEWS)) is exactly(through(site.base, VIEWS)))


def _match_late_score(site, node: Node) -> Node:
    """topk -> softmax, topk -> another score, topk -> scatter into -inf -> softmax or sigmoid."""
    for candidate in _exact_chain(node):
        if (softmax := softmax_of(candidate)) is not None:
            site.score, site.form, site.renorm = "softmax", "F2", True
            return softmax
        for user in users(candidate):
            if (late := score_above(candidate, user)) is not None:
                site.score, site.form = late[0], "topk->sigmoid"
                return late[1]
            if _spreads(site, candidate, user) and (late := _dense_score(site, user)) is not None:
                return late
    return node


def _spreads(site, values: Node, node: Node) -> bool:
    """Whether the selected values are put back in their places, among -inf."""
    scatter = read(node, _SCATTERS, "dim", "index", "src")
    return scatter is not None and scatter.src is values and scatter.index is site.indices \
        and is_last_dim(node, scatter.dim) and filled_with(scatter.source) == -torch.inf \
        and same_shape(node, site.source)


def _dense_score(site, scatter: Node):
    """The score function over the spread values; experts that were not selected get 0."""
    for candidate in _exact_chain(scatter):
        late = softmax_of(candidate)
        if late is not None:
            site.score, site.renorm = "softmax", True
        else:
            late = next((u for u in users(candidate) if read(u, {aten.sigmoid.default})), None)
            if late is None:
                continue
            site.score = "sigmoid"
        site.form, site.dense = "F7", True
        _note_write(site, scatter)
        return late
    return None


def _exact_chain(node: Node) -> list[Node]:
    """The node and the casts behind it that lose nothing."""
    chain = [node]
    while True:
        casts = [u for u in chain[-1].users if is_exact_cast(u)]
        if not casts:
            return chain
        chain.append(casts[0])


def _fold_renormalisation(site) -> None:
    if site.renorm:
        return  # a softmax over the selected is one
    for candidate in _exact_chain(site.gates):
        found = renormalisation(candidate)
        if found is None:
            continue
        division, total, eps, clamped = found
        if any(u is not division and u is not total for u in users(candidate)):
            site.leave("the renormalisation, since other code reads the selected scores")
        elif dtype(division) != torch.float32:
            site.leave(f"the renormalisation, which is computed in {name_of(dtype(division))}")
        elif clamped and eps > _least_sum(site):
            site.leave(f"the renormalisation, whose sum is clamped at {eps:g}: moe ops add an eps "
                       "instead")
        else:
            site.gates, site.renorm = division, True
            site.eps = 0.0 if clamped or eps <= 2.0 ** -26 * _least_sum(site) else eps
            _note_write(site, division)
        return
    if any(renormalisation(u) for u in site.gates.users if is_call(u, *CASTS)):
        site.leave("the renormalisation, which is computed from rounded scores")


def _least_sum(site) -> float:
    """A lower bound of the selected scores' sum: k of E softmax values hold k/E or more."""
    if site.score != "softmax" or site.bias is not None or site.groups != 1 \
            or site.forced is not None:
        return 0.0
    return site.k / site.num_experts if site.num_experts > 0 else 0.0


def _fold_scale(site) -> None:
    for candidate in _exact_chain(site.gates):
        user = only_user(candidate)
        factors = scaled(user)
        if factors is None:
            continue
        if factors[0] is candidate and is_number(factors[1]) and dtype(user) == torch.float32 \
                and not site.left:
            site.scale, site.gates = float(factors[1]), user
            _note_write(site, user)
        return


def _fold_cast(site) -> None:
    """The op's result is rounded once, to the type that the experts get."""
    user = only_user(site.gates)
    while read(user, CASTS, "dtype", "other"):
        if not dtype(site.gates).is_floating_point or dtype(site.gates).itemsize < 4:
            return
        site.gates, user = user, only_user(user)


def _note_write(site, node) -> None:
    if is_call(node, *_IN_PLACE):
        site.writes.append(node)
