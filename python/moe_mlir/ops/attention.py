"""Attention that also returns the entropies of its rows (docs/Spec.md 3.4, identity 5)."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

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
from ._check import ACTIVATIONS, Checker
from ._kernel import Kernel, Tensor, boolean, contiguous, kernels
from ._library import define, takes

_check = Checker("attention")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    exclude_self: bool = False,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention, with the log-sum-exps and entropies of its rows.

    `out = A v` with `A = softmax(scale q.k + bias)`; the entropy of a row of A
    is `row_lse - sum_j A_j x_j`, which is computed in the same pass over the keys
    (Mutual-Inform SMoE (15) chooses a head by it). `attention_posterior` can take
    both, and then needs no second pass over the keys of all heads. The token-by-token
    matrix is never materialised, forward or backward.

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


class Operands(NamedTuple):
    """The tensors of a call, as in the op's schema."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None


def _arguments(q, k, v, causal, bias, mask, scale, window, exclude_self, precision):
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check.tensor(name, value)
    _check.tensor("bias", bias, optional=True)
    _check.tensor("mask", mask, optional=True)
    options = pair_options(_check, scale, causal, window, exclude_self, precision)
    return q, k, v, bias, mask, *options


def _validate(operands, options):
    q, k, v, bias, mask = operands
    validate_pairs(_check, q, k, bias, mask, options)
    _check.dtype("v", v, ACTIVATIONS)
    _check.rank("v", v, "[batch, heads, nk, value_width]")
    _check.shape("v", v, (*k.shape[:3], v.shape[3]), "[batch, heads, nk, value_width]")


# -------------------------------------------------------------------- kernels


class Form(NamedTuple):
    """What of its operands a kernel is specialised to."""

    dtype: torch.dtype
    v_dtype: torch.dtype
    heads: int
    width: int
    value_width: int
    # Which of batch and heads the bias has.
    bias: tuple[bool, bool] | None
    bias_dtype: torch.dtype | None
    masks_keys: bool
    masks_queries: bool

    @classmethod
    def of(cls, operands: Operands) -> Self:
        q, k, v, bias, mask = operands
        bias = four_dims(bias)
        return cls(
            q.dtype, v.dtype, q.shape[1], q.shape[-1], v.shape[-1], bias_form(bias),
            None if bias is None else bias.dtype, mask is not None,
            mask_of_queries(q, k, mask) is not None,
        )  # fmt: skip

    @property
    def of_queries(self) -> tuple[str, int, str]:
        return "b", self.heads, "n"

    @property
    def of_keys(self) -> tuple[str, int, str]:
        return "b", self.heads, "m"

    def optional_inputs(self) -> Iterator[Tensor]:
        if self.bias is not None:
            yield Tensor("bias", bias_dims(self.bias, self.heads), self.bias_dtype, clause="bias")
        yield from mask_inputs(self.masks_queries, self.masks_keys)


def _optional(operands, form):
    """What `Form.optional_inputs` describe."""
    masks = [operands.mask] * (form.masks_queries + form.masks_keys)
    return masks if operands.bias is None else [four_dims(operands.bias), *masks]


@kernels
def kernel(form: Form, options: PairOptions) -> Kernel:
    return Kernel(
        "softmax_mix",
        (
            Tensor("q", (*form.of_queries, form.width), form.dtype),
            Tensor("k", (*form.of_keys, form.width), form.dtype),
            Tensor("v", (*form.of_keys, form.value_width), form.v_dtype, clause="values"),
            *form.optional_inputs(),
        ),
        (
            Tensor("out", (*form.of_queries, form.value_width), torch.float32),
            Tensor("row_lse", form.of_queries, torch.float32),
            Tensor("row_entropy", form.of_queries, torch.float32),
        ),
        (*options.attributes(form.width), ("with_entropy", boolean(True))),
    )


@takes(Operands, PairOptions)
def _cpu(operands, options):
    _validate(operands, options)
    q, k, v, *_ = operands
    form = Form.of(operands)
    out, row_lse, row_entropy = kernel(form, options)(
        *map(contiguous, (q, k, v, *_optional(operands, form))))
    return out.to(q.dtype), row_lse, row_entropy


@takes(Operands, PairOptions)
def _fake(operands, options):
    _validate(operands, options)
    q, _, v, *_ = operands
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


# -------------------------------------------------------------------- backward


@kernels
def backward_kernels(form: Form, options: PairOptions) -> tuple[Kernel, Kernel]:
    """The sweeps over queries and over keys."""
    inputs = (
        Tensor("q", (*form.of_queries, form.width), form.dtype),
        Tensor("k", (*form.of_keys, form.width), form.dtype),
        Tensor("row_lse", form.of_queries, torch.float32),
        Tensor("delta", form.of_queries, torch.float32),
        Tensor("v", (*form.of_keys, form.value_width), form.v_dtype, clause="values"),
        Tensor("dout", (*form.of_queries, form.value_width), torch.float32, clause="values"),
        *form.optional_inputs(),
    )
    common = tuple(options.attributes(form.width))
    dq = [Tensor("dq", (*form.of_queries, form.width), torch.float32)]
    if form.bias is not None:
        dq.append(Tensor("dbias", bias_dims(form.bias, form.heads), torch.float32))
    dkv = (
        Tensor("dk", (*form.of_keys, form.width), torch.float32),
        Tensor("dv", (*form.of_keys, form.value_width), torch.float32),
    )
    with_dbias = ("with_dbias", boolean(form.bias is not None))
    return (
        Kernel("softmax_mix_backward_dq", inputs, tuple(dq), (*common, with_dbias)),
        Kernel("softmax_mix_backward_dkv", inputs, dkv, common),
    )


@takes(Operands, PairOptions)
def _backward_cpu(dout, dlse, out, row_lse, operands, options):
    q, k, v, bias, _ = operands
    form = Form.of(operands)
    dout = dout.to(torch.float32)
    delta = (dout * out).sum(-1) - dlse
    inputs = [contiguous(x) for x in (q, k, row_lse, delta, v, dout, *_optional(operands, form))]
    of_queries, of_keys = backward_kernels(form, options)
    dq, *dbias = of_queries(*inputs)
    dk, dv = of_keys(*inputs)
    none = q.new_empty(0, dtype=torch.float32)
    dbias = dbias[0].view(bias.shape).to(bias.dtype) if dbias else none
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


@takes(Operands, PairOptions)
def _backward_fake(dout, dlse, out, row_lse, operands, options):
    q, k, v, bias, _ = operands

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
    num_operands = len(Operands._fields)
    ctx.options = inputs[num_operands:]
    out, row_lse, row_entropy = output
    ctx.mark_non_differentiable(row_entropy)
    ctx.save_for_backward(out, row_lse, *inputs[:num_operands])


def _backward(ctx, dout, dlse, _):
    dq, dk, dv, dbias = _backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options)
    _, _, *operands = ctx.saved_tensors
    has_bias = Operands(*operands).bias is not None
    return dq, dk, dv, dbias if has_bias else None, None, *(None for _ in ctx.options)


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
