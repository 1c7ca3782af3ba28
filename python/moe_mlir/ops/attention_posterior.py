"""moe.attention_posterior: mix expert probabilities by attention's posterior (docs/Spec.md 3.4)."""

import functools
import math

import torch

from ._attention import (
    bias_dims,
    bias_form,
    four_dims,
    mask_inputs,
    mask_of_queries,
    validate_pairs,
)
from ._check import ACTIVATIONS, Checker
from ._kernel import Kernel, Tensor, contiguous, enum, f64, i64, visibility
from ._library import define

_check = Checker("attention_posterior")


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
    query_mask=None,
    row_lse=None,
    row_entropy=None,
    sigma=1.0,
    scale=None,
    head_mode="min_entropy",
    head_scope="sequence",
    window=None,
    exclude_self=False,
    precision="ieee",
    return_lse=False,
):
    """Mixes the keys' expert probabilities by the posterior of attention given its output u.

    Args:
        q, k: `[batch, heads, n | nk, head_width]`, float32, bfloat16 or float16.
        u: the attention's output `[batch, n, d]`, before residual and norm.
        e: expert probabilities of the keys `[batch, nk, experts]`.
        causal: may a query see only its own position and earlier ones? No default.
        vp: the heads' projected values `[batch, heads, nk, d]`; or, instead,
        v, wo: values `[batch, heads, nk, w]` and output projections
            `[heads, d, w]` (heads times torch's out_proj slices); vp is then
            never formed.
        bias: added to the logits, broadcastable to `[batch, heads, n, nk]`.
        head_prior: `[batch, n, heads]` float32, with head_mode="all"; default uniform.
        mask: bool `[batch, nk]`, the real keys.
        query_mask: bool `[batch, n]`, the real queries; default `mask` where
            n = nk, since then they are the same tokens, else all.
        row_lse, row_entropy: `[batch, heads, n]` float32, what
            `moe_mlir.attention` returned for these q, k, bias and masks: spares
            a pass over the keys of all heads. Gradients do not need them.
        sigma: deviation of the Gaussians, a float or a learned 0-d tensor.
        scale: factor of q.k, default 1/sqrt(head_width).
        head_mode: "min_entropy" (the head whose prior is surest), "all", or a head.
        head_scope: "sequence" or "batch", where the mean entropy is taken.
        window, exclude_self: see only the last `window` positions; not oneself.
        precision: "ieee" or "tf32" products.
        return_lse: also return the log-sum-exps.

    Returns:
        p `[batch, n, experts]` float32, head `[batch]` int64 (-1 with "all"),
        and with `return_lse` the log-sum-exps of prior and posterior logits,
        `[batch, heads | 1, n]`, without gradient.
    """
    results = _op(
        q, k, u, e, causal, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
        sigma, scale, head_mode, head_scope, window, exclude_self, precision,
    )  # fmt: skip
    return results if return_lse else results[:2]


def _arguments(
    q, k, u, e, causal, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
    sigma, scale, head_mode, head_scope, window, exclude_self, precision,
):  # fmt: skip
    for name, value in (("q", q), ("k", k), ("u", u), ("e", e)):
        _check.tensor(name, value)
    optional = (("vp", vp), ("v", v), ("wo", wo), ("bias", bias), ("head_prior", head_prior))
    masks = (("mask", mask), ("query_mask", query_mask))
    rows = (("row_lse", row_lse), ("row_entropy", row_entropy))
    for name, value in (*optional, *masks, *rows):
        _check.tensor(name, value, optional=True)
    window = _check.integer("window", window, optional=True)
    if scale is not None:
        _check.number("scale", scale)
        scale = float(scale)
    head = None
    if not isinstance(head_mode, str):
        head_mode = _check.integer("head_mode", head_mode)
        head_mode, head = "fixed", head_mode
    sigma_value, sigma = _check.scalar_or_tensor("sigma", sigma)
    return (
        q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
        sigma_value, sigma, scale, head_mode, head, head_scope, bool(causal), window, bool(exclude_self), precision,
    )  # fmt: skip


def _validate(
    q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
    sigma_value, sigma, scale, head_mode, head, head_scope, causal, window, exclude_self, precision,
):  # fmt: skip
    del causal, exclude_self
    validate_pairs(_check, q, k, bias, mask, scale, window, query_mask)
    for name, tensor in (("u", u), ("e", e)):
        _check.dtype(name, tensor, ACTIVATIONS)
    batch, heads, n, _ = q.shape
    nk = k.shape[2]
    _check.rank("u", u, "[batch, n, d]")
    d = u.shape[-1]
    _check.shape("u", u, (batch, n, d), "[batch, n, d]")
    _check.rank("e", e, "[batch, nk, experts]")
    _check.shape("e", e, (batch, nk, e.shape[-1]), "[batch, nk, experts]")
    _validate_values(vp, v, wo, batch, heads, nk, d)
    if head_prior is not None:
        _check.dtype("head_prior", head_prior, (torch.float32,))
        _check.shape("head_prior", head_prior, (batch, n, heads), "[batch, n, heads]")
    if (row_lse is None) != (row_entropy is None):
        _check.fail("expected 'row_lse' and 'row_entropy' together, found one of them")
    for name, rows in (("row_lse", row_lse), ("row_entropy", row_entropy)):
        if rows is not None:
            _check.dtype(name, rows, (torch.float32,))
            _check.shape(name, rows, (batch, heads, n), "[batch, heads, n]")
    if sigma_value is None:
        _check.positive("sigma", sigma)
    if head_mode == "fixed":
        if head is None or not 0 <= head < heads:
            _check.fail(f"expected 'head_mode' in [0, {heads}) (the number of heads), found {head}")
    else:
        _check.choice("head_mode", head_mode, ("min_entropy", "all"))
    _check.choice("head_scope", head_scope, ("sequence", "batch"))
    _check.choice("precision", precision, ("ieee", "tf32"))


def _validate_values(vp, v, wo, batch, heads, nk, d):
    """The means: either `vp`, or `v` with `wo`."""
    given = [name for name, t in (("vp", vp), ("v", v), ("wo", wo)) if t is not None]
    if given not in (["vp"], ["v", "wo"]):
        _check.fail(
            f"expected either 'vp' or both 'v' and 'wo', found {' and '.join(given) or 'none'}"
        )
    for name, tensor in (("vp", vp), ("v", v), ("wo", wo)):
        if tensor is not None:
            _check.dtype(name, tensor, ACTIVATIONS)
    if vp is not None:
        _check.shape("vp", vp, (batch, heads, nk, d), "[batch, heads, nk, d of 'u']")
    else:
        _check.rank("v", v, "[batch, heads, nk, w]")
        _check.shape("v", v, (batch, heads, nk, v.shape[-1]), "[batch, heads, nk, w]")
        _check.shape("wo", wo, (heads, d, v.shape[-1]), "[heads, d of 'u', w of 'v']")


@functools.cache
def kernel(
    dtypes,
    heads,
    width,
    d,
    experts,
    value_width,
    bias_form,
    masks,
    sigma,
    has_rows,
    scale,
    head_mode,
    head,
    head_scope,
    causal,
    window,
    exclude_self,
    precision,
):
    """`dtypes` maps operand names to dtypes, absent ones left out, as a tuple of pairs.

    `bias_form` tells which of batch and heads the bias has, `masks` which of
    queries and keys have a mask; `sigma` None: it is a tensor operand.
    """
    dtype = dict(dtypes)
    lse_dims = ("b", heads if head_mode == "all" else 1, "n")
    attributes = [
        ("head_mode", enum("head_mode", head_mode)),
        ("head_scope", enum("head_scope", head_scope)),
        *_attributes(width, sigma, scale, causal, window, exclude_self, precision),
    ]
    if head is not None:
        attributes.append(("head", i64(head)))
    return Kernel(
        "attention_posterior",
        (
            *_tokens(dtype, heads, width, d, experts),
            *_optional_inputs(dtype, heads, d, value_width, bias_form, masks, sigma, has_rows),
        ),
        (
            Tensor("p", ("b", "n", experts), torch.float32),
            Tensor("head_index", ("b",), torch.int32),
            Tensor("prior_lse", lse_dims, torch.float32),
            Tensor("posterior_lse", lse_dims, torch.float32),
        ),
        tuple(attributes),
    )


def _tokens(dtype, heads, width, d, experts):
    return (
        Tensor("q", ("b", heads, "n", width), dtype["q"]),
        Tensor("k", ("b", heads, "m", width), dtype["k"]),
        Tensor("u", ("b", "n", d), dtype["u"]),
        Tensor("e", ("b", "m", experts), dtype["e"]),
    )


def _optional_inputs(
    dtype, heads, d, value_width, bias_form, masks, sigma, has_rows=False
):
    if "vp" in dtype:
        yield Tensor("vp", ("b", heads, "m", d), dtype["vp"], clause="means")
    else:
        yield Tensor("v", ("b", heads, "m", value_width), dtype["v"], clause="values")
        yield Tensor("wo", (heads, d, value_width), dtype["wo"], clause="values")
    if "bias" in dtype:
        yield Tensor("bias", bias_dims(bias_form, heads), dtype["bias"], clause="bias")
    if "head_prior" in dtype:
        yield Tensor("head_prior", ("b", "n", heads), dtype["head_prior"], clause="head_prior")
    yield from mask_inputs(*masks)
    if has_rows:
        for name in ("row_lse", "row_entropy"):
            yield Tensor(name, ("b", heads, "n"), torch.float32, clause="rows")
    if sigma is None:
        yield Tensor("sigma", (), torch.float32, clause="sigma")


def _attributes(width, sigma, scale, causal, window, exclude_self, precision):
    yield "visibility", visibility(causal, window, exclude_self)
    yield "precision", enum("precision", precision)
    yield "scale", f64(1 / math.sqrt(width) if scale is None else scale)
    if sigma is not None:
        yield "sigma", f64(sigma)


def _named(q, k, u, e, vp, v, wo, bias, head_prior):
    """The operands that are there, by name, the bias with all four dims."""
    named = dict(
        q=q, k=k, u=u, e=e, vp=vp, v=v, wo=wo, bias=four_dims(bias), head_prior=head_prior
    )
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _form(named, masks, sigma_value, sigma):
    """What of its operands a kernel is specialised to."""
    return (
        tuple((name, tensor.dtype) for name, tensor in named.items()),
        named["q"].shape[1],
        named["q"].shape[-1],
        named["u"].shape[-1],
        named["e"].shape[-1],
        named["v"].shape[-1] if "v" in named else None,
        bias_form(named.get("bias")),
        tuple(mask is not None for mask in masks),
        sigma if sigma_value is None else None,
    )


def _cpu(
    q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
    sigma_value, sigma, scale, head_mode, head, head_scope, causal, window, exclude_self, precision,
):  # fmt: skip
    _validate(
        q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
        sigma_value, sigma, scale, head_mode, head, head_scope, causal, window, exclude_self, precision,
    )  # fmt: skip
    named = _named(q, k, u, e, vp, v, wo, bias, head_prior)
    masks = (mask_of_queries(q, k, mask, query_mask), mask)
    run = kernel(
        *_form(named, masks, sigma_value, sigma),
        row_lse is not None,
        scale,
        head_mode,
        head,
        head_scope,
        causal,
        window,
        exclude_self,
        precision,
    )
    operands = [contiguous(tensor) for tensor in named.values()]
    operands += [contiguous(mask) for mask in masks if mask is not None]
    if row_lse is not None:
        operands += [contiguous(row_lse), contiguous(row_entropy)]
    if sigma_value is not None:
        operands.append(sigma_value.detach().to(torch.float32))
    p, chosen, prior_lse, posterior_lse = run(*operands)
    return p, chosen.to(torch.int64), prior_lse, posterior_lse


def _fake(
    q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
    sigma_value, sigma, scale, head_mode, head, head_scope, causal, window, exclude_self, precision,
):  # fmt: skip
    _validate(
        q, k, u, e, vp, v, wo, bias, head_prior, mask, query_mask, row_lse, row_entropy,
        sigma_value, sigma, scale, head_mode, head, head_scope, causal, window, exclude_self, precision,
    )  # fmt: skip
    batch, heads, n = q.shape[:3]
    lse = (batch, heads if head_mode == "all" else 1, n)
    return (
        q.new_empty((batch, n, e.shape[-1]), dtype=torch.float32),
        q.new_empty((batch,), dtype=torch.int64),
        q.new_empty(lse, dtype=torch.float32),
        q.new_empty(lse, dtype=torch.float32),
    )


# -------------------------------------------------------------------- backward


@functools.cache
def backward_kernel(
    dtypes,
    heads,
    width,
    d,
    experts,
    value_width,
    bias_form,
    masks,
    sigma,
    scale,
    all_heads,
    causal,
    window,
    exclude_self,
    precision,
):
    """The arguments are those of `kernel`."""
    dtype = dict(dtypes)
    lse_dims = ("b", heads if all_heads else 1, "n")
    inputs = [
        *_tokens(dtype, heads, width, d, experts),
        Tensor("p", ("b", "n", experts), torch.float32),
        Tensor("prior_lse", lse_dims, torch.float32),
        Tensor("posterior_lse", lse_dims, torch.float32),
        Tensor("dp", ("b", "n", experts), torch.float32),
    ]
    optional = list(_optional_inputs(dtype, heads, d, value_width, bias_form, masks, sigma))
    differentiable = [*_tokens(dtype, heads, width, d, experts)]
    differentiable += [tensor for tensor in optional if tensor.dtype != torch.bool]
    inputs += optional
    if not all_heads:
        inputs.append(Tensor("head", ("b",), torch.int64, clause="head"))
    return Kernel(
        "attention_posterior_backward",
        tuple(inputs),
        tuple(Tensor(f"d{x.name}", x.dims, torch.float32) for x in differentiable),
        tuple(_attributes(width, sigma, scale, causal, window, exclude_self, precision)),
    )


def _backward_cpu(
    dp, p, head, prior_lse, posterior_lse, q, k, u, e, vp, v, wo, bias, head_prior, mask,
    query_mask, sigma_value, sigma, scale, head_mode, causal, window, exclude_self, precision,
):  # fmt: skip
    all_heads = head_mode == "all"
    # One head needs no weights of heads.
    prior = head_prior if all_heads else None
    named = _named(q, k, u, e, vp, v, wo, bias, prior)
    masks = (mask_of_queries(q, k, mask, query_mask), mask)
    run = backward_kernel(
        *_form(named, masks, sigma_value, sigma),
        scale,
        all_heads,
        causal,
        window,
        exclude_self,
        precision,
    )
    tokens = [named.pop(name) for name in ("q", "k", "u", "e")]
    operands = [*tokens, p, prior_lse, posterior_lse, dp, *named.values()]
    operands += [mask for mask in masks if mask is not None]
    if sigma_value is not None:
        operands.append(sigma_value.to(torch.float32))
    if not all_heads:
        operands.append(head)
    grads = iter(run(*map(contiguous, operands)))

    def like(x):
        if x is None:
            return q.new_empty(0, dtype=torch.float32)
        if x is head_prior and not all_heads:
            return torch.zeros_like(x)
        return next(grads).view(x.shape).to(x.dtype)

    return tuple(map(like, (q, k, u, e, vp, v, wo, bias, head_prior, sigma_value)))


def _backward_fake(
    dp, p, head, prior_lse, posterior_lse, q, k, u, e, vp, v, wo, bias, head_prior, mask,
    query_mask, sigma_value, sigma, scale, head_mode, causal, window, exclude_self, precision,
):  # fmt: skip
    def like(x):
        if x is None:
            return q.new_empty(0, dtype=torch.float32)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return tuple(map(like, (q, k, u, e, vp, v, wo, bias, head_prior, sigma_value)))


_backward_op = define(
    "attention_posterior_backward(Tensor dp, Tensor p, Tensor head, Tensor prior_lse, "
    "Tensor posterior_lse, Tensor q, Tensor k, Tensor u, Tensor e, Tensor? vp, Tensor? v, "
    "Tensor? wo, Tensor? bias, Tensor? head_prior, Tensor? mask, Tensor? query_mask, "
    "Tensor? sigma_value, float sigma, float? scale, str head_mode, bool causal, int? window, bool exclude_self, "
    "str precision) -> "
    "(Tensor dq, Tensor dk, Tensor du, Tensor de, Tensor dvp, Tensor dv, Tensor dwo, "
    "Tensor dbias, Tensor dhead_prior, Tensor dsigma)",
    kernel=_backward_cpu,
    fake=_backward_fake,
    is_gradient=True,
)


def _setup_context(ctx, inputs, output):
    # The rows' sums are no function of their own: gradients flow through q and k.
    *tensors, _, _, sigma_value, sigma, scale, head_mode, _, _ = inputs[:19]
    causal, window, exclude_self, precision = inputs[19:]
    ctx.attributes = (sigma, scale, head_mode, causal, window, exclude_self, precision)
    p, head, prior_lse, posterior_lse = output
    ctx.mark_non_differentiable(head, prior_lse, posterior_lse)
    ctx.save_for_backward(p, head, prior_lse, posterior_lse, *tensors, sigma_value)


def _backward(ctx, dp, *_):
    saved = ctx.saved_tensors
    *of_operands, of_sigma = _backward_op(dp, *saved, *ctx.attributes)
    *operands, _, _, sigma_value = saved[4:]
    return (
        *(None if x is None else grad for x, grad in zip(operands, of_operands, strict=True)),
        *(None,) * 4,
        None if sigma_value is None else of_sigma,
        *(None,) * 9,
    )


_op = define(
    "attention_posterior(Tensor q, Tensor k, Tensor u, Tensor e, Tensor? vp, Tensor? v, "
    "Tensor? wo, Tensor? bias, Tensor? head_prior, Tensor? mask, Tensor? query_mask, "
    "Tensor? row_lse, Tensor? row_entropy, Tensor? sigma_value, float sigma, float? scale, str head_mode, "
    "int? head, str head_scope, bool causal, int? window, bool exclude_self, str precision) -> "
    "(Tensor p, Tensor head_index, Tensor prior_lse, Tensor posterior_lse)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    cast=("q", "k", "u", "vp", "v", "wo"),
    widen=("head_prior", "row_lse", "row_entropy"),
)
