"""moe.ac_logits: router logits in the metric of a token's cluster (docs/Spec.md 3.6)."""

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, INDICES, SCORES, Checker
from ._kernel import Kernel, Tensor, contiguous, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"m": "metric", "prev_idx": "prev_indices"}
_check = Checker("ac_logits", _NAMES)


@renamed(_NAMES)
def ac_logits(
    h: torch.Tensor,
    metric: torch.Tensor,
    prev_indices: torch.Tensor,
    emb: torch.Tensor,
    *,
    prev_gates: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """z_e = h^T M emb_e + bias_e, M the metric of the experts that the token had before.

    Args:
        h: tokens `[.., d]`, float32, bfloat16 or float16.
        metric: the metric of each expert `[experts, d]` float32, from
            `dispersion_weights`. A constant: it gets no gradient.
        prev_indices: `[.., r]` int32 or int64, the previous layer's experts of the
            token; outside `[0, experts)` the place takes no part. A token
            without any has M = 1.
        emb: `[experts, d]`, float32, bfloat16 or float16.
        prev_gates: `[.., r]` float32, by whose shares the metrics are mixed;
            needed with r > 1. A constant.
        bias: `[experts]`.

    Returns:
        z `[.., experts]` float32.
    """
    return _op(h, metric, prev_indices, emb, prev_gates, bias)


def _arguments(h, m, prev_idx, emb, prev_gates, bias):
    for name, value in (("h", h), ("m", m), ("prev_idx", prev_idx), ("emb", emb)):
        _check.tensor(name, value)
    _check.tensor("prev_gates", prev_gates, optional=True)
    _check.tensor("bias", bias, optional=True)
    return h, m, prev_idx, emb, prev_gates, bias


def _validate(h, m, prev_idx, emb, prev_gates, bias):
    _check.at_least_1d("h", h, "[.., d]")
    _check.dtype("h", h, ACTIVATIONS)
    d = h.shape[-1]
    _check.dtype("emb", emb, ACTIVATIONS)
    _check.rank("emb", emb, "[experts, d]")
    experts = emb.shape[0]
    _check.shape("emb", emb, (experts, d), "[experts, d of 'h']")
    _check.dtype("m", m, SCORES)
    _check.shape("m", m, (experts, d), "[experts, d] of 'emb'")
    _check.dtype("prev_idx", prev_idx, INDICES)
    _check.at_least_1d("prev_idx", prev_idx, "[.., r]")
    places = prev_idx.shape[-1]
    _check.shape("prev_idx", prev_idx, (*h.shape[:-1], places), "[leading dims of 'h', r]")
    if places < 1:
        _check.fail("expected 'prev_idx' to have at least one place a token, found 0")
    if prev_gates is not None:
        _check.dtype("prev_gates", prev_gates, SCORES)
        _check.shape("prev_gates", prev_gates, prev_idx.shape, "of 'prev_idx'")
    elif places > 1:
        _check.fail(
            "expected 'prev_gates' with more than one previous expert a token "
            f"({places}), found None"
        )
    if bias is not None:
        _check.dtype("bias", bias, ACTIVATIONS)
        _check.shape("bias", bias, (experts,), "[experts of 'emb']")


@kernels
def kernel(
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    emb_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    experts: int,
    width: int,
    places: int,
    mixed: bool,
) -> Kernel:
    inputs = [
        Tensor("h", ("n", width), dtype),
        Tensor("m", (experts, width), torch.float32),
        Tensor("prev_idx", ("n", places), index_dtype),
        Tensor("emb", (experts, width), emb_dtype),
    ]
    if mixed:
        inputs.append(Tensor("prev_gates", ("n", places), torch.float32, clause="gates"))
    if bias_dtype is not None:
        inputs.append(Tensor("bias", (experts,), bias_dtype, clause="bias"))
    return Kernel("ac_logits", tuple(inputs), (Tensor("z", ("n", experts), torch.float32),))


def _cpu(h, m, prev_idx, emb, prev_gates, bias):
    _validate(h, m, prev_idx, emb, prev_gates, bias)
    run = kernel(
        h.dtype,
        prev_idx.dtype,
        emb.dtype,
        None if bias is None else bias.dtype,
        *emb.shape,
        prev_idx.shape[-1],
        prev_gates is not None,
    )
    operands = [rows(h, 1), contiguous(m), rows(prev_idx, 1), contiguous(emb)]
    if prev_gates is not None:
        operands.append(rows(prev_gates, 1))
    if bias is not None:
        operands.append(contiguous(bias))
    (z,) = run(*operands)
    return z.view(*h.shape[:-1], emb.shape[0])


def _fake(h, m, prev_idx, emb, prev_gates, bias):
    _validate(h, m, prev_idx, emb, prev_gates, bias)
    return h.new_empty((*h.shape[:-1], emb.shape[0]), dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    h, m, prev_idx, emb, prev_gates, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(h, m, prev_idx, emb, prev_gates)


def _metric(m, prev_idx, prev_gates):
    """M_{k*} of each token `[tokens, d]`."""
    routed = (prev_idx >= 0) & (prev_idx < m.shape[0])
    if prev_gates is None:
        share = routed.to(m.dtype)
        total = share
    else:
        share = torch.where(routed, prev_gates, 0.0)
        total = share.sum(dim=-1, keepdim=True)
        share = share / total.masked_fill(total == 0, 1.0)
    metric = m.new_zeros(prev_idx.shape[0], m.shape[1])
    for place in range(prev_idx.shape[1]):
        of_place = m[prev_idx[:, place].clamp(0, m.shape[0] - 1)]
        of_place = torch.where(routed[:, place, None], of_place, 0.0)
        metric = metric + share[:, place, None] * of_place
    return torch.where(total == 0, 1.0, metric)


def _backward(ctx, dz):
    # dh = (dz emb) . M_{k*}, demb = dz^T (h . M_{k*}); M is a constant.
    h, m, prev_idx, emb, prev_gates = ctx.saved_tensors
    flat = dz.reshape(-1, dz.shape[-1])
    places = prev_idx.shape[-1]
    metric = _metric(
        m,
        prev_idx.reshape(-1, places),
        None if prev_gates is None else prev_gates.reshape(-1, places),
    )
    dh = demb = dbias = None
    if ctx.needs_input_grad[0]:
        dh = ((flat @ emb.float()) * metric).to(h.dtype).view(h.shape)
    if ctx.needs_input_grad[3]:
        demb = (flat.T @ (h.reshape(-1, h.shape[-1]).float() * metric)).to(emb.dtype)
    if ctx.needs_input_grad[5]:
        dbias = flat.sum(0).to(ctx.bias_dtype)
    return dh, None, None, demb, None, dbias


_op = define(
    "ac_logits(Tensor h, Tensor m, Tensor prev_idx, Tensor emb, Tensor? prev_gates, "
    "Tensor? bias) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("h", "prev_idx", "prev_gates"),
    widen=("m", "prev_gates"),
)
