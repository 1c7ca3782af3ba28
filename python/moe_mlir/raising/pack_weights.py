"""Stores the weights of a program in panels, where linear layers and experts alone read them.

    y = linear(x, w, b)                  y = packed_linear(x, panels, b, out)
    y = run_experts(x, .., w_in, ..)     y = run_experts(x, .., panels, ..)

Each weight of the program is replaced in place, so that there are never two copies of all. What
is packed, and the results, are as with `moe_mlir.pack_experts` and `pack_linears`.
"""

from collections import Counter
from typing import Any

import torch
from torch.fx import Node

from ..graph.arguments import bind_arguments
from ..ops._check import ACTIVATIONS
from ..ops._expert_activation import ExpertActivation
from ..ops._panels import columns_for, is_packed, pack_weight, why_no_panels
from ..weights.model_layers import is_of_router
from .calls import call
from .join_experts import join_experts
from .patterns import aten, only_user, users
from .reading import is_call, read, value

moe = torch.ops.moe


def pack_weights(program: torch.export.ExportedProgram, cpu: str) -> int:
    """Packs what it can for a CPU, by LLVM's name; returns the number of layers."""
    graph, weights = program.graph, _Weights(program, columns_for(cpu))
    join_experts(graph)
    packed = sum(_pack_experts(node, weights) for node in [*graph.nodes]
                 if is_call(node, moe.run_experts.default))
    packed += sum(_pack_linears(node, weights) for node in [*graph.nodes]
                  if node.op == "placeholder")
    graph.eliminate_dead_code()
    return packed


class _Weights:
    """The parameters of a program."""

    def __init__(self, program: torch.export.ExportedProgram, columns: int):
        self.columns = columns
        self._names = program.graph_signature.inputs_to_parameters
        self._state = program.state_dict
        # Tied weights, and views of one memory, stay as they are.
        self._owners = Counter(t.untyped_storage().data_ptr() for t in self._state.values()
                               if t.layout is torch.strided)

    def name(self, node: Node) -> str:
        return self._names[node.name]

    def may_change(self, node: Any) -> bool:
        """Whether a node is a parameter in memory of its own, of a type that kernels take."""
        if not isinstance(node, Node) or node.op != "placeholder" or node.name not in self._names:
            return False
        tensor = self._state.get(self.name(node))
        return (type(tensor) in (torch.Tensor, torch.nn.Parameter)
                and tensor.layout is torch.strided and tensor.device.type == "cpu"
                and tensor.dtype in ACTIVATIONS and tensor.numel() > 0
                and self._owners[tensor.untyped_storage().data_ptr()] == 1)

    def pack(self, node: Node, *, transposed: bool = False, halves: bool = False) -> None:
        tensor = self._state[self.name(node)]
        matrices = tensor.detach().view(-1, *tensor.shape[-2:])
        panels = pack_weight(matrices.mT if transposed else matrices, halves=halves,
                             columns=self.columns)
        # The program that this one was made of has the same tensor.
        tensor.data = panels
        with value(node).fake_mode:
            node.meta["val"] = torch.empty(panels.shape, dtype=panels.dtype)


def _pack_linears(weight: Node, weights: _Weights) -> int:
    """Packs a weight that linear layers alone read."""
    if not weights.may_change(weight) or is_of_router(weights.name(weight)):
        return 0
    layers = [bind_arguments(node) for node in users(weight)
              if is_call(node, aten.linear.default)]
    if len(layers) != len(users(weight)) or not layers or any(
            layer.weight is not weight or weight in (layer.input, layer.bias) for layer in layers):
        return 0
    out, width = value(weight).shape
    if why_no_panels(out, width, value(weight).dtype, columns=weights.columns):
        return 0
    weights.pack(weight)
    for node, layer in zip(users(weight), layers):
        _replace(node, moe.packed_linear.default, (layer.input, weight, layer.bias, out))
    return len(layers)


def _pack_experts(node: Node, weights: _Weights) -> int:
    """Packs both weights of a layer of experts that reads them alone."""
    layer = bind_arguments(node)
    if is_packed(value(layer.w_in)):
        return 0
    activation = ExpertActivation.of(layer)
    found = [_matrices(w, layer.transposed, node) for w in (layer.w_in, layer.w_out)]
    if None in found or not all(weights.may_change(weight) for weight, _ in found):
        return 0
    (w_in, in_transposed), (w_out, out_transposed) = found
    hidden = value(w_out).shape[1 if out_transposed else 2]
    if why_no_panels(None, hidden, value(w_out).dtype, columns=weights.columns):
        return 0
    weights.pack(w_in, transposed=in_transposed, halves=activation.gate == "concatenated")
    weights.pack(w_out, transposed=out_transposed)
    _replace(node, moe.run_experts.default,
             (layer.x, layer.gates, layer.indices, w_in, layer.b_in, w_out, layer.b_out, False,
              *activation.options))
    return 1


def _matrices(node, transposed, reader):
    """A weight that one layer reads, and whether it lies transposed; None if another does, too."""
    if only_user(node) is not reader:
        return None
    swap = read(node, {aten.transpose.int}, "dim0", "dim1")
    if swap is None or {swap.dim0, swap.dim1} != {1, 2}:
        return node, transposed
    return (swap.source, not transposed) if only_user(swap.source) is node else None


def _replace(node, target, arguments) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        y = call(graph, target, arguments, node)
    node.replace_all_uses_with(y)
    graph.erase_node(node)


__all__ = ["pack_weights"]
