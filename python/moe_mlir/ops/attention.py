"""Attention that tells how sure its heads are (docs/Spec.md 3.4, identity 5)."""

import functools
import math

import torch

from ._attention import bias_dims, bias_form, four_dims, mask_inputs, validate_pairs
from ._check import ACTIVATIONS, Checker
from ._kernel import Kernel, Tensor, boolean, contiguous, enum, f64, visibility
from ._library import define

_check = Checker("attention")


def attention(
    q,
    k,
    v,
    *,
    causal,
    bias=None,
    mask=None,
    scale=None,
    window=None,
    exclude_self=False,
    precision="ieee",
):
    """Scaled dot-product attention, with the log-sum-exps and entropies of its rows.

    `out = A v` with `A = softmax(scale q.k + bias)`; the entropy of a row of A
    is `row_lse - sum_j A_j x_j`, which the one pass over the keys sums up beside
    (Mutual-Inform SMoE (15) chooses a head by it). Given to
    `attention_posterior`, they spare it a pass over the keys of all heads. No
    matrix of tokens by tokens is held, forward or backward.

    Args:
        q, k: `[batch, heads, n | nk, head_width]`, float32, bfloat16 or float16.
        v: `[batch, heads, nk, value_width]`, likewise.
        causal: may a query see only its own position and earlier ones? No
            default. The last query stands at the last key.
        bias: added to the logits, broadcastable to `[batch, heads, n, nk]`.
        mask: bool `[batch, nk]`; covers the queries too when n = nk.
        scale: factor of q.k, default 1/sqrt(head_width).
        window, exclude_self: see only the last `window` positions; not oneself.
        precision: "ieee" or "tf32" products.

    Returns:
        out `[batch, heads, n, value_width]` in q's dtype, and row_lse and
        row_entropy `[batch, heads, n]`, both float32, natural logarithm, the
        entropy without gradient. A query that sees no key has 0, -inf and 0.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> out, row_lse, row_entropy = moe_mlir.attention(q, q, q, causal=True)
    >>> torch.allclose(out[..., 0, :], q[..., 0, :])  # the first token sees itself
    True
    """
    return _op(q, k, v, causal, bias, mask, scale, window, exclude_self, precision)


def _arguments(q, k, v, causal, bias, mask, scale, window, exclude_self, precision):
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check.tensor(name, value)
    _check.tensor("bias", bias, optional=True)
    _check.tensor("mask", mask, optional=True)
    window = _check.integer("window", window, optional=True)
    if scale is not None:
        _check.number("scale", scale)
        scale = float(scale)
    return q, k, v, bias, mask, scale, bool(causal), window, bool(exclude_self), precision


def _validate(q, k, v, bias, mask, scale, causal, window, exclude_self, precision):
    del causal, exclude_self
    validate_pairs(_check, q, k, bias, mask, scale, window)
    _check.dtype("v", v, ACTIVATIONS)
    _check.rank("v", v, "[batch, heads, nk, value_width]")
    _check.shape("v", v, (*k.shape[:3], v.shape[3]), "[batch, heads, nk, value_width]")
    _check.choice("precision", precision, ("ieee", "tf32"))


# -------------------------------------------------------------------- kernels


def _form(q, k, v, bias, mask, scale, causal, window, exclude_self, precision):
    """What of its operands a kernel is specialised to."""
    return (
        (q.dtype, v.dtype, None if bias is None else bias.dtype),
        (q.shape[1], q.shape[-1], v.shape[-1]),
        bias_form(bias),
        mask is not None,
        mask is not None and q.shape[2] == k.shape[2],
        scale,
        causal,
        window,
        exclude_self,
        precision,
    )


def _optional_inputs(dtype, heads, form, masks_keys, masks_queries):
    if form is not None:
        yield Tensor("bias", bias_dims(form, heads), dtype, clause="bias")
    yield from mask_inputs(masks_queries, masks_keys)


def _attributes(width, scale, causal, window, exclude_self, precision):
    yield "scale", f64(1 / math.sqrt(width) if scale is None else scale)
    yield "visibility", visibility(causal, window, exclude_self)
    yield "precision", enum("precision", precision)


@functools.cache
def kernel(dtypes, sizes, bias_form, masks_keys, masks_queries, *attributes):
    """`dtypes` are those of q, v and the bias; `sizes` are heads and the widths of q and v."""
    dtype, v_dtype, bias_dtype = dtypes
    heads, width, value_width = sizes
    return Kernel(
        "softmax_mix",
        (
            Tensor("q", ("b", heads, "n", width), dtype),
            Tensor("k", ("b", heads, "m", width), dtype),
            Tensor("v", ("b", heads, "m", value_width), v_dtype, clause="values"),
            *_optional_inputs(bias_dtype, heads, bias_form, masks_keys, masks_queries),
        ),
        (
            Tensor("out", ("b", heads, "n", value_width), torch.float32),
            Tensor("row_lse", ("b", heads, "n"), torch.float32),
            Tensor("row_entropy", ("b", heads, "n"), torch.float32),
        ),
        (*_attributes(width, *attributes), ("with_entropy", boolean(True))),
    )


def _masks(q, k, mask):
    if mask is None:
        return []
    return [mask] * (2 if q.shape[2] == k.shape[2] else 1)


def _cpu(q, k, v, bias, mask, scale, causal, window, exclude_self, precision):
    _validate(q, k, v, bias, mask, scale, causal, window, exclude_self, precision)
    bias = four_dims(bias)
    run = kernel(*_form(q, k, v, bias, mask, scale, causal, window, exclude_self, precision))
    operands = [q, k, v, *([] if bias is None else [bias]), *_masks(q, k, mask)]
    out, row_lse, row_entropy = run(*map(contiguous, operands))
    return out.to(q.dtype), row_lse, row_entropy


def _fake(q, k, v, bias, mask, scale, causal, window, exclude_self, precision):
    _validate(q, k, v, bias, mask, scale, causal, window, exclude_self, precision)
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


# -------------------------------------------------------------------- backward


@functools.cache
def backward_kernels(dtypes, sizes, bias_form, masks_keys, masks_queries, *attributes):
    """The sweeps over queries and over keys; the arguments are those of `kernel`."""
    dtype, v_dtype, bias_dtype = dtypes
    heads, width, value_width = sizes
    of_queries, of_keys = ("b", heads, "n"), ("b", heads, "m")
    inputs = (
        Tensor("q", (*of_queries, width), dtype),
        Tensor("k", (*of_keys, width), dtype),
        Tensor("row_lse", of_queries, torch.float32),
        Tensor("delta", of_queries, torch.float32),
        Tensor("v", (*of_keys, value_width), v_dtype, clause="values"),
        Tensor("dout", (*of_queries, value_width), torch.float32, clause="values"),
        *_optional_inputs(bias_dtype, heads, bias_form, masks_keys, masks_queries),
    )
    common = tuple(_attributes(width, *attributes))
    dq = [Tensor("dq", (*of_queries, width), torch.float32)]
    if bias_form is not None:
        dq.append(Tensor("dbias", bias_dims(bias_form, heads), torch.float32))
    dkv = (
        Tensor("dk", (*of_keys, width), torch.float32),
        Tensor("dv", (*of_keys, value_width), torch.float32),
    )
    with_dbias = ("with_dbias", boolean(bias_form is not None))
    return (
        Kernel("softmax_mix_backward_dq", inputs, tuple(dq), (*common, with_dbias)),
        Kernel("softmax_mix_backward_dkv", inputs, dkv, common),
    )


def _backward_cpu(
    dout, dlse, out, row_lse, q, k, v, bias, mask, scale, causal, window, exclude_self, precision,
):  # fmt: skip
    whole = four_dims(bias)
    form = _form(q, k, v, whole, mask, scale, causal, window, exclude_self, precision)
    dout = dout.to(torch.float32)
    delta = (dout * out).sum(-1) - dlse
    operands = [q, k, row_lse, delta, v, dout]
    operands += [*([] if bias is None else [whole]), *_masks(q, k, mask)]
    operands = [contiguous(x) for x in operands]
    of_queries, of_keys = backward_kernels(*form)
    dq, *dbias = of_queries(*operands)
    dk, dv = of_keys(*operands)
    none = q.new_empty(0, dtype=torch.float32)
    dbias = dbias[0].view(bias.shape).to(bias.dtype) if dbias else none
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


def _backward_fake(
    dout, dlse, out, row_lse, q, k, v, bias, mask, scale, causal, window, exclude_self, precision,
):  # fmt: skip
    def like(x):
        if x is None:
            return q.new_empty(0, dtype=torch.float32)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(q), like(k), like(v), like(bias)


_backward_op = define(
    "attention_backward(Tensor dout, Tensor dlse, Tensor out, Tensor row_lse, Tensor q, Tensor k, "
    "Tensor v, Tensor? bias, Tensor? mask, float? scale, bool causal, int? window, "
    "bool exclude_self, str precision) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    kernel=_backward_cpu,
    fake=_backward_fake,
    is_gradient=True,
)


def _setup_context(ctx, inputs, output):
    q, k, v, bias, mask, *ctx.attributes = inputs
    out, row_lse, row_entropy = output
    ctx.mark_non_differentiable(row_entropy)
    ctx.save_for_backward(out, row_lse, q, k, v, bias, mask)


def _backward(ctx, dout, dlse, _):
    dq, dk, dv, dbias = _backward_op(dout, dlse, *ctx.saved_tensors, *ctx.attributes)
    bias = ctx.saved_tensors[5]
    return dq, dk, dv, None if bias is None else dbias, *(None,) * 6


_op = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, float? scale, "
    "bool causal, int? window, bool exclude_self, str precision) "
    "-> (Tensor out, Tensor row_lse, Tensor row_entropy)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    cast=("q", "k", "v"),
)
