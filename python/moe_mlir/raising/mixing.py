"""Recognises similarity mixing as researchers write it, softmax(x xᵀ / tau) p, and raises it.

Plain torch holds the matrix of tokens by tokens in memory, several times over
in training; moe.similarity_inform does not. Raised where all is float32, so
that nothing that the model rounds is left out, and where the mask, if there
is one, is a triangle that the graph itself makes.
"""

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from .patterns import (
    CASTS,
    DIVISIONS,
    NEGATIONS,
    VIEWS,
    aten,
    filled_with,
    is_number,
    item,
    masked,
    masked_alone,
    product,
    same_sizes,
    scaled,
    softmax_input,
    through,
    through_idle_slices,
)
from .reading import dtype, is_call, read, source, value

_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default)
_UNITS = VIEWS | {aten.unsqueeze.default, aten.squeeze.dim}
_LOWEST = (-math.inf, torch.finfo(torch.float32).min)


@dataclass
class Mixing:
    """p = softmax(u ws ukᵀ / tau) e; `uk` None: the tokens themselves, `ws` None: the identity."""

    node: Node
    u: Node
    e: Node
    uk: Node | None
    ws: Node | None
    tau: float | Node
    causal: bool

    @property
    def operands(self) -> list[Node]:
        return [x for x in (self.u, self.e, self.uk, self.ws, self.tau) if isinstance(x, Node)]


def match_mixing(node: Node) -> Mixing | None:
    """The mixing that computes the probabilities `node`, if one does."""
    outer = _product(node)
    if outer is None or outer[2] or not _is_plain(node, *outer[:2]):
        return None
    weights, e, _ = outer
    found = scores_of(weights)
    if found is None:
        return None
    inner, tau, causal = found
    scores = _product(inner)
    if scores is None or not scores[2] or not _is_plain(inner, *scores[:2]):
        return None
    queries, keys, _ = scores
    if value(queries).dim() != value(e).dim():
        return None
    u, ws = _peel_matrix(queries, keys)
    return Mixing(node, u, e, None if keys is u else keys, ws, tau, causal)


def scores_of(weights: Node) -> tuple[Node, float | Node, bool] | None:
    """(scores, tau, causal) of weights softmax(scores / tau) in float32, masked by a triangle if
    causal; None for other weights and masks."""
    logits = softmax_input(weights)
    if logits is None or dtype(logits) != torch.float32:
        return None
    unmasked, causal = _peel_mask(logits)
    return None if causal is None else (*peel_temperature(unmasked), causal)


def mixing_of(node: Node | None) -> str:
    """ "similarity" or "attention", where the node's probabilities are mixed by a moe op or will be."""
    if is_call(item(node, 0), torch.ops.moe.similarity_inform.default):
        return "similarity"
    if posterior_of(node) is not None:
        return "attention"
    return "similarity" if node is not None and match_mixing(node) is not None else ""


def posterior_of(node: Node | None) -> Node | None:
    """The moe.attention_posterior that mixes the node's probabilities; else None."""
    chosen = read(node, {aten.where.self}, "self", "other")
    if chosen is not None:
        # A token that sees no other keeps its own.
        return posterior_of(chosen.self) or posterior_of(chosen.other)
    posterior = item(node, 0)
    return posterior if is_call(posterior, torch.ops.moe.attention_posterior.default) else None


def _is_plain(*nodes) -> bool:
    """All of f32, with the same leading sizes: nothing is broadcast."""
    leading = {tuple(map(str, value(n).shape[:-2])) for n in nodes}
    return len(leading) == 1 and all(dtype(n) == torch.float32 and value(n).dim() >= 2
                                     for n in nodes)


# -------------------------------------------------------------------- products


def _product(node):
    """(a, b, transposed): the node is a b, or a bᵀ if transposed, over its last two dims."""
    node, order = _base(node)
    if order != _dims(node):
        return None
    einsum = read(node, {aten.einsum.default}, "tensors", "path")
    if einsum is not None:
        return _einsum(einsum.source, einsum.tensors)
    factors = product(node)
    if factors is None:
        return None
    (a, a_order), (b, b_order) = map(_base, factors)
    if a_order != _dims(a):
        return None
    if b_order == _dims(b):
        return a, b, False
    swapped = [*b_order[:-2], *reversed(b_order[-2:])]
    return (a, b, True) if swapped == _dims(b) else None


def _dims(node):
    return list(range(value(node).dim()))


def _einsum(equation, operands):
    """`bik,bkj->bij` and `bik,bjk->bij`, in any letters."""
    terms, _, result = equation.replace(" ", "").partition("->")
    if len(operands) != 2 or len(result) < 2 or "." in equation:
        return None
    left, _, right = terms.partition(",")
    batch, i, j = result[:-2], result[-2], result[-1]
    k = left[-1:]
    if left != batch + i + k or len({*result, k}) != len(result) + 1:
        return None
    if right in (batch + k + j, batch + j + k):
        return *operands, right == batch + j + k
    return None


def _base(node):
    """The tensor behind permutations and unit dims, and which of its dims each dim is.

    Torch spells an einsum as a batched product between such views.
    """
    order = list(range(value(node).dim()))
    while True:
        if is_call(node, *_PERMUTES):
            moved = _permutation(node)
            order = [moved[d] for d in order]
        elif is_call(node, *_UNITS):
            kept = _without_units(source(node), node)
            if kept is None or any(d not in kept for d in order):
                break
            order = [kept[d] for d in order]
        else:
            break
        node = source(node)
    return node, order


def _permutation(node):
    rank = value(node).dim()
    dims = list(range(rank))
    permuted = read(node, {aten.permute.default}, "dims")
    if permuted is not None:
        return [d % rank for d in permuted.dims]
    swapped = read(node, {aten.transpose.int}, "dim0", "dim1")
    a, b = (-2, -1) if swapped is None else (swapped.dim0, swapped.dim1)
    if rank > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _without_units(source, view):
    """Where each dim of a view comes from, if it adds and removes nothing but dims of size 1."""
    def sized(node):
        return [(i, str(size)) for i, size in enumerate(value(node).shape) if str(size) != "1"]
    old, new = sized(source), sized(view)
    if [size for _, size in old] != [size for _, size in new]:
        return None
    return {i: j for (i, _), (j, _) in zip(new, old)}


# ---------------------------------------------------------------------- logits


def peel_temperature(node):
    """(dot products, tau) of `dot / tau` or `dot * scale`, with a number or a learned scalar."""
    divided = read(node, DIVISIONS, "other")
    if divided is None:
        dot, factor = scaled(node) or (node, 1.0)
        usable = is_number(factor) and factor > 0
        return (dot, 1.0 / float(factor)) if usable else (node, 1.0)
    tau = divided.other
    if isinstance(tau, Node):
        scalar = value(tau).dim() == 0 and dtype(tau) == torch.float32
        return (divided.source, tau) if scalar else (node, 1.0)
    return (divided.source, float(tau)) if is_number(tau) and tau > 0 else (node, 1.0)


def _peel_mask(node):
    """(logits, causal): causal is None where a mask is something else than a triangle."""
    found = masked_alone(node)
    if found is None:
        return node, None if masked(node) else False
    base, mask, fill, drops = found
    triangle = fill in _LOWEST and is_triangle(mask, drops) \
        and same_sizes(mask, node, slice(-2, None))
    return base, True if triangle else None


# A mask as what it says of key j and query i: ("ge" or "le", c) for j - i >= c, j - i <= c.
_OPPOSITE = {"ge": "le", "le": "ge"}


def is_triangle(mask: Node, drops: bool) -> bool:
    """Whether the mask keeps the keys up to the token's own, and no others."""
    relation = _relation(mask)
    return (_negated(relation) if drops else relation) == ("le", 0)


def _negated(relation):
    if relation is None:
        return None
    kind, c = relation
    return _OPPOSITE[kind], c - 1 if kind == "ge" else c + 1


def _relation(node):
    node = through_broadcasts(node)
    compared = read(node, {aten.eq.Scalar}, "other")
    if read(node, NEGATIONS) or (compared and compared.other == 0):
        return _negated(_relation(source(node)))
    triangle = read(node, {aten.tril.default, aten.triu.default}, "diagonal")
    if triangle is not None:
        kind = "le" if is_call(node, aten.tril.default) else "ge"
        return (kind, triangle.diagonal) if _is_ones(triangle.source) else None
    both = read(node, {aten.logical_and.default}, "other")
    if both is not None and _is_ones(both.other) and same_sizes(node, both.source, slice(-2, None)):
        return _relation(both.source)
    chosen = read(node, {aten.where.self}, "self", "other")
    if chosen is not None and _is_ones(chosen.self) and filled_with(chosen.other) == 0 \
            and same_sizes(node, chosen.source, slice(-2, None)):
        return _relation(chosen.source)
    return _comparison(node)


def through_broadcasts(node: Node, rows: bool = False) -> Node:
    """The pairs of queries and keys that a mask repeats along dims in front of them, and, with
    `rows`, along the queries."""
    while True:
        added = read(node, {aten.unsqueeze.default}, "dim")
        leading = added is not None and added.dim % value(node).dim() < value(node).dim() - 2
        expands = is_call(node, aten.expand.default)
        if not (leading or expands or read(node, CASTS, "dtype", "other") or is_call(node, *VIEWS)):
            return node
        repeats_rows = rows and expands and same_sizes(node, source(node), slice(-1, None)) \
            and str(value(source(node)).shape[-2]) == "1"
        if not repeats_rows and not same_sizes(node, source(node), slice(-2, None)):
            return node
        node = source(node)


def _is_ones(node) -> bool:
    return filled_with(node) == 1


# For integers, > c is >= c + 1.
_COMPARISONS = {
    overload: (kind + "e", shift)
    for name, kind, shift in (("ge", "g", 0), ("gt", "g", 1), ("le", "l", 0), ("lt", "l", -1))
    for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)}


def _comparison(node):
    """j - i <= c in the ways to write it, over two ranges."""
    call = read(node, _COMPARISONS, "other")
    if call is None or value(node).dim() != 2:
        return None
    if isinstance(call.other, Node):
        axes, c = (_axis(call.source), _axis(call.other)), 0
    else:
        difference = read(call.source, {aten.sub.Tensor}, "other")
        axes = (_axis(difference.source), _axis(difference.other)) if difference else (None, None)
        c = call.other
    if axes not in ((-1, -2), (-2, -1)) or not isinstance(c, int):
        return None
    kind, shift = _COMPARISONS[node.target]
    c += shift
    # i - j >= c is j - i <= -c.
    return (kind, c) if axes == (-1, -2) else (_OPPOSITE[kind], -c)


def _axis(node):
    """The dim along which the node counts 0, 1, 2..: -1 or -2; else None."""
    node, last = through_idle_slices(through(node, CASTS)), -1
    added = read(node, {aten.unsqueeze.default}, "dim")
    if added is not None:
        if value(node).dim() != 2:
            return None
        last = -2 if added.dim in (1, -1) else -1
        node = through_idle_slices(added.source)
    return last if counts_from_zero(node) and not dtype(node).is_floating_point else None


def counts_from_zero(node: Node) -> bool:
    """Whether the node is 0, 1, 2.."""
    if read(node, {aten.arange.default}, "end", "dtype"):
        return True
    call = read(node, {aten.arange.start, aten.arange.start_step}, "end", "step", "dtype")
    return call is not None and call.source == 0 and call.step in (None, 1)


def _peel_matrix(queries, keys):
    """(u, ws) of queries = u ws for the tokens u that are the keys."""
    call = read(queries, {aten.matmul.default}, "other")
    if call is None or call.source is not keys or value(call.other).dim() != 2:
        return queries, None
    return keys, call.other
