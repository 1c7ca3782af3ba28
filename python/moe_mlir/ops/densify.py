"""moe.densify: gates of the selected experts over all experts (docs/Spec.md 3.1)."""

import torch

from ._check import ACTIVATIONS, INDICES, SCORES, Checker
from ._kernel import Kernel, Tensor, kernels, rows
from ._library import define

_check = Checker("densify")


def densify(gates: torch.Tensor, indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The gate of each selected expert at its place, zeros elsewhere.

    Args:
        gates: `[.., k]`; 16-bit ones are widened to float32.
        indices: `[.., k]` int32 or int64; -1 is nowhere.
        num_experts: at least k.

    Returns:
        `[.., num_experts]` float32; equal indices of a token add up.
    """
    return _op(gates, indices, num_experts)


def _arguments(gates, indices, num_experts):
    _check.tensor("gates", gates)
    _check.tensor("indices", indices)
    num_experts = _check.integer("num_experts", num_experts)
    _check.dtype("gates", gates, ACTIVATIONS)
    return gates.to(torch.float32), indices, num_experts


def _validate(gates, indices, num_experts):
    _check.at_least_1d("gates", gates, "[.., k]")
    _check.dtype("gates", gates, SCORES)
    _check.dtype("indices", indices, INDICES)
    _check.shape("indices", indices, gates.shape, "of 'gates'")
    if num_experts < gates.shape[-1]:
        _check.fail(f"expected 'num_experts' to be at least k ({gates.shape[-1]}), found {num_experts}")


@kernels
def kernel(k: int, index_dtype: torch.dtype, experts: int) -> Kernel:
    return Kernel(
        "densify",
        (Tensor("gates", ("n", k), torch.float32), Tensor("indices", ("n", k), index_dtype)),
        (Tensor("dense", ("n", experts), torch.float32),),
    )


def _cpu(gates, indices, num_experts):
    _validate(gates, indices, num_experts)
    run = kernel(gates.shape[-1], indices.dtype, num_experts)
    (dense,) = run(rows(gates, 1), rows(indices, 1))
    return dense.view(*gates.shape[:-1], num_experts)


def _fake(gates, indices, num_experts):
    _validate(gates, indices, num_experts)
    return gates.new_empty((*gates.shape[:-1], num_experts))


def _setup_context(ctx, inputs, output):
    _, indices, _ = inputs
    ctx.save_for_backward(indices)


def _backward(ctx, ddense):
    (indices,) = ctx.saved_tensors
    inside = (indices >= 0) & (indices < ddense.shape[-1])
    where = torch.where(inside, indices, 0).to(torch.int64)
    return torch.where(inside, ddense.gather(-1, where), 0.0), None, None


_op = define(
    "densify(Tensor gates, Tensor indices, int num_experts) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("gates", "indices"),
    widen=("gates",),
)
