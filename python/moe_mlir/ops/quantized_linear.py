"""moe.quantized_linear: torch.nn.functional.linear of a quantized weight (docs/Spec.md 3.14)."""

import torch

from ._check import ACTIVATIONS, Checker
from ._expert_activation import ExpertActivation
from ._expert_runs import has_kernel
from ._kernel import Kernel, Tensor, contiguous, enum, i64, kernels
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
from .grouped_linear import attributes as linear_attributes

_check = Checker("quantized_linear")

# The arguments behind the tensors, in the order of the schema.
OPTIONS = 'str format="int4", int group=32, str activations="none"'


def quantized_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    quantization: Quantization,
) -> torch.Tensor:
    """y = x W^T + bias, with W = scales (value(codes) - zeros), decoded as it is read.

    Args:
        x: `[.., in]` float32, bfloat16 or float16.
        w: the codes of W, `[out_features, in]`, in the panels of one expert, int8
            (`ops/_quantized.py`). It has no gradient.
        scales: float32, bfloat16 or float16, in panels, or int8 of two levels.
        zeros: as `scales`, or None: the code in the middle stands for 0.
        bias: `[out_features]`, or None.
        out_features: the panels' columns behind them are not read.
        quantization: the format of the codes, the features of x that share a scale, and whether
            rows of x are rounded to int8 before they are multiplied.

    Returns:
        `[.., out_features]` in the dtype of x; sums are float32.
    """
    return _op(x, w, scales, zeros, bias, out_features, *quantization)


def _validate(x, w, scales, zeros, bias, out, quantization):
    _check.dtype("x", x, (*ACTIVATIONS, torch.float64))
    quantization.validate(_check)
    if x.dim() == 0 or w.dim() == 0 or w.shape[0] != 1:
        _check.fail("expected x [.., in] and w in the panels of one matrix, found shapes "
                    f"{tuple(x.shape)} and {tuple(w.shape)}")
    validate_weight(_check, ("w", "scales", "zeros"), w, scales, zeros, out, x.shape[-1],
                    quantization)
    if bias is not None:
        _check.shape("bias", bias, (out,), "[out_features]")


def attributes(quantization: Quantization, panels: int, activation: ExpertActivation) -> tuple:
    """What moe.grouped_linear says of a quantized weight in panels, and after it."""
    written = [("format", enum("weight_format", quantization.format))]
    if quantization.group:
        written.append(("group", i64(quantization.group)))
    if quantization.activations != "none":
        written.append(("activations", enum("activation_format", quantization.activations)))
    return (*linear_attributes(False, activation, panels), *written)


@kernels
def kernel(
    dtype: torch.dtype, width: int, out: int, panels: int, scales_dtype: torch.dtype,
    zeros_dtype: torch.dtype | None, bias_dtype: torch.dtype | None, quantization: Quantization,
) -> Kernel:
    of_scales = scales_shape(1, out, width, quantization.group, panels, scales_dtype)
    inputs = [
        Tensor("x", ("r", width), dtype),
        Tensor("w", codes_shape(1, out, width, quantization.format, panels), torch.int8),
        Tensor("offsets", (2,), torch.int64),
    ]
    if bias_dtype is not None:
        inputs.append(Tensor("bias", (1, out), bias_dtype, clause="bias"))
    inputs.append(Tensor("scales", of_scales, scales_dtype, clause="scales"))
    if zeros_dtype is not None:
        inputs.append(Tensor("zeros", of_scales, zeros_dtype, clause="zeros"))
    return Kernel("grouped_linear", tuple(inputs), (Tensor("y", ("r", out), dtype),),
                  attributes(quantization, panels, ExpertActivation()))


def _run(x, w, scales, zeros, bias, out, *options):
    quantization = Quantization(*options)
    _validate(x, w, scales, zeros, bias, out, quantization)
    if not has_kernel(x, w, scales, zeros, bias):
        rows = round_rows(x, quantization).to(x.dtype)
        return torch.nn.functional.linear(rows, _matrix(x, w, scales, zeros, out, quantization),
                                          bias)
    rows = contiguous(x).view(-1, x.shape[-1])
    run = kernel(x.dtype, x.shape[-1], out, columns(w), scales.dtype,
                 None if zeros is None else zeros.dtype, None if bias is None else bias.dtype,
                 quantization)
    operands = [rows, contiguous(w), torch.tensor([0, rows.shape[0]])]
    operands += [] if bias is None else [contiguous(bias)[None]]
    operands += [contiguous(each) for each in (scales, zeros) if each is not None]
    (y,) = run(*operands)
    return y.view(*x.shape[:-1], out)


def _matrix(x, w, scales, zeros, out, quantization):
    return dequantize_panels(w, scales, zeros, out, x.shape[-1], quantization,
                             halves=False)[0].to(x.dtype)


def _fake(x, w, scales, zeros, bias, out, *options):
    _validate(x, w, scales, zeros, bias, out, Quantization(*options))
    return x.new_empty((*x.shape[:-1], out))


def _setup_context(ctx, inputs, output):
    x, w, scales, zeros, _, ctx.out, *ctx.options = inputs
    ctx.save_for_backward(w, scales, zeros)
    ctx.width = x.shape[-1]


def _backward(ctx, dy):
    of_x, _, of_scales, of_zeros, of_bias, *rest = ctx.needs_input_grad
    if of_scales or of_zeros:
        _check.fail("expected scales and zeros without requires_grad, for which there is no "
                    "gradient; train adapters beside a quantized weight", RuntimeError)
    w, scales, zeros = ctx.saved_tensors
    dx = torch.ops.moe.quantized_linear_backward(
        dy, w, scales, zeros, ctx.width, *ctx.options) if of_x else None
    dbias = dy.reshape(-1, ctx.out).sum(0) if of_bias else None
    return dx, None, None, None, dbias, *[None] * len(rest)


_op = define(
    "quantized_linear(Tensor x, Tensor w, Tensor scales, Tensor? zeros, Tensor? bias, "
    f"int out_features, {OPTIONS}) -> Tensor",
    kernel=_run, fake=_fake, setup_context=_setup_context, backward=_backward,
    key="CompositeExplicitAutograd", rows=("x",), cast=("x", "bias"),
)


# ---- the gradient of x ------------------------------------------------------------


def _gradient(dy, w, scales, zeros, width, *options):
    """As if rows were not rounded, which has no slope."""
    weight = dequantize_panels(w, scales, zeros, dy.shape[-1], width, Quantization(*options),
                               halves=False)[0]
    # The order of sums in torch's product follows the strides.
    return contiguous(dy) @ weight.to(dy.dtype)


def _fake_gradient(dy, w, scales, zeros, width, *options):
    return dy.new_empty((*dy.shape[:-1], width))


define(
    "quantized_linear_backward(Tensor dy, Tensor w, Tensor scales, Tensor? zeros, "
    f"int in_features, {OPTIONS}) -> Tensor",
    kernel=_gradient, fake=_fake_gradient, key="CompositeExplicitAutograd", is_gradient=True,
)
