"""Recognises attention with a sink, a logit that takes its share and has no value, and raises it.

    softmax([scale q kᵀ + mask, sink])[.., :-1] v

Such a graph holds the matrix of tokens by tokens; moe.attention does not. Its log-sum-exp tells
the share of the sink: the result is attention without it, times sigmoid(lse - sink).

Models subtract the largest logit first, and cast in between. In 16 bits they round logits and
weights, which the op leaves in float32: its result is nearer to the exact one than theirs.
"""

import math
import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from ..ops._check import ACTIVATIONS
from .calls import call, rewrite_matches
from .mixing import peel_temperature
from .patterns import (
    CASTS,
    aten,
    exactly,
    is_last_dim,
    product,
    same_sizes,
    softmax_input,
    users,
)
from .plain_attention import untransposed
from .reading import dtype, is_call, item, read, source, value

_ADDITIONS = {aten.add.Tensor}


@dataclass
class _WithSink:
    """An attention, whose keys are transposed in front of their product or come so."""

    node: Node
    q: Node
    k: Node
    is_transposed: bool
    v: Node
    scale: float
    masks: list[Node]
    sink: Node


def raise_sink_attention(graph: Graph) -> int:
    """Rewrites the attentions of a graph that writes nothing in place; returns how many."""
    return rewrite_matches(graph, _match, _raise)


# ---- matching ----------------------------------------------------------------------


def _match(node: Node) -> _WithSink | None:
    outer = product(node)
    joined = _joined_logits(outer[0]) if outer else None
    if outer is None or joined is None:
        return None
    logits, sink = joined
    scores, masks = _peel_masks(logits)
    inner, tau = peel_temperature(exactly(scores))
    factors = product(inner)
    if factors is None or isinstance(tau, Node):
        return None
    q, transposed = map(exactly, factors)
    k = untransposed(transposed)
    match = _WithSink(node, q, transposed if k is None else exactly(k), k is None, outer[1],
                      1.0 / tau, masks, sink)
    return match if _fits(match) else None


def _joined_logits(weights: Node) -> tuple[Node, Node] | None:
    """(logits, sink), where the weights are softmax([logits, sink])[.., :-1]; else None."""
    cut = read(_rounded(weights), {aten.slice.Tensor}, "dim", "start", "end")
    if cut is None or not is_last_dim(cut.source, cut.dim) or cut.start or cut.end != -1:
        return None
    inputs = softmax_input(cut.source)
    if inputs is None or len(users(cut.source)) > 1:
        return None
    joined = read(_unshifted(exactly(inputs)), {aten.cat.default}, "dim")
    if joined is None or len(joined.source) != 2 or not is_last_dim(joined.source[0], joined.dim):
        return None
    logits, sink = joined.source
    return (logits, sink) if value(sink).shape[-1] == 1 else None


def _rounded(node: Node) -> Node:
    """The node behind copies and casts of weights, which may be to the type of the values."""
    node = exactly(node)
    # No integers, and none of the 8 bits of a model that quantizes its weights.
    while is_call(node, *CASTS) and dtype(node) in ACTIVATIONS:
        node = exactly(source(node))
    return node


def _unshifted(node: Node) -> Node:
    """x, where the node is x less its largest element, which no softmax notices."""
    difference = read(node, {aten.sub.Tensor}, "other")
    if difference is None:
        return node
    taken, x = difference.other, exactly(difference.source)
    largest = read(taken, {aten.amax.default}, "dim", "keepdim") \
        or read(item(taken, 0), {aten.max.dim}, "dim", "keepdim")
    fits = largest is not None and largest.keepdim and is_last_dim(largest.source, largest.dim) \
        and exactly(largest.source) is x
    return x if fits else node


def _peel_masks(logits: Node) -> tuple[Node, list[Node]]:
    """(scores, what is added to them)."""
    masks: list[Node] = []
    while (added := read(exactly(logits), _ADDITIONS, "other")) is not None:
        if not isinstance(added.other, Node):
            break
        logits = added.source
        masks.append(added.other)
    return logits, masks


def _fits(match: _WithSink) -> bool:
    """Whether operands are [batch, heads, tokens, width] of one type, with nothing broadcast but
    masks and sink."""
    operands = (match.q, match.k, match.v, match.node)
    if any(value(x).dim() != 4 or dtype(x) != dtype(match.q) for x in operands):
        return False
    if not all(same_sizes(match.q, x, slice(0, 2)) for x in operands):
        return False
    sizes = value(match.q).shape
    queries = sizes[:3]
    return (dtype(match.q) in ACTIVATIONS and sizes[3] != 0
            and all(_broadcasts(mask, (*queries, _num_keys(match))) for mask in match.masks)
            and _broadcasts(match.sink, (*queries, 1)))


def _num_keys(match):
    return value(match.k).shape[3 if match.is_transposed else 2]


def _broadcasts(node: Node, sizes) -> bool:
    """Whether a node that the op may take has the sizes, or 1 where they may be repeated."""
    shape = value(node).shape
    return dtype(node) in ACTIVATIONS and len(shape) == len(sizes) and all(
        str(have) in ("1", str(wanted)) for have, wanted in zip(shape, sizes))


# ---- rewriting ---------------------------------------------------------------------


def _raise(graph: Graph, match: _WithSink) -> None:
    like = match.node
    with graph.inserting_before(like):
        k = match.k
        if match.is_transposed:
            k = call(graph, aten.permute.default, (k, [0, 1, 3, 2]), like)
        results = call(graph, torch.ops.moe.attention.default,
                       (match.q, k, match.v, _bias(graph, match), None, match.scale, False, None,
                        False, "ieee"), like)
        out = call(graph, operator.getitem, (results, 0), like)
        lse = call(graph, operator.getitem, (results, 1), like)
        # A sink of -inf is none. Beside it a query that sees no key has no weights at all: the
        # difference of two infinities, which is no number, would reach all tokens.
        sink = call(graph, aten.clamp.default, (
            _to(graph, match.sink, torch.float32, like), torch.finfo(torch.float32).min), like)
        excess = call(graph, aten.sub.Tensor, (
            call(graph, aten.unsqueeze.default, (lse, -1), like), sink), like)
        share = call(graph, aten.sigmoid.default, (excess,), like)
        wide = call(graph, aten.mul.Tensor, (_to(graph, out, torch.float32, like), share), like)
        result = _to(graph, wide, dtype(like), like)
    like.replace_all_uses_with(result)


def _bias(graph, match) -> Node | None:
    """The sum of all masks, [1 or batch, 1 or heads, tokens, tokens]; -inf where they hide."""
    if not match.masks:
        return None
    like, masks = match.node, match.masks
    total = _hidden(graph, masks[0], like)
    for mask in masks[1:]:
        total = call(graph, aten.add.Tensor, (
            _to(graph, total, torch.float32, like),
            _to(graph, _hidden(graph, mask, like), torch.float32, like)), like)
    tokens = [value(match.q).shape[2], _num_keys(match)]
    if list(map(str, value(total).shape[2:])) == list(map(str, tokens)):
        return total
    sizes = [_size(graph, match.q, 2, like),
             _size(graph, match.k, 3 if match.is_transposed else 2, like)]
    return call(graph, aten.expand.default, (total, [-1, -1, *sizes]), like)


def _hidden(graph, mask, like) -> Node:
    """The mask, with -inf for the smallest numbers of its type, by which models say the same.

    Beside a sink, which is one of the usual numbers, both have the weight 0; so has a query all
    of whose keys are hidden. Blocks of keys behind -inf are skipped.
    """
    if dtype(mask) == torch.float16:  # whose smallest number is one of the usual ones
        return mask
    hides = call(graph, aten.le.Scalar, (mask, torch.finfo(dtype(mask)).min / 2), like)
    nothing = call(graph, aten.full.default, ([], -math.inf), like)
    return call(graph, aten.where.self, (hides, _to(graph, nothing, dtype(mask), like), mask),
                like)


def _size(graph, node, dim, like):
    size = value(node).shape[dim]
    return size if isinstance(size, int) else call(graph, aten.sym_size.int, (node, dim), like)


def _to(graph, node, kind, like) -> Node:
    if dtype(node) == kind:
        return node
    return call(graph, torch.ops.prims.convert_element_type.default, (node, kind), like)
