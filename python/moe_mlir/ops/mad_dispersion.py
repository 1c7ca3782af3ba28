"""moe.mad_dispersion: how far the tokens of each expert lie apart (docs/Spec.md 3.6)."""

from typing import Literal

import torch

from ._check import ACTIVATIONS, INDICES, MASK, Checker
from ._kernel import Kernel, Tensor, enum, kernels, rows
from ._library import define

_check = Checker("mad_dispersion")


def mad_dispersion(
    h: torch.Tensor,
    assign: torch.Tensor,
    num_experts: int,
    *,
    measure: Literal["mad", "variance", "pairwise"] = "mad",
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of the cluster of tokens that each expert was assigned.

    Args:
        h: tokens `[.., d]`, float32, bfloat16 or float16.
        assign: `[..]` int32 or int64, the expert of each token; outside
            `[0, num_experts)` the token is in no cluster.
        num_experts: the number of clusters.
        measure: "mad" (mean absolute deviation), "variance" or "pairwise".
        mask: bool `[..]`, True = real token.

    Returns:
        dispersion `[experts, d]` and mean `[experts, d]` in float32, counts
        `[experts]` in int64. Empty clusters are 0 everywhere. No gradient.
    """
    return _op(h, assign, num_experts, measure, mask)


def _arguments(h, assign, num_experts, measure, mask):
    _check.tensor("h", h)
    _check.tensor("assign", assign)
    num_experts = _check.integer("num_experts", num_experts)
    _check.tensor("mask", mask, optional=True)
    return h, assign, num_experts, measure, mask


def _validate(h, assign, num_experts, measure, mask):
    _check.at_least_1d("h", h, "[.., d]")
    _check.dtype("h", h, ACTIVATIONS)
    _check.dtype("assign", assign, INDICES)
    _check.shape("assign", assign, h.shape[:-1], "of 'h' without d")
    _check.at_least("num_experts", num_experts, 1)
    _check.choice("measure", measure, ("mad", "variance", "pairwise"))
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, h.shape[:-1], "of 'h' without d")


@kernels
def kernel(
    dtype: torch.dtype,
    assign_dtype: torch.dtype,
    experts: int,
    width: int,
    measure: str,
    masked: bool,
) -> Kernel:
    inputs = [Tensor("h", ("n", width), dtype), Tensor("assign", ("n",), assign_dtype)]
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    return Kernel(
        "mad_dispersion",
        tuple(inputs),
        (
            Tensor("s", (experts, width), torch.float32),
            Tensor("mean", (experts, width), torch.float32),
            Tensor("count", (experts,), torch.int32),
        ),
        (("measure", enum("dispersion_measure", measure)),),
    )


def _cpu(h, assign, num_experts, measure, mask):
    _validate(h, assign, num_experts, measure, mask)
    run = kernel(h.dtype, assign.dtype, num_experts, h.shape[-1], measure, mask is not None)
    operands = [rows(h, 1), rows(assign, 0)]
    if mask is not None:
        operands.append(rows(mask, 0))
    s, mean, count = run(*operands)
    return s, mean, count.to(torch.int64)


def _fake(h, assign, num_experts, measure, mask):
    _validate(h, assign, num_experts, measure, mask)
    shape = (num_experts, h.shape[-1])
    return (
        h.new_empty(shape, dtype=torch.float32),
        h.new_empty(shape, dtype=torch.float32),
        h.new_empty((num_experts,), dtype=torch.int64),
    )


_op = define(
    "mad_dispersion(Tensor h, Tensor assign, int num_experts, str measure, Tensor? mask) "
    "-> (Tensor s, Tensor mean, Tensor count)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
)
