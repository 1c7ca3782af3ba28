"""moe.dispersion_weights: the metric of each cluster (docs/Spec.md 3.6)."""

from typing import Literal

import torch

from .._support.keywords import renamed
from ._check import INDICES, SCORES, Checker
from ._kernel import Kernel, Tensor, boolean, contiguous, enum, f64, kernels
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"s": "dispersion", "count": "counts"}
_check = Checker("dispersion_weights", _NAMES)

SCALES = ("cluster", "feature", "global", "global_preclamp", "dispersion", "none")


@renamed(_NAMES)
def dispersion_weights(
    dispersion: torch.Tensor,
    counts: torch.Tensor,
    *,
    eps: float = 1e-4,
    clamp: float | None = None,
    scale: Literal[
        "cluster", "feature", "global", "global_preclamp", "dispersion", "none"
    ] = "cluster",
    include_empty: bool = False,
) -> torch.Tensor:
    """metric = 1 / (dispersion + eps), capped at `clamp` times its mean and divided by a mean.

    `moe_mlir.reference.DISPERSION_PRESETS` has the settings that the authors'
    code runs for language models, Swin and SoftMoE.

    Args:
        dispersion: `[experts, d]` float32, from `mad_dispersion`.
        counts: `[experts]` int32 or int64, the tokens of each cluster.
        eps: what a feature without dispersion is divided by.
        clamp: the cap, in means over live clusters and features; None for none.
        scale: the divisor: "cluster" (mean of the row), "feature" (mean over the
            clusters), "global", "global_preclamp" (the mean before the cap),
            "none"; or "dispersion", mean(dispersion + eps) / (dispersion + eps) without a cap.
        include_empty: let clusters without tokens take part.

    Returns:
        metric `[experts, d]` float32; rows of clusters without tokens are 1. No gradient.
    """
    return _op(dispersion, counts, eps, clamp, scale, include_empty)


def _arguments(s, count, eps, clamp, scale, include_empty):
    _check.tensor("s", s)
    _check.tensor("count", count)
    _check.number("eps", eps)
    if clamp is not None:
        _check.number("clamp", clamp)
        clamp = float(clamp)
    return s, count, float(eps), clamp, scale, bool(include_empty)


def _validate(s, count, eps, clamp, scale, include_empty):
    del include_empty
    _check.dtype("s", s, SCORES)
    _check.rank("s", s, "[experts, d]")
    _check.dtype("count", count, INDICES)
    _check.shape("count", count, s.shape[:1], "[experts of 's']")
    _check.positive("eps", eps)
    if clamp is not None:
        _check.positive("clamp", clamp)
    _check.choice("scale", scale, SCALES)


@kernels
def kernel(
    count_dtype: torch.dtype,
    experts: int,
    width: int,
    eps: float,
    clamp: float | None,
    scale: str,
    include_empty: bool,
) -> Kernel:
    attributes = [
        ("eps", f64(eps)),
        ("scale", enum("dispersion_scale", scale)),
        ("include_empty", boolean(include_empty)),
    ]
    if clamp is not None:
        attributes.append(("clamp", f64(clamp)))
    return Kernel(
        "dispersion_weights",
        (
            Tensor("s", (experts, width), torch.float32),
            Tensor("count", (experts,), count_dtype),
        ),
        (Tensor("m", (experts, width), torch.float32),),
        tuple(attributes),
    )


def _cpu(s, count, eps, clamp, scale, include_empty):
    _validate(s, count, eps, clamp, scale, include_empty)
    run = kernel(count.dtype, *s.shape, eps, clamp, scale, include_empty)
    (m,) = run(contiguous(s), contiguous(count))
    return m


def _fake(s, count, eps, clamp, scale, include_empty):
    _validate(s, count, eps, clamp, scale, include_empty)
    return torch.empty_like(s, memory_format=torch.contiguous_format)


_op = define(
    "dispersion_weights(Tensor s, Tensor count, float eps, float? clamp, str scale, "
    "bool include_empty) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    widen=("s",),
)
