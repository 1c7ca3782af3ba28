"""moe.attention_entropy: the mean entropy of each attention head (docs/Spec.md 3.5)."""

from typing import Literal, NamedTuple

import torch

from ._attention import (
    PairOptions,
    bias_dims,
    bias_form,
    four_dims,
    mask_inputs,
    mask_of_queries,
    pair_options,
    validate_pairs,
)
from ._check import Checker
from ._kernel import Kernel, Tensor, contiguous, kernels
from ._library import define, takes

_check = Checker("attention_entropy")


def attention_entropy(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    exclude_self: bool = False,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
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


class Operands(NamedTuple):
    """The tensors of a call, as in the op's schema."""

    q: torch.Tensor
    k: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None


class Form(NamedTuple):
    """What of its operands a kernel is specialised to."""

    dtype: torch.dtype
    heads: int
    width: int
    # Which of batch and heads the bias has.
    bias: tuple[bool, bool] | None
    bias_dtype: torch.dtype | None
    masks_queries: bool
    masks_keys: bool


def _arguments(q, k, causal, bias, mask, scale, window, exclude_self, precision):
    _check.tensor("q", q)
    _check.tensor("k", k)
    _check.tensor("bias", bias, optional=True)
    _check.tensor("mask", mask, optional=True)
    return q, k, bias, mask, *pair_options(_check, scale, causal, window, exclude_self, precision)


@kernels
def kernel(form: Form, options: PairOptions) -> Kernel:
    inputs = [
        Tensor("q", ("b", form.heads, "n", form.width), form.dtype),
        Tensor("k", ("b", form.heads, "m", form.width), form.dtype),
    ]
    if form.bias is not None:
        dims = bias_dims(form.bias, form.heads)
        inputs.append(Tensor("bias", dims, form.bias_dtype, clause="bias"))
    inputs += mask_inputs(form.masks_queries, form.masks_keys)
    return Kernel(
        "attention_entropy",
        tuple(inputs),
        (
            Tensor("entropy", ("b", form.heads), torch.float32),
            Tensor("rows", ("b", form.heads, "n"), torch.float32),
        ),
        tuple(options.attributes(form.width)),
    )


@takes(Operands, PairOptions)
def _cpu(operands, options):
    q, k, bias, mask = operands
    validate_pairs(_check, q, k, bias, mask, options)
    bias, query_mask = four_dims(bias), mask_of_queries(q, k, mask)
    form = Form(q.dtype, q.shape[1], q.shape[-1], bias_form(bias),
                None if bias is None else bias.dtype, query_mask is not None, mask is not None)
    entropy, of_rows = kernel(form, options)(
        *(contiguous(x) for x in (q, k, bias, query_mask, mask) if x is not None))
    return entropy, of_rows


@takes(Operands, PairOptions)
def _fake(operands, options):
    q, k, bias, mask = operands
    validate_pairs(_check, q, k, bias, mask, options)
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
