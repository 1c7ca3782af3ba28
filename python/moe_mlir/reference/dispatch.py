"""Tokens to experts and back (docs/Spec.md 3.8, 3.10)."""

import torch

from .._support.keywords import renamed
from ..formulas import softmax, wide
from ._common import normalise, without_padding
from .selection import rank_experts


@renamed({"idx": "indices"})
def dispatch(
    indices: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priority: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    capacity_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots [.., k], offsets [E+1], counts [E]): rows in the order of the experts.

    All first choices take their rows in token order, then all second choices;
    with `priority` [..] tokens come in its descending order instead, ties by
    token. An expert takes at most `capacity` rows, or those of
    `capacity_of` at a `capacity_factor`. A slot of -1 is dropped,
    masked, or of an index out of range. docs/Spec.md 3.10.
    """
    shape, k = indices.shape, indices.shape[-1]
    idx = indices.reshape(-1, k).to(torch.int64)
    if capacity_factor is not None:
        capacity = capacity_of(idx.shape[0], num_experts, k, capacity_factor)
    valid = (idx >= 0) & (idx < num_experts)
    if mask is not None:
        valid = valid & mask.reshape(-1, 1)
    tokens = torch.arange(idx.shape[0], device=idx.device)
    if priority is not None:
        tokens = rank_experts(priority.detach().reshape(-1))

    # Every (token, choice) pair in the order in which it asks for a row.
    expert = torch.where(valid, idx, num_experts)[tokens].T.reshape(-1)
    asked = torch.nn.functional.one_hot(expert, num_experts + 1).cumsum(dim=0)
    rank = asked.gather(-1, expert[:, None])[:, 0] - 1
    kept = expert < num_experts
    if capacity is not None:
        kept = kept & (rank < capacity)
    counts = torch.bincount(expert[kept], minlength=num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(dim=0), (1, 0))
    row = torch.where(kept, offsets[expert.clamp(max=num_experts - 1)] + rank, -1)
    slots = torch.empty_like(idx)
    slots[tokens] = row.reshape(k, -1).T
    return slots.reshape(shape), offsets, counts


def capacity_of(tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Rows that an expert takes at a capacity factor: k floor(cf ceil(T / E)) (3.10)."""
    return k * int(factor * -(-tokens // num_experts))


def combine(expert_out: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """y_i = sum_a g_ia expert_out[slots_ia]; a slot of -1 adds nothing; docs/Spec.md 3.10."""
    expert_out, gates = wide(expert_out, gates)
    placed = slots >= 0
    if expert_out.shape[0] == 0:
        return expert_out.new_zeros((*slots.shape[:-1], expert_out.shape[-1]))
    rows = expert_out[slots.clamp(min=0)].masked_fill(~placed[..., None], 0.0)
    return (rows * torch.where(placed, gates, 0.0)[..., None]).sum(dim=-2)


@renamed({"x": "h", "m": "metric"})
def soft_dispatch(
    h: torch.Tensor,
    phi: torch.Tensor,
    *,
    scale: float | torch.Tensor = 1.0,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    metric: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dispatch, combine), each [.., N, E, p]: SoftMoE's two softmaxes; docs/Spec.md 3.8.

    `metric` [.., N, D] is that of each token (Soft-ACMoE), a constant.
    """
    x, phi, m = wide(h, phi, None if metric is None else metric.detach())
    token = normalise(without_padding(x, mask), eps)
    if m is not None:
        token = token * without_padding(m, mask)
    slots = normalise(phi, eps, dim=0)
    logits = torch.einsum("...nd,dep->...nep", token, slots) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[..., None, None], -torch.inf)
    over_tokens = softmax(logits.movedim(-3, -1)).movedim(-1, -3)
    over_slots = softmax(logits.flatten(-2)).unflatten(-1, logits.shape[-2:])
    return over_tokens, over_slots
