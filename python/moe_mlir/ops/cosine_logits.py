"""moe.cosine_logits: compare the directions of tokens and experts (docs/Spec.md 3.2)."""

import torch

from ._check import ACTIVATIONS, Checker
from ._few_values import FewValues, scalar
from ._kernel import Kernel, Tensor, boolean, contiguous, f64, kernels, rows
from ._library import define

_check = Checker("cosine_logits")
_taus = FewValues()


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
    """z = cos(omega h, emb_e) / tau.

    Args:
        h: tokens `[.., d]`, float32, bfloat16 or float16.
        omega: projection `[c, d]`, or None: embeddings live where tokens do.
        emb: embeddings `[experts, c]` (`[experts, d]` without `omega`).
        tau: temperature, a float or a learned 0-d tensor.
        eps: the least norm that a vector is divided by.
        norm_token: divide `omega h` by its norm? It changes gates, never the choice.
        norm_emb: divide embeddings by their norms?

    Returns:
        z `[.., experts]` float32; 0 for a token of zeros.
    """
    return _op(h, omega, emb, tau, eps, norm_token, norm_emb)


def _arguments(h, omega, emb, tau, eps, norm_token, norm_emb):
    _check.tensor("h", h)
    _check.tensor("omega", omega, optional=True)
    _check.tensor("emb", emb)
    _check.number("eps", eps)
    tau_value, tau = _check.scalar_or_tensor("tau", tau)
    return h, omega, emb, tau_value, tau, float(eps), bool(norm_token), bool(norm_emb)


def _validate(h, omega, emb, tau_value, tau, eps, norm_token, norm_emb):
    del norm_token, norm_emb
    _check.at_least_1d("h", h, "[.., d]")
    _check.dtype("h", h, ACTIVATIONS)
    _check.dtype("emb", emb, ACTIVATIONS)
    _check.rank("emb", emb, "[experts, c]")
    d = h.shape[-1]
    if omega is None:
        _check.shape("emb", emb, (emb.shape[0], d), "[experts, d of 'h'] (no 'omega' was given)")
    else:
        _check.dtype("omega", omega, ACTIVATIONS)
        _check.rank("omega", omega, "[c, d]")
        _check.shape("omega", omega, (omega.shape[0], d), "[c, d of 'h']")
        _check.shape("emb", emb, (emb.shape[0], omega.shape[0]), "[experts, c of 'omega']")
    _check.positive("eps", eps)
    if tau_value is None:
        _check.positive("tau", tau)


@kernels
def kernel(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    experts: int,
    width: int,
    space: int,
    tau: float | None,
    eps: float,
    norm_token: bool,
    norm_emb: bool,
) -> Kernel:
    """`dtypes` are those of h, emb and omega (None: absent); `tau` None: an operand."""
    dtype, emb_dtype, omega_dtype = dtypes
    inputs = [Tensor("h", ("n", width), dtype), Tensor("emb", (experts, space), emb_dtype)]
    if omega_dtype is not None:
        inputs.append(Tensor("omega", (space, width), omega_dtype, clause="omega"))
    attributes = [
        ("eps", f64(eps)),
        ("norm_token", boolean(norm_token)),
        ("norm_emb", boolean(norm_emb)),
    ]
    if tau is None:
        inputs.append(Tensor("tau", (), torch.float32, clause="tau"))
    else:
        attributes.append(("tau", f64(tau)))
    z = Tensor("z", ("n", experts), torch.float32)
    return Kernel("cosine_logits", tuple(inputs), (z,), tuple(attributes))


def _cpu(h, omega, emb, tau_value, tau, eps, norm_token, norm_emb):
    _validate(h, omega, emb, tau_value, tau, eps, norm_token, norm_emb)
    dtypes = (h.dtype, emb.dtype, None if omega is None else omega.dtype)
    form = (dtypes, *emb.shape, h.shape[-1], eps, norm_token, norm_emb)
    if tau_value is None and not _taus.has(form, tau):
        tau_value = scalar(tau, h)
    run = kernel(
        dtypes,
        emb.shape[0],
        h.shape[-1],
        emb.shape[1],
        tau if tau_value is None else None,
        eps,
        norm_token,
        norm_emb,
    )
    operands = [rows(h, 1), contiguous(emb)]
    if omega is not None:
        operands.append(contiguous(omega))
    if tau_value is not None:
        operands.append(tau_value.detach().to(torch.float32))
    (z,) = run(*operands)
    return z.view(*h.shape[:-1], emb.shape[0])


def _fake(h, omega, emb, tau_value, tau, eps, norm_token, norm_emb):
    _validate(h, omega, emb, tau_value, tau, eps, norm_token, norm_emb)
    return h.new_empty((*h.shape[:-1], emb.shape[0]), dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    h, omega, emb, tau_value, ctx.tau, ctx.eps, ctx.norm_token, ctx.norm_emb = inputs
    # z is needed for dtau = -(1/tau) sum dz z only.
    ctx.save_for_backward(h, omega, emb, tau_value, None if tau_value is None else output)


def _norms(x, eps):
    """(|x|, max(|x|, eps)) of the rows."""
    norm = x.norm(dim=-1, keepdim=True)
    return norm, norm.clamp(min=eps)


def _through_norm(dhat, hat, norm, floor, eps):
    """dx = (dx^ - x^ (x^ . dx^)) / |x|, or dx^ / eps where |x| <= eps."""
    radial = hat * (hat * dhat).sum(dim=-1, keepdim=True)
    return torch.where(norm > eps, dhat - radial, dhat) / floor


def _backward(ctx, dz):
    h, omega, emb, tau_value, z = ctx.saved_tensors
    tokens, wide_emb = h.reshape(-1, h.shape[-1]).float(), emb.float()
    x = tokens if omega is None else tokens @ omega.float().T
    norm, floor = _norms(x, ctx.eps) if ctx.norm_token else (None, None)
    emb_norm, emb_floor = _norms(wide_emb, ctx.eps) if ctx.norm_emb else (None, None)
    x_hat = x / floor if ctx.norm_token else x
    emb_hat = wide_emb / emb_floor if ctx.norm_emb else wide_emb

    tau = ctx.tau if tau_value is None else tau_value.float()
    scaled = dz.reshape(-1, dz.shape[-1]) / tau
    dh = domega = demb = dtau = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        dx = scaled @ emb_hat
        if ctx.norm_token:
            dx = _through_norm(dx, x_hat, norm, floor, ctx.eps)
        if ctx.needs_input_grad[0]:
            dh = (dx if omega is None else dx @ omega.float()).to(h.dtype).view(h.shape)
        if ctx.needs_input_grad[1]:
            domega = (dx.T @ tokens).to(omega.dtype)
    if ctx.needs_input_grad[2]:
        demb = scaled.T @ x_hat
        if ctx.norm_emb:
            demb = _through_norm(demb, emb_hat, emb_norm, emb_floor, ctx.eps)
        demb = demb.to(emb.dtype)
    if tau_value is not None and ctx.needs_input_grad[3]:
        dtau = (-(dz * z).sum() / tau).to(tau_value.dtype)
    return dh, domega, demb, dtau, None, None, None, None


_op = define(
    "cosine_logits(Tensor h, Tensor? omega, Tensor emb, Tensor? tau_value, float tau, "
    "float eps, bool norm_token, bool norm_emb) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("h",),
)
