"""Scores of the experts from a token's features (docs/Spec.md 3.2, 3.6)."""

import torch

from .._support.keywords import renamed
from ..formulas import mix_metric, wide
from ._common import normalise


def router_logits(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """z = h W^T + b; docs/Spec.md 3.2."""
    h, weight, bias = wide(h, weight, bias)
    z = h @ weight.T
    return z if bias is None else z + bias


def cosine_logits(
    h: torch.Tensor,
    omega: torch.Tensor | None,
    emb: torch.Tensor,
    *,
    tau: float | torch.Tensor = 1.0,
    eps: float = 1e-4,
    norm_token: bool = True,
    norm_emb: bool = True,
) -> torch.Tensor:
    """z = cos(Omega h, e_j) / tau; docs/Spec.md 3.2. `omega` may be None."""
    h, omega, emb = wide(h, omega, emb)
    if not eps > 0:
        raise ValueError(f"cosine_logits: expected 'eps' to be positive, found {eps}")
    if not isinstance(tau, torch.Tensor) and not tau > 0:
        raise ValueError(f"cosine_logits: expected 'tau' to be positive, found {tau}")
    token = h if omega is None else h @ omega.T
    if emb.shape[-1] != token.shape[-1]:
        raise ValueError(
            f"cosine_logits: expected 'emb' to be as wide as the tokens it meets "
            f"({token.shape[-1]}), found {emb.shape[-1]}"
        )
    token = normalise(token, eps) if norm_token else token
    emb = normalise(emb, eps) if norm_emb else emb
    return token @ emb.T / tau


@renamed({"e": "embedding"})
def hyper_router(
    embedding: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    num_experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight [E,D], bias [E]) that a frozen network makes of e, an embedding; docs/Spec.md 3.2.

    W2 relu(W1 e + b1) + b2 read as [E, D+1] rows, the bias last.
    """
    e, w1, b1, w2, b2 = wide(embedding, w1, b1, w2, b2)
    w1, b1, w2, b2 = (t.detach() for t in (w1, b1, w2, b2))
    if w2.shape[0] % num_experts != 0:
        raise ValueError(
            f"hyper_router: expected 'w2' to have num_experts * (d + 1) rows with num_experts = "
            f"{num_experts}, found {w2.shape[0]}"
        )
    rows = (w2 @ torch.relu(w1 @ e + b1) + b2).reshape(num_experts, -1)
    return rows[:, :-1], rows[:, -1]


@renamed({"m": "metric", "prev_idx": "prev_indices"})
def ac_logits(
    h: torch.Tensor,
    metric: torch.Tensor,
    prev_indices: torch.Tensor,
    emb: torch.Tensor,
    *,
    prev_gates: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """z = h^T M_{k*} e_k with the previous layer's experts k*; docs/Spec.md 3.6."""
    h, emb, bias = wide(h, emb, bias)
    if prev_gates is None and prev_indices.shape[-1] > 1:
        raise ValueError(
            "ac_logits: expected 'prev_gates' with more than one previous expert a token "
            f"({prev_indices.shape[-1]}), found None"
        )
    z = (h * mix_metric(metric, prev_indices, prev_gates).to(h.dtype)) @ emb.T
    return z if bias is None else z + bias
