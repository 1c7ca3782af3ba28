"""What the references alone share: log-sum-exp with the edge rules, norms, masks."""

import math

import torch


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """LSE over the last dim; -inf for a row without support, with a zero gradient there."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -math.inf)
    peak = x.detach().amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    total = (x - peak).exp().sum(dim=-1)
    return torch.where(
        total == 0, -math.inf, total.masked_fill(total == 0, 1.0).log() + peak[..., 0]
    )


def without_padding(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """x with masked tokens (dim -2) set to 0, so that their garbage cannot leak (E11)."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def normalise(x: torch.Tensor, eps: float, *, dim: int = -1) -> torch.Tensor:
    """x / max(|x|, eps) along `dim`."""
    return x / x.norm(dim=dim, keepdim=True).clamp(min=eps)
