"""moe.similarity_inform: mix expert probabilities of similar tokens (docs/Spec.md 3.3)."""

import functools

import torch

from ._check import ACTIVATIONS, MASK, Checker
from ._kernel import Kernel, Tensor, contiguous, enum, f64, rows, visibility
from ._library import define

_check = Checker("similarity_inform")


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
    """p_i = sum_j softmax_j(u_i^T ws uk_j / tau) e_j, without the N x N matrix in memory.

    Args:
        u: tokens `[.., n, d]`, float32, bfloat16 or float16.
        e: expert probabilities of the keys `[.., nk, experts]`.
        causal: may a token see only itself and earlier ones? There is no
            default: the paper's own formula mixes in later tokens.
        uk: other keys `[.., nk, f]`, such as cached tokens; default: `u`.
        ws: similarity matrix `[d, f]`; default: the identity.
        tau: temperature, a float or a learned 0-d tensor. A float is compiled
            into the kernel, so one that changes every step should be a tensor.
        mask: bool `[.., nk]`, True = real token. Without `uk` it covers the
            queries too.
        window: see only the last `window` positions.
        restrict: "all", or "entropy": only keys at most as uncertain as the token.
        precision: "ieee" or "tf32" products.

    Returns:
        p `[.., n, experts]` and lse `[.., n]`, float32. A token that sees no
        key has p = 0 and lse = -inf.
    """
    return _op(u, e, causal, uk, ws, tau, mask, window, restrict, precision)


def _arguments(u, e, causal, uk, ws, tau, mask, window, restrict, precision):
    for name, value in (("u", u), ("e", e)):
        _check.tensor(name, value)
    for name, value in (("uk", uk), ("ws", ws), ("mask", mask)):
        _check.tensor(name, value, optional=True)
    window = _check.integer("window", window, optional=True)
    tau_value, tau = _check.scalar_or_tensor("tau", tau)
    return u, e, uk, ws, mask, tau_value, tau, bool(causal), window, restrict, precision


def _validate(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision):
    del causal
    for name, tensor in (("u", u), ("e", e), ("uk", uk)):
        if tensor is not None:
            _check.dtype(name, tensor, ACTIVATIONS)
            if tensor.dim() < 2 or tensor.dim() != u.dim():
                _check.fail(
                    f"expected '{name}' to have dims [.., tokens, width], as many as 'u', "
                    f"found shape {tuple(tensor.shape)}"
                )
    leading, width = u.shape[:-2], u.shape[-1]
    keys = u if uk is None else uk
    key_dims = (*leading, keys.shape[-2])
    _check.shape("e", e, (*key_dims, e.shape[-1]), "[.., keys, experts]")
    if uk is not None:
        _check.same_dtype("uk", uk, "u", u)
        if restrict == "entropy":
            _check.fail(
                "expected no 'uk' with restrict='entropy', which compares a token with its keys"
            )
        _check.shape("uk", uk, (*key_dims, uk.shape[-1]), "[.., keys, f]")
    if ws is not None:
        _check.same_dtype("ws", ws, "u", u)
        _check.shape("ws", ws, (width, keys.shape[-1]), "[d of 'u', d of the keys]")
    elif uk is not None:
        _check.shape("uk", uk, (*key_dims, width), "[.., keys, d of 'u'] (no 'ws' was given)")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, key_dims, "[.., keys]")
    if tau_value is None:
        _check.positive("tau", tau)
    if window is not None:
        _check.at_least("window", window, 1)
    _check.choice("restrict", restrict, ("all", "entropy"))
    _check.choice("precision", precision, ("ieee", "tf32"))


@functools.cache
def kernel(
    dtype,
    e_dtype,
    width,
    experts,
    key_width,
    has_uk,
    has_ws,
    masked,
    tau,
    causal,
    window,
    restrict,
    precision,
):
    """`tau` None: it is a tensor operand."""
    keys = "m" if has_uk else "n"
    return Kernel(
        "similarity_inform",
        (
            Tensor("u", ("b", "n", width), dtype),
            Tensor("e", ("b", keys, experts), e_dtype),
            *_optional_inputs(dtype, width, key_width, has_uk, has_ws, masked, tau),
        ),
        (
            Tensor("p", ("b", "n", experts), torch.float32),
            Tensor("lse", ("b", "n"), torch.float32),
        ),
        _attributes(tau, causal, window, restrict, precision),
    )


def _optional_inputs(dtype, width, key_width, has_uk, has_ws, masked, tau):
    if has_uk:
        yield Tensor("uk", ("b", "m", key_width), dtype, clause="keys")
    if has_ws:
        yield Tensor("ws", (width, key_width), dtype, clause="ws")
    if masked:
        yield Tensor("mask", ("b", "m" if has_uk else "n"), torch.bool, clause="mask")
    if tau is None:
        yield Tensor("tau", (), torch.float32, clause="tau")


def _attributes(tau, causal, window, restrict, precision):
    attributes = [
        ("visibility", visibility(causal, window)),
        ("restrict", enum("restrict", restrict)),
        ("precision", enum("precision", precision)),
    ]
    if tau is not None:
        attributes.append(("tau", f64(tau)))
    return tuple(attributes)


def _optional_operands(uk, ws, mask, tau_value):
    """What `_optional_inputs` describe."""
    if uk is not None:
        yield rows(uk, 2)
    if ws is not None:
        yield contiguous(ws)
    if mask is not None:
        yield rows(mask, 1)
    if tau_value is not None:
        yield tau_value.detach().to(torch.float32)


def _form(u, e, uk, ws, mask, tau_value, tau):
    """What of its operands a kernel is specialised to."""
    return (
        u.dtype,
        e.dtype,
        u.shape[-1],
        e.shape[-1],
        (u if uk is None else uk).shape[-1],
        uk is not None,
        ws is not None,
        mask is not None,
        tau if tau_value is None else None,
    )


def _cpu(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision):
    _validate(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision)
    form = _form(u, e, uk, ws, mask, tau_value, tau)
    run = kernel(*form, causal, window, restrict, precision)
    operands = [rows(u, 2), rows(e, 2), *_optional_operands(uk, ws, mask, tau_value)]
    p, lse = run(*operands)
    return p.view(*u.shape[:-1], e.shape[-1]), lse.view(u.shape[:-1])


def _fake(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision):
    _validate(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision)
    p = u.new_empty((*u.shape[:-1], e.shape[-1]), dtype=torch.float32)
    return p, u.new_empty(u.shape[:-1], dtype=torch.float32)


# -------------------------------------------------------------------- backward


@functools.cache
def backward_kernel(
    dtype,
    e_dtype,
    width,
    experts,
    key_width,
    has_uk,
    has_ws,
    masked,
    tau,
    causal,
    window,
    restrict,
    precision,
    has_dlse,
):
    """`tau` None: it is a tensor operand."""
    keys = "m" if has_uk else "n"
    results = [
        Tensor("du", ("b", "n", width), torch.float32),
        Tensor("de", ("b", keys, experts), torch.float32),
    ]
    if has_uk:
        results.append(Tensor("duk", ("b", "m", key_width), torch.float32))
    if has_ws:
        results.append(Tensor("dws", (width, key_width), torch.float32))
    if tau is None:
        results.append(Tensor("dtau", (), torch.float32))
    return Kernel(
        "similarity_inform_backward",
        (
            Tensor("u", ("b", "n", width), dtype),
            Tensor("e", ("b", keys, experts), e_dtype),
            Tensor("p", ("b", "n", experts), torch.float32),
            Tensor("lse", ("b", "n"), torch.float32),
            Tensor("dp", ("b", "n", experts), torch.float32),
            *_optional_dlse(has_dlse),
            *_optional_inputs(dtype, width, key_width, has_uk, has_ws, masked, tau),
        ),
        tuple(results),
        _attributes(tau, causal, window, restrict, precision),
    )


def _optional_dlse(has_dlse):
    if has_dlse:
        yield Tensor("dlse", ("b", "n"), torch.float32, clause="dlse")


def _backward_cpu(
    dp, dlse, p, lse, u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision
):
    form = _form(u, e, uk, ws, mask, tau_value, tau)
    run = backward_kernel(*form, causal, window, restrict, precision, dlse is not None)
    grads = iter(
        run(
            *(rows(x, 2) for x in (u, e, p)),
            rows(lse, 1),
            rows(dp, 2),
            *(() if dlse is None else (rows(dlse, 1),)),
            *_optional_operands(uk, ws, mask, tau_value),
        )
    )

    def like(x):
        if x is None:
            return u.new_empty(0, dtype=torch.float32)
        return next(grads).view(x.shape).to(x.dtype)

    return tuple(map(like, (u, e, uk, ws, tau_value)))


def _backward_fake(
    dp, dlse, p, lse, u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision
):
    def like(x):
        if x is None:
            return u.new_empty(0, dtype=torch.float32)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(u), like(e), like(uk), like(ws), like(tau_value)


_backward_op = define(
    "similarity_inform_backward(Tensor dp, Tensor? dlse, Tensor p, Tensor lse, Tensor u, Tensor e, "
    "Tensor? uk, Tensor? ws, Tensor? mask, Tensor? tau_value, float tau, bool causal, "
    "int? window, str restrict, str precision) -> "
    "(Tensor du, Tensor de, Tensor duk, Tensor dws, Tensor dtau)",
    kernel=_backward_cpu,
    fake=_backward_fake,
    is_gradient=True,
)


def _setup_context(ctx, inputs, output):
    u, e, uk, ws, mask, tau_value, *ctx.attributes = inputs
    ctx.save_for_backward(*output, u, e, uk, ws, mask, tau_value)
    # Few losses read lse; without its gradient nothing is made of zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx, dp, dlse):
    p, lse, u, e, uk, ws, mask, tau_value = ctx.saved_tensors
    if dp is None:
        dp = torch.zeros_like(p)
    du, de, duk, dws, dtau = _backward_op(
        dp, dlse, p, lse, u, e, uk, ws, mask, tau_value, *ctx.attributes
    )
    return (
        du,
        de,
        None if uk is None else duk,
        None if ws is None else dws,
        None,
        None if tau_value is None else dtau,
        *(None,) * 5,
    )


_op = define(
    "similarity_inform(Tensor u, Tensor e, Tensor? uk, Tensor? ws, Tensor? mask, "
    "Tensor? tau_value, float tau, bool causal, int? window, str restrict, str precision) "
    "-> (Tensor p, Tensor lse)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("u", "e", "uk", "mask"),
    cast=("u", "uk", "ws"),
)
