"""Rewrites recognised routers to torch.ops.moe ops, in place.

The ops have their own autograd, so a graph that is rewritten before autograd
trains through our gradients; one that is rewritten after decomposition is
ready for import.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from .match import Site, find_routers
from .patterns import aten, dtype, is_call, value

moe = torch.ops.moe
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def raise_routing(module: GraphModule) -> int:
    """Raises every router whose meaning the moe ops have exactly; returns how many."""
    sites = [site for site in find_routers(module.graph) if not site.reason]
    for site in sites:
        _raise_site(module.graph, site)
    # A gate that was normalised in place is dead now, though it writes.
    replaced = {site.gates for site in sites}
    module.graph.eliminate_dead_code(
        lambda node: node.is_impure() and node not in replaced)
    module.recompile()
    return len(sites)


def _call(graph, target, args, like: Node) -> Node:
    """A call with its fake value, at the insertion point, described as `like`."""
    node = graph.call_function(target, args)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "seq_nr"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    inputs = torch.fx.node.map_arg(args, value)
    key = "val" if "val" in like.meta else "example_value"
    fake_mode = _fake_mode(like)
    with fake_mode:
        node.meta[key] = target(*inputs)
    return node


def _fake_mode(node: Node):
    for x in [node, *node.all_input_nodes]:
        tensors = value(x)
        for tensor in tensors if isinstance(tensors, (tuple, list)) else [tensors]:
            if hasattr(tensor, "fake_mode"):
                return tensor.fake_mode
    raise ValueError(f"node '{node}' has no fake value; trace the graph with fake tensors")


def _raise_site(graph, site: Site) -> None:
    with graph.inserting_before(site.topk):
        scores = _raise_logits(graph, site)
        # softmax over the selected equals softmax, selection, renormalisation.
        renorm = site.renorm or site.form == "F2"
        call = _call(graph, moe.topk_renorm.default,
                     (scores, site.k, site.kind, renorm, site.scale, None, torch.int64), site.topk)
        gates = _call(graph, operator.getitem, (call, 0), site.topk)
        indices = _call(graph, operator.getitem, (call, 1), site.topk)
        target = dtype(site.gates)
        if target != torch.float32:
            gates = _call(graph, torch.ops.prims.convert_element_type.default, (gates, target),
                          site.gates)
    site.gates.replace_all_uses_with(gates)
    if site.indices is not None:
        site.indices.replace_all_uses_with(indices)


def _raise_logits(graph, site: Site) -> Node:
    """The layer that feeds the selection as moe.router_logits, where it may fuse.

    Only f32 layers: the op's result is f32, so that a 16-bit layer would lose
    the rounding of its own result.
    """
    logits = site.scores
    if site.kind != "logits" or dtype(logits) != torch.float32:
        return logits
    layer = logits
    while is_call(layer, *VIEWS) and isinstance(layer.args[0], Node):
        layer = layer.args[0]
    parts = _linear_layer(layer)
    if parts is None:
        return logits
    with graph.inserting_before(layer):
        projected = _call(graph, moe.router_logits.default, parts, layer)
    layer.replace_all_uses_with(projected)
    return projected if layer is logits else logits


def _linear_layer(node: Node):
    """(h, weight, bias) of `h @ weight.T + bias` with a 1-d bias; None otherwise."""
    if is_call(node, aten.linear.default):
        h, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    elif is_call(node, aten.mm.default):
        (h, weight), bias = node.args, None
        weight = _transposed(weight)
    elif is_call(node, aten.addmm.default):
        if node.kwargs:
            return None
        bias, h, weight = node.args
        weight = _transposed(weight)
    else:
        return None
    if weight is None or value(weight).dim() != 2 or (bias is not None and value(bias).dim() != 1):
        return None
    if any(dtype(x) != torch.float32 for x in (h, weight, bias) if x is not None):
        return None
    return h, weight, bias


def _transposed(node: Node):
    """w, where the node is its transpose."""
    if is_call(node, aten.permute.default) and list(node.args[1]) == [1, 0]:
        return node.args[0]
    if is_call(node, aten.t.default):
        return node.args[0]
    return None


