"""Small questions about nodes of a torch graph, at any level of decomposition.

The same router reads `softmax.int` before dispatch, `_softmax` in core ATen
and amax-sub-exp-sum-div inside Inductor; these functions accept all of them.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from .._torch.core import OpOverload
from .reading import dtype, is_assertion, is_call, item, read, source, value

aten = torch.ops.aten
prims = torch.ops.prims

CASTS = {
    aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.type_as.default,
    prims.convert_element_type.default,
}
_COPIES = {aten.alias.default, aten.clone.default, aten.contiguous.default}
# What changes neither signs nor places of elements.
SAME = CASTS | _COPIES | {aten.detach.default, aten.dropout.default}
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
TRANSPOSES = {aten.permute.default, aten.transpose.int, aten.t.default}
# What picks parts of a tensor, or repeats it.
_PICKS = {aten.expand.default, aten.select.int, aten.index.Tensor, aten.index_select.default,
          aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default}
DIVISIONS = {aten.div.Tensor, aten.div_.Tensor}
NEGATIONS = {aten.bitwise_not.default, aten.logical_not.default}
# (base, mask, fill, drops) of a call that writes `fill` over the base by a mask.
Masked = tuple[Node, Node, float, bool]
_MATMULS = {aten.mm.default, aten.bmm.default, aten.matmul.default}
_MULTIPLICATIONS = {aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor}


def same_shape(a: Node, b: Node) -> bool:
    """Whether two nodes have one shape; sizes are compared as written, which guards nothing."""
    return list(map(str, value(a).shape)) == list(map(str, value(b).shape))


def same_sizes(a: Node, b: Node, dims: slice) -> bool:
    """As `same_shape`, for a slice of the dims; a tensor that lacks them has others."""
    return same_rank_sizes(value(a).shape, value(b).shape, dims)


def same_rank_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt],
                    dims: slice) -> bool:
    return len(a[dims]) == len(b[dims]) and list(map(str, a[dims])) == list(map(str, b[dims]))


def is_last_dim(node: Node, dim: int | Sequence[int]) -> bool:
    """Whether `dim` of the tensor `node` names its last dimension alone."""
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return False
        dim = dim[0]
    return dim in (-1, value(node).dim() - 1)


def is_number(x: object) -> bool:
    """Whether an argument is a finite number that the graph holds."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def through(node: Node, targets: Collection[OpOverload]) -> Node:
    """The node behind a chain of calls of `targets`, seen against the data flow."""
    while is_call(node, *targets):
        node = source(node)
    return node


def through_idle_slices(node: Node) -> Node:
    """The node behind slices that take all of it, as `x[None, :]` is traced."""
    while is_call(node, aten.slice.Tensor) and same_shape(node, source(node)):
        node = source(node)
    return node


def is_exact_cast(node: Node) -> bool:
    """Whether the node's type holds every value of its source."""
    cast = read(node, CASTS, "dtype", "other")
    if cast is None:
        return False
    before, after = dtype(cast.source), dtype(node)
    return before.is_floating_point and torch.promote_types(before, after) == after


def exactly(node: Node) -> Node:
    """The node behind copies and casts that change neither values nor gradients."""
    while read(node, _COPIES) or is_exact_cast(node) or _is_idle_dropout(node):
        node = source(node)
    return node


def _is_idle_dropout(node) -> bool:
    dropout = read(node, {aten.dropout.default}, "p", "train")
    return dropout is not None and not dropout.train


def users(node: Node) -> list[Node]:
    return [u for u in node.users if not is_assertion(u)]


def only_user(node: Node) -> Node | None:
    found = users(node)
    return found[0] if len(found) == 1 else None


def results(node: Node, position: int) -> list[Node]:
    """The nodes that are the result `position` of a call."""
    return [user for user in node.users if item(user, position) is node]


def product(node: Node | None) -> tuple[Node, Node] | None:
    """(a, b) of a matrix product of two tensors; None for another call."""
    call = read(node, _MATMULS, "mat2", "other")
    return None if call is None else (call.source, call.mat2 or call.other)


def scaled(node: Node | None) -> tuple[Node, Any] | None:
    """(tensor, factor) of a product; the factor may be a tensor."""
    call = read(node, _MULTIPLICATIONS, "other")
    return None if call is None else (call.source, call.other)


# ---- constants and masks -----------------------------------------------------------


def filled_with(node: Argument) -> float | None:
    """The number that all elements of the node are; None where there is none."""
    if not isinstance(node, Node):
        return float(node) if isinstance(node, (int, float)) else None
    number = _constant(node)
    return None if number is None else _as_type(number, dtype(node))


def _constant(node):
    """What a constructor fills with, or what a copy or cast copies."""
    full = read(node, {aten.full.default, aten.full_like.default, aten.new_full.default,
                       aten.scalar_tensor.default}, "size", "fill_value", "dtype", "s")
    if full is not None:
        number = full.source if node.target is aten.scalar_tensor.default else full.fill_value
        return number if isinstance(number, (int, float)) else None
    if read(node, {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default},
            "size", "dtype"):
        return 0.0
    if read(node, {aten.ones.default, aten.ones_like.default, aten.new_ones.default},
            "size", "dtype"):
        return 1.0
    copied = (read(node, CASTS, "dtype", "other") or read(node, _COPIES)
              or read(node, {aten.expand.default}, "size"))
    if copied is not None or is_call(node, aten.detach.default) or _is_idle_dropout(node):
        return filled_with(source(node))
    return None


def _as_type(number, kind: torch.dtype):
    """A number as a tensor of the type holds it; None where it cannot."""
    if not kind.is_floating_point and not math.isfinite(number):
        return None
    return float(torch.tensor(number, dtype=torch.float64).to(kind))


def masked(node: Node) -> Masked | None:
    """(base, mask, fill, drops) of `base` with `fill` where the mask is true (drops) or
    false (not drops); None where the node is no such call. The mask may broadcast the base."""
    call = read(node, {aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar},
                "mask", "value")
    if call is not None:
        fill = filled_with(call.value)
        return None if fill is None else (call.source, call.mask, fill, True)
    call = read(node, {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther}, "self",
                "other")
    if call is None:
        return None
    for base, other, drops in ((call.self, call.other, False), (call.other, call.self, True)):
        fill = filled_with(other)
        if fill is not None and isinstance(base, Node):
            return base, call.source, fill, drops
    return None


def masked_alone(node: Node) -> Masked | None:
    """As `masked`, where the mask changes neither the shape nor the type of the base."""
    found = masked(node)
    if found is None or not same_shape(found[0], node) or dtype(found[0]) != dtype(node):
        return None
    return found


# ---- scores ---------------------------------------------------------------------


def softmax_input(node: Node) -> Node | None:
    """x, where the node is a softmax of x over its last dimension; else None."""
    call = read(node, {aten._softmax.default, aten.softmax.int, aten._safe_softmax.default},
                "dim", "dtype", "half_to_float")
    if call is None:
        return _decomposed_softmax_input(node)
    # A narrower type would round x first.
    kept = torch.promote_types(dtype(call.source), dtype(node)) == dtype(node)
    return call.source if kept and is_last_dim(node, call.dim) else None


def score_of(node: Node) -> tuple[str, Node] | None:
    """(score, x), where the node is that score function of x; None for another call."""
    if (x := softmax_input(node)) is not None:
        return "softmax", x
    if call := read(node, {aten.sigmoid.default}):
        return "sigmoid", call.source
    root = read(node, {aten.sqrt.default})
    inside = root and _softplus_input(root.source)
    return None if inside is None else ("sqrtsoftplus", inside)


def score_above(node: Node, user: Node) -> tuple[str, Node] | None:
    """(name, result) of the score of the node that a user of it is, or begins; a softmax is
    `softmax_of`'s. None of two ops between which 16 bits are rounded."""
    for candidate in (user, *users(user)):
        found = score_of(candidate)
        if found is None or found[0] == "softmax" or found[1] is not node:
            continue
        # The op rounds once; code that goes on in more bits would tell.
        if candidate is not user and dtype(user).itemsize < 4:
            return None
        return found[0], candidate
    return None


def _softplus_input(node):
    """x, where the node is ln(1 + e^x), in one call or as it is decomposed."""
    if call := read(node, {aten.softplus.default}):
        return call.source
    chosen = read(node, {aten.where.self}, "self", "other")
    logarithm = chosen and read(chosen.other, {aten.log1p.default})
    power = logarithm and read(logarithm.source, {aten.exp.default})
    above = chosen and read(chosen.source, {aten.gt.Scalar}, "other")
    # For large x the logarithm is x.
    if power and above and power.source is chosen.self is above.source \
            and is_number(above.other) and above.other >= 20:
        return power.source
    return None


def log_sigmoid_input(node: Node) -> Node | None:
    """x, where the node is ln sigmoid x, in one call or as it is decomposed."""
    if call := read(node, {aten.log_sigmoid.default}):
        return call.source
    # min(0, x) - ln(1 + e^-|x|)
    shifted = read(node, {aten.sub.Tensor}, "other")
    least = shifted and read(shifted.source, {aten.minimum.default}, "other")
    logarithm = shifted and read(shifted.other, {aten.log1p.default})
    power = logarithm and read(logarithm.source, {aten.exp.default})
    negative = power and read(power.source, {aten.neg.default})
    size = negative and read(negative.source, {aten.abs.default})
    if least and size and least.other is size.source and filled_with(least.source) == 0:
        return size.source
    return None


def log_sum_input(node: Node) -> Node | None:
    """x, where the node is ln sum e^x over the last dim, kept, in one call or as it is decomposed."""
    if call := read(node, {aten.logsumexp.default}, "dim", "keepdim"):
        return call.source if call.keepdim and is_last_dim(call.source, call.dim) else None
    # ln(sum e^(x - m)) + m for m = max x, or 0 where that is no number
    added = read(node, {aten.add.Tensor}, "other")
    logarithm = added and read(added.source, {aten.log.default})
    total = logarithm and read(logarithm.source, {aten.sum.dim_IntList}, "dim", "keepdim", "dtype")
    power = total and read(total.source, {aten.exp.default})
    shifted = power and read(power.source, {aten.sub.Tensor}, "other")
    chosen = shifted and masked(shifted.other)
    top = chosen and read(chosen[0], {aten.amax.default}, "dim", "keepdim")
    if chosen and top and shifted.other is added.other and chosen[2:] == (0.0, True) \
            and top.source is shifted.source and top.keepdim and is_last_dim(top.source, top.dim) \
            and _is_total(logarithm.source, total.source) and dtype(node).itemsize >= 4:
        return shifted.source
    return None


def _decomposed_softmax_input(node):
    """exp(x - amax x) / sum of it, where no step rounds to 16 bits."""
    division = read(node, DIVISIONS, "other")
    power = division and read(division.source, {aten.exp.default})
    if not power or dtype(node).itemsize < 4 or not _is_total(division.other, division.source):
        return None
    shifted = read(power.source, {aten.sub.Tensor}, "other")
    top = shifted and read(shifted.other, {aten.amax.default}, "dim", "keepdim")
    if top and top.source is shifted.source and top.keepdim and is_last_dim(top.source, top.dim) \
            and dtype(shifted.source).itemsize >= 4:
        return shifted.source
    return None


def _is_total(node, summed) -> bool:
    """Whether the node is the sum over the last dim of `summed`, kept, in a type that rounds none."""
    total = read(node, {aten.sum.dim_IntList}, "dim", "keepdim", "dtype")
    return total is not None and total.source is summed and bool(total.keepdim) \
        and is_last_dim(summed, total.dim) \
        and torch.promote_types(dtype(summed), dtype(node)) == dtype(node)


def softmax_of(node: Node) -> Node | None:
    """The softmax of the node over its last dimension, where the graph computes it."""
    for user in users(node):
        if softmax_input(user) is node:
            return user
        if is_call(user, aten.sub.Tensor):
            for power in user.users:
                for division in power.users:
                    if softmax_input(division) is node:
                        return division
    return None


def renormalisation(node: Node) -> tuple[Node, Node, float, bool] | None:
    """(division, sum, eps, clamped) where the node is divided by its sum over the last
    dimension: by sum + eps, or by max(sum, eps) if clamped."""
    for user in users(node):
        division = read(user, DIVISIONS, "other")
        if division is None or division.source is not node or not isinstance(division.other, Node):
            continue
        total, eps, clamped = _sum_and_eps(division.other)
        if total is not None and _is_total(total, node):
            return user, total, eps, clamped
    return None


def _sum_and_eps(node):
    """(sum, eps, clamped) of a divisor; the sum is None where the divisor is nothing such."""
    expanded = read(node, {aten.expand.default}, "size")
    node = node if expanded is None else expanded.source
    added = read(node, {aten.add.Tensor, aten.add.Scalar}, "other")
    if added is not None:
        usable = is_number(added.other) and added.other >= 0
        return (added.source, float(added.other), False) if usable else (None, 0.0, False)
    limited = read(node, {aten.clamp.default, aten.clamp_min.default}, "min", "max")
    if limited is not None:
        usable = is_number(limited.min) and limited.max is None
        return (limited.source, float(limited.min), True) if usable else (None, 0.0, False)
    return node, 0.0, False


def is_probability(node: Node) -> bool:
    """Whether the node is a distribution over experts, or a mixture of some, as far as the
    graph tells: no element is negative."""
    node = through(node, SAME | VIEWS)
    if softmax_input(node) is not None or read(node, {aten.sigmoid.default}):
        return True
    # torch spells einsum with permutations around a product.
    factors = product(through(node, _PICKS | TRANSPOSES | SAME | VIEWS))
    if factors is not None:
        left, right = factors
        return _factor(left) and (_factor(right) or _is_square(right))
    einsum = read(node, {aten.einsum.default}, "tensors", "path")
    if einsum is not None:
        return all(map(_factor, einsum.tensors))
    if is_call(node, torch.ops.moe.adjacency_gate.default):
        return is_probability(source(node))
    mixed = item(node, 0)
    if mixed is not None:
        return is_call(mixed, torch.ops.moe.similarity_inform.default,
                       torch.ops.moe.attention_posterior.default)
    return _is_normalised(node)


def _factor(node) -> bool:
    return is_probability(through(node, _PICKS | TRANSPOSES | SAME | VIEWS))


def _is_square(node) -> bool:
    """A matrix over pairs of experts: mixing distributions with it keeps their meaning."""
    shape = value(node).shape
    return len(shape) == 2 and shape[0] == shape[1]


def _is_normalised(node) -> bool:
    """x / sum x, where x is a product with a distribution: a posterior."""
    division = read(node, DIVISIONS, "other")
    factors = division and scaled(division.source)
    if not factors:
        return False
    found = renormalisation(division.source)
    return found is not None and found[0] is node and any(
        isinstance(x, Node) and is_probability(x) for x in factors)
