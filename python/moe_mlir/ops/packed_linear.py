"""moe.packed_linear: torch.nn.functional.linear of a weight in panels (docs/Spec.md 3.14)."""

import functools

import torch

from ._check import ACTIVATIONS, Checker
from ._expert_activation import ExpertActivation
from ._expert_runs import has_kernel
from ._kernel import Kernel, Tensor, contiguous
from ._library import define
from ._panels import columns, has_halves, is_packed, packed_shape, unpack_weight
from .grouped_linear import attributes

_check = Checker("packed_linear")


def packed_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out_features: int,
) -> torch.Tensor:
    """y = x W^T + bias, with W in the order in which kernels read it.

    Args:
        x: `[.., in]` float32, bfloat16 or float16.
        w: W, `[out_features, in]`, in panels: the weight of one expert, as
            `moe_mlir.pack_linears` lays it out; in the dtype of x. It has no gradient.
        bias: `[out_features]`, or None.
        out_features: the panels' columns behind them are zeros.

    Returns:
        `[.., out_features]` in the dtype of x; sums are float32.
    """
    return _op(x, w, bias, out_features)


def _validate(x, w, bias, out):
    _check.dtype("x", x, ACTIVATIONS)
    _check.same_dtype("w", w, "x", x)
    if x.dim() == 0 or not is_packed(w) or w.shape[0] != 1 or has_halves(w):
        _check.fail("expected x [.., in] and w in the panels of one matrix, found shapes "
                    f"{tuple(x.shape)} and {tuple(w.shape)}")
    wanted = packed_shape(1, out, x.shape[-1], x.dtype, False, columns(w))
    _check.shape("w", w, wanted, f"of panels for {x.shape[-1]} features and {out} of y")
    if bias is not None:
        _check.shape("bias", bias, (out,), "[out_features]")


@functools.cache
def kernel(
    dtype: torch.dtype, width: int, out: int, panels: int, bias_dtype: torch.dtype | None,
) -> Kernel:
    inputs = [
        Tensor("x", ("r", width), dtype),
        Tensor("w", packed_shape(1, out, width, dtype, False, panels), dtype),
        Tensor("offsets", (2,), torch.int64),
    ]
    if bias_dtype is not None:
        inputs.append(Tensor("bias", (1, out), bias_dtype, clause="bias"))
    return Kernel("grouped_linear", tuple(inputs), (Tensor("y", ("r", out), dtype),),
                  attributes(False, ExpertActivation(), panels))


def _run(x, w, bias, out):
    _validate(x, w, bias, out)
    if not has_kernel(x, w, bias):
        return torch.nn.functional.linear(x, _matrix(x, w, out), bias)
    rows = contiguous(x).view(-1, x.shape[-1])
    run = kernel(x.dtype, x.shape[-1], out, columns(w), None if bias is None else bias.dtype)
    operands = [rows, contiguous(w.detach()), torch.tensor([0, rows.shape[0]])]
    (y,) = run(*operands, *(() if bias is None else (contiguous(bias)[None],)))
    return y.view(*x.shape[:-1], out)


def _matrix(x, w, out):
    return unpack_weight(w, out, x.shape[-1])[0]


def _fake(x, w, bias, out):
    _validate(x, w, bias, out)
    return x.new_empty((*x.shape[:-1], out))


def _setup_context(ctx, inputs, output):
    x, w, _, ctx.out = inputs
    ctx.save_for_backward(w)
    ctx.width = x.shape[-1]


def _backward(ctx, dy):
    of_x, of_w, of_bias, _ = ctx.needs_input_grad
    if of_w:
        _check.fail("expected a weight in panels without requires_grad, for which there is no "
                    "gradient; call moe_mlir.unpack_linears(model) before training", RuntimeError)
    (w,) = ctx.saved_tensors
    dx = torch.ops.moe.packed_linear_backward(dy, w, ctx.width) if of_x else None
    return dx, None, dy.reshape(-1, ctx.out).sum(0) if of_bias else None, None


_op = define(
    "packed_linear(Tensor x, Tensor w, Tensor? bias, int out_features) -> Tensor",
    kernel=_run, fake=_fake, setup_context=_setup_context, backward=_backward,
    key="CompositeExplicitAutograd", rows=("x",), cast=("x", "w", "bias"),
    panels=("w",),
)


# ---- the gradient of x ------------------------------------------------------------


def _gradient(dy, w, width):
    # The order of sums in torch's product follows the strides.
    return contiguous(dy) @ unpack_weight(w, dy.shape[-1], width)[0]


def _fake_gradient(dy, w, width):
    return dy.new_empty((*dy.shape[:-1], width))


define(
    "packed_linear_backward(Tensor dy, Tensor w, int in_features) -> Tensor",
    kernel=_gradient, fake=_fake_gradient, key="CompositeExplicitAutograd", is_gradient=True,
)
