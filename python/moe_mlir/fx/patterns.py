"""Small questions about nodes of a torch graph, at any level of decomposition.

The same router reads `softmax.int` before dispatch, `_softmax` in core ATen
and amax-sub-exp-sum-div inside Inductor; these functions accept all of them.
"""

import torch
from torch.fx import Node

aten = torch.ops.aten

CASTS = {
    aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.type_as.default,
    torch.ops.prims.convert_element_type.default,
}
SAME = CASTS | {aten.alias.default, aten.detach.default, aten.clone.default,
                aten.contiguous.default, aten.dropout.default}
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
DIVISIONS = {aten.div.Tensor, aten.div_.Tensor}


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


def only_user(node):
    return next(iter(node.users)) if len(node.users) == 1 else None


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


def renormalisation(node):
    """(division, eps) where the node is divided by its sum over the last dimension."""
    for user in node.users:
        if not is_call(user, *DIVISIONS) or user.args[0] is not node:
            continue
        total, eps = user.args[1], 0.0
        if is_call(total, aten.add.Tensor, aten.add.Scalar) and not isinstance(total.args[1], Node):
            total, eps = total.args[0], float(total.args[1])
        elif is_call(total, aten.clamp.default, aten.clamp_min.default):
            total, eps = total.args[0], float(total.args[1])
        if is_call(total, aten.sum.dim_IntList) and total.args[0] is node \
                and is_last_dim(node, total.args[1]) and argument(total, 2, "keepdim", False):
            return user, eps
    return None


def is_probability(node) -> bool:
    """Whether no element of the node can be negative, as far as the graph tells."""
    node = through(node, SAME | VIEWS)
    if softmax_input(node) is not None or is_call(node, aten.sigmoid.default):
        return True
    if is_call(node, aten.mm.default, aten.bmm.default, aten.matmul.default):
        return all(is_probability(through(x, {aten.permute.default, aten.transpose.int,
                                              aten.t.default, aten.expand.default} | SAME | VIEWS))
                   for x in node.args[:2])
    if is_call(node, torch.ops.moe.adjacency_gate.default):
        return is_probability(node.args[0])
    if getattr(node.target, "__name__", "") == "getitem":
        return is_call(node.args[0], torch.ops.moe.similarity_inform.default,
                       torch.ops.moe.attention_posterior.default) and node.args[1] == 0
    return False
