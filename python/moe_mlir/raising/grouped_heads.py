"""Attention of one query a head whose keys serve several heads.

Models that share keys among heads repeat them for torch's attention:

    k = view(expand(unsqueeze(k0, 2), [B, Hk, G, S, D]), [B, Hk G, S, D]); attention(q, k, v)

Where a head has one query, as in a decoding step, the G heads of a key are G
queries of one head, and the cache of keys and values is read where it lies.
"""

import operator

import torch
from torch.fx import Graph, Node

from ..graph.arguments import bind_arguments
from .calls import call
from .patterns import VIEWS, aten, results, through_idle_slices
from .reading import is_call, source, value

_ATTENTION = torch.ops.moe.attention.default
_COPIES = (aten.clone.default, aten.contiguous.default)


def pack_grouped_heads(graph: Graph) -> int:
    """Rewrites the attentions of a graph; returns how many."""
    packed = [_pack(graph, node) for node in list(graph.nodes) if is_call(node, _ATTENTION)]
    if any(packed):
        graph.eliminate_dead_code()
    return sum(packed)


def _pack(graph, node) -> bool:
    arguments = bind_arguments(node)
    keys, values = _shared(arguments.k), _shared(arguments.v)
    q, bias = arguments.q, arguments.bias
    plain = not (arguments.causal or arguments.exclude_self or arguments.window
                 or arguments.mask is not None) and (bias is None or value(bias).dim() == 4)
    outs, sums = results(node, 0), results(node, 1)
    if keys is None or values is None or not plain or value(q).shape[2] != 1 \
            or len(outs) + len(sums) != len(node.users):
        return False
    batch, heads, _, width = value(q).shape
    shared = value(keys).shape[1]
    sizes = (batch, heads, shared, *((1,) if bias is None else value(bias).shape[:3]))
    if not all(isinstance(size, int) for size in sizes):
        return False
    each = heads // shared
    with graph.inserting_before(node):
        packed = call(graph, aten.view.default, (q, [batch, shared, each, width]), node)
        seen = None if bias is None else _of_groups(graph, bias, shared, each, node)
        new = call(graph, _ATTENTION, (packed, keys, values, seen, None, arguments.scale, False,
                                       None, False, arguments.precision), node)
        for position, found, dims in ((0, outs, [batch, heads, 1, value(values).shape[3]]),
                                      (1, sums, [batch, heads, 1])):
            if found:
                result = call(graph, operator.getitem, (new, position), node)
                result = call(graph, aten.view.default, (result, dims), node)
                for user in found:
                    user.replace_all_uses_with(result)
    return True


def _of_groups(graph, bias, shared, each, like):
    """The bias of one query of each head as that of `each` queries of the shared heads."""
    first, heads, _, keys = value(bias).shape
    if heads == 1:
        return call(graph, aten.expand.default, (bias, [-1, -1, each, -1]), like)
    return call(graph, aten.view.default, (bias, [first, shared, each, keys]), like)


def _shared(node: Node) -> Node | None:
    """The keys [B, Hk, S, D] that are repeated for heads [B, Hk G, S, D]; None for others."""
    repeated = node
    while is_call(repeated, *_COPIES, *VIEWS) and value(repeated).dim() == 4:
        repeated = source(repeated)
    while is_call(repeated, *_COPIES):
        repeated = source(repeated)
    if not is_call(repeated, aten.expand.default) or value(repeated).dim() != 5:
        return None
    single = through_idle_slices(source(repeated))
    keys = source(single) if is_call(single, aten.unsqueeze.default, *VIEWS) else None
    if keys is None or value(keys).dim() != 4:
        return None
    batch, shared, each, count, width = map(str, value(repeated).shape)
    fits = (list(map(str, value(single).shape)) == [batch, shared, "1", count, width]
            and list(map(str, value(keys).shape)) == [batch, shared, count, width]
            and str(value(node).shape[0]) == batch and str(value(node).shape[2]) == count
            and value(node).shape[1] == int(shared) * int(each)
            if shared.isdigit() and each.isdigit() else False)
    return keys if fits else None
