"""What a batch says of the experts: dispersions and co-selections (docs/Spec.md 3.6, 3.7)."""

from typing import Literal

import torch

from .._support.keywords import renamed
from ..formulas import blend_counts, co_selections, wide


def mad_dispersion(
    h: torch.Tensor,
    assign: torch.Tensor,
    num_experts: int,
    *,
    measure: Literal["mad", "variance", "pairwise"] = "mad",
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(s [E,D], mean [E,D], count [E]) of each expert's tokens; docs/Spec.md 3.6."""
    (h,) = wide(h.detach())
    h, assign = h.reshape(-1, h.shape[-1]), assign.reshape(-1)
    member = (assign >= 0) & (assign < num_experts)
    if mask is not None:
        member = member & mask.reshape(-1)
    h, assign = h[member], assign[member].to(torch.int64)

    count = torch.bincount(assign, minlength=num_experts)
    size = count.clamp(min=1).to(h.dtype)[:, None]
    empty = h.new_zeros(num_experts, h.shape[-1])
    mean = empty.index_add(0, assign, h) / size
    if measure == "pairwise":
        s = empty.clone()
        for expert in range(num_experts):
            rows = h[assign == expert]
            s[expert] = sum(((rows - row).abs().sum(dim=0) for row in rows), s[expert])
        return s / (size * size), mean, count
    deviation = h - mean[assign]
    spread = deviation.abs() if measure == "mad" else deviation * deviation
    return empty.index_add(0, assign, spread) / size, mean, count


@renamed({"s": "dispersion", "count": "counts"})
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
    """M [E,D], the scaled inverse of the dispersion; docs/Spec.md 3.6."""
    (s,) = wide(dispersion.detach())
    if not eps > 0:
        raise ValueError(f"dispersion_weights: expected 'eps' to be positive, found {eps}")
    if clamp is not None and not clamp > 0:
        raise ValueError(f"dispersion_weights: expected 'clamp' to be positive, found {clamp}")
    live = (torch.ones_like(counts) if include_empty else counts > 0).to(s.dtype)[:, None]
    clusters = live.sum().clamp(min=1)
    if scale == "dispersion":
        weight = (s + eps).mean(dim=-1, keepdim=True) / (s + eps)
    else:
        weight = 1 / (s + eps)
        before_cap = (weight * live).sum() / (clusters * s.shape[-1])
        if clamp is not None:
            weight = torch.minimum(weight, clamp * before_cap)
        if scale == "cluster":
            divisor = weight.mean(dim=-1, keepdim=True)
        elif scale == "feature":
            divisor = (weight * live).sum(dim=0) / clusters
        elif scale == "global":
            divisor = (weight * live).sum() / (clusters * s.shape[-1])
        elif scale == "global_preclamp":
            divisor = before_cap
        else:
            divisor = torch.ones_like(before_cap)
        # Without a live cluster a divisor may be 0; every row is then 1 below.
        weight = weight / divisor.masked_fill(divisor == 0, 1.0)
    return torch.where(live > 0, weight, torch.ones_like(weight))


@renamed({"p": "probs", "a": "adjacency"})
def adjacency_gate(
    probs: torch.Tensor,
    adjacency: torch.Tensor,
    *,
    threshold: float = 0.0,
    cold_start: Literal["literal", "base"] = "literal",
) -> torch.Tensor:
    """g = A p with entries below the threshold dropped; docs/Spec.md 3.7."""
    p, a = wide(probs, adjacency.detach())
    kept = torch.where(a >= threshold, a, torch.zeros_like(a))
    if cold_start == "base":
        untrained = (a == 0).all()
        kept = torch.where(untrained, torch.eye(a.shape[0], dtype=a.dtype, device=a.device), kept)
    return p @ kept.T


@renamed({"a": "adjacency", "idx": "indices"})
def adjacency_update(
    adjacency: torch.Tensor,
    indices: torch.Tensor,
    *,
    beta: float = 0.9,
    norm: Literal["row", "col", "eq7"] = "row",
    diagonal: bool = True,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """A' = beta A + (1 - beta) norm(C) with the co-selection counts C; docs/Spec.md 3.7."""
    counts = co_selections(indices, adjacency.shape[0], mask=mask)
    return blend_counts(adjacency, counts, beta=beta, norm=norm, diagonal=diagonal)
