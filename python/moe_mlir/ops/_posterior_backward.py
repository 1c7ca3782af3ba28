"""Gradient of moe.attention_posterior (docs/Spec.md 3.4, Backward).

With y the joint logits (prior l plus the Gaussian term) and W the joint weight
of a head and key, `core_ij = dP_i.e_j - dP_i.P_i` and `dY = W core`:

    de_j  = sum_i W dP_i
    du_i  = sum_hj dY v'_hj / sigma^2          (the u terms cancel: sum dY = 0)
    dv'_j = sum_i dY (u_i - v'_j) / sigma^2
    dl    = dY - R A,  R_ih = sum_j dY         (the second term with all heads only)
    d ln pi = R

The weights are recomputed from the saved log-sum-exps, a block of queries at a
time. A chosen head is gathered first, so that both modes run the same loop
over a dim of heads (all of them, or one).
"""

import math
from dataclasses import dataclass

import torch

from ..reference import visible_keys
from ._blocks import query_blocks, without_padding


@dataclass
class _Problem:
    """The operands in float32, padding zeroed, restricted to the heads that take part."""

    q: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    e: torch.Tensor
    vp: torch.Tensor
    bias: torch.Tensor | None
    log_prior: torch.Tensor | None  # ln pi [b, h, n], with all heads
    prior_lse: torch.Tensor
    posterior_lse: torch.Tensor
    sigma: float | torch.Tensor
    scale: float

    def row_shift(self):
        """c [b, h, n] with W = exp(y - c): the joint weights sum to 1 over heads and keys."""
        if self.log_prior is None:
            return self.posterior_lse
        # H' = softmax_h(ln pi + LSE2 - LSE1), and A' = exp(y - LSE2).
        finite = self.prior_lse.masked_fill(self.prior_lse == -math.inf, 0.0)
        evidence = self.log_prior + self.posterior_lse - finite
        return finite - self.log_prior + evidence.logsumexp(dim=1, keepdim=True)

    def prior_logits(self, rows):
        logits = self.q[..., rows, :] @ self.k.mT * self.scale
        return logits if self.bias is None else logits + self.bias[..., rows, :]

    def gaussian_logits(self, rows):
        """(u.v' - |v'|^2 / 2) / sigma^2."""
        cross = self.u[:, None, rows] @ self.vp.mT
        half_norm = (self.vp * self.vp).sum(-1)[..., None, :] / 2
        return (cross - half_norm) / (self.sigma * self.sigma)


def _gather_head(x, head, dim=1):
    """x restricted to the chosen head of each batch entry, the dim of heads kept at 1."""
    index = head.view(-1, *(1,) * (x.dim() - 1)).expand(
        -1, *(1 if d == dim else s for d, s in enumerate(x.shape) if d)
    )
    return x.gather(dim, index)


def _scatter_head(dx, head, like, dim=1):
    """The inverse of `_gather_head`: zeros for the heads that took no part."""
    if head is None:
        return dx
    index = head.view(-1, *(1,) * (dx.dim() - 1)).expand_as(dx)
    return torch.zeros(like.shape, dtype=dx.dtype, device=dx.device).scatter(dim, index, dx)


def posterior_backward(
    dp, p, head, prior_lse, posterior_lse, q, k, u, e, vp, v, wo, bias, head_prior, mask,
    sigma_value, sigma, scale, head_mode, causal, window, exclude_self,
):  # fmt: skip
    """Gradients of q, k, u, e, vp, v, wo, bias, head_prior, sigma; empty where absent."""
    batch, heads, n, width = q.shape
    chosen = None if head_mode == "all" else head
    problem, value_rows, projections = _problem(
        q, k, u, e, vp, v, wo, bias, head_prior, mask, prior_lse, posterior_lse, chosen,
        sigma if sigma_value is None else sigma_value.float(),
        1 / math.sqrt(width) if scale is None else scale,
    )  # fmt: skip
    visibility = dict(
        causal=causal,
        window=window,
        exclude_self=exclude_self,
        key_mask=mask,
        query_mask=mask if mask is not None and n == k.shape[2] else None,
        device=q.device,
    )
    dq, dk, du, de, dvp, dbias, row_sums, key_sums = _accumulate(problem, dp, p, visibility)

    absent = q.new_empty(0, dtype=torch.float32)
    square = problem.sigma * problem.sigma
    dsigma = absent
    if sigma_value is not None:
        norms = (problem.vp * problem.vp).sum(-1)
        terms = (problem.u * du).sum() - (key_sums * norms).sum() / (2 * square)
        dsigma = (-2 / problem.sigma * terms).to(sigma_value.dtype)
    dv, dwo = absent, absent
    if v is not None:
        dv = _scatter_head(dvp @ projections, chosen, v).to(v.dtype)
        per_batch = dvp.mT @ value_rows
        if chosen is None:
            dwo = per_batch.sum(0)
        else:
            dwo = torch.zeros(wo.shape, device=wo.device).index_add(0, chosen, per_batch[:, 0])
        dwo = dwo.to(wo.dtype)
    dprior = absent
    if head_prior is not None:
        # Only with all heads does the prior of the heads take part.
        dprior = torch.zeros_like(head_prior)
        if chosen is None:
            dprior = row_sums.mT / head_prior
            dprior = dprior.masked_fill(head_prior == 0, 0.0).contiguous()
    return (
        _scatter_head(dq, chosen, q).to(q.dtype),
        _scatter_head(dk, chosen, k).to(k.dtype),
        du.to(u.dtype),
        de.to(e.dtype),
        absent if vp is None else _scatter_head(dvp, chosen, vp).to(vp.dtype),
        dv,
        dwo,
        absent if bias is None else _reduce_bias(dbias, chosen, bias, heads),
        dprior,
        dsigma,
    )


def _problem(
    q, k, u, e, vp, v, wo, bias, head_prior, mask, prior_lse, posterior_lse, chosen, sigma, scale
):
    """The `_Problem`, the values that took part, and their projections [b or 1, h, d, w]."""
    n, nk = q.shape[2], k.shape[2]
    query_mask = mask if mask is not None and n == nk else None
    of_head = (lambda x: x) if chosen is None else (lambda x: _gather_head(x, chosen))
    key_rows = None if mask is None else mask[:, None]
    value_rows = projections = None
    if vp is not None:
        means = without_padding(of_head(vp), key_rows)
    else:
        value_rows = without_padding(of_head(v), key_rows)
        projections = wo.float()[None] if chosen is None else wo.float()[chosen][:, None]
        means = value_rows @ projections.mT
    if bias is not None:
        bias = bias.float().expand(q.shape[0], q.shape[1], n, nk)
        bias = of_head(bias)
    log_prior = None
    if chosen is None:
        uniform = torch.full_like(prior_lse, -math.log(q.shape[1]))
        log_prior = uniform if head_prior is None else head_prior.log().mT
    problem = _Problem(
        q=without_padding(of_head(q), None if query_mask is None else query_mask[:, None]),
        k=without_padding(of_head(k), key_rows),
        u=without_padding(u, query_mask),
        e=without_padding(e, mask),
        vp=means,
        bias=bias,
        log_prior=log_prior,
        prior_lse=prior_lse,
        posterior_lse=posterior_lse,
        sigma=sigma,
        scale=scale,
    )
    return problem, value_rows, projections


def _accumulate(problem, dp, p, visibility):
    """Runs over the blocks of queries and sums every gradient."""
    q, k, u, e, vp = problem.q, problem.k, problem.u, problem.e, problem.vp
    square = problem.sigma * problem.sigma
    dq, dk, du, de = map(torch.zeros_like, (q, k, u, e))
    dvp = torch.zeros_like(vp)
    dbias = None if problem.bias is None else torch.zeros(problem.bias.shape, device=q.device)
    row_sums = torch.zeros_like(problem.posterior_lse)
    key_sums = q.new_zeros(k.shape[:-1])
    shift = problem.row_shift()
    delta = (dp * p).sum(-1)
    for rows in query_blocks(q.shape[-2]):
        visible = visible_keys(q.shape[-2], k.shape[-2], rows=rows, **visibility)
        if visible.dim() == 3:
            visible = visible[:, None]
        prior = problem.prior_logits(rows)
        joint = prior + problem.gaussian_logits(rows)
        weight = (joint - shift[..., rows, None]).exp().masked_fill(~visible, 0.0)
        dp_rows = dp[:, rows]
        core = dp_rows @ e.mT - delta[:, rows, None]
        dy = weight * core[:, None]
        de += (weight.mT @ dp_rows[:, None]).sum(1)
        du[:, rows] = (dy @ vp).sum(1) / square
        over_queries = dy.sum(-2)
        dvp += (dy.mT @ u[:, None, rows] - over_queries[..., None] * vp) / square
        key_sums += over_queries
        row_sums[..., rows] = dy.sum(-1)
        dl = dy
        if problem.log_prior is not None:
            attention = (prior - problem.prior_lse[..., rows, None]).exp()
            attention = attention.masked_fill(~visible, 0.0)
            dl = dy - row_sums[..., rows, None] * attention
        dq[..., rows, :] = dl @ k * problem.scale
        dk += dl.mT @ q[..., rows, :] * problem.scale
        if dbias is not None:
            dbias[..., rows, :] = dl
    return dq, dk, du, de, dvp, dbias, row_sums, key_sums


def _reduce_bias(dbias, chosen, bias, heads):
    """The gradient of the broadcast bias, summed back to the shape that was given."""
    full = dbias
    if chosen is not None:
        whole = torch.empty(dbias.shape[0], heads, *dbias.shape[2:], device="meta")
        full = _scatter_head(dbias, chosen, whole)
    return full.sum_to_size(bias.shape).to(bias.dtype)
