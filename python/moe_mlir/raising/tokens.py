"""Selections among tokens: indexers of sparse attention, which are no routers.

A router's scores have an expert for each row of a weight. Those of an indexer come from a product
with keys, so that their last dim is the tokens'.
"""

from torch.fx import Node

from .patterns import (
    CASTS,
    NEGATIONS,
    TRANSPOSES,
    VIEWS,
    aten,
    is_last_dim,
    product,
    same_sizes,
)
from .reading import is_call, read, source, value

# What leaves the last dim of its first argument where it is.
_KEEPS = CASTS | NEGATIONS | {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.relu.default, aten.relu_.default, aten.clamp.default, aten.clamp_min.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar,
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.expand.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default, *VIEWS}
_MOST_CALLS = 64


def selects_tokens(node: Node) -> bool:
    """Whether the last dim of the node is that of keys, or of what else is computed of tokens."""
    for _ in range(_MOST_CALLS):
        factors = product(node)
        if factors is not None:
            node = factors[1]
        elif is_call(node, *TRANSPOSES):
            return _moves_last_dim(node) and source(node).op == "call_function"
        elif (total := read(node, {aten.sum.dim_IntList}, "dim", "keepdim", "dtype")) is not None:
            if any(is_last_dim(total.source, dim) for dim in total.dim):
                return False
            node = total.source
        elif is_call(node, aten.where.self):
            chosen = read(node, {aten.where.self}, "self", "other")
            node = next((x for x in (chosen.self, chosen.other) if same_sizes(x, node, slice(-1, None))
                         and x.op == "call_function"), chosen.source)
        elif is_call(node, *_KEEPS) and same_sizes(source(node), node, slice(-1, None)):
            node = source(node)
        else:
            return False
    return False


def _moves_last_dim(node) -> bool:
    """Whether a transposition puts another dim last."""
    swapped = read(node, {aten.transpose.int}, "dim0", "dim1")
    if swapped is not None:
        rank = value(node).dim()
        dims = {swapped.dim0 % rank, swapped.dim1 % rank}
        return len(dims) == 2 and rank - 1 in dims
    permuted = read(node, {aten.permute.default}, "dims")
    return permuted is None or not is_last_dim(node, permuted.dims[-1])
