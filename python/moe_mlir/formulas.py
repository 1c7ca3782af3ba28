"""Formulas in plain torch that the router modules, the metrics and the references share.

They serve where no kernel is worth its call, such as a moving average of E x E
numbers once a step, and are differentiable by torch's own autograd.
"""

import math
from typing import Any, Literal, TypeAlias, overload

import torch

from ._support.keywords import renamed

# What the authors' code runs, by task; docs/Spec.md 3.6 and Trap 2. All of them
# let empty clusters into the means, which the op by default does not (E14).
DISPERSION_PRESETS = {
    "lm": dict(eps=1e-4, clamp=10.0, scale="feature", include_empty=True),
    "swin": dict(eps=1e-4, clamp=1.5, scale="global_preclamp", include_empty=True),
    "softmoe": dict(eps=0.35, clamp=5.0, scale="global", include_empty=True),
}


@overload
def wide(*tensors: torch.Tensor) -> list[torch.Tensor]: ...
@overload
def wide(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]: ...  # type: ignore[overload-cannot-match]
def wide(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors in the dtype of the computation, float64 if one of them is."""
    present = [t for t in tensors if t is not None]
    double = any(t.dtype == torch.float64 for t in present)
    dtype = torch.float64 if double else torch.float32
    return [None if t is None else t.to(dtype) for t in tensors]


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dim; a row without support is 0 (E6), NaN stays NaN."""
    if x.shape[-1] == 0:
        return x
    peak = x.detach().amax(dim=-1, keepdim=True)
    weight = (x - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weight.sum(dim=-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """part / whole, 0 where the whole is 0 (E7)."""
    return torch.where(whole == 0, 0.0, part / whole.masked_fill(whole == 0, 1.0))


@renamed({"p": "probs"})
def entropy(probs: torch.Tensor) -> torch.Tensor:
    """-sum p ln p over the last dim, 0 ln 0 = 0."""
    return -torch.xlogy(probs, probs).sum(dim=-1)


# The names of score functions, for signatures; "none" takes scores as they are.
LogitScore: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
ScoreName: TypeAlias = Literal[LogitScore, "none"]

# Of logits; the compiler's are in lib/Dialect/MoE/IR/ScoreFunctions.cpp.
SCORE_FUNCTIONS = {
    "softmax": softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x, threshold=100).sqrt(),
    "none": lambda x: x,
}


@renamed({"x": "logits"})
def map_scores(
    logits: torch.Tensor,
    score: ScoreName,
) -> torch.Tensor:
    """s = score(x) of logits x, which rank without a bias and make the gates; docs/Spec.md 9.1."""
    if score not in SCORE_FUNCTIONS:
        names = ", ".join(map(repr, SCORE_FUNCTIONS))
        raise ValueError(f"grouped_topk: expected 'score' to be one of {names}, found {score!r}")
    return SCORE_FUNCTIONS[score](logits)


@renamed({"m": "metric", "prev_idx": "prev_indices"})
def mix_metric(
    metric: torch.Tensor,
    prev_indices: torch.Tensor,
    prev_gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """M of each token [.., D]: that of its previous expert, or blended by its gates (P3 C.6).

    A token without a previous expert has 1s. No gradient.
    """
    m, prev_gates = wide(metric.detach(), None if prev_gates is None else prev_gates.detach())
    routed = prev_indices >= 0
    chosen = m[prev_indices.clamp(min=0)]
    chosen = torch.where(routed[..., None], chosen, torch.ones_like(chosen))
    if prev_gates is None:
        return chosen[..., 0, :]
    share = torch.where(routed, prev_gates, 0.0)
    total = share.sum(dim=-1, keepdim=True)
    mixed = (ratio(share, total)[..., None] * chosen).sum(dim=-2)
    return torch.where(total == 0, torch.ones_like(mixed), mixed)


@renamed({"idx": "indices"})
def co_selections(
    indices: torch.Tensor,
    num_experts: int,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """C [E,E] int64: how many tokens chose both experts; the diagonal is the load."""
    idx = indices.reshape(-1, indices.shape[-1]).to(torch.int64)
    # A token selects a set: an expert that is named twice is one of it once.
    repeated = (idx[:, :, None] == idx[:, None, :]).tril(-1).any(-1)
    chosen = (idx >= 0) & (idx < num_experts) & ~repeated
    if mask is not None:
        chosen = chosen & mask.reshape(-1, 1)
    both = chosen[:, :, None] & chosen[:, None, :]
    # Pairs that do not count go to a bin behind the table.
    pair = (idx[:, :, None] * num_experts + idx[:, None, :]).masked_fill(~both, num_experts**2)
    table = torch.zeros(num_experts**2 + 1, dtype=torch.int64, device=idx.device)
    table = table.scatter_add(0, pair.reshape(-1), torch.ones_like(pair.reshape(-1)))
    return table[:-1].reshape(num_experts, num_experts)


@renamed({"a": "adjacency"})
def blend_counts(
    adjacency: torch.Tensor,
    counts: torch.Tensor,
    *,
    beta: float = 0.9,
    norm: Literal["row", "col", "eq7"] = "row",
    diagonal: bool = True,
) -> torch.Tensor:
    """The moving average of `adjacency_update` on counts that are already there."""
    (a,) = wide(adjacency.detach())
    share = counts.to(a.dtype)
    if not diagonal:
        share = share - torch.diag(share.diagonal())
    if norm == "row":
        divisor = share.sum(dim=1, keepdim=True)
    elif norm == "col":
        divisor = share.sum(dim=0, keepdim=True)
    else:
        divisor = share.diagonal()[None, :]
    share = ratio(share, divisor)
    # E18: nothing was selected, so nothing is learnt or forgotten.
    return torch.where(counts.sum() == 0, a, beta * a + (1 - beta) * share)
