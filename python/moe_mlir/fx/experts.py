"""Experts that run on sorted assignments, raised to dispatch, grouped layers and combine.

The form that models write (transformers' "grouped_mm"), with x `[T, d]` and the
selected experts idx `[T, k]`:

    e, perm = sort(view(idx))              rows in the order of their experts
    ends = cumsum(histc(e))                where each expert's rows end
    h = grouped_mm(x[perm // k], w, ends) [+ b[e]]
    ...                                    row by row, any number of such layers
    y = sum(view((out * gates[perm])[inverse(perm)], [T, k, d]), 1)

becomes

    slots, offsets, _ = dispatch(idx); h = grouped_linear(x[token_rows(slots)], w, b, offsets)
    ...; y = combine(out, gates, slots)

whose rows may stand in another order inside an expert: no row reads another.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .. import experts, ops  # noqa: F401  registers torch.ops.moe.*
from .calls import call
from .patterns import (CASTS, VIEWS, argument, aten, dtype, is_call, item, only_user, same_shape,
                       users, value)

moe = torch.ops.moe
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_FLOOR_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)


@dataclass
class _Layer:
    """grouped_mm(x, w, ends), and the sum with its bias where there is one."""

    product: Node
    result: Node
    bias: Node | None


@dataclass
class _Experts:
    sort: Node
    idx: Node
    num_experts: int
    rows: list = field(default_factory=list)     # perm // k
    layers: list = field(default_factory=list)
    weighed: Node | None = None                  # rows * column
    column: Node | None = None                   # their gates
    gates: Node | None = None                    # [T, k]
    result: Node | None = None                   # [T, d]


def raise_experts(graph) -> int:
    """Raises experts on sorted assignments in a graph of core ATen; returns how many."""
    found = [m for m in map(_match, [n for n in graph.nodes if is_call(n, aten.sort.default)]) if m]
    for match in found:
        _rewrite(graph, match)
    if found:
        graph.eliminate_dead_code()
    return len(found)


# ---- recognition ------------------------------------------------------------------


def _match(sort: Node):
    flat = sort.args[0]
    if not is_call(flat, *VIEWS) or value(flat).dim() != 1 or value(flat.args[0]).dim() != 2:
        return None
    outputs = {i: [u for u in sort.users if item(u, i) is sort] for i in (0, 1)}
    if len(outputs[0]) != 1 or len(outputs[1]) != 1:
        return None
    match = _Experts(sort, flat.args[0], 0)
    ends, biases = _match_ends(match, outputs[0][0])
    if ends is None or not _match_layers(match, ends, biases):
        return None
    return match if _match_permutation(match, outputs[1][0]) else None


def _match_ends(match: _Experts, sorted_ids: Node):
    """The rows' ends by expert, and the rows of biases by expert."""
    ends, biases = None, []
    for user in users(sorted_ids):
        if is_call(user, aten.index.Tensor) and list(user.args[1]) == [sorted_ids] \
                and value(user.args[0]).dim() == 2:
            biases.append(user)
            continue
        counts = only_user(user) if is_call(user, *CASTS) else user
        if not is_call(counts, aten.histc.default) or ends is not None:
            return None, []
        match.num_experts, low, high = (argument(counts, i, name, 0) for i, name in
                                        ((1, "bins"), (2, "min"), (3, "max")))
        ends = only_user(counts)
        if (low, high) != (0, match.num_experts - 1) or not is_call(ends, aten.cumsum.default):
            return None, []
    return ends, biases


def _match_layers(match: _Experts, ends: Node, biases: list) -> bool:
    for user in users(ends):
        if not _is_grouped_product(user, ends):
            return False
        bias = next((b for b in biases if only_user(user) is not None
                     and is_call(only_user(user), aten.add.Tensor)
                     and b in only_user(user).args), None)
        match.layers.append(_Layer(user, only_user(user) if bias else user, bias))
    taken = {layer.bias for layer in match.layers}
    return bool(match.layers) and all(b in taken and only_user(b) for b in biases)


def _is_grouped_product(node: Node, ends: Node) -> bool:
    if getattr(getattr(node.target, "_schema", None), "name", "") not in _GROUPED:
        return False
    return argument(node, 2, "offs") is ends and value(node.args[1]).dim() == 3 \
        and argument(node, 3, "bias") is None and argument(node, 4, "out_dtype") is None


def _match_permutation(match: _Experts, perm: Node) -> bool:
    """Where the rows' order is used: tokens, gates, and the way back."""
    k = value(match.idx).shape[1]
    gates, inverse = None, None
    for user in users(perm):
        if is_call(user, *_FLOOR_DIVISIONS) and user.args[1] == k and _rounds_down(user):
            match.rows.append(user)
        elif is_call(user, aten.index.Tensor) and list(user.args[1]) == [perm] and gates is None:
            gates = user
        elif is_call(user, aten.index_put.default) and list(user.args[1]) == [perm] \
                and is_call(user.args[2], aten.arange.start_step, aten.arange.default):
            inverse = user
        else:
            return False
    if gates is None or inverse is None:
        return False
    return _match_gates(match, gates) and _match_sum(match, gates, inverse, k)


def _rounds_down(division: Node) -> bool:
    return is_call(division, aten.floor_divide.default) \
        or division.kwargs.get("rounding_mode", argument(division, 2, "rounding_mode")) == "floor"


def _match_gates(match: _Experts, gates: Node) -> bool:
    flat = gates.args[0]
    match.gates = flat.args[0] if is_call(flat, *VIEWS) else None
    return match.gates is not None and same_shape(match.gates, match.idx)


def _match_sum(match: _Experts, gates: Node, inverse: Node, k) -> bool:
    """sum(view(index(out * unsqueeze(gates), inverse), [T, k, d]), 1)"""
    column = only_user(gates)
    product = only_user(column) if is_call(column, aten.unsqueeze.default) else None
    unsorted = only_user(product) if is_call(product, aten.mul.Tensor) else None
    if not is_call(unsorted, aten.index.Tensor) or list(unsorted.args[1]) != [inverse]:
        return False
    view = only_user(unsorted)
    total = only_user(view) if is_call(view, *VIEWS) else None
    if not is_call(total, aten.sum.dim_IntList) or list(total.args[1]) != [1] \
            or argument(total, 2, "keepdim", False):
        return False
    if value(view).dim() != 3 or value(view).shape[1] != k or len(users(inverse)) != 1:
        return False
    match.weighed, match.column, match.result = product, column, total
    return True


# ---- the rewrite ------------------------------------------------------------------


def _rewrite(graph, match: _Experts) -> None:
    with graph.inserting_before(match.sort):
        plan = call(graph, moe.dispatch.default,
                    (match.idx, match.num_experts, *[None] * 6, 1), match.sort)
        slots, offsets = (call(graph, operator.getitem, (plan, i), match.sort) for i in (0, 1))
        tokens = call(graph, moe.token_rows.default, (slots,), match.sort)
    for rows in match.rows:
        rows.replace_all_uses_with(tokens)
    for layer in match.layers:
        _rewrite_layer(graph, layer, offsets)
    outputs = next(x for x in match.weighed.args[:2] if x is not match.column)
    with graph.inserting_before(match.result):
        gates = match.gates
        if dtype(gates) != torch.float32:
            gates = call(graph, torch.ops.prims.convert_element_type.default,
                         (gates, torch.float32), match.result)
        y = call(graph, moe.combine.default, (outputs, gates, slots, None), match.result)
        if dtype(y) != dtype(match.result):
            y = call(graph, torch.ops.prims.convert_element_type.default,
                     (y, dtype(match.result)), match.result)
    match.result.replace_all_uses_with(y)


def _rewrite_layer(graph, layer: _Layer, offsets: Node) -> None:
    product = layer.product
    with graph.inserting_before(product):
        weight = call(graph, aten.permute.default, (product.args[1], [0, 2, 1]), product)
        bias = None if layer.bias is None else layer.bias.args[0]
        y = call(graph, moe.grouped_linear.default, (product.args[0], weight, bias, offsets),
                 product)
    layer.result.replace_all_uses_with(y)
