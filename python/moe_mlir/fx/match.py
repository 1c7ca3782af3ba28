"""Finds the routers of a torch graph: every `topk` over experts is an anchor.

From the anchor the walk goes up to the score function (through casts, views,
a selection bias, a mask of groups) and down to the gates (a gather, a
renormalisation, a scale). One walk covers the families that models spell:

    F1  softmax -> topk -> renorm          F5  softmax + bias -> topk -> gather
    F2  topk -> softmax                    F6  softmax -> groups -> topk
    F3  softmax -> topk                    F7  topk -> scatter -> sigmoid
    F4  sigmoid + bias [-> groups] -> topk -> gather -> renorm -> scale
    P1  probabilities -> topk -> renorm    P3  probabilities -> topk

Two have anchors of their own (`greedy`), because they select without a top-k:

    F8  softmax -> argmax, max             F9  top-1, mask, top-1 (sparse mixer)
"""

import operator

import torch
from torch.fx import Node

from .gates import match_gates
from .greedy import find_greedy
from .groups import check_fill, peel_groups
from .patterns import (VIEWS, argument, aten, dtype, exactly, is_call, is_last_dim, is_probability,
                       same_shape, softmax_input, through, value)
from .site import RouterMatch, Site, name_of

_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)


def find_selections(graph) -> list[RouterMatch]:
    """Every selection of the graph, in order: top-k sites, and moe ops as they are."""
    sites = {site.anchor: site for site in find_routers(graph)}
    for node in graph.nodes:
        if is_call(node, torch.ops.moe.topk_renorm.default, torch.ops.moe.grouped_topk.default):
            sites[node] = _existing(node)
    return [sites[node].describe() for node in graph.nodes if node in sites]


def _existing(node: Node) -> Site:
    """A selection that is a moe op already."""
    scores, k = node.args[:2]
    site = Site(node, k=k, form="moe op", scores=scores)
    if is_call(node, torch.ops.moe.topk_renorm.default):
        site.kind, site.renorm, site.scale = node.args[2:5]
        site.score = "probs" if site.kind == "probs" else "softmax"
    else:
        site.bias, site.score = node.args[2], node.args[6]
        site.groups, site.topk_group, site.group_score = node.args[7:10]
        site.renorm, site.eps, site.scale = node.args[10:13]
    return site


def find_routers(graph) -> list[Site]:
    """All sites in order, groups' inner selections folded into their router."""
    sites = [_match(n) for n in graph.nodes if is_call(n, aten.topk.default)]
    sites += find_greedy(graph)
    inner = {t for site in sites for t in site.inner}
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted((site for site in sites if site.anchor not in inner),
                  key=lambda site: order[site.anchor])


def _match(topk: Node) -> Site:
    site = Site(topk, *_outputs(topk), k=argument(topk, 1, "k"))
    if not is_last_dim(site.source, argument(topk, 2, "dim", -1)):
        site.reject("the selection is not over the last dimension")
    elif argument(topk, 3, "largest", True) is False:
        site.reject("the selection takes the smallest scores")
    elif not isinstance(site.k, int) or site.num_experts < 0:
        site.reject("k or the number of experts is not a constant")
    else:
        _match_scores(site)
        match_gates(site)
        _name_form(site)
        _check_raisable(site)
    return site


def _outputs(topk):
    gets: dict[int, list] = {0: [], 1: []}
    for user in topk.users:
        if user.target is operator.getitem:
            gets[user.args[1]].append(user)
    # Tracing writes one getitem a result; several of one are the same value.
    for nodes in gets.values():
        for extra in nodes[1:]:
            extra.replace_all_uses_with(nodes[0])
    return (gets[0] or [None])[0], (gets[1] or [None])[0]


# ---- upwards: what is selected from ------------------------------------------------


def _match_scores(site: Site) -> None:
    node = peel_groups(site, exactly(site.source))
    if is_call(node, aten.add.Tensor) and isinstance(node.args[1], Node):
        node = _peel_bias(site, node)
    site.base = node = exactly(node)
    # A score function may sit behind a view that joins the token dimensions.
    score = exactly(through(node, VIEWS))
    logits = softmax_input(score)
    if logits is not None:
        site.score = "softmax"
    elif is_call(score, aten.sigmoid.default):
        site.score, logits = "sigmoid", score.args[0]
    elif is_probability(node):
        site.score, site.kind, site.scores = "probs", "probs", node
        return
    else:
        site.scores = node
        return
    site.scores = exactly(logits)
    if dtype(score) != torch.float32:
        _select_rounded(site, score)


def _select_rounded(site: Site, score: Node) -> None:
    """Scores that the model rounds are selected from as they are: rounding makes ties."""
    if site.bias is not None or site.inner:
        site.reject(f"the {site.score} is computed in {name_of(dtype(score))}; the moe op computes "
                    "in float32, which would change results")
    site.kind, site.scores = "probs", site.base
    site.leave(f"the {site.score}, which is computed in {name_of(dtype(score))}")


def _peel_bias(site: Site, node: Node) -> Node:
    left, right = node.args[:2]
    if value(right).dim() > value(left).dim() or is_probability(right):
        left, right = right, left
    if not is_probability(left):
        return node
    site.bias = right
    if value(right).numel() != site.num_experts or dtype(node) != torch.float32:
        site.reject(f"the bias of the selection has shape {tuple(value(right).shape)} and sums "
                    f"of {name_of(dtype(node))}; expected one float32 sum an expert")
    return left


# ---- the verdict ------------------------------------------------------------------


def _name_form(site: Site) -> None:
    if site.form != "topk":
        return
    if site.groups != 1:
        site.form = "F4" if site.score == "sigmoid" else "F6"
    elif site.score == "sigmoid":
        site.form = "F4"
    elif site.score == "softmax":
        renorm = site.renorm or "renormalisation" in site.left
        site.form = "F5" if site.bias is not None else "F1" if renorm else "F3"
    elif site.kind == "probs":
        site.form = "P1" if site.renorm else "P3"


def _check_raisable(site: Site) -> None:
    """Leaves a reason where the moe op would not compute the same."""
    check_fill(site)
    if site.form == "topk":
        site.reject("no score function above or below the selection was recognised")
    elif site.gates is None:
        site.reject("the gates are not computed from the selected values")
    elif dtype(site.scores) not in _ACTIVATIONS:
        site.reject(f"scores are {name_of(dtype(site.scores))}, not f32, bf16 or f16")
    elif site.groups > 1 and site.k > site.topk_group * (site.num_experts // site.groups):
        site.reject(f"{site.k} experts are selected from {site.topk_group} groups that have fewer")
    elif not same_shape(site.scores, site.source) and value(site.source).dim() != 2:
        site.reject("a view between the scores and the selection changes more than the tokens")
