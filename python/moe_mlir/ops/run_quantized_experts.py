"""moe.run_quantized_experts: a layer of experts with quantized weights (docs/Spec.md 3.14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._check import INDICES, SCORES, Checker
from ._expert_activation import SCHEMA, ExpertActivation
from ._expert_runs import has_kernel
from ._kernel import Kernel, Tensor, contiguous, kernels, rows
from ._library import define
from ._quantized import (
    Quantization,
    codes_shape,
    columns,
    dequantize_panels,
    round_rows,
    scales_shape,
    validate_weight,
)
from .grouped_linear import as_bits
from .quantized_linear import OPTIONS, attributes
from .run_experts import apply_gates, layer_steps, places

_check = Checker("run_quantized_experts", {"x": "h"})


class QuantizedOperands(NamedTuple):
    """Codes, scales and zeros of a weight in panels, and the bias beside it."""

    w: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None


def run_quantized_experts(
    x: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    first: QuantizedOperands,
    last: QuantizedOperands,
    hidden: int,
    quantization: Quantization,
    last_quantization: Quantization | None = None,
    *,
    activation: ExpertActivation,
) -> torch.Tensor:
    """y_t = sum_a gates_ta expert_{indices_ta}(x_t), with weights decoded as they are read.

    Args:
        x: `[tokens, d]`.
        gates: `[tokens, k]` float32.
        indices: `[tokens, k]` int32 or int64; out of `[0, experts)`: no expert.
        first: of the weights `[experts, features, d]`; codes int8, in panels
            (`ops/_quantized.py`), without gradients.
        last: of the weights `[experts, d, hidden]`.
        hidden: what comes out of the activation; half of the features with a gate.
        quantization: of both weights.
        last_quantization: of the last weight, where it has other codes or groups than the first.
        activation: between the two layers.

    Returns:
        `[tokens, d]` in the dtype of x.
    """
    of_last: tuple[str | None, int | None] = None, None
    if last_quantization is not None and last_quantization != quantization:
        if last_quantization.activations != quantization.activations:
            _check.fail("expected rows of both layers rounded in the same way, found "
                        f"{quantization.activations!r} and {last_quantization.activations!r}")
        of_last = last_quantization[:2]
    return _op(x, gates, indices, *first, *last, hidden, *quantization, *of_last,
               *activation.options)


class Quantizations(NamedTuple):
    """Of the first and of the last weight."""

    first: Quantization
    last: Quantization

    @classmethod
    def of(cls, options: Sequence) -> Quantizations:
        """From the op's arguments format, group, activations, format_out and group_out."""
        format, group, activations, format_out, group_out = options
        return cls(Quantization(format, group, activations), Quantization(
            format if format_out is None else format_out,
            group if group_out is None else group_out, activations))


def _split(options):
    return Quantizations.of(options[:5]), ExpertActivation(*options[5:])


def _features(hidden, activation):
    return hidden if activation.gate == "none" else 2 * hidden


def _validate(x, gates, indices, first, last, hidden, quantizations, activation):
    _check.rank("x", x, "[tokens, d]")
    _check.rank("indices", indices, "[tokens, k]")
    _check.dtype("indices", indices, INDICES)
    _check.shape("indices", indices, (x.shape[0], indices.shape[1]), "[tokens of 'x', k]")
    _check.shape("gates", gates, indices.shape, "of 'indices'")
    if x.dtype != torch.float64:
        _check.dtype("gates", gates, SCORES)
    for each in quantizations:
        each.validate(_check)
    features, width = _features(hidden, activation), x.shape[1]
    activation.validate(_check, features)
    validate_weight(_check, ("w_in", "scales_in", "zeros_in"), first.w, first.scales,
                    first.zeros, features, width, quantizations.first)
    validate_weight(_check, ("w_out", "scales_out", "zeros_out"), last.w, last.scales,
                    last.zeros, width, hidden, quantizations.last)
    if first.w.shape[0] != last.w.shape[0] or first.w.shape[0] == 0:
        _check.fail("expected 'w_in' and 'w_out' of as many experts, at least 1, found "
                    f"{first.w.shape[0]} and {last.w.shape[0]}")
    for name, bias, size in (("b_in", first.bias, features), ("b_out", last.bias, width)):
        if bias is not None:
            _check.shape(name, bias, (first.w.shape[0], size), "[experts, features]")


@kernels
def kernel(
    dtype: torch.dtype, width: int, hidden: int, experts: int, k: int, index_dtype: torch.dtype,
    panels: tuple[int, int], dtypes: tuple, quantizations: Quantizations,
    activation: ExpertActivation,
) -> Kernel:
    """`dtypes` are those of scales, zeros and bias of both layers, None for none."""
    features = _features(hidden, activation)
    inputs = [Tensor("x", ("n", width), dtype), Tensor("gates", ("n", k), torch.float32),
              Tensor("indices", ("n", k), index_dtype)]
    clauses: list[tuple] = []
    for suffix, q, out, taken, (format, group, _), (scales, zeros, bias) in zip(
            ("in", "out"), panels, (features, width), (width, hidden), quantizations, dtypes):
        inputs.append(Tensor(f"w_{suffix}", codes_shape(experts, out, taken, format, q),
                             torch.int8))
        mine = []
        of_scales = scales_shape(experts, out, taken, group, q, scales)
        # In the order of the op's clauses.
        for clause, name, shape, each in (
                ("bias", "b", (experts, out), bias),
                ("scales", "scales", of_scales, scales), ("zeros", "zeros", of_scales, zeros)):
            if each is not None:
                inputs.append(Tensor(f"{name}_{suffix}", shape, each))
                mine.append((clause, f"{name}_{suffix}"))
        clauses.append(tuple(mine))
    steps, y = layer_steps(
        dtype, experts, k, hidden, width,
        (clauses[0], attributes(quantizations.first, panels[0], activation)),
        (clauses[1], attributes(quantizations.last, panels[1], ExpertActivation())))
    return Kernel("run_quantized_experts", tuple(inputs), (y,), steps=steps)


def _run(x, gates, indices, *others):
    first, last = QuantizedOperands(*others[:4]), QuantizedOperands(*others[4:8])
    hidden, (quantizations, activation) = others[8], _split(others[9:])
    _validate(x, gates, indices, first, last, hidden, quantizations, activation)
    if not has_kernel(x, gates, indices, *first, *last):
        return _plain(x, gates, indices, first, last, hidden, quantizations, activation)
    run = kernel(
        x.dtype, x.shape[1], hidden, first.w.shape[0], indices.shape[1], indices.dtype,
        (columns(first.w), columns(last.w)),
        tuple(tuple(None if each is None else each.dtype for each in of[1:])
              for of in (first, last)),
        quantizations, activation,
    )  # fmt: skip
    operands = [rows(x, 1), rows(gates, 1), rows(indices, 1)]
    for w, scales, zeros, bias in (first, last):
        operands += [contiguous(each) for each in (w, bias, scales, zeros) if each is not None]
    (y,) = run(*operands)
    return y


def _weights(x, first, last, hidden, quantizations, activation):
    """Both weights as floats `[experts, out, in]` of the dtype of x."""
    features, width = _features(hidden, activation), x.shape[1]
    halves = activation.gate == "concatenated"
    w_in = dequantize_panels(first.w, first.scales, first.zeros, features, width,
                             quantizations.first, halves=halves)
    w_out = dequantize_panels(last.w, last.scales, last.zeros, width, hidden,
                              quantizations.last, halves=False)
    return w_in.to(x.dtype), w_out.to(x.dtype)


def _plain(x, gates, indices, first, last, hidden, quantizations, activation):
    w_in, w_out = _weights(x, first, last, hidden, quantizations, activation)
    slots, offsets, tokens = places(indices, first.w.shape[0])
    linear = torch.ops.moe.grouped_linear
    z = linear(round_rows(x, quantizations.first).to(x.dtype), w_in, first.bias, offsets, tokens)
    rows_of_last = round_rows(activation(z), quantizations.last).to(x.dtype)
    outputs = linear(rows_of_last, w_out, last.bias, offsets)
    return apply_gates(outputs, gates, slots)


def _fake(x, gates, indices, *others):
    first, last = QuantizedOperands(*others[:4]), QuantizedOperands(*others[4:8])
    _validate(x, gates, indices, first, last, others[8], *_split(others[9:]))
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.hidden = inputs[:12]
    ctx.options = inputs[12:]
    ctx.save_for_backward(*tensors)


# Of the op's tensors, those that have a gradient: x, gates, b_in and b_out.
_DIFFERENTIABLE = (0, 1, 6, 10)


def _backward(ctx, dy):
    needed = ctx.needs_input_grad[:11]
    if any(need for n, need in enumerate(needed) if n not in _DIFFERENTIABLE):
        _check.fail("expected scales and zeros without requires_grad, for which there is no "
                    "gradient; train adapters beside quantized weights", RuntimeError)
    grads = torch.ops.moe.run_quantized_experts_backward(
        dy, *ctx.saved_tensors, ctx.hidden, as_bits([needed[n] for n in _DIFFERENTIABLE]),
        *ctx.options)
    found = dict(zip(_DIFFERENTIABLE, grads, strict=True))
    grads = [found[n] if need else None for n, need in enumerate(needed)]
    return *grads, *[None] * (1 + len(ctx.options))


_TENSORS = ("Tensor x, Tensor gates, Tensor indices, "
            "Tensor w_in, Tensor scales_in, Tensor? zeros_in, Tensor? b_in, "
            "Tensor w_out, Tensor scales_out, Tensor? zeros_out, Tensor? b_out, int hidden")
_OPTIONS = f"{OPTIONS}, str? format_out=None, int? group_out=None"
_op = define(
    f"run_quantized_experts({_TENSORS}, {_OPTIONS}, {SCHEMA}) -> Tensor",
    kernel=_run, fake=_fake, setup_context=_setup_context, backward=_backward,
    key="CompositeExplicitAutograd", cast=("x", "b_in", "b_out"), widen=("gates",),
)


# ---- gradients ------------------------------------------------------------------


def _run_backward(dy, x, gates, indices, *others):
    """Those of the layer with its weights as floats, as if rows were not rounded."""
    first, last = QuantizedOperands(*others[:4]), QuantizedOperands(*others[4:8])
    hidden, needed, (quantizations, activation) = others[8], others[9], _split(others[10:])
    w_in, w_out = _weights(x, first, last, hidden, quantizations, activation)
    # Bits of the tensors of run_experts: x, gates, indices, w_in, b_in, w_out, b_out.
    bits = needed & 3 | (needed >> 2 & 1) << 4 | (needed >> 3 & 1) << 6
    grads = torch.ops.moe.run_experts_backward(
        dy, x, gates, indices, w_in, first.bias, w_out, last.bias, bits, False,
        *activation.options)
    return grads[0], grads[1], grads[3], grads[5]


def _fake_backward(dy, x, gates, indices, *others):
    hidden, needed, (_, activation) = others[8], others[9], _split(others[10:])
    experts = others[0].shape[0]
    shapes = (x.shape, gates.shape, (experts, _features(hidden, activation)),
              (experts, x.shape[1]))
    dtypes = (x.dtype, gates.dtype, x.dtype, x.dtype)
    return tuple(x.new_empty(shape if needed >> n & 1 else (0,), dtype=dtype)
                 for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)))


define(
    f"run_quantized_experts_backward(Tensor dy, {_TENSORS}, int needed, {_OPTIONS}, {SCHEMA}) "
    "-> (Tensor dx, Tensor dgates, Tensor db_in, Tensor db_out)",
    kernel=_run_backward, fake=_fake_backward, key="CompositeExplicitAutograd", is_gradient=True,
)
