"""moe.bias_update: raise the selection bias of experts with little load (docs/Spec.md F14)."""

import torch

from ._check import INDICES, SCORES, Checker
from ._few_values import FewValues
from ._kernel import Kernel, Tensor, contiguous, f64, kernels
from ._library import define

_check = Checker("bias_update")
_gammas = FewValues()


def bias_update(bias: torch.Tensor, counts: torch.Tensor, *, gamma: float = 0.001) -> torch.Tensor:
    """bias + gamma sign(mean load - load), for after the optimizer's step.

    Args:
        bias: `[experts]` float32.
        counts: `[experts]` int32 or int64, the load of the step.
        gamma: the size of a step.

    Returns:
        the new bias `[experts]` float32; `bias` itself is not changed. No gradient.
    """
    return _op(bias, counts, gamma)


def _arguments(bias, counts, gamma):
    _check.tensor("bias", bias)
    _check.tensor("counts", counts)
    _check.number("gamma", gamma)
    return bias, counts, float(gamma)


def _validate(bias, counts, gamma):
    _check.rank("bias", bias, "[experts]")
    _check.dtype("bias", bias, SCORES)
    _check.dtype("counts", counts, INDICES)
    _check.shape("counts", counts, bias.shape, "of 'bias'")
    _check.finite("gamma", gamma)


@kernels
def kernel(experts: int, count_dtype: torch.dtype, gamma: float) -> Kernel:
    return Kernel(
        "bias_update",
        (Tensor("bias", (experts,), torch.float32), Tensor("counts", (experts,), count_dtype)),
        (Tensor("bias_new", (experts,), torch.float32),),
        (("gamma", f64(gamma)),),
    )


def _cpu(bias, counts, gamma):
    _validate(bias, counts, gamma)
    form = (bias.shape[0], counts.dtype)
    if _gammas.has(form, gamma):
        (new,) = kernel(*form, gamma)(contiguous(bias), contiguous(counts))
        return new
    (signs,) = kernel(*form, 1.0)(torch.zeros_like(contiguous(bias)), contiguous(counts))
    return bias + gamma * signs


def _fake(bias, counts, gamma):
    _validate(bias, counts, gamma)
    return torch.empty_like(bias, memory_format=torch.contiguous_format)


_op = define(
    "bias_update(Tensor bias, Tensor counts, float gamma) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    widen=("bias",),
)
