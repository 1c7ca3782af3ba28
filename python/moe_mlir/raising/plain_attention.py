"""Recognises attention as models write it in plain torch, softmax(scale q kᵀ) v, and raises it.

Such a graph holds the matrix of tokens by tokens, of which a causal model throws half away;
moe.attention does not. Raised where all is float32, so that nothing that the model rounds is
left out, and where the mask, if there is one, is a triangle that the graph itself makes.
"""

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from .calls import call, rewrite_matches
from .mixing import scores_of
from .patterns import aten, exactly, product, same_sizes
from .reading import dtype, read, value

_SWAPS = ((2, 3), (3, 2), (-1, -2), (-2, -1))


@dataclass
class _Plain:
    """An attention whose keys are transposed in front of their product."""

    node: Node
    q: Node
    transposed: Node
    v: Node
    scale: float
    causal: bool


def raise_plain_attention(graph: Graph) -> int:
    """Rewrites the attentions of a graph that writes nothing in place; returns how many."""
    return rewrite_matches(graph, _match, _raise)


def _match(node: Node) -> _Plain | None:
    outer = product(node)
    scores = scores_of(exactly(outer[0])) if outer else None
    if outer is None or scores is None:
        return None
    inner, tau, causal = scores
    factors = product(inner)
    if factors is None or isinstance(tau, Node):
        return None
    match = _Plain(node, *factors, outer[1], 1.0 / tau, causal)
    return match if _fits(match) else None


def _fits(match: _Plain) -> bool:
    """Whether the operands are [batch, heads, tokens, width] of f32, with nothing broadcast."""
    operands = (match.q, match.transposed, match.v, match.node)
    if any(value(x).dim() != 4 or dtype(x) != torch.float32 for x in operands):
        return False
    if not all(same_sizes(match.q, x, slice(0, 2)) for x in operands):
        return False
    queries, keys = value(match.q).shape[2], value(match.transposed).shape[3]
    return value(match.q).shape[3] != 0 and (not match.causal or str(queries) == str(keys))


def _raise(graph: Graph, match: _Plain) -> None:
    with graph.inserting_before(match.node):
        k = untransposed(match.transposed)
        if k is None:
            k = call(graph, aten.permute.default, (match.transposed, [0, 1, 3, 2]), match.node)
        results = call(graph, torch.ops.moe.attention.default,
                       (match.q, k, match.v, None, None, match.scale, match.causal, None, False,
                        "ieee"), match.node)
        out = call(graph, operator.getitem, (results, 0), match.node)
    match.node.replace_all_uses_with(out)


def untransposed(node: Node) -> Node | None:
    """x, where the node is x with its last two dims swapped."""
    permuted = read(node, {aten.permute.default}, "dims")
    if permuted is not None:
        return permuted.source if [d % 4 for d in permuted.dims] == [0, 1, 3, 2] else None
    swapped = read(node, {aten.transpose.int}, "dim0", "dim1")
    return swapped.source if swapped and (swapped.dim0, swapped.dim1) in _SWAPS else None
