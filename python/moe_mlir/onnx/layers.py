"""What of a traced model the nodes of onnxruntime cannot express, found before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph.arguments import bind_arguments
from ..ops._expert_activation import ExpertActivation
from ..ops._panels import is_packed
from ..ops._quantized import Quantization
from .code_blocks import blocks_of_experts, blocks_of_linear, why_no_blocks, why_no_zeros
from .nodes import IN_TORCH, attributes_of, quantizations_of
from .nonnegative import is_nonnegative

_moe = torch.ops.moe
EXPERTS = (_moe.run_experts.default, _moe.run_quantized_experts.default)
_IN_PARTS = ("expected experts that run as one op, found some in parts: with a capacity "
             "(capacity_factor=None serves all choices), with other layers between them than an "
             "activation that kernels know, or other than two linear layers")
# Why ops of ours have no form in a file.
_REASONS = {
    **dict.fromkeys(("combine", "dispatch", "grouped_linear", "token_rows"), _IN_PARTS),
    "forward_substitution": "expected attention that ONNX has operators for, found a chunked delta "
                            "rule",
    "packed_linear": "expected linear layers whose weights are not packed; call "
                     "moe_mlir.unpack_linears(model) first",
}


@dataclass
class Weights:
    """The weights and constants of a program, by the names of their placeholders."""

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]       # those that users know

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, prefix: str) -> Weights:
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
                 **signature.inputs_to_lifted_tensor_constants}
        known = {**program.constants, **program.state_dict}
        tensors = {node: known[name] for node, name in names.items() if name in known}
        return cls(tensors, {node: name.removeprefix(prefix) for node, name in names.items()})

    def layer(self, weight: Any) -> str:
        """The name of the layer that has a weight; empty for what is none of the model's."""
        name = self.names.get(getattr(weight, "name", ""), "")
        return name.removesuffix(".codes").rpartition(".")[0]


def check_layers(
    program: torch.export.ExportedProgram, weights: Weights, *, tanh_gelu: bool,
    with_capacity: Sequence[str] = (),
) -> int:
    """The number of layers of experts of a program.

    Args:
        with_capacity: names of layers that drop choices; how many depends on the number of tokens,
            which a file does not know.

    Raises:
        ValueError: the program has none, or what cannot be written; all reasons.
    """
    reasons: dict[str, list[str]] = {}
    count = 0
    if with_capacity:
        reasons[_IN_PARTS] = list(with_capacity)
    for node in program.graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith("moe."):
            continue
        name, reason = _of_node(node, weights, tanh_gelu)
        count += node.target in EXPERTS
        if reason:
            reasons.setdefault(reason, []).append(name)
    if reasons:
        raise ValueError("onnx.export: " + "; ".join(
            f"{_some(names)}: {reason}" for reason, names in reasons.items()))
    if not count:
        raise ValueError("onnx.export: expected a model with layers of experts that run as one op, "
                         "found none; torch.onnx.export writes models without experts, and "
                         "moe_mlir.explain tells what was recognised")
    return count


def _some(names):
    """Names of layers, of which those of calls without weights are empty."""
    names = list(dict.fromkeys(name for name in names if name))
    if not names:
        return "the model"
    return f"'{names[0]}'" + (f" and {len(names) - 1} others" if len(names) > 1 else "")


def _of_node(node, weights, tanh_gelu) -> tuple[str, str]:
    """The layer of a call of one of our ops, and why it cannot be written."""
    given = bind_arguments(node)
    op = node.target._schema.name.partition("::")[2]
    if op == "run_experts":
        return weights.layer(given.w_in), _why_not_experts(given, weights, tanh_gelu)
    if op == "run_quantized_experts":
        return weights.layer(given.w_in), _why_not_quantized(given, weights, tanh_gelu)
    if op == "quantized_linear":
        return weights.layer(given.w), _why_not_linear(given, weights)
    if op == "grouped_topk" and (given.forced is not None or given.num_valid is not None):
        return "", "expected grouped_topk without 'forced' and 'num_valid', found one of them"
    reason = "" if op in IN_TORCH else _REASONS.get(op) or (
        f"expected ops that ONNX has a form of ({', '.join(IN_TORCH)}), found moe.{op}")
    return weights.layer(getattr(given, "w", None)), reason


def _why_not_experts(given, weights, tanh_gelu) -> str:
    w_in, w_out = (w.meta["val"] for w in (given.w_in, given.w_out))
    if is_packed(w_in):
        return "expected weights that are not packed; call moe_mlir.unpack_experts(model) first"
    width = w_out.shape[2 if given.transposed else 1]
    return (_why_not_computed(given, weights, ("w_in", "w_out", "b_in", "b_out"))
            or _why_not_layer(given, weights, tanh_gelu)
            or _why_not_width(given, width))


def _why_not_quantized(given, weights, tanh_gelu) -> str:
    first, last = quantizations_of(given)
    activation = ExpertActivation.of(given)
    blocks = blocks_of_experts(first, last, given.x.meta["val"].shape[1], given.hidden, activation)
    for mine, zeros in zip(blocks, (given.zeros_in, given.zeros_out)):
        reason = why_no_blocks(mine) or why_no_zeros(_tensor(zeros, weights), mine)
        if reason:
            return reason
    return (_why_not_computed(given, weights, ("w_in", "w_out", "b_in", "b_out"))
            or _why_not_layer(given, weights, tanh_gelu))


def _why_not_linear(given, weights) -> str:
    x = given.x.meta["val"]
    blocks = blocks_of_linear(Quantization(given.format, given.group, given.activations),
                              given.out_features, x.shape[-1])
    return (why_no_blocks(blocks) or why_no_zeros(_tensor(given.zeros, weights), blocks)
            or _why_not_type(x) or _why_not_computed(given, weights, ("w",)))


def _tensor(node: Node | None, weights) -> torch.Tensor | None:
    return None if node is None else weights.tensors.get(node.name)


def _why_not_layer(given, weights, tanh_gelu) -> str:
    """What holds for layers of floats and of codes."""
    activation = ExpertActivation.of(given)
    if attributes_of(activation, tanh_gelu) is None:
        return _why_not_activation(activation)
    if reason := _why_not_type(given.x.meta["val"]):
        return reason
    if not is_nonnegative(given.gates, weights.tensors):
        return ("expected gates that cannot be negative, as those of a softmax or a sigmoid, found "
                "others, which onnxruntime's node would take for 0")
    return ""


def _why_not_activation(activation) -> str:
    if activation == ExpertActivation("gelu"):
        return ("expected the gelu of tanh, which is that of onnxruntime's node, found that of erf; "
                "tanh_gelu=True writes the one of tanh, up to 5e-4 away")
    return ("expected an activation of onnxruntime's node: relu, silu, the gelu of tanh, none, or "
            f"silu with a gate and one limit for both halves; found {activation}")


def _why_not_type(x) -> str:
    return "" if x.dtype == torch.float32 else (
        f"expected float32, found {x.dtype}; call model.float() first")


def _why_not_computed(given, weights, names) -> str:
    for name in names:
        weight = getattr(given, name)
        if weight is not None and weight.name not in weights.tensors:
            return (f"expected '{name}' to be a weight of the model, found one that it computes; "
                    "merge adapters and parametrizations first")
    return ""


def _why_not_width(given, width) -> str:
    d = given.x.meta["val"].shape[1]
    return "" if width == d else (f"expected experts that return as many features as they take, "
                                  f"found {width} of {d}")
