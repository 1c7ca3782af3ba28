"""Small questions about nodes of a torch graph, at any level of decomposition.

The same router reads `softmax.int` before dispatch, `_softmax` in core ATen
and amax-sub-exp-sum-div inside Inductor; these functions accept all of them.
"""

import operator

import torch
from torch.fx import Node

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
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.matmul.default}


def is_call(node, *targets) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def argument(node, position: int, name: str, default=None):
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def value(node):
    return node.meta.get("val", node.meta.get("example_value"))


def dtype(node):
    return value(node).dtype


def same_shape(a, b) -> bool:
    """Whether two nodes have one shape; sizes are compared as written, which guards nothing."""
    return list(map(str, value(a).shape)) == list(map(str, value(b).shape))


def is_last_dim(node, dim) -> bool:
    """Whether `dim` of the tensor `node` names its last dimension alone."""
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return False
        dim = dim[0]
    return dim in (-1, value(node).dim() - 1)


def through(node, targets):
    """The node behind a chain of calls of `targets`, seen against the data flow."""
    while is_call(node, *targets):
        node = node.args[0]
    return node


def is_exact_cast(node) -> bool:
    """Whether the node's type holds every value of its source."""
    if not is_call(node, *CASTS):
        return False
    source, target = dtype(node.args[0]), dtype(node)
    return source.is_floating_point and torch.promote_types(source, target) == target


def exactly(node):
    """The node behind copies and casts that change neither values nor gradients."""
    while is_call(node, *_COPIES) or is_exact_cast(node) or _is_idle_dropout(node):
        node = node.args[0]
    return node


def _is_idle_dropout(node) -> bool:
    return is_call(node, aten.dropout.default) and not node.args[2]


def is_assertion(node) -> bool:
    """Whether the node only checks what tracing knows anyway."""
    return is_call(node, aten._assert_tensor_metadata.default)


def users(node) -> list:
    return [u for u in node.users if not is_assertion(u)]


def only_user(node):
    found = users(node)
    return found[0] if len(found) == 1 else None


def item(node, position: int):
    """The call whose result `position` the node is; else None."""
    if node is not None and isinstance(node, Node) and node.target is operator.getitem \
            and node.args[1] == position:
        return node.args[0]
    return None


def filled_with(node):
    """The number that all elements of the node are; None where there is none."""
    node = through(node, SAME | {aten.expand.default}) if isinstance(node, Node) else node
    if isinstance(node, (int, float)):
        return float(node)
    if is_call(node, aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = argument(node, 1 if node.target is not aten.new_full.default else 2, "fill_value")
        return float(fill) if isinstance(fill, (int, float)) else None
    if is_call(node, aten.scalar_tensor.default):
        return float(node.args[0])
    if is_call(node, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return 0.0
    if is_call(node, aten.ones.default, aten.ones_like.default, aten.new_ones.default):
        return 1.0
    return None


def masked(node):
    """(base, mask, fill, drops) of `base` with `fill` where the mask is true (drops) or
    false (not drops); None where the node is no such call."""
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar):
        fill = filled_with(node.args[2])
        return None if fill is None else (node.args[0], node.args[1], fill, True)
    if not is_call(node, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther):
        return None
    mask, first, second = node.args
    for base, other, drops in ((first, second, False), (second, first, True)):
        fill = filled_with(other)
        if fill is not None and isinstance(base, Node):
            return base, mask, fill, drops
    return None


# ---- scores ---------------------------------------------------------------------


def softmax_input(node):
    """x, where the node is a softmax of x over its last dimension; else None."""
    if is_call(node, aten._softmax.default, aten.softmax.int, aten._safe_softmax.default):
        return node.args[0] if is_last_dim(node, node.args[1]) else None
    if not is_call(node, *DIVISIONS):
        return None
    power, total = node.args[:2]
    if not (is_call(power, aten.exp.default) and is_call(total, aten.sum.dim_IntList)):
        return None
    if total.args[0] is not power or not is_last_dim(power, total.args[1]):
        return None
    shifted = power.args[0]
    if is_call(shifted, aten.sub.Tensor) and is_call(shifted.args[1], aten.amax.default) \
            and shifted.args[1].args[0] is shifted.args[0]:
        return shifted.args[0]
    return None


def softmax_of(node):
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


def renormalisation(node):
    """(division, sum, eps, clamped) where the node is divided by its sum over the last
    dimension: by sum + eps, or by max(sum, eps) if clamped."""
    for user in users(node):
        if not is_call(user, *DIVISIONS) or user.args[0] is not node:
            continue
        total, eps, clamped = user.args[1], 0.0, False
        if is_call(total, aten.expand.default):
            total = total.args[0]
        if is_call(total, aten.add.Tensor, aten.add.Scalar) and not isinstance(total.args[1], Node):
            total, eps = total.args[0], float(total.args[1])
        elif is_call(total, aten.clamp.default, aten.clamp_min.default):
            low = argument(total, 1, "min")
            if low is None or argument(total, 2, "max") is not None:
                continue
            total, eps, clamped = total.args[0], float(low), True
        if is_call(total, aten.sum.dim_IntList) and total.args[0] is node \
                and is_last_dim(node, total.args[1]) and argument(total, 2, "keepdim", False):
            return user, total, eps, clamped
    return None


def is_probability(node) -> bool:
    """Whether the node is a distribution over experts, or a mixture of some, as far as the
    graph tells: no element is negative."""
    node = through(node, SAME | VIEWS)
    if softmax_input(node) is not None or is_call(node, aten.sigmoid.default):
        return True
    # torch spells einsum with permutations around a product.
    behind = through(node, _PICKS | TRANSPOSES | SAME | VIEWS)
    if is_call(behind, *PRODUCTS):
        node = behind
        left, right = node.args[:2]
        return _factor(left) and (_factor(right) or _is_square(right))
    if is_call(node, aten.einsum.default):
        return all(map(_factor, node.args[1]))
    if is_call(node, torch.ops.moe.adjacency_gate.default):
        return is_probability(node.args[0])
    if item(node, 0) is not None:
        return is_call(node.args[0], torch.ops.moe.similarity_inform.default,
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
    if not is_call(node, *DIVISIONS) or not is_call(node.args[0], aten.mul.Tensor):
        return False
    found = renormalisation(node.args[0])
    return found is not None and found[0] is node and any(
        isinstance(x, Node) and is_probability(x) for x in node.args[0].args[:2])
