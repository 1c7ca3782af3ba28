"""moe.z_loss: how large the logits are (docs/Spec.md 4, F14)."""

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, MASK, Checker
from ._kernel import Kernel, Tensor, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"z": "logits"}
_check = Checker("z_loss", _NAMES)


@renamed(_NAMES)
def z_loss(logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over the tokens of the squared log-sum-exp of their logits.

    Args:
        logits: `[.., experts]`, float32, bfloat16 or float16.
        mask: bool `[..]`, True = real token.

    Returns:
        a 0-d float32 tensor; a token whose logits are all -inf counts with 0.
    """
    loss, _ = _op(logits, mask)
    return loss


def _arguments(z, mask):
    _check.tensor("z", z)
    _check.tensor("mask", mask, optional=True)
    return z, mask


def _validate(z, mask):
    _check.at_least_1d("z", z, "[.., experts]")
    _check.dtype("z", z, ACTIVATIONS)
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, z.shape[:-1], "of 'z' without experts")


@kernels
def kernel(experts: int, dtype: torch.dtype, masked: bool) -> Kernel:
    inputs = [Tensor("z", ("n", experts), dtype)]
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    results = (Tensor("loss", (), torch.float32), Tensor("lse", ("n",), torch.float32))
    return Kernel("z_loss", tuple(inputs), results)


def _cpu(z, mask):
    _validate(z, mask)
    operands = [rows(z, 1)] if mask is None else [rows(z, 1), rows(mask, 0)]
    loss, lse = kernel(z.shape[-1], z.dtype, mask is not None)(*operands)
    return loss, lse.view(z.shape[:-1])


def _fake(z, mask):
    _validate(z, mask)
    return (
        z.new_empty((), dtype=torch.float32),
        z.new_empty(z.shape[:-1], dtype=torch.float32),
    )


def _setup_context(ctx, inputs, output):
    z, mask = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(z, mask, lse)


def _backward(ctx, dloss, _):
    # dz_ne = 2 lse_n softmax(z)_ne / tokens
    z, mask, lse = ctx.saved_tensors
    tokens = lse.numel() if mask is None else mask.sum().clamp(min=1)
    supported = lse != -torch.inf  # false for masked tokens too
    if torch.is_grad_enabled():
        # What a second gradient goes through must depend on z.
        lse = torch.where(supported[..., None], z.to(torch.float32), 0.0).logsumexp(-1)
    level = torch.where(supported, lse, 0.0)[..., None]
    dz = 2 * level * (z.to(torch.float32) - level).exp() * (dloss / tokens)
    return torch.where(supported[..., None], dz, 0.0).to(z.dtype), None


_op = define(
    "z_loss(Tensor z, Tensor? mask) -> (Tensor loss, Tensor lse)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
