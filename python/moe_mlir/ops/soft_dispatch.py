"""moe.soft_dispatch: SoftMoE's two softmaxes (docs/Spec.md 3.8)."""

import torch

from .._support.keywords import renamed
from ._check import ACTIVATIONS, MASK, SCORES, Checker
from ._few_values import FewValues, scalar
from ._kernel import Kernel, Tensor, contiguous, f64, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"x": "h", "m": "metric"}
_check = Checker("soft_dispatch", _NAMES)
_scales = FewValues()


@renamed(_NAMES)
def soft_dispatch(
    h: torch.Tensor,
    phi: torch.Tensor,
    *,
    scale: float | torch.Tensor = 1.0,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    metric: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of tokens in slots, and of slots for tokens.

    Args:
        h: tokens `[.., n, d]`; every sequence has its own slots.
        phi: `[d, experts, slots]`.
        scale: factor of the logits, a number or a 0-d tensor (learned).
        eps: norms are at least this.
        mask: bool `[.., n]`, True = real token.
        metric: `[.., n, d]` float32, multiplies the normalised tokens (Soft-ACMoE);
            a constant.

    Returns:
        dispatch `[.., n, experts, slots]`, a softmax over n, and combine, a
        softmax over (experts, slots), both float32; 0 for masked tokens.
    """
    return _op(h, phi, scale, eps, mask, metric)


def _arguments(x, phi, scale, eps, mask, m):
    _check.tensor("x", x)
    _check.tensor("phi", phi)
    _check.tensor("mask", mask, optional=True)
    _check.tensor("m", m, optional=True)
    _check.number("eps", eps)
    scale_value, scale = _check.scalar_or_tensor("scale", scale)
    return x, phi, scale_value, scale, float(eps), mask, m


def _validate(x, phi, scale_value, scale, eps, mask, m):
    _check.dtype("x", x, ACTIVATIONS)
    if x.dim() < 2:
        _check.fail(f"expected 'x' to have dims [.., n, d], found shape {tuple(x.shape)}")
    _check.dtype("phi", phi, ACTIVATIONS)
    _check.rank("phi", phi, "[d, experts, slots]")
    if phi.shape[0] != x.shape[-1]:
        _check.fail(
            f"expected dim 0 of 'phi' to be d of 'x' ({x.shape[-1]}), found {phi.shape[0]}"
        )
    _check.finite("scale", scale)
    _check.positive("eps", eps)
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, x.shape[:-1], "of 'x' without d")
    if m is not None:
        _check.dtype("m", m, SCORES)
        _check.shape("m", m, x.shape, "of 'x'")


@kernels
def kernel(
    x_dtype: torch.dtype,
    phi_dtype: torch.dtype,
    width: int,
    experts: int,
    slots: int,
    scale: float | None,
    eps: float,
    masked: bool,
    metric: bool,
) -> Kernel:
    inputs = [
        Tensor("x", ("b", "n", width), x_dtype),
        Tensor("phi", (width, experts, slots), phi_dtype),
    ]
    if metric:
        inputs.append(Tensor("m", ("b", "n", width), torch.float32, clause="metric"))
    if scale is None:
        inputs.append(Tensor("scale", (), torch.float32, clause="scale"))
    if masked:
        inputs.append(Tensor("mask", ("b", "n"), torch.bool, clause="mask"))
    attributes = () if scale is None else (("scale", f64(scale)),)
    dims = ("b", "n", experts, slots)
    return Kernel(
        "soft_dispatch",
        tuple(inputs),
        (Tensor("to_slots", dims, torch.float32), Tensor("to_tokens", dims, torch.float32)),
        (*attributes, ("eps", f64(eps))),
    )


def _cpu(x, phi, scale_value, scale, eps, mask, m):
    _validate(x, phi, scale_value, scale, eps, mask, m)
    width, experts, slots = phi.shape
    form = (x.dtype, phi.dtype, width, experts, slots)
    masks = (mask is not None, m is not None)
    if scale_value is None and not _scales.has((form, eps, masks), scale):
        scale_value = scalar(scale, x)
    learned = scale_value is not None
    run = kernel(*form, None if learned else scale, eps, *masks)
    operands = [rows(x, 2), contiguous(phi)]
    if m is not None:
        operands.append(rows(m, 2))
    if learned:
        operands.append(scale_value.detach().to(torch.float32))
    if mask is not None:
        operands.append(rows(mask, 1))
    shape = (*x.shape[:-1], experts, slots)
    return tuple(result.view(shape) for result in run(*operands))


def _fake(x, phi, scale_value, scale, eps, mask, m):
    _validate(x, phi, scale_value, scale, eps, mask, m)
    shape = (*x.shape[:-1], *phi.shape[1:])
    return tuple(x.new_empty(shape, dtype=torch.float32) for _ in range(2))


def _setup_context(ctx, inputs, output):
    x, phi, scale_value, ctx.scale, ctx.eps, mask, m = inputs
    ctx.save_for_backward(x, phi, scale_value, mask, m, *output)


def _backward(ctx, dto_slots, dto_tokens):
    x, phi, scale_value, mask, m, to_slots, to_tokens = ctx.saved_tensors
    scale = ctx.scale if scale_value is None else scale_value.to(torch.float32)
    # Both softmaxes: dl = w (dw - sum w dw)
    n, slots = -3, (-2, -1)
    dl = to_slots * (dto_slots - (to_slots * dto_slots).sum(n, keepdim=True))
    dl = dl + to_tokens * (dto_tokens - (to_tokens * dto_tokens).sum(slots, keepdim=True))

    wide = x.to(torch.float32)
    if mask is not None:
        wide = wide.masked_fill(~mask[..., None], 0.0)
        m = None if m is None else m.masked_fill(~mask[..., None], 0.0)
    token, token_norm = _normalise(wide, ctx.eps, -1)
    slot, slot_norm = _normalise(phi.to(torch.float32), ctx.eps, 0)
    weighed = token if m is None else token * m

    dweighed = torch.einsum("...nep,dep->...nd", dl, slot)
    dslot = torch.einsum("...nd,...nep->dep", weighed, dl)
    dscale = None
    if scale_value is not None:
        dscale = (dslot * slot).sum().to(scale_value.dtype)
    dtoken = scale * (dweighed if m is None else dweighed * m)
    dx = _normalise_backward(dtoken, token, token_norm, ctx.eps, -1)
    if mask is not None:
        dx = dx.masked_fill(~mask[..., None], 0.0)
    dphi = _normalise_backward(scale * dslot, slot, slot_norm, ctx.eps, 0)
    return dx.to(x.dtype), dphi.to(phi.dtype), dscale, None, None, None, None


def _normalise(x, eps, dim):
    norm = x.norm(dim=dim, keepdim=True)
    return x / norm.clamp(min=eps), norm


def _normalise_backward(dunit, unit, norm, eps, dim):
    """dx = (dx^ - x^ (x^ . dx^)) / |x|, or dx^ / eps where |x| <= eps."""
    tangent = dunit - unit * (unit * dunit).sum(dim, keepdim=True)
    return torch.where(norm > eps, tangent / norm.clamp(min=eps), dunit / eps)


_op = define(
    "soft_dispatch(Tensor x, Tensor phi, Tensor? scale_value, float scale, float eps, "
    "Tensor? mask, Tensor? m) -> (Tensor dispatch, Tensor combine)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("x", "mask", "m"),
    widen=("m",),
)
