"""What the references share: dtypes, and softmax and log-sum-exp with the edge rules."""

import math

import torch


def wide(*tensors):
    """The tensors in the dtype of the computation, float64 if one of them is."""
    present = [t for t in tensors if t is not None]
    double = any(t.dtype == torch.float64 for t in present)
    dtype = torch.float64 if double else torch.float32
    return [None if t is None else t.to(dtype) for t in tensors]


def softmax(x):
    """Softmax over the last dim; a row without support is 0 (E6), NaN stays NaN."""
    if x.shape[-1] == 0:
        return x
    peak = x.detach().amax(dim=-1, keepdim=True)
    weight = (x - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weight.sum(dim=-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)


def log_sum_exp(x):
    """LSE over the last dim; -inf for a row without support, with a zero gradient there."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -math.inf)
    peak = x.detach().amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    total = (x - peak).exp().sum(dim=-1)
    return torch.where(
        total == 0, -math.inf, total.masked_fill(total == 0, 1.0).log() + peak[..., 0]
    )


def without_padding(x, mask):
    """x with masked tokens (dim -2) set to 0, so that their garbage cannot leak (E11)."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def normalise(x, eps, *, dim=-1):
    """x / max(|x|, eps) along `dim`."""
    return x / x.norm(dim=dim, keepdim=True).clamp(min=eps)


def ratio(part, whole):
    """part / whole, 0 where the whole is 0 (E7)."""
    return torch.where(whole == 0, 0.0, part / whole.masked_fill(whole == 0, 1.0))
