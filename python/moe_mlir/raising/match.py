"""Finds the routers of a torch graph: every `topk` over experts is an anchor.

From the anchor the walk goes up to the score function (through casts, views,
a selection bias, a mask of groups) and down to the gates (a gather, a
renormalisation, a scale). One walk covers the families that models spell:

    F1  softmax -> topk -> renorm          F5  softmax + bias -> topk -> gather
    F2  topk -> softmax                    F6  softmax -> groups -> topk
    F3  softmax -> topk                    F7  topk -> scatter -> sigmoid
    F4  sigmoid + bias [-> groups] -> topk -> gather -> renorm -> scale
    P1  probabilities -> topk -> renorm    P3  probabilities -> topk

Where the numbers that are selected from are other than the gates', or a table has the ids, the
gates are looked up (`forced`, F10 and F11).

Two have anchors of their own (`greedy`), because they select without a top-k:

    F8  softmax -> argmax, max             F9  top-1, mask, top-1 (sparse mixer)
"""

from typing import get_args

import torch
from torch.fx import Graph, Node

from ..formulas import LogitScore
from ..graph.arguments import bind_arguments
from ..ops._check import ACTIVATIONS
from .forced import find_by_table, match_forced
from .gates import match_gates
from .greedy import find_greedy, other_selection, selected_by
from .groups import check_fill, peel_groups
from .memory import Writes, is_read_elsewhere
from .patterns import (
    VIEWS,
    aten,
    exactly,
    is_exact_cast,
    is_last_dim,
    is_probability,
    results,
    same_shape,
    score_of,
    through,
)
from .reading import dtype, is_call, read, value
from .site import RouterMatch, Site, name_of
from .tokens import selects_tokens
from .words import describe_site, scores_in_words


def find_selections(graph: Graph) -> list[RouterMatch]:
    """Every selection of the graph, in order: top-k sites, moe ops as they are, and what may be
    a router by argmax or sort that is not recognised."""
    sites = {site.anchor: site for site in find_routers(graph)}
    for node in set(graph.nodes) - selected_by(sites.values()):
        if (site := other_selection(node)) is not None:
            sites[node] = site
    for node in graph.nodes:
        if is_call(node, torch.ops.moe.topk_renorm.default, torch.ops.moe.grouped_topk.default):
            sites[node] = _existing(node)
    return [describe_site(sites[node]) for node in graph.nodes if node in sites]


def _existing(node: Node) -> Site:
    """A selection that is a moe op already."""
    call = bind_arguments(node)
    site = Site(node, k=call.k, form="moe op", scores=call.scores)
    site.renorm, site.scale = call.renorm, call.route_scale
    if is_call(node, torch.ops.moe.topk_renorm.default):
        site.kind = call.kind
        site.score = "probs" if site.kind == "probs" else "softmax"
    else:
        site.bias, site.score, site.eps = call.bias, call.score, call.eps
        site.groups, site.topk_group, site.group_score = (call.n_group, call.topk_group,
                                                          call.group_score)
        site.forced, site.base = call.forced, call.scores
    return site


def find_routers(graph: Graph) -> list[Site]:
    """All sites in order, groups' inner selections folded into their router.

    A top-k among tokens is no router that was missed, but an indexer of attention.
    """
    sites = [_match(n) for n in graph.nodes if is_call(n, aten.topk.default)]
    sites = [site for site in sites if not site.reason or not selects_tokens(site.source)]
    sites += find_greedy(graph)
    sites += map(_verified, find_by_table(graph, {site.gates for site in sites if site.gates}))
    inner = {t for site in sites for t in site.inner}
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = Writes(graph)
    for site in sites:
        _check_memory(site, writes)
    return sorted((site for site in sites if site.anchor not in inner),
                  key=lambda site: order[site.anchor])


def _match(topk: Node) -> Site:
    site = _match_selection(topk)
    if site.reason and (forced := match_forced(site)) is not None and not _verified(forced).reason:
        return forced
    return site


def _match_selection(topk: Node) -> Site:
    call = read(topk, {aten.topk.default}, "k", "dim", "largest", "sorted")
    values, indices = _outputs(topk)
    site = Site(topk, values, indices, call.k)
    if not is_last_dim(site.source, call.dim):
        site.reject("the selection is not over the last dimension")
    elif not call.largest:
        site.reject("the selection takes the smallest scores")
    elif not isinstance(site.k, int) or site.num_experts < 0:
        site.reject("k or the number of experts is not a constant")
    else:
        _match_scores(site)
        match_gates(site)
        _name_form(site)
        _verified(site)
    return site


def _verified(site: Site) -> Site:
    """The site, with a reason where it cannot be raised."""
    _check_raisable(site)
    _check_order(site)
    return site


def _outputs(topk):
    gets = results(topk, 0), results(topk, 1)
    # Tracing writes one getitem a result; several of one are the same value.
    for nodes in gets:
        for extra in nodes[1:]:
            extra.replace_all_uses_with(nodes[0])
    return tuple((nodes or [None])[0] for nodes in gets)


# ---- upwards: what is selected from ------------------------------------------------


def _match_scores(site: Site) -> None:
    node = exactly(_peel_bias(site, peel_groups(site, exactly(site.source))))
    if site.bias is not None:
        # What only chooses needs no gradient; the gates are gathered from scores that have theirs.
        node = exactly(through(node, {aten.detach.default}))
    site.base = node
    # A score function may sit behind a view that joins the token dimensions.
    score = exactly(through(node, VIEWS))
    found = score_of(score)
    if value(score).shape[-1:] != (site.num_experts,):
        found = None  # the view joins or splits experts
    if found is None:
        if is_probability(node):
            site.score, site.kind = "probs", "probs"
        site.scores = node
        return
    site.score, logits = found
    site.scores = exactly(logits)
    if dtype(score) != torch.float32:
        _select_rounded(site, score)


def _select_rounded(site: Site, score: Node) -> None:
    """Scores that the model rounds are selected from as they are: rounding makes ties."""
    if site.inner:
        site.reject(f"the {site.score} is computed in {name_of(dtype(score))}; the moe op computes "
                    "in float32, which would change results")
    site.kind, site.scores = "probs", site.base
    site.leave(f"the {site.score}, which is computed in {name_of(dtype(score))}")


def _peel_bias(site: Site, node: Node) -> Node:
    call = read(node, {aten.add.Tensor}, "other")
    if call is None or not isinstance(call.other, Node):
        return node
    left, right = call.source, call.other
    if value(right).dim() > value(left).dim() or _is_score(right):
        left, right = right, left
    if not _is_score(left):
        return node
    site.bias = right
    shape = value(right).shape
    one_an_expert = shape[-1:] == (site.num_experts,) and value(right).numel() == site.num_experts
    if not one_an_expert or dtype(node) != torch.float32 or dtype(right) not in ACTIVATIONS \
            or not same_shape(left, node):
        site.reject(f"the bias of the selection is {name_of(dtype(right))} of shape "
                    f"{tuple(shape)}, and sums are {name_of(dtype(node))}; expected one floating "
                    "bias and one float32 sum an expert")
    return left


def _is_score(node: Node) -> bool:
    return is_probability(node) or score_of(exactly(through(node, VIEWS))) is not None


# ---- the verdict ------------------------------------------------------------------

# Scores of one expert's logit alone.
_OF_EACH_LOGIT = set(get_args(LogitScore)) - {"softmax"}


def _name_form(site: Site) -> None:
    if site.form != "topk":
        return
    if site.groups != 1:
        site.form = "F4" if site.score in _OF_EACH_LOGIT else "F6"
    elif site.score in _OF_EACH_LOGIT:
        site.form = "F4"
    elif site.score == "softmax":
        renorm = site.renorm or "renormalisation" in site.left
        site.form = "F5" if site.bias is not None else "F1" if renorm else "F3"
    elif site.kind == "probs":
        site.form = "P1" if site.renorm else "P3"


def _check_raisable(site: Site) -> None:
    """Leaves a reason where the moe op would not compute the same."""
    check_fill(site)
    if site.form == "topk" and site.k == site.num_experts:
        site.reject(f"the top-k takes all {site.k}, which is a sort and chooses none")
    elif site.form == "topk":
        site.reject("no score function above or below the selection was recognised: "
                    + scores_in_words(site))
    elif site.gates is None:
        site.reject("the gates are not computed from the selected values")
    elif dtype(site.scores) not in ACTIVATIONS:
        site.reject(f"scores are {name_of(dtype(site.scores))}, not f32, bf16 or f16")
    elif site.groups > 1 and site.k > site.topk_group * (site.num_experts // site.groups):
        site.reject(f"{site.k} experts are selected from {site.topk_group} groups that have fewer")
    elif site.kind == "logits" and value(site.scores).shape[-1:] != value(site.shaped).shape[-1:]:
        site.reject("a view between the scores and the selection joins or splits experts")
    elif not same_shape(site.scores, site.shaped) and value(site.shaped).dim() != 2:
        site.reject("a view between the scores and the selection changes more than the tokens")
    elif dtype(site.gates).itemsize > 4 and not is_exact_cast(site.gates):
        site.reject(f"the gates are computed in {name_of(dtype(site.gates))}; moe ops compute in "
                    "float32")


def _check_order(site: Site) -> None:
    """The selected values stay torch's where other code reads them, beside our indices."""
    if site.reason or site.values in (None, site.gates) \
            or read(site.anchor, {aten.topk.default}, "k", "dim", "largest", "sorted").sorted:
        return
    if is_read_elsewhere(site.values, site.gates):
        site.reject("other code reads the selected values, which sorted=False leaves in an order "
                    "of torch's own")


def _check_memory(site: Site, writes: Writes) -> None:
    if site.reason:
        return
    outputs = [node for node in (site.gates, site.indices) if node is not None]
    inputs = [node for node in (site.scores, site.bias) if node is not None]
    if site.forced is not None:
        inputs.append(site.source if site.selects else site.forced)
    for _, indices, values in site.rounds:
        outputs += [*indices, *values]
    if writes.disturb(outputs, inputs, site.writes):
        site.reject("the graph writes to the router's tensors in place before their last use")
