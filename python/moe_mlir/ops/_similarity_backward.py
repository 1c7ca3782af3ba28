"""Gradient of moe.similarity_inform (docs/Spec.md 3.3, Backward).

With x the logits and S = exp(x - lse), recomputed a block of queries at a time:

    dx_ij = S_ij (dP_i.e_j - dP_i.P_i + dlse_i)
    de_j  = sum_i S_ij dP_i
    dQ_i  = sum_j dx_ij K_j / tau,  dK_j = sum_i dx_ij Q_i / tau,  Q = u ws
    dtau  = -sum_i Q_i.dQ_i / tau
"""

import torch

from ..reference import entropy, visible_keys
from ._blocks import query_blocks, without_padding


def similarity_backward(
    dp, dlse, p, lse, u, e, uk, ws, mask, tau_value, tau, causal, window, restrict
):
    """Gradients of u, e, uk, ws, tau; an empty tensor where the operand is absent."""
    query_mask = mask if uk is None else None
    keys = without_padding(u if uk is None else uk, mask)
    tokens = without_padding(u, query_mask)
    values = without_padding(e, mask)
    queries = tokens if ws is None else tokens @ ws.float()
    divisor = tau if tau_value is None else tau_value.float()
    level = entropy(values) if restrict == "entropy" else None

    dqueries = torch.zeros_like(queries)
    dkeys = torch.zeros_like(keys)
    dvalues = torch.zeros_like(values)
    shift = dlse - (dp * p).sum(-1)
    for rows in query_blocks(u.shape[-2]):
        visible = visible_keys(
            u.shape[-2],
            keys.shape[-2],
            causal=causal,
            window=window,
            key_mask=mask,
            query_mask=query_mask,
            rows=rows,
            device=u.device,
        )
        if level is not None:
            visible = visible & (level[..., None, :] <= level[..., rows, None])
        x = queries[..., rows, :] @ keys.mT / divisor
        weight = (x - lse[..., rows, None]).exp().masked_fill(~visible, 0.0)
        dp_rows = dp[..., rows, :]
        dx = weight * (dp_rows @ values.mT + shift[..., rows, None])
        dvalues += weight.mT @ dp_rows
        dqueries[..., rows, :] = dx @ keys / divisor
        dkeys += dx.mT @ queries[..., rows, :] / divisor

    absent = u.new_empty(0, dtype=torch.float32)
    du = dqueries if ws is None else dqueries @ ws.float().T
    dws = absent
    if ws is not None:
        dws = tokens.flatten(0, -2).T @ dqueries.flatten(0, -2)
        dws = dws.to(ws.dtype)
    duk = absent
    if uk is None:
        du = du + dkeys
    else:
        duk = dkeys.to(uk.dtype)
    dtau = absent
    if tau_value is not None:
        dtau = (-(queries * dqueries).sum() / divisor).to(tau_value.dtype)
    return du.to(u.dtype, copy=True), dvalues.to(e.dtype), duk, dws, dtau
