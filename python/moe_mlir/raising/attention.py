"""Attention beside ops that need the entropies of its heads: one pass over the keys for both.

`moe.attention` emits the log-sum-exps and entropies of its rows beside its
output. Where a graph has an attention, torch's or ours, and a
`moe.attention_posterior` or `moe.attention_entropy` of the same weights, the
attention becomes ours and hands its rows over.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from ..graph.arguments import bind_arguments
from ..ops._check import ACTIVATIONS
from .calls import call
from .masks import causal_but_for, is_causal
from .memory import origin, written
from .patterns import SAME, TRANSPOSES, VIEWS, aten, same_shape
from .reading import dtype, is_call, value

moe = torch.ops.moe
_SDPA = aten.scaled_dot_product_attention.default
# What Inductor's graphs have of it on the CPU: (output, log-sum-exps).
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_TAKES_ROWS = (moe.attention_posterior.default, moe.attention_entropy.default)


@dataclass(frozen=True)
class Weights:
    """What decides the weight of a key for a query; `bias` may be a mask of pairs."""

    q: Node
    k: Node
    bias: Node | None
    mask: Node | None
    scale: float
    causal: bool
    window: int | None
    exclude_self: bool
    precision: str

    def seen_as(self, wanted: "Weights") -> "Weights":
        """With a mask of pairs as the mask of keys that is wanted, where it says no more.

        Rows of masked queries may then be any numbers.
        """
        if self.bias is None or self.mask is not None or wanted.mask is None:
            return self
        causal = causal_but_for(self.bias, _bare(wanted.mask))
        if causal is None or (causal and not _is_square(self.q, self.k)):
            return self
        return replace(self, bias=None, mask=wanted.mask, causal=causal or self.causal)

    def difference(self, wanted: "Weights") -> str:
        """Empty, or how these weights differ from those of the same queries and keys."""
        for name in ("bias", "mask"):
            if not _is_same(getattr(self, name), getattr(wanted, name)):
                return f"its {name} is another"
        for name in ("causal", "window", "exclude_self"):
            mine, other = getattr(self, name), getattr(wanted, name)
            if mine != other:
                return f"its {name} is {mine}, not {other}"
        if not math.isclose(self.scale, wanted.scale, rel_tol=1e-12):
            return f"its scale is {self.scale}, not {wanted.scale}"
        if self.precision not in ("ieee", wanted.precision):
            return f"its precision is {self.precision}, not {wanted.precision}"
        return ""


@dataclass(frozen=True)
class Attention:
    """A call of torch's attention or ours; `reason` says why it cannot give its rows."""

    node: Node
    v: Node
    weights: Weights
    reason: str = ""


@dataclass(frozen=True)
class Rows:
    """An op that could have the rows of an attention; `reason` says why it does not get them."""

    taker: Node
    attention: Attention
    reason: str

    @property
    def left(self) -> str:
        return f"the attention's entropies: {self.reason}" if self.reason else ""


def raise_attention(graph: Graph) -> int:
    """Lets attention give its rows to the ops that want them; returns to how many."""
    for node in list(graph.nodes):
        if is_call(node, moe.attention.default):
            _see_by_position(node)
    matches = [match for match in find_rows(graph) if not match.reason]
    order = {node: i for i, node in enumerate(graph.nodes)}
    given: dict[Node, tuple] = {}
    for match in matches:
        node = match.attention.node
        if node not in given:
            takers = [other.taker for other in matches if other.attention is match.attention]
            first = min([node, *takers], key=order.__getitem__)
            given[node] = _emit(graph, match.attention, first)
        _take(graph, match, *given[node])
    return len(matches)


def find_rows(graph: Graph) -> list[Rows]:
    """Every op on the rows of an attention that the graph has."""
    attentions = [found for found in map(_attention, graph.nodes) if found is not None]
    takers = [node for node in graph.nodes if is_call(node, *_TAKES_ROWS)] if attentions else []
    if not takers:
        return []
    order = {node: i for i, node in enumerate(graph.nodes)}
    changed = {origin(x) for node in graph.nodes for x in written(node)}
    found = (_match(node, attentions, order, changed) for node in takers)
    return [match for match in found if match is not None]


def _match(taker, attentions, order, changed) -> Rows | None:
    arguments = bind_arguments(taker)
    if getattr(arguments, "row_lse", None) is not None:
        return None
    if getattr(arguments, "query_mask", None) is not None:
        return None  # the attention masks queries by its keys' mask
    wanted, best = _weights(arguments), None
    for attention in attentions:
        has = attention.weights
        if not (_is_same(has.q, wanted.q) and _is_same(has.k, wanted.k)):
            continue
        if _reads_masked_rows_nowhere(taker):
            has = has.seen_as(wanted)
        reason = (attention.reason or has.difference(wanted)
                  or _unready(attention, taker, order)
                  or _changes(has, changed))
        if not reason:
            return Rows(taker, attention, "")
        best = best or Rows(taker, attention, reason)
    return best


def _reads_masked_rows_nowhere(taker) -> bool:
    """Whether the rows of masked queries may be any numbers, or can be made 0 as they should be."""
    if is_call(taker, moe.attention_posterior.default):
        return True
    arguments, mean = bind_arguments(taker), _item(taker, 0)
    return not (mean and mean.users) and _is_square(arguments.q, arguments.k)


def _unready(attention, taker, order) -> str:
    """An attention after the taker moves before it, where its operands are there."""
    if order[attention.node] < order[taker]:
        return ""
    ours = is_call(attention.node, moe.attention.default)
    ready = all(order[x] < order[taker] for x in attention.node.all_input_nodes)
    return "" if ready and not ours else "it comes later"


def _changes(weights, changed) -> str:
    operands = (weights.q, weights.k, weights.bias, weights.mask)
    is_changed = any(x is not None and origin(x) in changed for x in operands)
    return "the graph writes its operands in place" if is_changed else ""


def left_of(taker: Node | None) -> str:
    """Which part of an op on an attention's rows stays as it is, and why; empty where none."""
    if taker is None or not is_call(taker, *_TAKES_ROWS):
        return ""
    return next((rows.left for rows in find_rows(taker.graph) if rows.taker is taker), "")


# ------------------------------------------------------------------ attentions


def _attention(node) -> Attention | None:
    if is_call(node, moe.attention.default):
        arguments = bind_arguments(node)
        return Attention(node, arguments.v, _weights(arguments))
    if not is_call(node, _SDPA, _FLASH):
        return None
    arguments = bind_arguments(node)
    q, k, v = arguments.query, arguments.key, arguments.value
    bias, causal = _bias(arguments.attn_mask, q, k)
    causal = causal or arguments.is_causal
    weights = Weights(q, k, bias, None, _scale(arguments.scale, q), causal, None, False, "ieee")
    return Attention(node, v, weights, _why_not(node, arguments, bias))


def _why_not(node, arguments, bias) -> str:
    """Why torch's attention cannot be ours; empty where it can."""
    q, k, v = arguments.query, arguments.key, arguments.value
    device = value(q).device.type
    if device != "cpu":
        # Ours has been measured beside torch's on the CPU only.
        return f"it runs on {device}, where torch's own is kept"
    if arguments.dropout_p:
        return "it drops weights out"
    if reason := _misfit(value(q), value(k), value(v), None if bias is None else value(bias),
                         arguments.is_causal):
        return reason
    out = node if node.target is _SDPA else _item(node, 0)
    if out is None or (node.target is _FLASH and _item(node, 1) is not None):
        return "its log-sum-exps are used"
    if dtype(out) != dtype(q) or _layout(value(out)) is None:
        return "its result has another type or layout"
    return ""


def _misfit(q, k, v, bias, causal) -> str:
    """What of the operands (tensors) moe.attention does not take; empty where nothing."""
    def sizes(*dims):
        return list(map(str, dims))

    if any(x.dtype not in ACTIVATIONS or x.dtype != q.dtype for x in (q, k, v)):
        return f"its operands are {q.dtype}, {k.dtype} and {v.dtype}"
    if any(x.dim() != 4 for x in (q, k, v)):
        return f"its operands have {q.dim()} dims, not 4"
    if sizes(*k.shape) != sizes(*q.shape[:2], k.shape[2], q.shape[3]) \
            or sizes(*v.shape[:3]) != sizes(*k.shape[:3]) or q.shape[3] == 0:
        return "its queries, keys and values have other batches, heads or widths"
    if causal and str(q.shape[2]) != str(k.shape[2]):
        return "it is causal from the first of its keys, not to the last"
    if bias is not None:
        full = sizes(*q.shape[:3], k.shape[2])
        own = sizes(*[1] * (4 - bias.dim()), *bias.shape)
        if bias.dtype not in (*ACTIVATIONS, torch.bool) or len(own) != 4 \
                or any(a not in ("1", b) for a, b in zip(own, full, strict=True)):
            return f"its bias is {bias.dtype} of shape {list(bias.shape)}"
    return ""


def _weights(arguments) -> Weights:
    """Of an op of ours."""
    bias, causal = _bias(arguments.bias, arguments.q, arguments.k)
    return Weights(arguments.q, arguments.k, bias, arguments.mask,
                   _scale(arguments.scale, arguments.q), causal or arguments.causal,
                   arguments.window, arguments.exclude_self, arguments.precision)


def _scale(scale, q) -> float:
    return float(value(q).shape[-1]) ** -0.5 if scale is None else float(scale)


def _bias(bias, q, k):
    """(what is left of the bias, whether it was a causal mask)."""
    causal = bias is not None and _is_square(q, k) and is_causal(bias)
    return (None, True) if causal else (bias, False)


def _is_square(q, k) -> bool:
    return str(value(q).shape[2]) == str(value(k).shape[2])


def _see_by_position(node) -> None:
    """A bias that is a causal mask as what it is: a kernel skips what nobody sees."""
    arguments = bind_arguments(node)
    bias, causal = _bias(arguments.bias, arguments.q, arguments.k)
    if causal:
        _set(node, bias=bias, causal=True)


def _set(node, **changed) -> None:
    """Changes arguments of a call by their names."""
    arguments = vars(bind_arguments(node)) | changed
    node.args = tuple(arguments[x.name] for x in node.target._schema.arguments)
    node.kwargs = {}


# ----------------------------------------------------------------- same values


def _is_same(a, b) -> bool:
    """Whether two operands hold the same values, as far as views and copies of them tell."""
    while isinstance(a, Node) and isinstance(b, Node):
        a, b = _bare(a), _bare(b)
        if a is b:
            return True
        if not (_is_view(a) and a.target is b.target
                and _plain(a.args[1:], a.kwargs) == _plain(b.args[1:], b.kwargs)):
            return False
        a, b = a.args[0], b.args[0]
    return a is b


def _bare(node):
    """The node behind copies, and views and casts that change nothing."""
    while is_call(node, *SAME, *VIEWS, aten.expand.default):
        source = node.args[0]
        idle = dtype(source) == dtype(node) and same_shape(source, node)
        if not idle or is_call(node, aten.dropout.default):
            break
        node = source
    return node


def _is_view(node) -> bool:
    return is_call(node, operator.getitem, *VIEWS, *TRANSPOSES, aten.expand.default,
                   aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.slice.Tensor,
                   aten.unflatten.int, aten.flatten.using_ints, aten.chunk.default,
                   aten.split.Tensor, aten.unbind.int)


def _plain(*arguments):
    """Arguments to compare: sizes by their expressions."""
    def size(node):
        return str(value(node)) if isinstance(value(node), (int, torch.SymInt)) else node

    return torch.fx.node.map_aggregate(
        arguments, lambda x: size(x) if isinstance(x, Node) else x)


# --------------------------------------------------------------------- rewrite


def _emit(graph, attention, place) -> tuple:
    """(log-sum-exps, entropies) of the attention's rows, from `place` on."""
    node = attention.node
    if is_call(node, moe.attention.default):
        with graph.inserting_after(node):
            return tuple(call(graph, operator.getitem, (node, i), node) for i in (1, 2))
    weights = attention.weights
    out = node if node.target is _SDPA else _item(node, 0)
    with graph.inserting_before(place):
        bias = _bias_of_pairs(graph, weights, node)
        ours = call(graph, moe.attention.default,
                    (weights.q, weights.k, attention.v, bias, None, weights.scale,
                     weights.causal, None, False, "ieee"), node)
        found, *rows = (call(graph, operator.getitem, (ours, i), node) for i in range(3))
        # Views of the result may rely on how torch lays it out.
        order = _layout(value(out))
        if order != [0, 1, 2, 3]:
            found = call(graph, aten.permute.default, (found, order), node)
            found = call(graph, aten.contiguous.default, (found,), node)
            back = [order.index(d) for d in range(4)]
            found = call(graph, aten.permute.default, (found, back), node)
    out.replace_all_uses_with(found)
    # Torch counts it as random for the weights that it may drop, so nobody else erases it.
    for dead in dict.fromkeys((out, node)):
        graph.erase_node(dead)
    return tuple(rows)


def _bias_of_pairs(graph, weights, like):
    """The bias with a value for each pair; -inf where a mask hides it."""
    bias = weights.bias
    if bias is not None and dtype(bias) == torch.bool:
        bias = call(graph, aten.where.Scalar, (bias, 0.0, -math.inf), like)
    if bias is None or list(map(str, value(bias).shape[-2:])) == \
            [str(value(x).shape[2]) for x in (weights.q, weights.k)]:
        return bias
    kept = [-1] * (value(bias).dim() - 2)
    sizes = [_size(graph, x, 2, like) for x in (weights.q, weights.k)]
    return call(graph, aten.expand.default, (bias, [*kept, *sizes]), like)


def _size(graph, node, dim, like):
    """The size as a number, or the node that knows it."""
    size = value(node).shape[dim]
    return size if isinstance(size, int) else call(graph, aten.sym_size.int, (node, dim), like)


def _layout(tensor):
    """The order of dims in which the tensor is contiguous; None where it is not one of torch's."""
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [2, 0, 1, 3]):
        sizes = [tensor.shape[d] for d in order]
        strides = [math.prod(sizes[i + 1:]) for i in range(4)]
        if list(map(str, strides)) == [str(tensor.stride(d)) for d in order]:
            return order
    return None


def _take(graph, match, row_lse, row_entropy) -> None:
    taker = match.taker
    if is_call(taker, moe.attention_posterior.default):
        _set(taker, row_lse=row_lse, row_entropy=row_entropy)
        return
    mean, rows, mask = _item(taker, 0), _item(taker, 1), bind_arguments(taker).mask
    if rows is not None:
        with graph.inserting_before(rows):
            masked = mask is None or match.attention.weights.mask is not None
            rows.replace_all_uses_with(
                row_entropy if masked else _of_real(graph, row_entropy, mask, taker))
    # Of masked tokens the mean is one over those that are left.
    if mean is not None and mask is None:
        with graph.inserting_before(mean):
            mean.replace_all_uses_with(_mean(graph, row_entropy, mean))


def _of_real(graph, rows, mask, like):
    """The rows with 0 for masked queries, where the attention's mask of pairs gave others."""
    real = call(graph, aten.unsqueeze.default, (mask, 1), like)
    zero = call(graph, aten.full_like.default, (rows, 0.0), like)
    return call(graph, aten.where.self, (real, rows, zero), like)


def _mean(graph, rows, like):
    """The mean over the last dim, 0 of no rows."""
    count = _size(graph, rows, 2, like)
    known = isinstance(count, int)
    count = max(count, 1) if known else call(graph, torch.sym_max, (count, 1), like)
    total = call(graph, aten.sum.dim_IntList, (rows, [-1]), like)
    return call(graph, aten.div.Tensor, (total, count), like)


def _item(node, position):
    """The result `position` of a call, if it is used."""
    return next((user for user in node.users
                 if user.target is operator.getitem and user.args[1] == position), None)


# --------------------------------------------------------------- whole imports


def decomposition(default: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What torch.export makes of an attention: moe.attention, which holds no matrix of tokens
    by tokens, or else its `default` decomposition."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *,
                  scale=None, enable_gqa=False):
        bias = _as_bias(attn_mask, query, key)
        if dropout_p or _misfit(query, key, value, bias, is_causal):
            return default(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                           enable_gqa=enable_gqa)
        out, *_ = moe.attention.default(query, key, value, bias, None, scale, is_causal, None,
                                        False, "ieee")
        # As torch lays its results out: what views them may rely on it.
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    return attention


def _as_bias(mask, q, k):
    """A mask of pairs as what it adds to their logits."""
    if mask is None or q.dim() != 4 or k.dim() != 4:
        return mask
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)
    return mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])
