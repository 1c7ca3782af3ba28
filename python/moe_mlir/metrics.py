"""Routing metrics of the papers; docs/Spec.md 5.

All take an optional `mask` (True = real token) over the tokens, leave masked
tokens out, and give 0 where there is no token.
"""

import torch

from .reference import entropy

__all__ = [
    "entropy_ratio",
    "fluctuation_rate",
    "load_balance_std",
    "router_instability",
    "routing_entropy",
    "selection_counts",
]


def _mean(values, mask):
    """Mean over the tokens that count, 0 without any."""
    values = values if mask is None else values[mask]
    return values.double().mean() if values.numel() else values.new_zeros((), dtype=torch.float64)


def fluctuation_rate(idx_a, idx_b, *, mask=None):
    """Share of tokens whose chosen set of experts differs between two routings."""
    if idx_a.shape != idx_b.shape:
        raise ValueError(
            "fluctuation_rate: expected 'idx_b' to have the shape of 'idx_a' "
            f"{tuple(idx_a.shape)}, found {tuple(idx_b.shape)}"
        )
    differs = (idx_a.sort(dim=-1).values != idx_b.sort(dim=-1).values).any(dim=-1)
    return _mean(differs, mask)


def routing_entropy(p, *, mask=None):
    """Mean entropy of the routing probabilities [.., E], natural logarithm."""
    return _mean(entropy(p.double()), mask)


def entropy_ratio(p_method, p_base, *, mask=None):
    """Mean entropy of a method's probabilities over that of its baseline's."""
    base = routing_entropy(p_base, mask=mask)
    ratio = routing_entropy(p_method, mask=mask) / base.masked_fill(base == 0, 1.0)
    return torch.where(base == 0, 0.0, ratio)


def selection_counts(idx, num_experts, *, mask=None):
    """How often each expert was chosen, int64 [E]; indices of -1 are nowhere."""
    chosen = (idx >= 0) & (idx < num_experts)
    if mask is not None:
        chosen = chosen & mask[..., None]
    return torch.bincount(idx[chosen].to(torch.int64), minlength=num_experts)


def load_balance_std(idx, num_experts, *, mask=None):
    """Population deviation over the experts of their percentage of assignments."""
    counts = selection_counts(idx, num_experts, mask=mask).double()
    total = counts.sum()
    if total == 0:
        return total
    return (100 * counts / total).std(correction=0)


def router_instability(top1_prev, top1_cur, *, mask=None):
    """Share of ordered token pairs that share an expert in one layer only.

    From the contingency table c of the two assignments and its margins a, b:
    `(sum a^2 + sum b^2 - 2 sum c^2) / n^2`, in O(n + E^2) instead of O(n^2).
    """
    prev, cur = top1_prev.reshape(-1), top1_cur.reshape(-1)
    if prev.shape != cur.shape:
        raise ValueError(
            "router_instability: expected 'top1_cur' to have as many tokens as 'top1_prev' "
            f"({prev.numel()}), found {cur.numel()}"
        )
    valid = (prev >= 0) & (cur >= 0)
    if mask is not None:
        valid = valid & mask.reshape(-1)
    prev, cur = prev[valid].to(torch.int64), cur[valid].to(torch.int64)
    tokens = prev.numel()
    if tokens == 0:
        return torch.zeros((), dtype=torch.float64)
    experts = int(torch.maximum(prev.max(), cur.max())) + 1
    table = torch.bincount(prev * experts + cur, minlength=experts * experts)
    table = table.reshape(experts, experts).double()
    margins = (table.sum(dim=1) ** 2).sum() + (table.sum(dim=0) ** 2).sum()
    return (margins - 2 * (table**2).sum()) / tokens**2
