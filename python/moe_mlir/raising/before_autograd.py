"""Dynamo's graph in ATen, as it is before autograd sees it, which is where routers are raised.

Not every part of such a graph can be traced: regions under a functorch
transform, and operators that hold graphs of their own (checkpoints, conditions,
loops). These stay as Dynamo wrote them, between the parts that are traced. Of
checkpoints the graphs inside are traced.
"""

import contextlib
import operator

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from .._torch.core import (
    FakeTensor,
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    set_grad_enabled,
)


def trace_before_autograd(module: GraphModule) -> tuple[GraphModule, list[GraphModule]]:
    """Returns (module, graphs): one module that computes what `module` does, and its traced graphs.

    Routers may be in these. Without fake tensors there are no graphs.
    """
    parts = _regions(module.graph)
    with _state_kept():
        if not any(parts.values()):
            traced = _trace(module)
            return (module, []) if traced is None else (traced, [traced])
        # In the order in which they run: one may enter a mode that the next is in.
        whole = split_module(module, None, parts.__getitem__, keep_original_order=True)
        graphs = []
        for name, piece in list(whole.named_children()):
            if _is_opaque(int(name.removeprefix("submod_"))):
                graphs += _trace_checkpoints(piece)
            elif (traced := _trace(piece)) is not None:
                setattr(whole, name, traced)
                graphs.append(traced)
    return whole, graphs


def _trace(module):
    fakes = [n.meta["example_value"] for n in module.graph.nodes if n.op == "placeholder"]
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    if mode is None:
        return None
    # Run node by node, so that the new graph keeps the lines of the user's code.
    with mode, torch.fx.traceback.preserve_node_meta():
        interpreter = _Interpreter(module)
        traced = make_fx(interpreter.run, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    constants = [getattr(traced, n.target) for n in traced.graph.nodes if n.op == "get_attr"]
    # A fake constant is a value that tracing lost sight of.
    return None if any(isinstance(c, FakeTensor) for c in constants) else traced


class _Interpreter(torch.fx.Interpreter):
    """Enters autocast where the graph does: make_fx notes Dynamo's calls without running them.

    Without it dtypes behind them would be those of no autocast.
    """

    def call_function(self, target, args, kwargs):
        if target is enter_autocast:
            context = torch.autocast(*args, **kwargs)
            context.__enter__()
            return context
        if target is exit_autocast:
            (context,) = args
            return context.__exit__(None, None, None)
        return super().call_function(target, args, kwargs)


@contextlib.contextmanager
def _state_kept():
    """Modes that a graph enters and leaves in different parts do not outlive a failure."""
    devices = [d for d in ("cpu", "cuda") if torch.amp.is_autocast_available(d)]
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache, grad = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    try:
        yield
    finally:
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        set_grad_enabled(grad)


# ------------------------------------------------------------------ checkpoints


def _trace_checkpoints(piece) -> list:
    """Traces the graphs inside of a piece's checkpoints; returns them."""
    if any(_depth_change(node) for node in piece.graph.nodes):
        return []  # under a transform or in a mode that is not entered here
    bodies = [n.args[0].target for n in piece.graph.nodes if _is_checkpoint(n)]
    graphs = []
    for name in dict.fromkeys(bodies):
        body = getattr(piece, name)
        traced = None if any(_regions(body.graph).values()) else _trace(body)
        if traced is not None:
            # Where the checkpoint keeps its policy.
            traced.meta.update(body.meta)
            setattr(piece, name, traced)
            graphs.append(traced)
    return graphs


def _is_checkpoint(node):
    operators = torch.ops.higher_order
    return node.target in (
        operators.tag_activation_checkpoint, operators.wrap_activation_checkpoint
    )


# --------------------------------------------------------------------- regions


def _is_opaque(region):
    return region % 2 == 1


def _regions(graph) -> dict:
    """The region of each node, in order; odd ones are not to be traced."""
    _give_graphs_to_each_user(graph)
    nodes = list(graph.nodes)
    opaque = _opaque_nodes(nodes)
    parts, region = {}, 0
    for node in nodes:
        if node.op != "get_attr" and (node in opaque) != _is_opaque(region):
            region += 1
        parts[node] = region
    for node in nodes:
        # A constant goes where it is read; a graph cannot be handed from part to part.
        if node.op == "get_attr":
            parts[node] = min((parts[user] for user in node.users), default=parts[node])
    return parts


def _give_graphs_to_each_user(graph):
    for node in list(graph.nodes):
        if node.op == "get_attr" and len(node.users) > 1 and _is_graph(graph, node):
            for user in list(node.users)[1:]:
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))


def _is_graph(graph, node):
    owner = graph.owning_module
    return isinstance(getattr(owner, node.target, None), torch.fx.GraphModule)


def _opaque_nodes(nodes) -> set:
    opaque = set()
    for node in nodes:
        operands = node.all_input_nodes
        takes_part = node.target is operator.getitem and operands[0] in opaque
        if isinstance(node.target, HigherOrderOperator) or takes_part:
            opaque.add(node)
    for inside in _contexts(nodes):
        transform = _is_transform(inside[0])
        if transform or (opaque.intersection(inside) and not opaque.issuperset(inside)):
            opaque.update(inside)
    return opaque


def _contexts(nodes):
    """The nodes of each transform or autocast that is entered, the outermost ones."""
    depth, begin = 0, None
    for place, node in enumerate(nodes):
        change = _depth_change(node)
        if change > 0 and depth == 0:
            begin = place
        depth += change
        if change < 0 and depth == 0:
            yield nodes[begin : place + 1]


def _depth_change(node):
    name = getattr(node.target, "__name__", "")
    enters = name.endswith("_increment_nesting") or name == "_enter_autocast"
    leaves = name.endswith("_decrement_nesting") or name == "_exit_autocast"
    return enters - leaves


def _is_transform(node):
    return getattr(node.target, "__name__", "").endswith("_increment_nesting")
