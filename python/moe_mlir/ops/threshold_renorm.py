"""moe.threshold_renorm: select the experts above a threshold (docs/Spec.md 3.9)."""

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, MASK, SCORES, Checker
from ._few_values import FewValues, scalar
from ._kernel import Kernel, Tensor, boolean, f64, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"p": "probs"}
_check = Checker("threshold_renorm", _NAMES)
_thetas = FewValues()


@renamed(_NAMES)
def threshold_renorm(
    probs: torch.Tensor,
    theta: float | torch.Tensor,
    *,
    renorm: bool = True,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects every expert with p > theta, or the best one where there is none.

    Args:
        probs: probabilities `[.., experts]`; 16-bit ones are widened to float32.
        theta: the threshold, a number or a 0-d tensor (learned). Its gradient
            is straight-through: `theta` moves a mask that multiplies the
            gates, so `dtheta = -sum over the selected of gate * dgate`.
        renorm: divide the gates by the sum of the selected probabilities.
        mask: bool `[..]`, True = real token; others get gates and count 0.

    Returns:
        gates `[.., experts]` float32, 0 where not selected, and count `[..]`
        int64, the number of selected experts.
    """
    return _op(probs, theta, renorm, mask)


def _arguments(p, theta, renorm, mask):
    _check.tensor("p", p)
    _check.tensor("mask", mask, optional=True)
    _check.dtype("p", p, ACTIVATIONS)
    theta_value, theta = _check.scalar_or_tensor("theta", theta)
    return p.to(torch.float32), theta_value, theta, bool(renorm), mask


def _validate(p, theta_value, theta, renorm, mask):
    _check.at_least_1d("p", p, "[.., experts]")
    _check.dtype("p", p, SCORES)
    if p.shape[-1] < 1:
        _check.fail("expected 'p' to have at least one expert, found none")
    _check.finite("theta", theta)
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, p.shape[:-1], "of 'p' without experts")


@kernels
def kernel(experts: int, theta: float | None, renorm: bool, masked: bool) -> Kernel:
    inputs = [Tensor("p", ("n", experts), torch.float32)]
    if theta is None:
        inputs.append(Tensor("theta", (), torch.float32, clause="theta"))
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    attributes = () if theta is None else (("theta", f64(theta)),)
    return Kernel(
        "threshold_renorm",
        tuple(inputs),
        (
            Tensor("gates", ("n", experts), torch.float32),
            Tensor("count", ("n",), torch.int32),
        ),
        (*attributes, ("renorm", boolean(renorm))),
    )


def _cpu(p, theta_value, theta, renorm, mask):
    _validate(p, theta_value, theta, renorm, mask)
    if theta_value is None and not _thetas.has((p.shape[-1], renorm, mask is not None), theta):
        theta_value = scalar(theta, p)
    learned = theta_value is not None
    run = kernel(p.shape[-1], None if learned else theta, renorm, mask is not None)
    operands = [rows(p, 1)]
    if learned:
        operands.append(theta_value.detach().to(torch.float32))
    if mask is not None:
        operands.append(rows(mask, 0))
    gates, count = run(*operands)
    return gates.view(p.shape), count.view(p.shape[:-1]).to(torch.int64)


def _fake(p, theta_value, theta, renorm, mask):
    _validate(p, theta_value, theta, renorm, mask)
    gates = torch.empty_like(p, memory_format=torch.contiguous_format)
    return gates, p.new_empty(p.shape[:-1], dtype=torch.int64)


def _setup_context(ctx, inputs, output):
    p, theta_value, ctx.theta, ctx.renorm, mask = inputs
    gates, count = output
    ctx.mark_non_differentiable(count)
    ctx.save_for_backward(p, gates, theta_value, mask)


def _backward(ctx, dgates, _):
    p, gates, theta_value, mask = ctx.saved_tensors
    theta = ctx.theta if theta_value is None else theta_value.to(torch.float32)
    above = p > theta
    best = torch.zeros_like(above).scatter(-1, p.argmax(-1, keepdim=True), True)
    selected = torch.where(above.any(-1, keepdim=True), above, best)
    if mask is not None:
        selected = selected & mask[..., None]
    dg = torch.where(selected, dgates, 0.0)
    dp, shared = dg, (gates * dg).sum(-1, keepdim=True)
    if ctx.renorm:
        # dp_b = (dg_b - sum_a g_a dg_a) / sum of the selected
        total = torch.where(selected, p, 0.0).sum(-1, keepdim=True)
        dp = torch.where(selected & (total != 0), (dg - shared) / total, 0.0)
    dtheta = None
    if theta_value is not None:
        dtheta = -shared.sum().to(theta_value.dtype)
    return dp, dtheta, None, None, None


_op = define(
    "threshold_renorm(Tensor p, Tensor? theta_value, float theta, bool renorm, Tensor? mask) "
    "-> (Tensor gates, Tensor count)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("p", "mask"),
    widen=("p",),
)
