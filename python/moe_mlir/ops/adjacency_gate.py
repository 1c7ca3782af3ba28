"""moe.adjacency_gate: smooth probabilities over the expert graph (docs/Spec.md 3.7)."""

from typing import Literal

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, SCORES, Checker
from ._few_values import FewValues
from ._kernel import Kernel, Tensor, contiguous, enum, f64, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"p": "probs", "a": "adjacency"}
_check = Checker("adjacency_gate", _NAMES)
_thresholds = FewValues()
# A threshold that drops nothing.
_NONE = -torch.finfo(torch.float32).max


@renamed(_NAMES)
def adjacency_gate(
    probs: torch.Tensor,
    adjacency: torch.Tensor,
    *,
    threshold: float = 0.0,
    cold_start: Literal["literal", "base"] = "literal",
) -> torch.Tensor:
    """g_j = sum_k a_jk p_k, with entries of `adjacency` below `threshold` dropped.

    Args:
        probs: probabilities `[.., experts]`; 16-bit ones are widened to float32.
        adjacency: `[experts, experts]` float32. It gets no gradient.
        threshold: an entry stays iff it is >= threshold.
        cold_start: what an adjacency of zeros means: "literal" zeros, or
            "base", the identity.

    Returns:
        g `[.., experts]` float32; not a distribution.
    """
    return _op(probs, adjacency, threshold, cold_start)


def _arguments(p, a, threshold, cold_start):
    _check.tensor("p", p)
    _check.tensor("a", a)
    _check.number("threshold", threshold)
    _check.dtype("p", p, ACTIVATIONS)
    return p.to(torch.float32), a, float(threshold), cold_start


def _validate(p, a, threshold, cold_start):
    _check.at_least_1d("p", p, "[.., experts]")
    _check.dtype("p", p, SCORES)
    _check.dtype("a", a, SCORES)
    experts = p.shape[-1]
    _check.shape("a", a, (experts, experts), "[experts of 'p', experts of 'p']")
    _check.finite("threshold", threshold)
    _check.choice("cold_start", cold_start, ("literal", "base"))


@kernels
def kernel(experts: int, threshold: float, cold_start: str) -> Kernel:
    return Kernel(
        "adjacency_gate",
        (
            Tensor("p", ("n", experts), torch.float32),
            Tensor("a", (experts, experts), torch.float32),
        ),
        (Tensor("g", ("n", experts), torch.float32),),
        (("threshold", f64(threshold)), ("cold_start", enum("cold_start", cold_start))),
    )


def _cpu(p, a, threshold, cold_start):
    _validate(p, a, threshold, cold_start)
    if not _thresholds.has((p.shape[-1], cold_start), threshold):
        a, threshold, cold_start = _kept(a, threshold, cold_start), _NONE, "literal"
    (g,) = kernel(p.shape[-1], threshold, cold_start)(rows(p, 1), contiguous(a))
    return g.view(p.shape)


def _kept(a, threshold, cold_start):
    """What a gate reads of an adjacency, by the rules of the kernel."""
    kept = torch.where(a >= threshold, a, 0.0)
    if cold_start == "base":
        identity = torch.eye(a.shape[0], dtype=a.dtype, device=a.device)
        kept = torch.where((a == 0).all(), identity, kept)
    return kept


def _fake(p, a, threshold, cold_start):
    _validate(p, a, threshold, cold_start)
    return torch.empty_like(p, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    _, a, ctx.threshold, ctx.cold_start = inputs
    ctx.save_for_backward(a)


def _backward(ctx, dg):
    # dp = A^T dg with the A that the forward used: threshold and cold start do
    # the same to A^T.
    (a,) = ctx.saved_tensors
    return _op(dg.to(torch.float32), a.mT, ctx.threshold, ctx.cold_start), None, None, None


_op = define(
    "adjacency_gate(Tensor p, Tensor a, float threshold, str cold_start) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("p",),
    widen=("p", "a"),
)
