"""moe.topk_renorm in its full form: other scores, bias, groups, forced ids (docs/Spec.md 9.1)."""

from typing import Literal

import torch

from ..formulas import SCORE_FUNCTIONS, ScoreName
from ._check import ACTIVATIONS, INDICES, MASK, Checker
from ._few_values import FewValues
from ._kernel import Kernel, Tensor, boolean, contiguous, enum, f64, i64, kernels, rows
from ._library import define
from .topk_renorm import gradient, matrices, save_for_gradient, write

_check = Checker("grouped_topk")

_scales = FewValues()

# The contract's names and the dialect's.
_GROUP_SCORES = {"top2": "top2_sum", "top2_sum": "top2_sum", "max": "max"}


def grouped_topk(
    scores: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    score: ScoreName = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    group_score: Literal["top2", "top2_sum", "max"] = "top2",
    renorm: bool = True,
    eps: float = 0.0,
    route_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    num_valid: int | torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects k experts a token by biased, group-limited scores and weighs them without the bias.

    Args:
        scores: logits `[.., experts]`, float32, bfloat16 or float16.
        k: experts to select, 1 <= k <= experts of the groups that stay.
        bias: `[experts]`, added for the choice only; no gradient.
        score: a key of `moe_mlir.formulas.SCORE_FUNCTIONS`: "softmax", "sigmoid" .., or "none" for
            scores that are used as they are.
        n_group, topk_group: only the `topk_group` best of `n_group` groups of
            consecutive experts take part.
        group_score: a group's value, "top2" (the sum of its two best, DeepSeek-V3), which may be
            given by its name in IR, "top2_sum", too, or "max" (its best, DeepSeek-V2).
        renorm: divide the gates by their sum + `eps`.
        route_scale: factor of all gates.
        mask: bool `[..]`, True = real token; others get index -1 and gate 0.
        num_valid: 0-d int32 tensor or int; tokens from this flat position on are padding.
        forced: `[.., k]` recorded ids: their gates are computed anew, the order is kept, and an
            id of -1 has gate 0.
        index_dtype: torch.int64 or torch.int32.
        out: tensors for gates and indices, which are returned; without gradients.

    Returns:
        gates `[.., k]` float32 and indices `[.., k]`.
    """
    given = (
        scores, k, bias, score, n_group, topk_group, group_score, renorm, eps, route_scale,
        mask, num_valid, forced, index_dtype,
    )  # fmt: skip
    return _op(*given) if out is None else write(_check, _op, _cpu, _arguments(*given), given, out)


def _arguments(
    scores, k, bias, score, n_group, topk_group, group_score, renorm, eps, route_scale, mask,
    num_valid, forced, index_dtype,
):  # fmt: skip
    for name, value in (("bias", bias), ("mask", mask), ("forced", forced)):
        _check.tensor(name, value, optional=True)
    _check.tensor("scores", scores)
    k = _check.integer("k", k)
    n_group = _check.integer("n_group", n_group)
    topk_group = _check.integer("topk_group", topk_group)
    for name, value in (("route_scale", route_scale), ("eps", eps)):
        _check.number(name, value)
    if num_valid is not None and not isinstance(num_valid, torch.Tensor):
        num_valid = _check.integer("num_valid", num_valid)
        num_valid = torch.full((), num_valid, dtype=torch.int32, device=scores.device)
    return (
        scores, k, bias, forced, mask, num_valid, score, n_group, topk_group, group_score,
        bool(renorm), float(eps), float(route_scale), index_dtype,
    )  # fmt: skip


def _validate(
    scores, k, bias, forced, mask, num_valid, score, n_group, topk_group, group_score, renorm, eps,
    route_scale, index_dtype,
):  # fmt: skip
    _check.at_least_1d("scores", scores, "[.., experts]")
    _check.dtype("scores", scores, ACTIVATIONS)
    experts, tokens = scores.shape[-1], scores.shape[:-1]
    if not 1 <= k <= experts:
        _check.fail(f"expected 'k' in [1, {experts}] (the number of experts), found {k}")
    _check.choice("score", score, tuple(SCORE_FUNCTIONS))
    _check.choice("group_score", group_score, tuple(_GROUP_SCORES))
    if n_group < 1 or experts % n_group:
        _check.fail(
            f"expected 'n_group' to divide the number of experts ({experts}), found {n_group}"
        )
    if not 1 <= topk_group <= n_group:
        _check.fail(f"expected 'topk_group' in [1, {n_group}] ('n_group'), found {topk_group}")
    kept = topk_group * (experts // n_group)
    if k > kept:
        _check.fail(f"expected 'k' to be at most {kept} (the experts of the groups kept), found {k}")
    _check.finite("route_scale", route_scale)
    if not (eps >= 0.0 and eps < float("inf")):
        _check.fail(f"expected 'eps' to be at least 0 and finite, found {eps}")
    if index_dtype not in INDICES:
        _check.fail(f"expected 'index_dtype' to be torch.int32 or torch.int64, found {index_dtype}")
    if bias is not None:
        _check.dtype("bias", bias, ACTIVATIONS)
        _check.shape("bias", bias, (experts,), "[experts]")
    if forced is not None:
        _check.dtype("forced", forced, INDICES)
        _check.shape("forced", forced, (*tokens, k), "[tokens of 'scores', k]")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, tokens, "of 'scores' without experts")
    if num_valid is not None:
        _check.dtype("num_valid", num_valid, (torch.int32,))
        _check.shape("num_valid", num_valid, (), "[]")


@kernels
def kernel(
    dtype: torch.dtype,
    experts: int,
    k: int,
    bias: torch.dtype | None,
    forced: torch.dtype | None,
    masked: bool,
    counted: bool,
    index_dtype: torch.dtype,
    attributes: tuple[tuple[str, str], ...],
) -> Kernel:
    inputs = [Tensor("scores", ("n", experts), dtype)]
    if bias is not None:
        inputs.append(Tensor("select_bias", (experts,), bias, clause="bias"))
    if forced is not None:
        inputs.append(Tensor("forced", ("n", k), forced, clause="forced"))
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    if counted:
        inputs.append(Tensor("num_valid", (), torch.int32, clause="num_valid"))
    results = (Tensor("gates", ("n", k), torch.float32), Tensor("indices", ("n", k), index_dtype))
    return Kernel("topk_renorm", tuple(inputs), results, attributes)


@kernels
def _attributes(score, n_group, topk_group, group_score, renorm, eps, route_scale):
    kind = "probs" if score == "none" else "logits"
    return (
        ("kind", enum("score_kind", kind)),
        ("score", enum("score_function", score)),
        ("n_group", i64(n_group)),
        ("topk_group", i64(topk_group)),
        ("group_score", enum("group_score", _GROUP_SCORES[group_score])),
        ("renorm", boolean(renorm)),
        ("eps", f64(eps)),
        ("route_scale", f64(route_scale)),
    )


def _cpu(scores, k, bias, forced, mask, num_valid, *options, out=None):
    _validate(scores, k, bias, forced, mask, num_valid, *options)
    *attributes, route_scale, index_dtype = options
    form = (
        scores.dtype, scores.shape[-1], k, None if bias is None else bias.dtype,
        None if forced is None else forced.dtype, mask is not None, num_valid is not None,
        index_dtype,
    )  # fmt: skip
    constant = _scales.has((form, *attributes), route_scale)
    run = kernel(*form, _attributes(*attributes, route_scale if constant else 1.0))
    operands = [rows(scores, 1)]
    if bias is not None:
        operands.append(contiguous(bias))
    if forced is not None:
        operands.append(rows(forced, 1))
    if mask is not None:
        operands.append(rows(mask, 0))
    if num_valid is not None:
        operands.append(num_valid)
    gates, indices = run(*operands, out=matrices(out))
    if not constant:
        gates = gates * route_scale if out is None else gates.mul_(route_scale)
    shape = (*scores.shape[:-1], k)
    return gates.view(shape), indices.view(shape)


def _fake(scores, k, *options):
    _validate(scores, k, *options)
    shape = (*scores.shape[:-1], k)
    gates = scores.new_empty(shape, dtype=torch.float32)
    return gates, scores.new_empty(shape, dtype=options[-1])


def _setup_context(ctx, inputs, output):
    scores, score = inputs[0], inputs[6]
    renorm, eps, route_scale = inputs[10:13]
    # Scores that are used as they are may be -inf, and then have no gradient.
    needs_scores = not (score == "softmax" and renorm and eps == 0)
    save_for_gradient(
        ctx, scores, *output, score=score, renorm=renorm, eps=eps, route_scale=route_scale,
        needs_scores=needs_scores,
    )  # fmt: skip


def _backward(ctx, dgates, _):
    return gradient(ctx, dgates), *(None,) * 13


_op = define(
    "grouped_topk(Tensor scores, int k, Tensor? bias, Tensor? forced, Tensor? mask, "
    "Tensor? num_valid, str score, int n_group, int topk_group, str group_score, bool renorm, "
    "float eps, float route_scale, ScalarType index_dtype) -> (Tensor gates, Tensor indices)",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("scores", "forced", "mask"),
)
