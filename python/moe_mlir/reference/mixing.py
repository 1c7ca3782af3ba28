"""Expert probabilities mixed over tokens (docs/Spec.md 3.3 to 3.5).

They favour the reading over the speed: each holds the whole N x N matrix.
"""

import math
from typing import Literal

import torch

from .._support.keywords import renamed
from ..formulas import entropy, softmax, wide
from ._common import log_sum_exp, without_padding


def visible_keys(
    n: int,
    nk: int,
    *,
    causal: bool,
    window: int | None = None,
    exclude_self: bool = False,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    rows: slice = slice(None),
    device: torch.device | None = None,
) -> torch.Tensor:
    """Which key [.., n, nk] each query may see: the rule of docs/Spec.md 2.

    `rows` restricts the answer to a slice of the queries.
    """
    position = torch.arange(n, device=device)[rows, None] + (nk - n)
    key = torch.arange(nk, device=device)[None, :]
    visible = torch.ones(position.shape[0], nk, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (key <= position)
    if exclude_self:
        visible = visible & (key != position)
    if window is not None:
        reach = window + 1 if exclude_self else window
        visible = visible & (key > position - reach)
    if key_mask is not None:
        visible = visible & key_mask[..., None, :]
    if query_mask is not None:
        visible = visible & query_mask[..., rows, None]
    return visible


@renamed({"u": "h", "e": "probs", "uk": "keys", "ws": "weight"})
def similarity_inform(
    h: torch.Tensor,
    probs: torch.Tensor,
    *,
    causal: bool,
    keys: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    tau: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    restrict: Literal["all", "entropy"] = "all",
    precision: Literal["ieee", "tf32"] = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(p, lse): expert probabilities mixed over similar tokens; docs/Spec.md 3.3."""
    del precision  # the meaning has no roundings
    u, e, uk, ws = wide(h, probs, keys, weight)
    query_mask = mask if uk is None else None
    mixed = without_padding(u if uk is None else uk, mask)
    u = without_padding(u, query_mask)
    e = without_padding(e, mask)
    logits = (u if ws is None else u @ ws) @ mixed.transpose(-1, -2) / tau
    visible = visible_keys(
        u.shape[-2],
        mixed.shape[-2],
        causal=causal,
        window=window,
        key_mask=mask,
        query_mask=query_mask,
        device=u.device,
    )
    if restrict == "entropy":
        level = entropy(e.detach())
        visible = visible & (level[..., None, :] <= level[..., :, None])
    logits = logits.masked_fill(~visible, -math.inf)
    return softmax(logits) @ e, log_sum_exp(logits)


def _prior_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    exclude_self: bool,
    query_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention logits [B,H,N,Nk], -inf where not visible, and the query mask."""
    n, nk = q.shape[-2], k.shape[-2]
    if query_mask is None and mask is not None and n == nk:
        query_mask = mask
    head_mask = None if mask is None else mask[..., None, :]
    k = without_padding(k, head_mask)
    q = without_padding(q, None if query_mask is None else query_mask[..., None, :])
    logits = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    visible = visible_keys(
        n,
        nk,
        causal=causal,
        window=window,
        exclude_self=exclude_self,
        key_mask=mask,
        query_mask=query_mask,
        device=q.device,
    )
    if visible.dim() > 2:
        visible = visible[..., None, :, :]
    if bias is not None:
        # Garbage in the bias of a hidden pair must not survive the masking.
        logits = logits + torch.where(visible, bias, 0.0)
    return logits.masked_fill(~visible, -math.inf), query_mask


def _row_entropies(logits: torch.Tensor) -> torch.Tensor:
    weight = softmax(logits)
    return entropy(weight)


def _mean_entropies(
    rows: torch.Tensor, query_mask: torch.Tensor | None, scope: str
) -> torch.Tensor:
    """Mean entropy of each head [B,H] over the valid tokens of the sequence or batch."""
    if query_mask is None:
        valid = rows.new_ones(rows.shape[0], 1, rows.shape[-1])
    else:
        valid = query_mask[:, None, :].to(rows.dtype)
    total, tokens = (rows * valid).sum(dim=-1), valid.sum(dim=-1)
    if scope == "batch":
        total, tokens = total.sum(dim=0, keepdim=True), tokens.sum(dim=0, keepdim=True)
    mean = torch.where(tokens == 0, 0.0, total / tokens.clamp(min=1))
    return mean.expand(rows.shape[:2])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    exclude_self: bool = False,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, row_lse, row_entropy): attention with the entropies of its rows; docs/Spec.md 3.4."""
    del precision  # the meaning has no roundings
    q, k, v, bias = wide(q, k, v, bias)
    logits, _ = _prior_logits(
        q,
        k,
        bias=bias,
        mask=mask,
        scale=scale,
        causal=causal,
        window=window,
        exclude_self=exclude_self,
    )
    v = without_padding(v, None if mask is None else mask[..., None, :])
    return softmax(logits) @ v, log_sum_exp(logits), _row_entropies(logits.detach())


def attention_entropy(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    exclude_self: bool = False,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(entropy [B,H], rows [B,H,N]) of the attention's own weights; docs/Spec.md 3.5."""
    del precision  # the meaning has no roundings
    q, k, bias = wide(q.detach(), k.detach(), None if bias is None else bias.detach())
    logits, query_mask = _prior_logits(
        q,
        k,
        bias=bias,
        mask=mask,
        scale=scale,
        causal=causal,
        window=window,
        exclude_self=exclude_self,
    )
    rows = _row_entropies(logits)
    return _mean_entropies(rows, query_mask, "sequence"), rows


def lowest_entropy_head(mean: torch.Tensor) -> torch.Tensor:
    """argmin over the heads [B,H], ties to the lower head (E19)."""
    mean = mean.masked_fill(mean.isnan(), math.inf)
    heads = torch.arange(mean.shape[-1], device=mean.device)
    best = mean == mean.amin(dim=-1, keepdim=True)
    return torch.where(best, heads, mean.shape[-1] - 1).amin(dim=-1)


@renamed({"u": "attn_output", "e": "probs", "vp": "projected_v"})
def attention_posterior(
    q: torch.Tensor,
    k: torch.Tensor,
    attn_output: torch.Tensor,
    probs: torch.Tensor,
    *,
    causal: bool,
    projected_v: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    wo: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    head_prior: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    row_lse: torch.Tensor | None = None,
    row_entropy: torch.Tensor | None = None,
    sigma: float | torch.Tensor = 1.0,
    scale: float | None = None,
    head_mode: Literal["min_entropy", "all"] | int = "min_entropy",
    head_scope: Literal["sequence", "batch"] = "sequence",
    window: int | None = None,
    exclude_self: bool = False,
    precision: Literal["ieee", "tf32"] = "ieee",
    return_lse: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(p, head): expert probabilities mixed by attention's posterior; docs/Spec.md 3.4.

    Written with the densities of Lemma 1 themselves, `ln N(u_i | v'_j, sigma^2)`
    up to the constant that all heads and keys share; none of the algebra that
    the kernels use; the rows' sums are found anew.
    """
    del precision, row_lse, row_entropy
    q, k, u, e, vp, v, wo, bias, head_prior = wide(
        q, k, attn_output, probs, projected_v, v, wo, bias, head_prior
    )
    prior, query_mask = _prior_logits(
        q,
        k,
        bias=bias,
        mask=mask,
        query_mask=query_mask,
        scale=scale,
        causal=causal,
        window=window,
        exclude_self=exclude_self,
    )
    head_mask = None if mask is None else mask[..., None, :]
    means = (
        without_padding(vp, head_mask)
        if vp is not None
        else without_padding(v, head_mask) @ wo.transpose(-1, -2)
    )
    u = without_padding(u, query_mask)
    e = without_padding(e, mask)

    cross = u[:, None] @ means.transpose(-1, -2)
    mean_norm = (means * means).sum(dim=-1)[..., None, :]
    u_norm = (u * u).sum(dim=-1)[:, None, :, None]
    joint = prior - (u_norm - 2 * cross + mean_norm) / (2 * sigma * sigma)
    posterior = prior + (2 * cross - mean_norm) / (2 * sigma * sigma)

    batch, heads, n, _ = prior.shape
    if head_mode == "all":
        pi = math.log(1 / heads) if head_prior is None else head_prior.log().transpose(-1, -2)
        prior_lse = log_sum_exp(prior)
        joint_lse = log_sum_exp(joint)
        evidence = torch.where(
            prior_lse == -math.inf,
            -math.inf,
            pi + joint_lse - prior_lse.masked_fill(prior_lse == -math.inf, 0.0),
        )
        head_weight = softmax(evidence.transpose(-1, -2)).transpose(-1, -2)
        p = (head_weight[..., None] * (softmax(joint) @ e[:, None])).sum(dim=1)
        head = torch.full((batch,), -1, dtype=torch.int64, device=q.device)
        lse = prior_lse, log_sum_exp(posterior)
    else:
        if head_mode == "min_entropy":
            rows = _row_entropies(prior.detach())
            head = lowest_entropy_head(_mean_entropies(rows, query_mask, head_scope))
        else:
            head = torch.full((batch,), head_mode, dtype=torch.int64, device=q.device)
        of_head = head[:, None, None, None].expand(batch, 1, n, prior.shape[-1])
        p = softmax(joint.gather(1, of_head))[:, 0] @ e
        lse = (
            log_sum_exp(prior.gather(1, of_head)),
            log_sum_exp(posterior.gather(1, of_head)),
        )
    return (p, head, *lse) if return_lse else (p, head)
