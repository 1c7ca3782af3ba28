"""Regions with and without gradients, which a program of inference need not tell apart.

torch.export makes a graph of its own of each `with torch.no_grad()` of a model that is traced with
gradients, and of each `with torch.enable_grad()` of one that is traced without.
"""

import operator

import torch
from torch.fx import Graph, GraphModule, Node

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_grad_modes(graph: Graph, owner: GraphModule) -> None:
    """Writes the calls of such regions in their place; `owner` has their graphs, and stays as it is."""
    bodies = {node: getattr(owner, node.target) for node in graph.find_nodes(op="get_attr")}
    while regions := [node for node in graph.find_nodes(op="call_function", target=_REGION)
                      if all(user.target is operator.getitem for user in node.users)]:
        for region in regions:
            _inline(graph, region, bodies)


def _inline(graph, region, bodies) -> None:
    _, body, *operands = region.args
    inner = bodies[body]
    value: dict[Node, Node] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(region):
        for node in inner.graph.nodes:
            if node.op not in ("placeholder", "output"):
                value[node] = graph.node_copy(node, value.__getitem__)
            if node.op == "get_attr":  # a region in this one
                bodies[value[node]] = getattr(inner, node.target)
    results = torch.fx.node.map_arg(inner.graph.output_node().args[0], value.__getitem__)
    for user in list(region.users):
        _replace(graph, user, results[user.args[1]])
    graph.erase_node(region)
    if not body.users:
        graph.erase_node(body)


def _replace(graph, node, result) -> None:
    for user in list(node.users):
        user.args, user.kwargs = torch.fx.node.map_arg(
            (user.args, user.kwargs), lambda x: result if x is node else x)
    graph.erase_node(node)
