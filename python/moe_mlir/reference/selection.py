"""Selection of experts: orders, top-k and thresholds (docs/Spec.md 3.1, 3.9, 9.1)."""

import math
from typing import Literal

import torch

from .._support.keywords import renamed
from ..formulas import ScoreName, map_scores, ratio, softmax, wide


def rank_experts(scores: torch.Tensor) -> torch.Tensor:
    """Experts of each row in the order of E1: value descending, index ascending.

    +0 equals -0 (E2) and NaN ranks below -inf (E3). Two stable sorts: by value
    with NaN as -inf, then NaN behind everything else.
    """
    nan = scores.isnan()
    value = scores.masked_fill(nan, -math.inf) + 0.0
    by_value = value.sort(dim=-1, descending=True, stable=True).indices
    nan_last = nan.gather(-1, by_value).to(torch.int8).sort(dim=-1, stable=True).indices
    return by_value.gather(-1, nan_last)


def _check_k(op: str, k: int, num_experts: int) -> None:
    """E8: a k that does not exist is refused, never clamped."""
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"{op}: expected 'k' in [1, {num_experts}] (the number of experts), found {k}"
        )


def topk_renorm(
    scores: torch.Tensor,
    k: int,
    *,
    kind: Literal["logits", "probs"] = "logits",
    renorm: bool = True,
    route_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gates, indices) of the k best experts; docs/Spec.md 3.1."""
    (scores,) = wide(scores)
    _check_k("topk_renorm", k, scores.shape[-1])
    indices = rank_experts(scores.detach())[..., :k]
    chosen = scores.gather(-1, indices)
    if kind == "probs":
        gates = chosen.masked_fill(chosen == -math.inf, 0.0)
        if renorm:
            gates = ratio(gates, gates.sum(dim=-1, keepdim=True))
    elif renorm:
        gates = softmax(chosen)
    else:
        gates = softmax(scores).gather(-1, indices)
    gates = gates * route_scale
    # E3: a NaN anywhere in the row shows in all its gates, selected or not.
    gates = gates.masked_fill(scores.isnan().any(dim=-1, keepdim=True), math.nan)
    if mask is not None:
        gates = torch.where(mask[..., None], gates, 0.0)
        indices = indices.masked_fill(~mask[..., None], -1)
    return gates, indices.to(index_dtype)


def grouped_topk(
    scores: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    score: ScoreName = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    group_score: Literal["top2", "top2_sum", "max"] = "top2",
    renorm: bool = True,
    eps: float = 0.0,
    route_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    num_valid: int | torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gates, indices): biased, group-limited or forced selection; docs/Spec.md 9.1.

    The gates come from the scores without the bias. `score` is "softmax",
    "sigmoid", "sqrtsoftplus" or "none"; `group_score` is "top2", also called "top2_sum", or
    "max".
    """
    (x,) = wide(scores)
    bias = None if bias is None else bias.detach().to(x.dtype)
    _check_k("grouped_topk", k, x.shape[-1])
    _check_groups(x.shape[-1], k, n_group, topk_group)
    mapped = map_scores(x, score)
    if forced is None:
        # Without a bias and sums of scores the operand itself ranks: no ties where s saturates.
        plain = bias is None and (n_group == 1 or group_score == "max")
        choice = (x if plain else mapped if bias is None else mapped + bias).detach()
        ranked = rank_experts(choice)
        if n_group > 1:
            kept = kept_experts(choice, n_group, topk_group, group_score).gather(-1, ranked)
            dropped_last = (~kept).to(torch.int8).sort(dim=-1, stable=True).indices
            ranked = ranked.gather(-1, dropped_last)
        indices = ranked[..., :k]
        outside = choice.gather(-1, indices) == -math.inf
    else:
        indices = forced.to(torch.int64)
        outside = (indices < 0) | (indices >= x.shape[-1])
    experts = indices.masked_fill(outside, 0) if forced is not None else indices
    gates = _gates_of(x, mapped, experts, outside, score, renorm, eps) * route_scale
    # A NaN anywhere in the row shows in all its gates (E3), whatever their sum is; a forced id
    # that is no expert has none.
    gates = gates.masked_fill(x.isnan().any(dim=-1, keepdim=True), math.nan)
    if forced is not None:
        gates = torch.where(outside, 0.0, gates)
        held = torch.iinfo(index_dtype)
        indices = indices.masked_fill((indices < held.min) | (indices > held.max), -1)

    valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else mask
    if num_valid is not None:
        row = torch.arange(valid.numel(), device=x.device).reshape(valid.shape)
        valid = valid & (row < num_valid)
    gates = torch.where(valid[..., None], gates, 0.0)
    return gates, indices.masked_fill(~valid[..., None], -1).to(index_dtype)


def _check_groups(experts: int, k: int, n_group: int, topk_group: int) -> None:
    if n_group < 1 or experts % n_group != 0:
        raise ValueError(
            f"grouped_topk: expected 'n_group' to divide the number of experts ({experts}), "
            f"found {n_group}"
        )
    if not 1 <= topk_group <= n_group:
        raise ValueError(
            f"grouped_topk: expected 'topk_group' in [1, {n_group}] (the number of groups), "
            f"found {topk_group}"
        )
    if k > topk_group * (experts // n_group):
        raise ValueError(
            f"grouped_topk: expected 'k' to be at most {topk_group * (experts // n_group)} "
            f"(the experts of {topk_group} groups), found {k}"
        )


def kept_experts(
    choice: torch.Tensor,
    n_group: int,
    topk_group: int,
    group_score: Literal["top2", "top2_sum", "max"],
) -> torch.Tensor:
    """Which experts [.., experts] are of the best groups, by the choice scores; docs/Spec.md 9.1."""
    groups = choice.unflatten(-1, (n_group, -1))
    ordered = groups.masked_fill(groups.isnan(), -math.inf)
    if group_score == "max":
        best = 1
    elif group_score in ("top2", "top2_sum"):
        best = min(2, groups.shape[-1])
    else:
        raise ValueError(
            "grouped_topk: expected 'group_score' to be one of 'top2', 'top2_sum', 'max', "
            f"found {group_score!r}"
        )
    value = ordered.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept = kept.scatter(-1, rank_experts(value)[..., :topk_group], True)
    return kept[..., None].expand(groups.shape).flatten(-2)


def _gates_of(
    x: torch.Tensor,
    mapped: torch.Tensor,
    indices: torch.Tensor,
    outside: torch.Tensor,
    score: str,
    renorm: bool,
    eps: float,
) -> torch.Tensor:
    """Weights of the chosen experts: their scores without bias, step 5 of 9.1."""
    if renorm and eps == 0 and score in ("softmax", "sigmoid"):
        # s / sum s is the softmax of ln s: nothing underflows, nothing divides 0/0.
        log_score = x if score == "softmax" else torch.nn.functional.logsigmoid(x)
        return softmax(log_score.gather(-1, indices).masked_fill(outside, -math.inf))
    value = mapped.gather(-1, indices)
    value = value.masked_fill(outside | (value == -math.inf), 0.0)
    return ratio(value, value.sum(dim=-1, keepdim=True) + eps) if renorm else value


@renamed({"p": "probs"})
def threshold_renorm(
    probs: torch.Tensor,
    theta: float | torch.Tensor,
    *,
    renorm: bool = True,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gates [.., experts], count [..]) of the experts with p > theta; docs/Spec.md 3.9.

    Strictly above (E20); a token without any keeps its best expert. A `theta`
    that is a tensor learns straight through: its mask multiplies the gates, so
    dtheta = - sum over the selected of gate dgate.
    """
    (p,) = wide(probs)
    above = p.detach() > theta
    best = torch.zeros_like(above).scatter(-1, rank_experts(p.detach())[..., :1], True)
    chosen = torch.where(above.any(dim=-1, keepdim=True), above, best)
    gates = torch.where(chosen & (p != -math.inf), p, 0.0)
    if renorm:
        gates = ratio(gates, gates.sum(dim=-1, keepdim=True))
    if isinstance(theta, torch.Tensor):
        gates = gates * (1 + (theta.detach() - theta).to(gates.dtype))
    gates = gates.masked_fill(p.isnan().any(dim=-1, keepdim=True), math.nan)
    count = chosen.sum(dim=-1)
    if mask is not None:
        gates = torch.where(mask[..., None], gates, 0.0)
        count = torch.where(mask, count, 0)
    return gates, count


def densify(gates: torch.Tensor, indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[.., k] gates on their experts in [.., num_experts], zeros elsewhere; docs/Spec.md 3.1."""
    (gates,) = wide(gates)
    # An index of -1 goes to a column that is cut off.
    where = torch.where(indices >= 0, indices, num_experts).to(torch.int64)
    dense = gates.new_zeros((*gates.shape[:-1], num_experts + 1))
    return dense.scatter(-1, where, gates)[..., :-1]


def make_finite(scores: torch.Tensor, *, scope: Literal["row", "tensor"] = "row") -> torch.Tensor:
    """Non-finite scores become the least finite one, of the row or of the whole tensor.

    Where nothing is finite they become 0. The replacement is a constant for
    the gradient; docs/Spec.md 3.1.
    """
    (scores,) = wide(scores)
    if scope not in ("row", "tensor"):
        raise ValueError(f"make_finite: expected 'scope' to be 'row' or 'tensor', found {scope!r}")
    if scores.numel() == 0:
        return scores
    finite = scores.isfinite()
    known = scores.detach().masked_fill(~finite, math.inf)
    least = known.amin(dim=-1, keepdim=True) if scope == "row" else known.amin()
    return torch.where(finite, scores, least.masked_fill(least == math.inf, 0.0))
