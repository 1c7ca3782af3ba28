"""Weights in the layout of onnxruntime's nodes, in the place of the operators that ask for it.

They are made one at a time, when the file is written: a model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from . import code_blocks
from .code_blocks import Blocks
from .nodes import OWN


def arrange_weights(model: ir.Model) -> None:
    """Replaces the operators of our own in a model by weights; those that nobody reads go."""
    graph = model.graph
    for node in [node for node in graph if node.domain == OWN]:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        made = _arranged(node, attributes) if node.op_type == "Arranged" else \
            _codes(node, attributes)
        for output, tensor in zip(node.outputs, made, strict=True):
            _put(graph, output, tensor)
        graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    model.opset_imports.pop(OWN, None)


def _put(graph, output, tensor):
    """A weight in the place of what an operator of our own returns."""
    value = ir.Value(name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype),
                     const_value=tensor)
    graph.register_initializer(value)
    for user, index in list(output.uses()):
        user.replace_input_with(index, value)


def _arranged(node, attributes) -> list[ir.LazyTensor]:
    name, weight = _weight(node.inputs[0])

    def make():
        rows = weight().detach()
        if attributes["transposed"]:
            rows = rows.mT
        return code_blocks.by_turns(rows) if attributes["interleave"] else rows
    shape = list(weight().shape)
    if attributes["transposed"]:
        shape[1:] = shape[:0:-1]
    return [_lazy(make, f"{name}.arranged", torch.float32, shape)]


def _codes(node, attributes) -> list[ir.LazyTensor]:
    blocks = Blocks.of(attributes)
    weights = [_weight(value) for value in node.inputs]
    shapes = blocks.shapes(weights[0][1]().shape[0])
    makers = (code_blocks.codes, code_blocks.scales, code_blocks.zeros)
    dtypes = (torch.uint8, torch.float32, torch.uint8)
    return [_lazy(lambda make=make, panels=panels: make(panels(), blocks), f"{name}.blocks", *form)
            for (name, panels), make, *form in zip(weights, makers, dtypes, shapes)]


def _weight(value: Any) -> tuple[str, Callable[[], torch.Tensor]]:
    """The name of a weight of the model, and what returns it."""
    tensor = value.const_value
    return value.name, lambda: tensor.raw


_TYPES = {torch.float32: ir.DataType.FLOAT, torch.uint8: ir.DataType.UINT8}


def _lazy(make, name, dtype, shape) -> ir.LazyTensor:
    def tensor():
        return ir.tensor(make().contiguous().numpy(), name=name)
    return ir.LazyTensor(tensor, dtype=_TYPES[dtype], shape=ir.Shape(shape), name=name)
