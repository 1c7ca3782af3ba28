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
With expert parallelism idx holds E where another rank has the expert. Rows of
such a selection, which the model fills with zeros wherever it made any, do not
exist behind `dispatch`. The form is read in core ATen and before, where it
writes in place what nobody else sees.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .. import experts, ops  # noqa: F401  registers torch.ops.moe.*
from ..graph.arguments import bind_arguments
from ..ops._check import ACTIVATIONS
from .calls import call
from .expert_activations import fuse_activations
from .memory import Writes, between, origin, written
from .mixing import counts_from_zero
from .patterns import (
    CASTS,
    TRANSPOSES,
    VIEWS,
    aten,
    is_last_dim,
    masked_alone,
    only_user,
    results,
    same_shape,
    scaled,
    users,
)
from .reading import PLACES, dtype, is_assertion, is_call, read, source, value

moe = torch.ops.moe
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_FLOOR_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
_CLAMPS = (aten.clamp.default, aten.clamp_.default, aten.clamp_max.default, aten.clamp_max_.default)


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
    masked: list[Node] = field(default_factory=list)  # rows with zeros for other ranks' experts
    clamped: list[Node] = field(default_factory=list)  # ids for the biases of these rows
    weighed: Node | None = None                  # rows * column
    column: Node | None = None                   # their gates
    gates: Node | None = None                    # [T, k]
    result: Node | None = None                   # [T, d]

    @property
    def inputs(self) -> list[Node]:
        """What the layers of experts are computed from."""
        read_by_rows = [x for rows in self.rows for x in map(source, users(rows))]
        weights = [_weight(layer.product) for layer in self.layers]
        biases = [source(layer.bias) for layer in self.layers if layer.bias is not None]
        return [self.idx, self.gates, *read_by_rows, *weights, *biases]

    @property
    def results(self) -> list[Node]:
        """What is not read inside; ids may be clamped for biases that there are not."""
        return [self.result, *self.clamped]


def raise_experts(graph: Graph, device: str | None = None) -> int:
    """Raises experts on sorted assignments, and fuses what is done between their layers.

    Given a device, those that have kernels there alone. Returns how many places have changed.
    """
    sorts = [n for n in graph.nodes if is_call(n, aten.sort.default)]
    found = [m for m in map(_match, sorts) if m and (device is None or _has_kernels(m, device))]
    writes, closed, dead = Writes(graph), [], set()
    for match in found:
        inside = {*between(match.inputs, match.results)}.difference(match.inputs)
        calls = [n for n in inside if any(True for _ in written(n))]
        if _is_closed(match, inside, calls, writes):
            closed.append(match)
            dead.update(calls)
    for match in closed:
        _rewrite(graph, match)
    if closed:
        # What the form wrote in place is dead now, though it writes.
        graph.eliminate_dead_code(
            lambda node: node.is_impure() and node not in dead and not is_assertion(node))
    fused = fuse_activations(graph)
    if fused:
        graph.eliminate_dead_code()
    return len(closed) + fused


def _has_kernels(match: _Experts, device: str) -> bool:
    results = [value(layer.product) for layer in match.layers]
    return all(x.device.type == device and x.dtype in ACTIVATIONS for x in results)


def _is_closed(match: _Experts, inside: set, calls: list, writes: Writes) -> bool:
    """Whether nothing that the experts make between inputs and result is read elsewhere or lasts."""
    seen: set[Node] = set()
    queue = [match.sort]
    while queue:
        node = queue.pop()
        if node is not match.result and node not in seen:
            seen.add(node)
            queue += users(node)
    own = all(origin(x) in inside for node in calls for x in written(node))
    return own and inside.issuperset(seen) \
        and not writes.disturb(match.results, match.inputs, calls)


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
    ends, biases, absent = None, [], []
    for user in users(sorted_ids):
        if _is_table(user, sorted_ids):
            biases.append(user)
        elif is_call(user, *_CLAMPS):
            match.clamped.append(user)
        elif is_call(user, aten.ge.Scalar):
            absent.append(user)
        elif ends is not None or (ends := _read_ends(match, user)) is None:
            return None, []
    for node in match.clamped:
        # The biases of rows that do not exist; these are the last ones.
        call = read(node, _CLAMPS, "min", "max")
        if call is None or call.min is not None or call.max != match.num_experts - 1 \
                or not all(_is_table(user, node) for user in users(node)):
            return None, []
        biases += users(node)
    return (ends, biases) if all(_match_masks(match, node) for node in absent) else (None, [])


def _is_table(node: Node, ids: Node) -> bool:
    table = _rows_of(node, ids)
    return table is not None and value(table).dim() == 2


def _read_ends(match: _Experts, node: Node) -> Node | None:
    """cumsum(histc(ids)), from a user of the ids."""
    counts = only_user(node) if read(node, CASTS, "dtype", "other") else node
    histogram = read(counts, {aten.histc.default}, "bins", "min", "max")
    if histogram is None or (histogram.min, histogram.max) != (0, histogram.bins - 1):
        return None
    match.num_experts, ends = histogram.bins, only_user(counts)
    return ends if read(ends, {aten.cumsum.default}, "dim", "dtype") else None


def _match_masks(match: _Experts, absent: Node) -> bool:
    """Zeros in rows whose id is no expert of this rank: masked_fill(x, unsqueeze(ids >= E), 0)."""
    call, mask = read(absent, {aten.ge.Scalar}, "other"), only_user(absent)
    column = read(mask, {aten.unsqueeze.default}, "dim")
    if call is None or call.other != match.num_experts or column is None or column.dim != -1:
        return False
    for user in users(mask):
        filled = masked_alone(user)
        if filled is None or filled[1] is not mask or filled[2] != 0 or not filled[3]:
            return False
        match.masked.append(user)
    return True


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
    call = read(node, {aten.add.Tensor, aten.add_.Tensor}, "other")
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
        if is_call(user, aten.empty_like.default):
            continue  # the memory of its inverse
        if _divides_by(user, k) and all(_rows_of(x, user) is not None for x in users(user)):
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
    put = read(node, {aten.index_put.default, aten.index_put_.default}, "indices", "values")
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
    for node in match.masked:
        filled = masked_alone(node)
        assert filled is not None  # as `_match_masks` found
        node.replace_all_uses_with(filled[0])
    for layer in match.layers:
        _rewrite_layer(graph, layer, offsets)
    factors = scaled(match.weighed)
    assert factors is not None and match.result is not None  # as `_match_sum` found
    outputs = next(x for x in factors if x is not match.column)
    with graph.inserting_before(match.result):
        gates = _cast(graph, match.gates, torch.float32, match.result)
        y = call(graph, moe.combine.default, (outputs, gates, slots, None), match.result)
        y = _cast(graph, y, dtype(match.result), match.result)
    match.result.replace_all_uses_with(y)


def _cast(graph, node: Node, to: torch.dtype, like: Node) -> Node:
    # One that has a gradient: the graph may be trained.
    return node if dtype(node) == to else call(graph, aten.to.dtype, (node, to), like)


def _rewrite_layer(graph, layer: _Layer, offsets: Node) -> None:
    product = layer.product
    weight, transposed = _stored(_weight(product))
    with graph.inserting_before(product):
        bias = None if layer.bias is None else source(layer.bias)
        y = call(graph, moe.grouped_linear.default,
                 (source(product), weight, bias, offsets, None, transposed), product)
    layer.result.replace_all_uses_with(y)


def _stored(weight: Node) -> tuple[Node, bool]:
    """The weights of a product as the model has them, and whether they are `[experts, in, out]`."""
    swap = read(weight, TRANSPOSES, "dim0", "dim1", "dims")
    if swap is None:
        return weight, True
    dims = [x % 3 for x in (swap.dims or sorted((swap.dim0 % 3, swap.dim1 % 3), reverse=True))]
    return (swap.source, False) if dims in ([0, 2, 1], [2, 1]) else (weight, True)
