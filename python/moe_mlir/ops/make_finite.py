"""moe.make_finite: non-finite scores become the least finite one (docs/Spec.md 3.1)."""

from typing import Literal

import torch

from ._check import ACTIVATIONS, Checker
from ._kernel import Kernel, Tensor, enum, kernels, rows
from ._library import define

_check = Checker("make_finite")


def make_finite(scores: torch.Tensor, *, scope: Literal["row", "tensor"] = "row") -> torch.Tensor:
    """Replaces NaN and infinities by the least finite score, 0 where there is none.

    Args:
        scores: `[.., experts]`, float32, bfloat16 or float16.
        scope: look for it in the "row" or in the whole "tensor".

    Returns:
        `[.., experts]` float32. The replacement is a constant for the gradient.
    """
    return _op(scores, scope)


def _arguments(scores, scope):
    _check.tensor("scores", scores)
    return scores, scope


def _validate(scores, scope):
    _check.at_least_1d("scores", scores, "[.., experts]")
    _check.dtype("scores", scores, ACTIVATIONS)
    _check.choice("scope", scope, ("row", "tensor"))


@kernels
def kernel(experts: int, dtype: torch.dtype, scope: str) -> Kernel:
    return Kernel(
        "make_finite",
        (Tensor("scores", ("n", experts), dtype),),
        (Tensor("finite", ("n", experts), torch.float32),),
        (("scope", enum("finite_scope", scope)),),
    )


def _cpu(scores, scope):
    _validate(scores, scope)
    (finite,) = kernel(scores.shape[-1], scores.dtype, scope)(rows(scores, 1))
    return finite.view(scores.shape)


def _fake(scores, scope):
    _validate(scores, scope)
    return scores.new_empty(scores.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _backward(ctx, dfinite):
    (scores,) = ctx.saved_tensors
    return torch.where(scores.isfinite(), dfinite, 0.0).to(scores.dtype), None


_op = define(
    "make_finite(Tensor scores, str scope) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
