"""moe.router_logits: project tokens onto experts (docs/Spec.md 3.2)."""

import torch

from ._check import ACTIVATIONS, Checker
from ._kernel import Kernel, Tensor, contiguous, kernels, rows
from ._library import define

_check = Checker("router_logits")


def router_logits(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """z = h weight^T + bias, accumulated and returned in float32.

    Args:
        h: tokens `[.., d]`, float32, bfloat16 or float16.
        weight: `[experts, d]`, any of these dtypes.
        bias: `[experts]`, any of these dtypes.

    Returns:
        z `[.., experts]` float32, whatever the inputs are.
    """
    return _op(h, weight, bias)


def _arguments(h, weight, bias):
    _check.tensor("h", h)
    _check.tensor("weight", weight)
    _check.tensor("bias", bias, optional=True)
    return h, weight, bias


def _validate(h, weight, bias):
    _check.at_least_1d("h", h, "[.., d]")
    _check.dtype("h", h, ACTIVATIONS)
    _check.dtype("weight", weight, ACTIVATIONS)
    _check.rank("weight", weight, "[experts, d]")
    _check.shape("weight", weight, (weight.shape[0], h.shape[-1]), "[experts, d of 'h']")
    if bias is not None:
        _check.dtype("bias", bias, ACTIVATIONS)
        _check.shape("bias", bias, weight.shape[:1], "[experts of 'weight']")


@kernels
def kernel(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    experts: int,
    width: int,
) -> Kernel:
    inputs = [Tensor("h", ("n", width), dtype), Tensor("weight", (experts, width), weight_dtype)]
    if bias_dtype is not None:
        inputs.append(Tensor("bias", (experts,), bias_dtype, clause="bias"))
    return Kernel("router_logits", tuple(inputs), (Tensor("z", ("n", experts), torch.float32),))


def _cpu(h, weight, bias):
    _validate(h, weight, bias)
    bias_dtype = None if bias is None else bias.dtype
    run = kernel(h.dtype, weight.dtype, bias_dtype, *weight.shape)
    operands = [rows(h, 1), contiguous(weight)]
    if bias is not None:
        operands.append(contiguous(bias))
    (z,) = run(*operands)
    return z if h.dim() == 2 else z.view(*h.shape[:-1], weight.shape[0])


def _fake(h, weight, bias):
    _validate(h, weight, bias)
    return h.new_empty((*h.shape[:-1], weight.shape[0]), dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    h, weight, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(h, weight)


def _backward(ctx, dz):
    h, weight = ctx.saved_tensors
    rows, tokens = dz.reshape(-1, dz.shape[-1]), h.reshape(-1, h.shape[-1])
    dh = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dh = (dz @ weight.to(torch.float32)).to(h.dtype)
    if ctx.needs_input_grad[1]:
        dweight = (rows.T @ tokens.to(torch.float32)).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        dbias = rows.sum(0).to(ctx.bias_dtype)
    return dh, dweight, dbias


_op = define(
    "router_logits(Tensor h, Tensor weight, Tensor? bias) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("h",),
    cast=("h", "weight", "bias"),
)
