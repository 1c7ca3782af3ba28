"""moe.topk_renorm: select k experts a token and weigh them (docs/Spec.md 3.1)."""

from typing import Any, Literal

import torch

from ._check import ACTIVATIONS, INDICES, MASK, Checker
from ._few_values import FewValues
from ._kernel import Kernel, Tensor, boolean, enum, f64, kernels, rows
from ._library import define
from ._out import can_write, copy, pair

_check = Checker("topk_renorm")
_scales, _backward_scales = FewValues(), FewValues()


def topk_renorm(
    scores: torch.Tensor,
    k: int,
    *,
    kind: Literal["logits", "probs"] = "logits",
    renorm: bool = True,
    route_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the k best experts of each token and computes their gates.

    Order: value descending, then index ascending; NaN ranks last and makes the
    token's gates NaN. Experts of -inf and tokens without support get gate 0.

    Args:
        scores: `[.., experts]`, float32, bfloat16 or float16.
        k: experts to select, 1 <= k <= experts.
        kind: "logits" (a softmax is part of the op) or "probs".
        renorm: divide the gates of the selected experts by their sum.
        route_scale: factor of all gates.
        mask: bool `[..]`, True = real token; others get index -1 and gate 0.
        index_dtype: torch.int64 or torch.int32.
        out: tensors for gates and indices, which are returned; without gradients.

    Returns:
        gates `[.., k]` float32 and indices `[.., k]`.
    """
    given = (scores, k, kind, renorm, route_scale, mask, index_dtype)
    return _op(*given) if out is None else write(_check, _op, _cpu, _arguments(*given), given, out)


def write(
    check: Checker, op: Any, kernel: Any, args: tuple, given: tuple, out: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A selection in tensors of the caller."""
    out = pair(check, out, "gates and indices")
    shape = (*args[0].shape[:-1], args[1])
    if can_write(check, args, out, shape, (torch.float32, args[-1]), "[tokens of 'scores', k]"):
        kernel(*args, out=out)
        return out
    return copy(out, op(*given))


def _arguments(scores, k, kind, renorm, route_scale, mask, index_dtype):
    _check.tensor("scores", scores)
    _check.tensor("mask", mask, optional=True)
    k = _check.integer("k", k)
    _check.number("route_scale", route_scale)
    if index_dtype not in INDICES:
        _check.fail(f"expected 'index_dtype' to be torch.int32 or torch.int64, found {index_dtype}")
    return scores, k, kind, bool(renorm), float(route_scale), mask, index_dtype


def _validate(scores, k, kind, route_scale, mask, index_dtype):
    _check.at_least_1d("scores", scores, "[.., experts]")
    _check.dtype("scores", scores, ACTIVATIONS)
    if not 1 <= k <= scores.shape[-1]:
        _check.fail(f"expected 'k' in [1, {scores.shape[-1]}] (the number of experts), found {k}")
    _check.choice("kind", kind, ("logits", "probs"))
    _check.finite("route_scale", route_scale)
    if index_dtype not in INDICES:
        _check.fail(f"expected 'index_dtype' to be torch.int32 or torch.int64, found {index_dtype}")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, scores.shape[:-1], "of 'scores' without experts")


@kernels
def kernel(
    dtype: torch.dtype,
    experts: int,
    k: int,
    kind: str,
    renorm: bool,
    route_scale: float,
    masked: bool,
    index_dtype: torch.dtype,
) -> Kernel:
    inputs = [Tensor("scores", ("n", experts), dtype)]
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    return Kernel(
        "topk_renorm",
        tuple(inputs),
        (Tensor("gates", ("n", k), torch.float32), Tensor("indices", ("n", k), index_dtype)),
        (
            ("kind", enum("score_kind", kind)),
            ("renorm", boolean(renorm)),
            ("route_scale", f64(route_scale)),
        ),
    )


def _cpu(scores, k, kind, renorm, route_scale, mask, index_dtype, *, out=None):
    _validate(scores, k, kind, route_scale, mask, index_dtype)
    experts, masked = scores.shape[-1], mask is not None
    form = (scores.dtype, experts, k, kind, renorm, masked, index_dtype)
    constant = _scales.has(form, route_scale)
    run = kernel(
        scores.dtype, experts, k, kind, renorm, route_scale if constant else 1.0, masked,
        index_dtype,
    )  # fmt: skip
    operands = (rows(scores, 1), rows(mask, 0)) if masked else (rows(scores, 1),)
    gates, indices = run(*operands, out=matrices(out))
    if not constant:
        # A call with results of its own is replayed if they are what the kernel wrote.
        gates = gates * route_scale if out is None else gates.mul_(route_scale)
    if scores.dim() != 2:
        shape = (*scores.shape[:-1], k)
        gates, indices = gates.view(shape), indices.view(shape)
    return gates, indices


def matrices(out: Any) -> list[torch.Tensor] | None:
    """Results [.., k] as kernels see them."""
    return out and [x.view(x.shape[:-1].numel(), x.shape[-1]) for x in out]


def _fake(scores, k, kind, renorm, route_scale, mask, index_dtype):
    _validate(scores, k, kind, route_scale, mask, index_dtype)
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=index_dtype)


# -------------------------------------------------------------------- backward


@kernels
def backward_kernel(
    index_dtype: torch.dtype,
    scores_dtype: torch.dtype | None,
    experts: int,
    k: int,
    score: str,
    renorm: bool,
    eps: float,
    route_scale: float,
) -> Kernel:
    """`scores_dtype` None: this form's gradient does not read the scores."""
    inputs = [
        Tensor("dgates", ("n", k), torch.float32),
        Tensor("gates", ("n", k), torch.float32),
        Tensor("indices", ("n", k), index_dtype),
    ]
    if scores_dtype is not None:
        inputs.append(Tensor("scores", ("n", experts), scores_dtype, clause="scores"))
    attributes = (
        ("kind", enum("score_kind", "probs" if score == "none" else "logits")),
        ("score", enum("score_function", score)),
        ("renorm", boolean(renorm)),
        ("eps", f64(eps)),
        ("route_scale", f64(route_scale)),
    )
    dscores = Tensor("dscores", ("n", experts), torch.float32)
    return Kernel("topk_renorm_backward", tuple(inputs), (dscores,), attributes)


def _backward_cpu(dgates, gates, indices, scores, experts, dtype, score, renorm, eps, route_scale):
    form = (
        indices.dtype, None if scores is None else scores.dtype, experts, gates.shape[-1], score,
        renorm, eps,
    )  # fmt: skip
    if not _backward_scales.has(form, route_scale):
        # The gradient of gates before they were scaled; where all are 0, so is the gradient.
        dgates = dgates * route_scale
        gates, route_scale = gates / (route_scale or 1.0), 1.0
    run = backward_kernel(*form, route_scale)
    operands = (dgates, gates, indices) if scores is None else (dgates, gates, indices, scores)
    (dscores,) = run(*(rows(x, 1) for x in operands))
    return dscores.view(*gates.shape[:-1], experts).to(dtype)


def _backward_fake(dgates, gates, indices, scores, experts, dtype, score, renorm, eps, route_scale):
    return gates.new_empty((*gates.shape[:-1], experts), dtype=dtype)


_backward_op = define(
    "topk_renorm_backward(Tensor dgates, Tensor gates, Tensor indices, Tensor? scores, "
    "SymInt experts, ScalarType dtype, str score, bool renorm, float eps, float route_scale) "
    "-> Tensor",
    kernel=_backward_cpu,
    fake=_backward_fake,
    is_gradient=True,
    rows=("dgates", "gates", "indices", "scores"),
)


def save_for_gradient(
    ctx: Any,
    scores: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    *,
    score: str,
    renorm: bool,
    eps: float,
    route_scale: float,
    needs_scores: bool,
) -> None:
    """What `gradient` reads; of a selection, whatever its form."""
    ctx.mark_non_differentiable(indices)
    ctx.experts, ctx.dtype = scores.shape[-1], scores.dtype
    ctx.form = score, renorm, eps, route_scale
    ctx.save_for_backward(gates, indices, scores if needs_scores else None)


def gradient(ctx: Any, dgates: torch.Tensor) -> torch.Tensor:
    """dscores of a selection, whose indices and choice bias have no gradient."""
    return _backward_op(dgates, *ctx.saved_tensors, ctx.experts, ctx.dtype, *ctx.form)


def _setup_context(ctx, inputs, output):
    scores, _, kind, renorm, route_scale, _, _ = inputs
    # softmax(TopK(z)) needs nothing but its result, and raw probabilities not
    # even that: no scores are kept.
    save_for_gradient(
        ctx, scores, *output, score="softmax" if kind == "logits" else "none", renorm=renorm,
        eps=0.0, route_scale=route_scale, needs_scores=(kind == "probs") == renorm,
    )  # fmt: skip


def _backward(ctx, dgates, _):
    return gradient(ctx, dgates), *(None,) * 6


_op = define(
    "topk_renorm(Tensor scores, int k, str kind, bool renorm, float route_scale, Tensor? mask, "
    "ScalarType index_dtype) -> (Tensor gates, Tensor indices)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("scores", "mask"),
)
