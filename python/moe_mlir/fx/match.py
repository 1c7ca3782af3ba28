"""Finds the routers of a torch graph: every `topk` over experts is an anchor.

From the anchor the walk goes up to the score function (through casts, views,
a selection bias, a mask of groups) and down to the gates (a gather, a
renormalisation, a scale). One walk covers the families that models spell:

    F1  softmax -> topk -> renorm          F5  softmax + bias -> topk -> gather
    F2  topk -> softmax                    F6  softmax -> groups -> topk
    F3  softmax -> topk                    F7  topk -> scatter -> sigmoid
    F4  sigmoid + bias [-> groups] -> topk -> gather -> renorm -> scale
    P1  probabilities -> topk -> renorm    P3  probabilities -> topk
"""

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..importer.locations import describe, module_path
from .patterns import (CASTS, SAME, VIEWS, argument, aten, dtype, is_call, is_last_dim,
                       is_probability, only_user, renormalisation, softmax_input, through, value)


@dataclass(frozen=True)
class RouterMatch:
    """One top-k site of a model.

    `form` names the family; `recognised` says whether the site becomes a moe
    op, and `reason` why not.
    """

    module: str
    location: str
    form: str
    score: str
    k: int
    num_experts: int
    renorm: bool
    scale: float
    bias: bool
    groups: int
    recognised: bool
    reason: str


@dataclass
class Site:
    """A match in the making, with the nodes that a rewrite needs."""

    topk: Node
    values: Node | None
    indices: Node | None
    score: str = "none"
    kind: str = "logits"
    form: str = "topk"
    scores: Node | None = None   # what the selection op will read
    base: Node | None = None     # the scores before the selection, without bias and groups
    softmax_dtype: torch.dtype | None = None
    gates: Node | None = None    # the node that holds the final weights
    renorm: bool = False
    eps: float = 0.0
    scale: float = 1.0
    bias: Node | None = None
    groups: int = 1
    reason: str = ""
    # Top-k calls that choose groups for this site; no sites of their own.
    inner: list = field(default_factory=list)

    @property
    def k(self) -> int:
        return argument(self.topk, 1, "k")

    @property
    def num_experts(self) -> int:
        return value(self.topk.args[0]).shape[-1]

    def describe(self) -> RouterMatch:
        return RouterMatch(
            module_path(self.topk), describe(self.topk).split(" (")[0], self.form, self.score,
            self.k, _int(self.num_experts), self.renorm, self.scale, self.bias is not None,
            self.groups, not self.reason, self.reason)


def _int(size) -> int:
    return size if isinstance(size, int) else -1


def find_selections(graph) -> list[RouterMatch]:
    """Every selection of the graph, in order: top-k sites, and moe ops as they are."""
    sites = {site.topk: site for site in find_routers(graph)}
    for node in graph.nodes:
        if is_call(node, torch.ops.moe.topk_renorm.default):
            scores, k, kind, renorm, scale = node.args[:5]
            score = "probs" if kind == "probs" else "softmax"
            sites[node] = Site(node, None, None, score, kind, "moe op", scores, scores, renorm=renorm,
                               scale=scale)
    return [sites[node].describe() for node in graph.nodes if node in sites]


def find_routers(graph) -> list[Site]:
    """All top-k sites in order, groups' inner selections folded into their router."""
    sites = [_match(n) for n in graph.nodes if is_call(n, aten.topk.default)]
    inner = {t for site in sites for t in site.inner}
    return [site for site in sites if site.topk not in inner]


def _match(topk: Node) -> Site:
    values, indices = _outputs(topk)
    site = Site(topk, values, indices)
    source = topk.args[0]
    if not is_last_dim(source, argument(topk, 2, "dim", -1)):
        site.reason = "not raised: the selection is not over the last dimension"
    elif argument(topk, 3, "largest", True) is False:
        site.reason = "not raised: the selection takes the smallest scores"
    elif not isinstance(site.k, int):
        site.reason = "not raised: k is not a constant"
    else:
        _match_scores(site, source)
        _match_gates(site)
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


def _match_scores(site: Site, source: Node) -> None:
    node = _peel_groups(site, through(source, SAME))
    if is_call(node, aten.add.Tensor) and isinstance(node.args[1], Node):
        node = _peel_bias(site, node)
    node = through(node, SAME | VIEWS)
    logits = softmax_input(node)
    if logits is not None:
        site.score, site.scores = "softmax", through(logits, CASTS)
        site.softmax_dtype = dtype(node)
    elif is_call(node, aten.sigmoid.default):
        site.score, site.scores = "sigmoid", through(node.args[0], CASTS)
    elif is_probability(source):
        site.score, site.kind, site.scores = "probs", "probs", through(source, CASTS)
    else:
        site.scores = through(source, CASTS)
    site.base = node


def _peel_groups(site: Site, node: Node) -> Node:
    """Scores with the experts of other groups masked out -> the scores."""
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        base, mask = node.args[0], node.args[1]
    elif is_call(node, aten.where.self):
        mask, first, second = node.args
        constant = is_call(second, aten.full.default, aten.full_like.default,
                           aten.scalar_tensor.default)
        base = first if constant else second
    else:
        return node
    site.inner = _selections_behind(mask)
    if site.inner:
        site.groups = _int(value(site.inner[0].args[0]).shape[-1])
        return through(base, SAME)
    return node


def _selections_behind(mask: Node, limit: int = 64) -> list[Node]:
    """The top-k calls that a group mask is computed from, nearest first."""
    found, queue, seen = [], [mask], set()
    while queue and len(seen) < limit:
        node = queue.pop(0)
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if is_call(node, aten.topk.default):
            found.append(node)
        queue.extend(node.all_input_nodes)
    return found


def _peel_bias(site: Site, node: Node) -> Node:
    left, right = node.args[:2]
    if value(right).dim() > value(left).dim() or is_probability(right):
        left, right = right, left
    if is_probability(left):
        site.bias = right
        return left
    return node


# ---- downwards: what becomes of the selected ----------------------------------------


def _match_gates(site: Site) -> None:
    node = site.values
    if site.indices is not None:
        for user in site.indices.users:
            if is_call(user, aten.gather.default) and argument(user, 2, "index") is site.indices:
                node = user
    if node is None:
        return
    if site.score == "none":
        node = _match_late_score(site, node)
    site.gates = node
    for candidate in _cast_chain(node):
        divided = renormalisation(candidate)
        if divided and _users_are(candidate, divided[0]):
            site.gates, site.eps = divided
            site.renorm = True
            break
    _match_scale(site)


def _cast_chain(node):
    """The node and the casts behind it, while nobody else looks."""
    chain = [node]
    while (user := only_user(chain[-1])) is not None and is_call(user, *CASTS):
        chain.append(user)
    return chain


def _users_are(node, division) -> bool:
    """Whether the node is used by its renormalisation and by nothing else."""
    return all(u is division or is_call(u, aten.sum.dim_IntList) for u in node.users)


def _match_late_score(site: Site, node: Node) -> Node:
    """topk -> softmax, topk -> sigmoid, topk -> scatter."""
    for candidate in _cast_chain(node):
        for user in candidate.users:
            if softmax_input(user) is candidate and _only_softmax(candidate, user):
                site.score, site.form, site.softmax_dtype = "softmax", "F2", dtype(user)
                return user
            if is_call(user, aten.sigmoid.default):
                site.score, site.form = "sigmoid", "topk->sigmoid"
            if is_call(user, aten.scatter.src):
                site.form = "F7"
    return node


def _only_softmax(node, softmax) -> bool:
    return is_call(softmax, aten._softmax.default, aten.softmax.int) and only_user(node) is softmax


def _match_scale(site: Site) -> None:
    user = only_user(site.gates)
    while user is not None and is_call(user, *CASTS):
        site.gates, user = user, only_user(user)
    if user is not None and is_call(user, aten.mul.Tensor, aten.mul.Scalar) \
            and not isinstance(user.args[1], Node):
        site.scale, site.gates = float(user.args[1]), user


# ---- the verdict ------------------------------------------------------------------


def _name_form(site: Site) -> None:
    if site.form != "topk":
        return
    if site.groups != 1:
        site.form = "F4" if site.score == "sigmoid" else "F6"
    elif site.score == "sigmoid":
        site.form = "F4"
    elif site.score == "softmax":
        site.form = "F5" if site.bias is not None else "F1" if site.renorm else "F3"
    elif site.kind == "probs":
        site.form = "P1" if site.renorm else "P3"


def _check_raisable(site: Site) -> None:
    """Leaves a reason where the moe op would not compute the same."""
    if site.form not in ("F1", "F2", "F3", "P1", "P3"):
        what = {"topk": "no score function above or below the selection was recognised"}
        site.reason = "not raised: " + what.get(
            site.form, f"form {site.form} is recognised but has no rewrite yet")
    elif site.gates is None:
        site.reason = "not raised: the gates are not computed from the selected values"
    elif dtype(site.scores) not in (torch.float32, torch.bfloat16, torch.float16):
        site.reason = f"not raised: scores are {_name(dtype(site.scores))}, not f32, bf16 or f16"
    elif site.score == "softmax" and site.softmax_dtype != torch.float32:
        site.reason = (f"not raised: the softmax is computed in {_name(site.softmax_dtype)}; the "
                       "moe op computes in float32, which would change results")
    elif site.eps > _harmless_eps(site):
        site.reason = f"not raised: eps {site.eps:g} in the renormalisation changes gates"


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _harmless_eps(site: Site) -> float:
    """The largest eps that f32 rounding drops: k softmax values sum to k/E or more."""
    if site.score != "softmax" or not isinstance(site.num_experts, int):
        return 0.0
    return 2.0 ** -26 * site.k / site.num_experts
