"""Rewrites recognised routers to torch.ops.moe ops, in place.

The ops have their own autograd, so a graph that is rewritten before autograd
trains through our gradients; one that is rewritten after decomposition is
ready for import.
"""

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, GraphModule, Node

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from .attention import raise_attention
from .calls import call
from .match import Site, find_routers
from .memory import Writes
from .mixing import match_mixing
from .no_grad import fold_no_grad, nodes_without_gradients
from .patterns import VIEWS, aten, exactly, same_shape, softmax_input, through
from .reading import dtype, is_assertion, read, value

moe = torch.ops.moe


def raise_routing(module: GraphModule, layers: bool = True) -> int:
    """Raises every router whose meaning the moe ops have exactly; returns how many.

    With `layers` the layer that makes the logits becomes an op as well, where it may.
    """
    return raise_graph(module.graph, module.recompile, layers)


def raise_graph(graph: Graph, recompile: Callable[[], object] = lambda: None,
                layers: bool = True) -> int:
    """As `raise_routing`, for a graph whose module is not at hand."""
    raise_attention(graph)
    fold_no_grad(graph)
    without = nodes_without_gradients(graph)
    sites = [site for site in find_routers(graph)
             if not site.reason and site.anchor not in without]
    for site in sites:
        if site.rounds:
            _raise_greedy(graph, site)
        elif site.forced is not None:
            _raise_forced(graph, site)
        else:
            _raise_site(graph, site, layers)
    for scores in dict.fromkeys(site.scores for site in sites if site.kind == "probs"):
        _raise_mixing(graph, scores)
    # What a folded call wrote in place is dead now, though it writes; and what
    # is only asserted about is dead, too.
    writes = {write for site in sites for write in site.writes}
    graph.eliminate_dead_code(
        lambda node: node.is_impure() and node not in writes and not is_assertion(node))
    recompile()
    return len(sites)


def _raise_site(graph, site: Site, layers: bool) -> None:
    with graph.inserting_before(site.anchor):
        logits = _raise_logits(graph, site) if layers else site.scores
        scores = _like_selection(graph, site, logits)
        gates, indices = _select(graph, site, scores, site.k)
        if site.dense:
            gates = call(graph, moe.densify.default, (gates, indices, site.num_experts),
                         site.anchor)
        assert site.gates is not None  # or the site would not be raised
        gates = _rounded(graph, gates, site.gates)
    site.gates.replace_all_uses_with(gates)
    if site.indices is not None:
        # Where the gates were the selection's own values, they keep its indices.
        site.indices.replace_all_uses_with(indices)


def _raise_forced(graph, site: Site) -> None:
    """The ids of what is selected from as it is, and the gates that other scores have there."""
    assert site.forced is not None and site.gates is not None  # or the site would be another
    if site.selects:
        with graph.inserting_before(site.anchor):
            raw = Site(site.anchor, kind="probs", score="probs")
            _, indices = _select(graph, raw, site.source, site.k)
        site.forced.replace_all_uses_with(indices)
        site.forced = indices
    with graph.inserting_before(site.gates):
        ids = _with_shared(graph, site)
        scores = _like_selection(graph, site, site.scores)
        gates, _ = _select(graph, site, scores, site.k + site.shared, ids)
        gates = _rounded(graph, gates, site.gates)
    site.gates.replace_all_uses_with(gates)


def _with_shared(graph, site: Site) -> Node:
    """The ids with those of shared experts behind them, which every token has."""
    if not site.shared:
        return site.forced
    like, first = site.gates, site.num_experts
    one = call(graph, aten.slice.Tensor, (site.forced, -1, 0, 1), like)
    shared = [call(graph, aten.full_like.default, (one, first + i), like)
              for i in range(site.shared)]
    return call(graph, aten.cat.default, ([site.forced, *shared], -1), like)


def _select(graph, site: Site, scores: Node, k: int, forced: Node | None = None):
    """The gates and indices of a selection op over the scores."""
    plain = (site.score in ("softmax", "probs") or site.kind == "probs") and site.bias is None \
        and site.groups == 1 and site.eps == 0.0 and forced is None
    if plain:
        results = call(graph, moe.topk_renorm.default,
                       (scores, k, site.kind, site.renorm, site.scale, None, torch.int64),
                       site.anchor)
    else:
        score = "none" if site.kind == "probs" else site.score
        results = call(graph, moe.grouped_topk.default,
                       (scores, k, _flat_bias(graph, site), forced, None, None, score, site.groups,
                        site.topk_group, site.group_score or "top2", site.renorm, site.eps,
                        site.scale, torch.int64), site.anchor)
    return tuple(call(graph, operator.getitem, (results, i), site.anchor) for i in range(2))


def _flat_bias(graph, site: Site):
    if site.bias is None or value(site.bias).dim() == 1:
        return site.bias
    return call(graph, aten.reshape.default, (site.bias, [-1]), site.anchor)


def _like_selection(graph, site: Site, scores: Node) -> Node:
    """The scores in the shape that the model selects from; tokens may have been joined."""
    if same_shape(scores, site.shaped):
        return scores
    return call(graph, aten.reshape.default, (scores, [-1, site.num_experts]), site.anchor)


def _rounded(graph, gates: Node, like: Node) -> Node:
    if dtype(like) == torch.float32:
        return gates
    # One that has a gradient: the graph may be trained.
    return call(graph, aten.to.dtype, (gates, dtype(like)), like)


def _raise_greedy(graph, site: Site) -> None:
    """Each round of top-1 selection becomes one op with k = 1."""
    for scores, indices, values in site.rounds:
        inner = Site(site.anchor, score=site.score, kind=site.kind)
        rounded = site.kind == "probs"
        source = scores if rounded else exactly(softmax_input(scores))
        with graph.inserting_before(scores.next if rounded else scores):
            gates, chosen = _select(graph, inner, source, 1)
            for node in indices:
                node.replace_all_uses_with(_like_maximum(graph, chosen, node))
            for node in values:
                result = _rounded(graph, gates, node)
                node.replace_all_uses_with(_like_maximum(graph, result, node))


def _raise_mixing(graph, scores: Node) -> None:
    """The probabilities that a selection reads, if tokens inform each other in them."""
    mixing = match_mixing(scores)
    if mixing is None or Writes(graph).disturb([scores], mixing.operands):
        return
    learned = isinstance(mixing.tau, Node)
    with graph.inserting_before(scores):
        results = call(graph, moe.similarity_inform.default,
                       (mixing.u, mixing.e, mixing.uk, mixing.ws, None,
                        mixing.tau if learned else None, 1.0 if learned else mixing.tau,
                        mixing.causal, None, "all", "ieee"), scores)
        mixed = call(graph, operator.getitem, (results, 0), scores)
    scores.replace_all_uses_with(mixed)


def _like_maximum(graph, result: Node, node: Node) -> Node:
    """A result `[.., 1]` in the shape of a maximum that may have dropped the dimension."""
    if value(result).dim() == value(node).dim():
        return result
    return call(graph, aten.squeeze.dim, (result, -1), node)


def _raise_logits(graph, site: Site) -> Node:
    """The layer that feeds the selection as moe.router_logits, where it may fuse.

    Only f32 layers: the op's result is f32, so that a 16-bit layer would lose
    the rounding of its own result.
    """
    logits = site.scores
    if site.kind != "logits" or dtype(logits) != torch.float32:
        return logits
    layer = through(logits, VIEWS)
    parts = _linear_layer(layer)
    if parts is None:
        return logits
    with graph.inserting_before(layer):
        projected = call(graph, moe.router_logits.default, parts, layer)
    layer.replace_all_uses_with(projected)
    return projected if layer is logits else logits


def _linear_layer(node: Node):
    """(h, weight, bias) of `h @ weight.T + bias` with a 1-d bias; None otherwise."""
    layer = read(node, {aten.linear.default}, "weight", "bias")
    product = read(node, {aten.mm.default}, "mat2")
    added = read(node, {aten.addmm.default}, "mat1", "mat2")
    if layer is not None:
        h, weight, bias = layer.source, layer.weight, layer.bias
    elif product is not None:
        h, weight, bias = product.source, _transposed(product.mat2), None
    elif added is not None:
        h, weight, bias = added.mat1, _transposed(added.mat2), added.source
    else:
        return None
    if weight is None or value(weight).dim() != 2 or (bias is not None and value(bias).dim() != 1):
        return None
    if bias is not None and value(bias).shape != value(weight).shape[:1]:
        return None  # one number for all experts
    if any(dtype(x) != torch.float32 for x in (h, weight, bias) if x is not None):
        return None
    return h, weight, bias


def _transposed(node: Node):
    """w, where the node is its transpose."""
    permuted = read(node, {aten.permute.default}, "dims")
    if permuted is not None:
        return permuted.source if list(permuted.dims) == [1, 0] else None
    transposed = read(node, {aten.t.default})
    return None if transposed is None else transposed.source
