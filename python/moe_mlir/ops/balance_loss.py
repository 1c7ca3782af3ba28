"""moe.balance_loss: how unevenly experts are chosen (docs/Spec.md 4, F14)."""

from typing import Literal

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, INDICES, MASK, SCORES, Checker
from ._kernel import Kernel, Tensor, enum, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"p": "probs", "idx": "indices"}
_check = Checker("balance_loss", _NAMES)


@renamed(_NAMES)
def balance_loss(
    probs: torch.Tensor,
    indices: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    divide_by: Literal["tokens", "assignments"] = "tokens",
) -> torch.Tensor:
    """E sum_e f_e P_e: f the experts' shares of the assignments, P their mean probabilities.

    Args:
        probs: probabilities `[.., experts]`; 16-bit ones are widened to float32.
        indices: `[.., k]` int32 or int64, the experts of each token; -1 is none.
        mask: bool `[..]`, True = real token.
        divide_by: "tokens", or "assignments" (tokens * k, as the code that
            descends from fastmoe does).

    Returns:
        a 0-d float32 tensor; 0 without a token. The gradient goes to `probs`.
    """
    loss, _ = _op(probs, indices, mask, divide_by)
    return loss


def _arguments(p, idx, mask, divide_by):
    _check.tensor("p", p)
    _check.tensor("idx", idx)
    _check.tensor("mask", mask, optional=True)
    _check.dtype("p", p, ACTIVATIONS)
    return p.to(torch.float32), idx, mask, divide_by


def _validate(p, idx, mask, divide_by):
    _check.at_least_1d("p", p, "[.., experts]")
    _check.dtype("p", p, SCORES)
    _check.at_least_1d("idx", idx, "[.., k]")
    _check.dtype("idx", idx, INDICES)
    _check.shape("idx", idx, (*p.shape[:-1], idx.shape[-1]), "[tokens of 'p', k]")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, p.shape[:-1], "of 'p' without experts")
    _check.choice("divide_by", divide_by, ("tokens", "assignments"))


@kernels
def kernel(experts: int, k: int, index_dtype: torch.dtype, masked: bool, divide_by: str) -> Kernel:
    inputs = [
        Tensor("p", ("n", experts), torch.float32),
        Tensor("indices", ("n", k), index_dtype),
    ]
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    return Kernel(
        "balance_loss",
        tuple(inputs),
        (Tensor("loss", (), torch.float32), Tensor("load", (experts,), torch.int32)),
        (("divisor", enum("loss_divisor", divide_by)),),
    )


def _cpu(p, idx, mask, divide_by):
    _validate(p, idx, mask, divide_by)
    run = kernel(p.shape[-1], idx.shape[-1], idx.dtype, mask is not None, divide_by)
    operands = [rows(p, 1), rows(idx, 1)]
    if mask is not None:
        operands.append(rows(mask, 0))
    loss, load = run(*operands)
    return loss, load.to(torch.int64)


def _fake(p, idx, mask, divide_by):
    _validate(p, idx, mask, divide_by)
    return p.new_empty(()), p.new_empty((p.shape[-1],), dtype=torch.int64)


def _setup_context(ctx, inputs, output):
    p, idx, mask, divide_by = inputs
    ctx.shape = p.shape
    ctx.places = idx.shape[-1] if divide_by == "assignments" else 1
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], mask)


def _backward(ctx, dloss, _):
    # dp_ne = E f_e / divisor for real tokens; the load is a constant.
    load, mask = ctx.saved_tensors
    experts = ctx.shape[-1]
    tokens = ctx.shape[:-1].numel() if mask is None else mask.sum()
    divisor = load.sum() * tokens * ctx.places
    dp = experts * load.to(torch.float32) / divisor.clamp(min=1).to(torch.float32) * dloss
    dp = dp.expand(ctx.shape)
    dp = dp if mask is None else torch.where(mask[..., None], dp, 0.0)
    return dp, None, None, None


_op = define(
    "balance_loss(Tensor p, Tensor idx, Tensor? mask, str divide_by) -> (Tensor loss, Tensor load)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    widen=("p",),
)
