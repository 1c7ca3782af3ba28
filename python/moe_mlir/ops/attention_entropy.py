"""moe.attention_entropy: how sure each attention head is (docs/Spec.md 3.5)."""

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
from ._check import Checker
from ._kernel import Kernel, Tensor, contiguous, enum, f64, visibility
from ._library import define

_check = Checker("attention_entropy")


def attention_entropy(
    q,
    k,
    *,
    causal,
    bias=None,
    mask=None,
    scale=None,
    window=None,
    exclude_self=False,
    precision="ieee",
):
    """Entropy of the attention weights softmax(scale q.k + bias), natural logarithm.

    Args:
        q, k: `[batch, heads, n | nk, head_width]`, float32, bfloat16 or float16.
        causal: may a query see only its own position and earlier ones? No default.
        bias: added to the logits, broadcastable to `[batch, heads, n, nk]`.
        mask: bool `[batch, nk]`; covers the queries too when n = nk.
        scale: factor of q.k, default 1/sqrt(head_width).
        window, exclude_self: see only the last `window` positions; not oneself.
        precision: "ieee" or "tf32" products.

    Returns:
        entropy `[batch, heads]`, the mean over the unmasked queries, and rows
        `[batch, heads, n]`, both float32. No gradient.
    """
    return _op(q, k, causal, bias, mask, scale, window, exclude_self, precision)


def _arguments(q, k, causal, bias, mask, scale, window, exclude_self, precision):
    _check.tensor("q", q)
    _check.tensor("k", k)
    _check.tensor("bias", bias, optional=True)
    _check.tensor("mask", mask, optional=True)
    window = _check.integer("window", window, optional=True)
    if scale is not None:
        _check.number("scale", scale)
        scale = float(scale)
    return q, k, bias, mask, scale, bool(causal), window, bool(exclude_self), precision


def _validate(q, k, bias, mask, scale, causal, window, exclude_self, precision):
    del causal, exclude_self
    validate_pairs(_check, q, k, bias, mask, scale, window)
    _check.choice("precision", precision, ("ieee", "tf32"))


@functools.cache
def kernel(
    dtype, bias_dtype, heads, width, bias_form, masks_queries, masks_keys, scale, causal, window,
    exclude_self, precision,
):  # fmt: skip
    """`bias_form` tells which of batch and heads the bias has."""
    inputs = [
        Tensor("q", ("b", heads, "n", width), dtype),
        Tensor("k", ("b", heads, "m", width), dtype),
    ]
    if bias_dtype is not None:
        inputs.append(Tensor("bias", bias_dims(bias_form, heads), bias_dtype, clause="bias"))
    inputs += mask_inputs(masks_queries, masks_keys)
    attributes = (
        ("visibility", visibility(causal, window, exclude_self)),
        ("precision", enum("precision", precision)),
        ("scale", f64(1 / math.sqrt(width) if scale is None else scale)),
    )
    return Kernel(
        "attention_entropy",
        tuple(inputs),
        (
            Tensor("entropy", ("b", heads), torch.float32),
            Tensor("rows", ("b", heads, "n"), torch.float32),
        ),
        attributes,
    )


def _cpu(q, k, bias, mask, scale, causal, window, exclude_self, precision):
    _validate(q, k, bias, mask, scale, causal, window, exclude_self, precision)
    bias = four_dims(bias)
    query_mask = mask_of_queries(q, k, mask)
    run = kernel(
        q.dtype,
        None if bias is None else bias.dtype,
        q.shape[1],
        q.shape[-1],
        bias_form(bias),
        query_mask is not None,
        mask is not None,
        scale,
        causal,
        window,
        exclude_self,
        precision,
    )
    operands = [contiguous(x) for x in (q, k, bias, query_mask, mask) if x is not None]
    entropy, of_rows = run(*operands)
    return entropy, of_rows


def _fake(q, k, bias, mask, scale, causal, window, exclude_self, precision):
    _validate(q, k, bias, mask, scale, causal, window, exclude_self, precision)
    return (
        q.new_empty(q.shape[:2], dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


_op = define(
    "attention_entropy(Tensor q, Tensor k, Tensor? bias, Tensor? mask, float? scale, "
    "bool causal, int? window, bool exclude_self, str precision) "
    "-> (Tensor entropy, Tensor rows)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    cast=("q", "k"),
)
