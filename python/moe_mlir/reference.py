"""What every op means, in plain torch.

Each function follows the formulas of docs/Spec.md literally and takes any
floating dtype: float64 inputs are computed and returned in float64, all others
in float32. It is the judge of the compiled kernels (on float64 copies of the
same inputs), the `impl="torch"` form of the router modules, and differentiable
by torch's own autograd. It favours the reading over the speed: the mixing ops
hold the whole N x N matrix.
"""

import math

import torch

__all__ = [
    "ac_logits",
    "adjacency_gate",
    "adjacency_update",
    "attention_entropy",
    "attention_posterior",
    "blend_counts",
    "co_selections",
    "dispersion_weights",
    "entropy",
    "lowest_entropy_head",
    "mad_dispersion",
    "rank_experts",
    "router_logits",
    "similarity_inform",
    "topk_renorm",
    "visible_keys",
]


def _wide(*tensors):
    """The tensors in the dtype of the computation, float64 if one of them is."""
    present = [t for t in tensors if t is not None]
    double = any(t.dtype == torch.float64 for t in present)
    dtype = torch.float64 if double else torch.float32
    return [None if t is None else t.to(dtype) for t in tensors]


# ------------------------------------------------------------------ selection


def rank_experts(scores):
    """Experts of each row in the order of E1: value descending, index ascending.

    +0 equals -0 (E2) and NaN ranks below -inf (E3). Two stable sorts: by value
    with NaN as -inf, then NaN behind everything else.
    """
    nan = scores.isnan()
    value = scores.masked_fill(nan, -math.inf) + 0.0
    by_value = value.sort(dim=-1, descending=True, stable=True).indices
    nan_last = nan.gather(-1, by_value).to(torch.int8).sort(dim=-1, stable=True).indices
    return by_value.gather(-1, nan_last)


def _softmax(x):
    """Softmax over the last dim; a row without support is 0 (E6), NaN stays NaN."""
    if x.shape[-1] == 0:
        return x
    peak = x.detach().amax(dim=-1, keepdim=True)
    weight = (x - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weight.sum(dim=-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def topk_renorm(
    scores,
    k,
    *,
    kind="logits",
    renorm=True,
    route_scale=1.0,
    mask=None,
    index_dtype=torch.int64,
):
    """(gates, indices) of the k best experts; docs/Spec.md 3.1."""
    (scores,) = _wide(scores)
    indices = rank_experts(scores.detach())[..., :k]
    chosen = scores.gather(-1, indices)
    if kind == "probs":
        gates = chosen.masked_fill(chosen == -math.inf, 0.0)
        if renorm:
            total = gates.sum(dim=-1, keepdim=True)
            gates = torch.where(total == 0, 0.0, gates / total.masked_fill(total == 0, 1.0))
    elif renorm:
        gates = _softmax(chosen)
    else:
        gates = _softmax(scores).gather(-1, indices)
    gates = gates * route_scale
    # E3: a NaN anywhere in the row shows in all its gates, selected or not.
    gates = gates.masked_fill(scores.isnan().any(dim=-1, keepdim=True), math.nan)
    if mask is not None:
        gates = torch.where(mask[..., None], gates, 0.0)
        indices = indices.masked_fill(~mask[..., None], -1)
    return gates, indices.to(index_dtype)


def router_logits(h, weight, bias=None):
    """z = h W^T + b; docs/Spec.md 3.2."""
    h, weight, bias = _wide(h, weight, bias)
    z = h @ weight.T
    return z if bias is None else z + bias


# --------------------------------------------------------------------- mixing


def entropy(p):
    """-sum p ln p over the last dim, 0 ln 0 = 0."""
    return -torch.xlogy(p, p).sum(dim=-1)


def visible_keys(
    n,
    nk,
    *,
    causal,
    window=None,
    exclude_self=False,
    key_mask=None,
    query_mask=None,
    rows=slice(None),
    device=None,
):
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


def _without_padding(x, mask):
    """x with masked tokens (dim -2) set to 0, so that their garbage cannot leak (E11)."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def _log_sum_exp(x):
    """LSE over the last dim; -inf for a row without support, with a zero gradient there."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -math.inf)
    peak = x.detach().amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    total = (x - peak).exp().sum(dim=-1)
    return torch.where(
        total == 0, -math.inf, total.masked_fill(total == 0, 1.0).log() + peak[..., 0]
    )


def similarity_inform(
    u,
    e,
    *,
    causal,
    uk=None,
    ws=None,
    tau=1.0,
    mask=None,
    window=None,
    restrict="all",
    precision="ieee",
):
    """(p, lse): expert probabilities mixed over similar tokens; docs/Spec.md 3.3."""
    del precision  # the meaning has no roundings
    u, e, uk, ws = _wide(u, e, uk, ws)
    query_mask = mask if uk is None else None
    keys = _without_padding(u if uk is None else uk, mask)
    u = _without_padding(u, query_mask)
    e = _without_padding(e, mask)
    logits = (u if ws is None else u @ ws) @ keys.transpose(-1, -2) / tau
    visible = visible_keys(
        u.shape[-2],
        keys.shape[-2],
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
    return _softmax(logits) @ e, _log_sum_exp(logits)


def _prior_logits(q, k, *, bias, mask, scale, causal, window, exclude_self):
    """Attention logits [B,H,N,Nk], -inf where not visible, and the query mask."""
    n, nk = q.shape[-2], k.shape[-2]
    query_mask = mask if mask is not None and n == nk else None
    head_mask = None if mask is None else mask[..., None, :]
    k = _without_padding(k, head_mask)
    q = _without_padding(q, None if query_mask is None else query_mask[..., None, :])
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


def _row_entropies(logits):
    weight = _softmax(logits)
    return entropy(weight)


def _mean_entropies(rows, query_mask, scope):
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


def attention_entropy(
    q, k, *, causal, bias=None, mask=None, scale=None, window=None, exclude_self=False
):
    """(entropy [B,H], rows [B,H,N]) of the attention's own weights; docs/Spec.md 3.5."""
    q, k, bias = _wide(q.detach(), k.detach(), None if bias is None else bias.detach())
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


def lowest_entropy_head(mean):
    """argmin over the heads [B,H], ties to the lower head (E19)."""
    mean = mean.masked_fill(mean.isnan(), math.inf)
    heads = torch.arange(mean.shape[-1], device=mean.device)
    best = mean == mean.amin(dim=-1, keepdim=True)
    return torch.where(best, heads, mean.shape[-1] - 1).amin(dim=-1)


def attention_posterior(
    q,
    k,
    u,
    e,
    *,
    causal,
    vp=None,
    v=None,
    wo=None,
    bias=None,
    head_prior=None,
    mask=None,
    sigma=1.0,
    scale=None,
    head_mode="min_entropy",
    head_scope="sequence",
    window=None,
    exclude_self=False,
    precision="ieee",
    return_lse=False,
):
    """(p, head): expert probabilities mixed by attention's posterior; docs/Spec.md 3.4.

    Written with the densities of Lemma 1 themselves, `ln N(u_i | v'_j, sigma^2)`
    up to the constant that all heads and keys share; none of the algebra that
    the kernels use.
    """
    del precision
    q, k, u, e, vp, v, wo, bias, head_prior = _wide(q, k, u, e, vp, v, wo, bias, head_prior)
    prior, query_mask = _prior_logits(
        q,
        k,
        bias=bias,
        mask=mask,
        scale=scale,
        causal=causal,
        window=window,
        exclude_self=exclude_self,
    )
    head_mask = None if mask is None else mask[..., None, :]
    means = (
        _without_padding(vp, head_mask)
        if vp is not None
        else _without_padding(v, head_mask) @ wo.transpose(-1, -2)
    )
    u = _without_padding(u, query_mask)
    e = _without_padding(e, mask)

    cross = u[:, None] @ means.transpose(-1, -2)
    mean_norm = (means * means).sum(dim=-1)[..., None, :]
    u_norm = (u * u).sum(dim=-1)[:, None, :, None]
    joint = prior - (u_norm - 2 * cross + mean_norm) / (2 * sigma * sigma)
    posterior = prior + (2 * cross - mean_norm) / (2 * sigma * sigma)

    batch, heads, n, _ = prior.shape
    if head_mode == "all":
        pi = math.log(1 / heads) if head_prior is None else head_prior.log().transpose(-1, -2)
        prior_lse = _log_sum_exp(prior)
        joint_lse = _log_sum_exp(joint)
        evidence = torch.where(
            prior_lse == -math.inf,
            -math.inf,
            pi + joint_lse - prior_lse.masked_fill(prior_lse == -math.inf, 0.0),
        )
        head_weight = _softmax(evidence.transpose(-1, -2)).transpose(-1, -2)
        p = (head_weight[..., None] * (_softmax(joint) @ e[:, None])).sum(dim=1)
        head = torch.full((batch,), -1, dtype=torch.int64, device=q.device)
        lse = prior_lse, _log_sum_exp(posterior)
    else:
        if head_mode == "min_entropy":
            rows = _row_entropies(prior.detach())
            head = lowest_entropy_head(_mean_entropies(rows, query_mask, head_scope))
        else:
            head = torch.full((batch,), head_mode, dtype=torch.int64, device=q.device)
        of_head = head[:, None, None, None].expand(batch, 1, n, prior.shape[-1])
        p = _softmax(joint.gather(1, of_head))[:, 0] @ e
        lse = (
            _log_sum_exp(prior.gather(1, of_head)),
            _log_sum_exp(posterior.gather(1, of_head)),
        )
    return (p, head, *lse) if return_lse else (p, head)


# ----------------------------------------------------------------- clustering


def mad_dispersion(h, assign, num_experts, *, measure="mad", mask=None):
    """(s [E,D], mean [E,D], count [E]) of each expert's tokens; docs/Spec.md 3.6."""
    (h,) = _wide(h.detach())
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


def dispersion_weights(s, count, *, eps=1e-4, clamp=None, scale="cluster", include_empty=False):
    """M [E,D], the scaled inverse of the dispersion; docs/Spec.md 3.6."""
    (s,) = _wide(s.detach())
    live = (torch.ones_like(count) if include_empty else count > 0).to(s.dtype)[:, None]
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


def ac_logits(h, m, prev_idx, emb, *, prev_gates=None, bias=None):
    """z = h^T M_{k*} e_k with the previous layer's experts k*; docs/Spec.md 3.6."""
    h, m, emb, prev_gates, bias = _wide(h, m.detach(), emb, prev_gates, bias)
    routed = prev_idx >= 0
    metric = m[prev_idx.clamp(min=0)]
    metric = torch.where(routed[..., None], metric, torch.ones_like(metric))
    if prev_gates is None:
        metric = metric[..., 0, :]
    else:
        share = prev_gates.detach() * routed
        total = share.sum(dim=-1, keepdim=True)
        share = share / total.masked_fill(total == 0, 1.0)
        mixed = (share[..., None] * metric).sum(dim=-2)
        metric = torch.where(total == 0, torch.ones_like(mixed), mixed)
    z = (h * metric) @ emb.T
    return z if bias is None else z + bias


# ------------------------------------------------------------- expert adjacency


def adjacency_gate(p, a, *, threshold=0.0, cold_start="literal"):
    """g = A p with entries below the threshold dropped; docs/Spec.md 3.7."""
    p, a = _wide(p, a.detach())
    kept = torch.where(a >= threshold, a, torch.zeros_like(a))
    if cold_start == "base":
        untrained = (a == 0).all()
        kept = torch.where(untrained, torch.eye(a.shape[0], dtype=a.dtype, device=a.device), kept)
    return p @ kept.T


def adjacency_update(a, idx, *, beta=0.9, norm="row", diagonal=True, mask=None):
    """A' = beta A + (1 - beta) norm(C) with the co-selection counts C; docs/Spec.md 3.7."""
    counts = co_selections(idx, a.shape[0], mask=mask)
    return blend_counts(a, counts, beta=beta, norm=norm, diagonal=diagonal)


def co_selections(idx, num_experts, *, mask=None):
    """C [E,E] int64: how many tokens chose both experts; the diagonal is the load."""
    idx = idx.reshape(-1, idx.shape[-1]).to(torch.int64)
    chosen = (idx >= 0) & (idx < num_experts)
    if mask is not None:
        chosen = chosen & mask.reshape(-1, 1)
    both = chosen[:, :, None] & chosen[:, None, :]
    # Pairs that do not count go to a bin behind the table.
    pair = (idx[:, :, None] * num_experts + idx[:, None, :]).masked_fill(~both, num_experts**2)
    table = torch.zeros(num_experts**2 + 1, dtype=torch.int64, device=idx.device)
    table = table.scatter_add(0, pair.reshape(-1), torch.ones_like(pair.reshape(-1)))
    return table[:-1].reshape(num_experts, num_experts)


def blend_counts(a, counts, *, beta=0.9, norm="row", diagonal=True):
    """The moving average of `adjacency_update` on counts that are already there."""
    (a,) = _wide(a.detach())
    share = counts.to(a.dtype)
    if not diagonal:
        share = share - torch.diag(share.diagonal())
    if norm == "row":
        divisor = share.sum(dim=1, keepdim=True)
    elif norm == "col":
        divisor = share.sum(dim=0, keepdim=True)
    else:
        divisor = share.diagonal()[None, :]
    share = torch.where(divisor == 0, 0.0, share / divisor.masked_fill(divisor == 0, 1.0))
    # E18: nothing was selected, so nothing is learnt or forgotten.
    return torch.where(counts.sum() == 0, a, beta * a + (1 - beta) * share)
