"""Losses on routing, and the bias that balances without one (docs/Spec.md 4, 9.2 F14)."""

from typing import Literal

import torch

from .._support.keywords import renamed
from ..formulas import ratio, wide
from ._common import log_sum_exp


@renamed({"p": "probs", "idx": "indices"})
def balance_loss(
    probs: torch.Tensor,
    indices: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    divide_by: Literal["tokens", "assignments"] = "tokens",
) -> torch.Tensor:
    """E sum_e f_e P_e: f the share of assignments, P the mean probability.

    `divide_by="assignments"` divides P by tokens * k, as fastmoe's descendants do.
    """
    if divide_by not in ("tokens", "assignments"):
        raise ValueError(
            "balance_loss: expected 'divide_by' to be 'tokens' or 'assignments', "
            f"found {divide_by!r}"
        )
    (p,) = wide(probs)
    experts, k = p.shape[-1], indices.shape[-1]
    p, idx = p.reshape(-1, experts), indices.reshape(-1, k)
    if mask is not None:
        p, idx = p[mask.reshape(-1)], idx[mask.reshape(-1)]
    load = torch.bincount(idx[idx >= 0].to(torch.int64), minlength=experts).to(p.dtype)
    divisor = p.new_tensor(p.shape[0] * (k if divide_by == "assignments" else 1))
    return experts * (ratio(load, load.sum()) * ratio(p.sum(dim=0), divisor)).sum()


@renamed({"z": "logits"})
def z_loss(logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over the tokens of LSE(z)^2; a token without support counts with 0 (E6)."""
    (z,) = wide(logits)
    z = z.reshape(-1, z.shape[-1])
    if mask is not None:
        z = z[mask.reshape(-1)]
    lse = log_sum_exp(z)
    square = torch.where(lse == -torch.inf, 0.0, lse) ** 2
    return square.sum() / max(1, square.numel())


def bias_update(bias: torch.Tensor, counts: torch.Tensor, *, gamma: float = 0.001) -> torch.Tensor:
    """bias + gamma sign(mean load - load), sign(0) = 0: after the optimizer's step."""
    (bias,) = wide(bias.detach())
    # The sign of the mean minus the load in integers: exact for any counts.
    counts = counts.to(torch.int64)
    return bias + gamma * torch.sign(counts.sum() - counts * counts.numel()).to(bias.dtype)
