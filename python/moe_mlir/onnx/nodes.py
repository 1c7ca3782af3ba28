"""Layers of experts, and what is around them, as nodes of onnxruntime.

The functions are decompositions of our ops into torch's and `torch.onnx.ops.symbolic`, which stands
for a node. Nodes read weights in another layout than a model has them; that is an operator of our
own until `arranged_weights` puts the weights themselves in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from ..ops._expert_activation import ExpertActivation
from ..ops._quantized import Quantization
from . import selections
from .code_blocks import Blocks, blocks_of_experts, blocks_of_linear

# The domain of the operators that stand for weights in another layout.
OWN = "moe_mlir"
_MICROSOFT = "com.microsoft"
# The score of an expert that a token has not: its exponential is 0, as is that of its distance to
# any logarithm of a gate. Not -inf: a token without experts has no other, and their softmax is NaN.
_NO_EXPERT = -6e4

# Our ops that a file has in operators of ONNX.
IN_TORCH = ("grouped_topk", "router_logits", "topk_renorm")

# ---- what the nodes compute between an expert's layers ------------------------------------

_PLAIN = {"none": "identity", "relu": "relu", "silu": "silu", "gelu_tanh": "gelu"}


def attributes_of(activation: ExpertActivation, tanh_gelu: bool = False) -> dict[str, Any] | None:
    """The attributes of a node with this activation; None if there are none.

    Args:
        tanh_gelu: the nodes' gelu, which is that of tanh, stands for the one of erf, too.
    """
    name = activation.activation
    if activation.gate == "none":
        if name == "gelu" and tanh_gelu:
            name = "gelu_tanh"
        known = name in _PLAIN and activation.alpha == 1
        return {"activation_type": _PLAIN[name]} if known else None
    limit, of_up = activation.limit, activation.up_limit
    if name != "silu" or activation.bound != "clamp" or of_up not in (None, limit):
        return None
    # 1: gates and factors take turns, which is all that the kernels of the CPU know.
    found = {"activation_type": "swiglu", "swiglu_fusion": 1,
             "activation_alpha": float(activation.alpha),
             "activation_beta": float(activation.up_offset)}
    return found if limit is None else {**found, "swiglu_limit": float(limit)}


# ---- decompositions -------------------------------------------------------------------------


def decompositions(*, tanh_gelu: bool) -> dict[Any, Callable]:
    """What our ops are in a file: nodes of onnxruntime, or their meaning in plain torch."""
    moe = torch.ops.moe
    table: dict[Any, Callable]
    table = {moe.run_experts.default: functools.partial(_run_experts, tanh_gelu=tanh_gelu),
             moe.run_quantized_experts.default:
                 functools.partial(_run_quantized_experts, tanh_gelu=tanh_gelu),
             moe.quantized_linear.default: _quantized_linear}
    for name in IN_TORCH:
        table[getattr(moe, name).default] = getattr(selections, name)
    table = {op: _with_names(op, function) for op, function in table.items()}
    # onnxruntime has no kernel for a choice between bools.
    table[torch.ops.aten.where.self] = _where
    return table


def _with_names(op, function):
    """`function` of the op's arguments as one namespace, with its defaults."""
    def of_arguments(*args, **kwargs):
        found = {}
        for i, argument in enumerate(op._schema.arguments):
            default = argument.default_value if argument.has_default_value() else None
            found[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name, default)
        return function(SimpleNamespace(**found))

    return of_arguments


def _where(condition, x, other):
    if x.dtype != torch.bool or other.dtype != torch.bool:
        return NotImplemented
    return (condition & x) | (~condition & other)


def _run_experts(given, *, tanh_gelu):
    activation = ExpertActivation.of(given)
    interleave = activation.gate == "concatenated"
    dense = _dense_gates(given.gates, given.indices, given.w_in.shape[0])
    total = dense.sum(-1, keepdim=True)
    y = _node("MoE", [
        # Of shares the largest, which decides most of the result, has a logarithm near 0.
        given.x, _scores_of(dense / total),
        _arranged(given.w_in, given.transposed, interleave), _arranged(given.b_in, False, interleave),
        _arranged(given.w_out, given.transposed, False), given.b_out,
    ], {"k": given.indices.shape[1], "normalize_routing_weights": 1,
        **(attributes_of(activation, tanh_gelu) or {})}, given.x)
    # The node's gates have the sum 1; those of the model may have another.
    return y * total


def _run_quantized_experts(given, *, tanh_gelu):
    activation = ExpertActivation.of(given)
    first, last = quantizations_of(given)
    d, hidden = given.x.shape[1], given.hidden
    blocks = blocks_of_experts(first, last, d, hidden, activation)
    dense = _dense_gates(given.gates, given.indices, given.w_in.shape[0])
    fc1 = _codes(given.w_in, given.scales_in, given.zeros_in, blocks[0])
    fc2 = _codes(given.w_out, given.scales_out, given.zeros_out, blocks[1])
    bias = _arranged(given.b_in, False, blocks[0].interleave)
    return _node("QMoE", [
        given.x, _scores_of(dense), fc1[0], fc1[1], bias, fc2[0], fc2[1], given.b_out,
        None, None, None, fc1[2], fc2[2], None, dense,
    ], {"k": given.indices.shape[1], "normalize_routing_weights": 0,
        "expert_weight_bits": blocks[0].bits, "fc2_expert_weight_bits": blocks[1].bits,
        "block_size": blocks[0].size, "weights_prepacked": 0,
        "accuracy_level": _accuracy_level(first),
        **(attributes_of(activation, tanh_gelu) or {})}, given.x)


def _quantized_linear(given):
    quantization = Quantization(given.format, given.group, given.activations)
    blocks = blocks_of_linear(quantization, given.out_features, given.x.shape[-1])
    codes, scales, zeros = _codes(given.w, given.scales, given.zeros, blocks)
    return _node("MatMulNBits", [given.x, codes, scales, zeros, None, given.bias], {
        "K": blocks.width, "N": blocks.out, "bits": blocks.bits, "block_size": blocks.size,
        "accuracy_level": _accuracy_level(quantization),
    }, given.x, given.out_features)


def quantizations_of(given: Any) -> tuple[Quantization, Quantization]:
    """How the first and the last weight of a call of run_quantized_experts are stored."""
    first = Quantization(given.format, given.group, given.activations)
    return first, Quantization(given.format_out or first.format,
                               first.group if given.group_out is None else given.group_out,
                               first.activations)


def _accuracy_level(quantization):
    """4: rows are rounded to 8 bits; 0: they are multiplied as they are."""
    return 4 if quantization.activations == "int8" else 0


# ---- gates ------------------------------------------------------------------------------------


def _dense_gates(gates, indices, experts):
    """The gates `[tokens, experts]`, 0 for experts that a token has not."""
    chosen = (indices >= 0) & (indices < experts)
    gates = torch.where(chosen, gates, 0.0)
    places = torch.where(chosen, indices, 0).to(torch.int64)
    return gates.new_zeros((indices.shape[0], experts)).scatter_add(1, places, gates)


def _scores_of(gates):
    """Scores whose softmax selects the experts of positive gates, in the ratio of these; of a token
    without gates, or with NaN for one, they are all the same."""
    return torch.where(gates > 0, gates.log(), _NO_EXPERT)


# ---- nodes --------------------------------------------------------------------------------------


def _node(name, inputs, attributes, x, width=None):
    """A node of onnxruntime whose result has the shape of x, or another last size."""
    while inputs[-1] is None:
        inputs.pop()
    shape = x.shape if width is None else (*x.shape[:-1], width)
    return torch.onnx.ops.symbolic(f"{_MICROSOFT}::{name}", inputs, attributes, dtype=x.dtype,
                                   shape=shape, version=1)


def _arranged(w, transposed, interleave):
    """A weight or a bias as `[experts, out, in]`, gates and factors of a layer by turns."""
    if w is None or not (transposed or interleave):
        return w
    shape = (w.shape[0], w.shape[2], w.shape[1]) if transposed else w.shape
    return torch.onnx.ops.symbolic(
        f"{OWN}::Arranged", [w], {"transposed": int(transposed), "interleave": int(interleave)},
        dtype=w.dtype, shape=shape, version=1)


def _codes(codes, scales, zeros, blocks: Blocks):
    """Codes, scales and zeros (or None) of a quantized weight, in blocks."""
    experts = codes.shape[0]
    inputs = [codes, scales] if zeros is None else [codes, scales, zeros]
    shapes = blocks.shapes(experts)[:len(inputs)]
    found = torch.onnx.ops.symbolic_multi_out(
        f"{OWN}::Codes", inputs, blocks.attributes(),
        dtypes=[torch.uint8, torch.float32, torch.uint8][:len(inputs)], shapes=shapes, version=1)
    return (*found, None) if zeros is None else tuple(found)
