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
from torch.fx import Graph, Node

from .. import experts, ops  # noqa: F401  registers torch.ops.moe.*
from ..graph.arguments import bind_arguments
from .calls import call
from .expert_activations import fuse_activations
from .mixing import counts_from_zero
from .patterns import CASTS, VIEWS, aten, is_last_dim, only_user, results, same_shape, scaled, users
from .reading import PLACES, dtype, is_call, read, source, value

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
    rows: list[Node] = field(default_factory=list)  # perm // k
    layers: list[_Layer] = field(default_factory=list)
    weighed: Node | None = None                  # rows * column
    column: Node | None = None                   # their gates
    gates: Node | None = None                    # [T, k]
    result: Node | None = None                   # [T, d]


def raise_experts(graph: Graph) -> int:
    """Raises experts on sorted assignments in a graph of core ATen; returns how many."""
    found = [m for m in map(_match, [n for n in graph.nodes if is_call(n, aten.sort.default)]) if m]
    for match in found:
        _rewrite(graph, match)
    if found:
        graph.eliminate_dead_code()
    if fuse_activations(graph):
        graph.eliminate_dead_code()
    return len(found)


# ---- recognition ------------------------------------------------------------------


def _match(sort: Node):
    ascending = read(sort, {aten.sort.default}, "dim")
    flat = ascending.source if ascending is not None else None
    if not is_call(flat, *VIEWS) or value(flat).dim() != 1 or value(source(flat)).dim() != 2:
        return None
    ids, order = results(sort, 0), results(sort, 1)
    if len(ids) != 1 or len(order) != 1:
        return None
    match = _Experts(sort, source(flat), 0)
    ends, biases = _match_ends(match, ids[0])
    if ends is None or not _match_layers(match, ends, biases):
        return None
    return match if _match_permutation(match, order[0]) else None


def _rows_of(node, index):
    """What a call picks rows of by the one index; None for another call."""
    call = read(node, {aten.index.Tensor}, "indices")
    return call.source if call is not None and list(call.indices) == [index] else None


def _match_ends(match: _Experts, sorted_ids: Node):
    """The rows' ends by expert, and the rows of biases by expert."""
    ends, biases = None, []
    for user in users(sorted_ids):
        table = _rows_of(user, sorted_ids)
        if table is not None and value(table).dim() == 2:
            biases.append(user)
            continue
        counts = only_user(user) if read(user, CASTS, "dtype", "other") else user
        histogram = read(counts, {aten.histc.default}, "bins", "min", "max")
        if histogram is None or ends is not None:
            return None, []
        match.num_experts, ends = histogram.bins, only_user(counts)
        if (histogram.min, histogram.max) != (0, histogram.bins - 1) \
                or read(ends, {aten.cumsum.default}, "dim", "dtype") is None:
            return None, []
    return ends, biases


def _match_layers(match: _Experts, ends: Node, biases: list) -> bool:
    for user in users(ends):
        if not _is_grouped_product(user, ends):
            return False
        bias = next((b for b in biases if _adds(only_user(b), user, b)), None)
        match.layers.append(_Layer(user, only_user(bias) if bias else user, bias))
    taken = {layer.bias for layer in match.layers}
    return bool(match.layers) and all(b in taken and only_user(b) for b in biases)


def _adds(node: Node, product: Node, bias: Node) -> bool:
    """Whether the node adds the bias to a product that nobody else reads."""
    call = read(node, {aten.add.Tensor}, "other")
    return call is not None and {call.source, call.other} == {product, bias} \
        and only_user(product) is node


def _is_grouped_product(node: Node, ends: Node) -> bool:
    if getattr(getattr(node.target, "_schema", None), "name", "") not in _GROUPED:
        return False
    call = bind_arguments(node)
    rest = [x for name, x in vars(call).items() if name not in ("input", "self", "weight", "mat2",
                                                                "offs", *PLACES)]
    return call.offs is ends and value(_weight(node)).dim() == 3 and not any(
        x is not None for x in rest)


def _weight(product: Node) -> Node:
    call = bind_arguments(product)
    return getattr(call, "weight", None) or call.mat2


def _match_permutation(match: _Experts, perm: Node) -> bool:
    """Where the rows' order is used: tokens, gates, and the way back."""
    k = value(match.idx).shape[1]
    gates, inverse = None, None
    for user in users(perm):
        if _divides_by(user, k):
            match.rows.append(user)
        elif _rows_of(user, perm) is not None and gates is None:
            gates = user
        elif _inverts(user, perm):
            inverse = user
        else:
            return False
    if gates is None or inverse is None:
        return False
    return _match_gates(match, gates) and _match_sum(match, gates, inverse, k)


def _divides_by(node: Node, k) -> bool:
    call = read(node, _FLOOR_DIVISIONS, "other", "rounding_mode")
    return call is not None and call.other == k and (
        call.rounding_mode == "floor" or is_call(node, aten.floor_divide.default))


def _inverts(node: Node, perm: Node) -> bool:
    """Whether the node puts 0, 1, 2.. in the places that the permutation names."""
    put = read(node, {aten.index_put.default}, "indices", "values")
    return put is not None and list(put.indices) == [perm] and counts_from_zero(put.values)


def _match_gates(match: _Experts, gates: Node) -> bool:
    flat = source(gates)
    match.gates = source(flat) if is_call(flat, *VIEWS) else None
    return match.gates is not None and same_shape(match.gates, match.idx)


def _match_sum(match: _Experts, gates: Node, inverse: Node, k) -> bool:
    """sum(view(index(out * unsqueeze(gates), inverse), [T, k, d]), 1)"""
    column = only_user(gates)
    added = read(column, {aten.unsqueeze.default}, "dim")
    product = only_user(column) if added and is_last_dim(column, added.dim) else None
    factors = scaled(product)
    unsorted = only_user(product) if factors and column in factors else None
    if unsorted is None or _rows_of(unsorted, inverse) is not product:
        return False
    view = only_user(unsorted)
    node = only_user(view) if is_call(view, *VIEWS) else None
    total = read(node, {aten.sum.dim_IntList}, "dim", "keepdim")
    if total is None or list(total.dim) != [1] or total.keepdim:
        return False
    if value(view).dim() != 3 or value(view).shape[1] != k or len(users(inverse)) != 1:
        return False
    match.weighed, match.column, match.result = product, column, node
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
    factors = scaled(match.weighed)
    assert factors is not None and match.result is not None  # as `_match_sum` found
    outputs = next(x for x in factors if x is not match.column)
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
        weight = call(graph, aten.permute.default, (_weight(product), [0, 2, 1]), product)
        bias = None if layer.bias is None else source(layer.bias)
        y = call(graph, moe.grouped_linear.default, (source(product), weight, bias, offsets),
                 product)
    layer.result.replace_all_uses_with(y)
