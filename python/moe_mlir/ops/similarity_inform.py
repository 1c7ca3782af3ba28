"""moe.similarity_inform: mix expert probabilities of similar tokens (docs/Spec.md 3.3)."""

import functools

import torch

from ._check import ACTIVATIONS, MASK, Checker
from ._kernel import Kernel, Tensor, boolean, contiguous, enum, f64, i64, rows
from ._library import define
from ._similarity_backward import similarity_backward

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
    for name, value in (("u", u), ("e", e)):
        _check.tensor(name, value)
    for name, value in (("uk", uk), ("ws", ws), ("mask", mask)):
        _check.tensor(name, value, optional=True)
    _check.integer("window", window, optional=True)
    tau_value, tau = _check.scalar_or_tensor("tau", tau)
    return _op(u, e, uk, ws, mask, tau_value, tau, bool(causal), window, restrict, precision)


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
    inputs = [Tensor("u", ("b", "n", width), dtype), Tensor("e", ("b", keys, experts), e_dtype)]
    if has_uk:
        inputs.append(Tensor("uk", ("b", "m", key_width), dtype, clause="keys"))
    if has_ws:
        inputs.append(Tensor("ws", (width, key_width), dtype, clause="ws"))
    if masked:
        inputs.append(Tensor("mask", ("b", keys), torch.bool, clause="mask"))
    attributes = [
        ("causal", boolean(causal)),
        ("restrict", enum("restrict", restrict)),
        ("precision", enum("precision", precision)),
    ]
    if tau is None:
        inputs.append(Tensor("tau", (), torch.float32, clause="tau"))
    else:
        attributes.append(("tau", f64(tau)))
    if window is not None:
        attributes.append(("window", i64(window)))
    return Kernel(
        "similarity_inform",
        tuple(inputs),
        (
            Tensor("p", ("b", "n", experts), torch.float32),
            Tensor("lse", ("b", "n"), torch.float32),
        ),
        tuple(attributes),
    )


def _cpu(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision):
    _validate(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision)
    run = kernel(
        u.dtype,
        e.dtype,
        u.shape[-1],
        e.shape[-1],
        (u if uk is None else uk).shape[-1],
        uk is not None,
        ws is not None,
        mask is not None,
        tau if tau_value is None else None,
        causal,
        window,
        restrict,
        precision,
    )
    operands = [rows(u, 2), rows(e, 2)]
    if uk is not None:
        operands.append(rows(uk, 2))
    if ws is not None:
        operands.append(contiguous(ws))
    if mask is not None:
        operands.append(rows(mask, 1))
    if tau_value is not None:
        operands.append(tau_value.detach().to(torch.float32))
    p, lse = run(*operands)
    return p.view(*u.shape[:-1], e.shape[-1]), lse.view(u.shape[:-1])


def _fake(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision):
    _validate(u, e, uk, ws, mask, tau_value, tau, causal, window, restrict, precision)
    p = u.new_empty((*u.shape[:-1], e.shape[-1]), dtype=torch.float32)
    return p, u.new_empty(u.shape[:-1], dtype=torch.float32)


# -------------------------------------------------------------------- backward


def _backward_fake(dp, dlse, p, lse, u, e, uk, ws, mask, tau_value, tau, causal, window, restrict):
    def like(x):
        if x is None:
            return u.new_empty(0, dtype=torch.float32)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(u), like(e), like(uk), like(ws), like(tau_value)


# One opaque op, because its loop over query blocks would otherwise be traced
# and tie a compiled training graph to one number of tokens.
_backward_op = define(
    "similarity_inform_backward(Tensor dp, Tensor dlse, Tensor p, Tensor lse, Tensor u, Tensor e, "
    "Tensor? uk, Tensor? ws, Tensor? mask, Tensor? tau_value, float tau, bool causal, "
    "int? window, str restrict) -> (Tensor du, Tensor de, Tensor duk, Tensor dws, Tensor dtau)",
    kernel=similarity_backward,
    key="CompositeExplicitAutograd",
    fake=_backward_fake,
)


def _setup_context(ctx, inputs, output):
    u, e, uk, ws, mask, tau_value, ctx.tau, ctx.causal, ctx.window, ctx.restrict, _ = inputs
    ctx.save_for_backward(u, e, uk, ws, mask, tau_value, *output)


def _backward(ctx, dp, dlse):
    u, e, uk, ws, mask, tau_value, p, lse = ctx.saved_tensors
    du, de, duk, dws, dtau = _backward_op(
        dp,
        dlse,
        p,
        lse,
        u,
        e,
        uk,
        ws,
        mask,
        tau_value,
        ctx.tau,
        ctx.causal,
        ctx.window,
        ctx.restrict,
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
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
