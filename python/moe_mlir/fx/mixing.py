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

from .patterns import (CASTS, DIVISIONS, VIEWS, argument, aten, dtype, filled_with, is_call, item, masked,
                       same_shape, softmax_input, through, value)

_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default)
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


def match_mixing(node) -> Mixing | None:
    """The mixing that computes the probabilities `node`, if one does."""
    outer = _product(node)
    if outer is None or outer[2] or not _is_plain(node, *outer[:2]):
        return None
    weights, e, _ = outer
    logits = softmax_input(weights)
    if logits is None or dtype(logits) != torch.float32:
        return None
    unmasked, causal = _peel_mask(logits)
    inner, tau = _peel_temperature(unmasked)
    scores = _product(inner)
    if scores is None or not scores[2] or not _is_plain(inner, *scores[:2]):
        return None
    queries, keys, _ = scores
    if value(queries).dim() != value(e).dim() or causal is None:
        return None
    u, ws = _peel_matrix(queries, keys)
    return Mixing(node, u, e, None if keys is u else keys, ws, tau, causal)


def mixing_of(node) -> str:
    """ "similarity" or "attention", where the node's probabilities are mixed by a moe op or will be."""
    if is_call(item(node, 0), torch.ops.moe.similarity_inform.default):
        return "similarity"
    if posterior_of(node) is not None:
        return "attention"
    return "similarity" if node is not None and match_mixing(node) is not None else ""


def posterior_of(node):
    """The moe.attention_posterior that mixes the node's probabilities; else None."""
    if is_call(node, aten.where.self):
        # A token that sees no other keeps its own.
        return next(filter(None, map(posterior_of, node.args[1:])), None)
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
    if is_call(node, aten.einsum.default):
        return _einsum(node)
    if not is_call(node, aten.matmul.default, aten.bmm.default, aten.mm.default):
        return None
    (a, a_order), (b, b_order) = map(_base, node.args[:2])
    if a_order != _dims(a):
        return None
    if b_order == _dims(b):
        return a, b, False
    swapped = [*b_order[:-2], *reversed(b_order[-2:])]
    return (a, b, True) if swapped == _dims(b) else None


def _dims(node):
    return list(range(value(node).dim()))


def _einsum(node):
    """`bik,bkj->bij` and `bik,bjk->bij`, in any letters."""
    equation, operands = node.args[:2]
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
    while isinstance(node, Node) and node.op == "call_function" and node.args:
        source = node.args[0]
        if is_call(node, *_PERMUTES):
            moved = _permutation(node)
            order = [moved[d] for d in order]
        elif is_call(node, *VIEWS, aten.unsqueeze.default, aten.squeeze.dim):
            kept = _without_units(source, node)
            if kept is None or any(d not in kept for d in order):
                break
            order = [kept[d] for d in order]
        else:
            break
        node = source
    return node, order


def _permutation(node):
    rank = value(node).dim()
    dims = list(range(rank))
    if is_call(node, aten.permute.default):
        return [d % rank for d in node.args[1]]
    a, b = (d % rank for d in node.args[1:3]) if len(node.args) > 2 else (-2 % rank, -1 % rank)
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


def _peel_temperature(node):
    """(dot products, tau) of `dot / tau` or `dot * scale`, with a number or a learned scalar."""
    if is_call(node, *DIVISIONS, aten.mul.Tensor, aten.mul.Scalar) and len(node.args) == 2:
        base, factor = node.args
        divides = is_call(node, *DIVISIONS)
        if isinstance(factor, Node):
            scalar = divides and value(factor).dim() == 0 and dtype(factor) == torch.float32
            return (base, factor) if scalar else (node, 1.0)
        if factor > 0:
            return base, float(factor) if divides else 1.0 / float(factor)
    return node, 1.0


def _peel_mask(node):
    """(logits, causal): causal is None where a mask is something else than a triangle."""
    found = masked(node)
    if found is None:
        return node, False
    base, mask, fill, drops = found
    if fill not in _LOWEST or not same_shape(base, node):
        return node, None
    return base, True if is_triangle(mask, drops) else None


# A mask as what it says of key j and query i: ("ge" or "le", c) for j - i >= c, j - i <= c.
_OPPOSITE = {"ge": "le", "le": "ge"}


def is_triangle(mask, drops) -> bool:
    """Whether the mask keeps the keys up to the token's own, and no others."""
    relation = _relation(mask)
    return (_negated(relation) if drops else relation) == ("le", 0)


def _negated(relation):
    if relation is None:
        return None
    kind, c = relation
    return _OPPOSITE[kind], c - 1 if kind == "ge" else c + 1


def _relation(node):
    node = through(node, VIEWS | CASTS | {aten.unsqueeze.default, aten.expand.default})
    if is_call(node, aten.logical_not.default, aten.bitwise_not.default) or (
            is_call(node, aten.eq.Scalar) and node.args[1] == 0):
        return _negated(_relation(node.args[0]))
    if is_call(node, aten.tril.default, aten.triu.default):
        kind = "le" if is_call(node, aten.tril.default) else "ge"
        return (kind, argument(node, 1, "diagonal", 0)) if _is_ones(node.args[0]) else None
    if is_call(node, aten.logical_and.default) and _is_ones(node.args[1]):
        return _relation(node.args[0])
    if is_call(node, aten.where.self) and _is_ones(node.args[1]) and filled_with(node.args[2]) == 0:
        return _relation(node.args[0])
    return _comparison(node)


def _is_ones(node) -> bool:
    return filled_with(node) == 1


def _comparison(node):
    """j - i <= c in the ways to write it, over two ranges."""
    name = getattr(node.target, "__name__", "").partition(".")[0] if node.op == "call_function" \
        else ""
    if name not in ("ge", "gt", "le", "lt") or len(node.args) != 2:
        return None
    left, right = node.args
    if isinstance(right, Node):
        axes = _axis(left), _axis(right)
        c = 0
    else:
        difference = is_call(left, aten.sub.Tensor)
        axes = tuple(map(_axis, left.args[:2])) if difference else ()
        c = right
    if axes not in ((-1, -2), (-2, -1)):
        return None
    # For integers, > c is >= c + 1.
    kind, c = name[0] + "e", c + {"gt": 1, "lt": -1}.get(name, 0)
    # i - j >= c is j - i <= -c.
    return (kind, c) if axes == (-1, -2) else (_OPPOSITE[kind], -c)


def _axis(node):
    """The dim along which the node counts 0, 1, 2..: -1 or -2; else None."""
    if not isinstance(node, Node):
        return None
    node, last = through(node, CASTS), -1
    if is_call(node, aten.unsqueeze.default):
        if value(node).dim() != 2:
            return None
        last = -2 if node.args[1] in (1, -1) else -1
        node = node.args[0]
    counts = is_call(node, aten.arange.default) or (
        is_call(node, aten.arange.start_step) and node.args[0] == 0 and node.args[2:] in ((), (1,)))
    return last if counts and not dtype(node).is_floating_point else None


def _peel_matrix(queries, keys):
    """(u, ws) of queries = u ws for the tokens u that are the keys."""
    if is_call(queries, aten.matmul.default) and queries.args[0] is keys:
        return (keys, queries.args[1]) if value(queries.args[1]).dim() == 2 else (queries, None)
    return queries, None
