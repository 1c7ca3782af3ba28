"""moe.adjacency_update: learn the expert graph from co-selections (docs/Spec.md 3.7)."""

from typing import Literal

import torch

from .._support.keywords import renamed
from ._check import INDICES, MASK, SCORES, Checker
from ._few_values import FewValues
from ._kernel import Kernel, Tensor, boolean, contiguous, enum, f64, kernels, rows
from ._library import define

# What the schema calls otherwise, as callers once did.
_NAMES = {"a": "adjacency", "idx": "indices"}
_check = Checker("adjacency_update", _NAMES)
_betas = FewValues()


@renamed(_NAMES)
def adjacency_update(
    adjacency: torch.Tensor,
    indices: torch.Tensor,
    *,
    beta: float = 0.9,
    norm: Literal["row", "col", "eq7"] = "row",
    diagonal: bool = True,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """a_new = beta adjacency + (1 - beta) norm(C), C counting how often two experts were chosen together.

    Args:
        adjacency: `[experts, experts]` float32.
        indices: `[.., k]` int32 or int64, the experts of each token by the *base*
            scores; -1 selects nothing.
        beta: weight of the old adjacency, in [0, 1].
        norm: "row" (Algorithm 1), "col", or "eq7" (by the diagonal).
        diagonal: count an expert with itself.
        mask: bool `[..]`, True = real token.

    Returns:
        a_new `[experts, experts]` float32; `adjacency` itself is not changed. A call
        without a valid token returns a copy of `adjacency`. No gradient.
    """
    return _op(adjacency, indices, beta, norm, diagonal, mask)


def _arguments(a, idx, beta, norm, diagonal, mask):
    _check.tensor("a", a)
    _check.tensor("idx", idx)
    _check.number("beta", beta)
    _check.tensor("mask", mask, optional=True)
    return a, idx, float(beta), norm, bool(diagonal), mask


def _validate(a, idx, beta, norm, diagonal, mask):
    _check.dtype("a", a, SCORES)
    _check.rank("a", a, "[experts, experts]")
    _check.shape("a", a, (a.shape[0], a.shape[0]), "[experts, experts]")
    _check.at_least_1d("idx", idx, "[.., k]")
    _check.dtype("idx", idx, INDICES)
    if not 0.0 <= beta <= 1.0:
        _check.fail(f"expected 'beta' in [0, 1], found {beta}")
    _check.choice("norm", norm, ("row", "col", "eq7"))
    if norm == "eq7" and not diagonal:
        _check.fail("expected 'diagonal' to be True with norm='eq7', which divides by it")
    if mask is not None:
        _check.dtype("mask", mask, MASK)
        _check.shape("mask", mask, idx.shape[:-1], "of 'idx' without k")


@kernels
def kernel(
    experts: int,
    k: int,
    index_dtype: torch.dtype,
    beta: float,
    norm: str,
    diagonal: bool,
    masked: bool,
) -> Kernel:
    inputs = [
        Tensor("a", (experts, experts), torch.float32),
        Tensor("indices", ("n", k), index_dtype),
    ]
    if masked:
        inputs.append(Tensor("mask", ("n",), torch.bool, clause="mask"))
    return Kernel(
        "adjacency_update",
        tuple(inputs),
        (Tensor("a_new", (experts, experts), torch.float32),),
        (
            ("beta", f64(beta)),
            ("norm", enum("adjacency_norm", norm)),
            ("diagonal", boolean(diagonal)),
        ),
    )


def _cpu(a, idx, beta, norm, diagonal, mask):
    _validate(a, idx, beta, norm, diagonal, mask)
    sizes = (a.shape[0], idx.shape[-1], idx.dtype)
    constant = _betas.has((sizes, norm, diagonal, mask is not None), beta)
    run = kernel(*sizes, beta if constant else 0.0, norm, diagonal, mask is not None)
    operands = [contiguous(a), rows(idx, 1)]
    if mask is not None:
        operands.append(rows(mask, 0))
    (a_new,) = run(*operands)
    # Without beta it is norm(C), or a itself where nothing was selected.
    return a_new if constant else torch.lerp(a_new, a, beta)


def _fake(a, idx, beta, norm, diagonal, mask):
    _validate(a, idx, beta, norm, diagonal, mask)
    return torch.empty_like(a, memory_format=torch.contiguous_format)


_op = define(
    "adjacency_update(Tensor a, Tensor idx, float beta, str norm, bool diagonal, Tensor? mask) "
    "-> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    widen=("a",),
)
