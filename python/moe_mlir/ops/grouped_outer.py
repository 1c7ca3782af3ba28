"""moe.grouped_outer: the gradient of the experts' weights (docs/Spec.md 3.14)."""

import torch

from ._check import INDICES, Checker
from ._expert_runs import are_grouped, has_kernel, multiply_columns, runs
from ._kernel import Kernel, Tensor, contiguous, kernels
from ._library import define

_check = Checker("grouped_outer")


def grouped_outer(
    dy: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """dw_e = sum of dy_i^T x_{rows_i} over the rows offsets_e <= i < offsets_{e+1}.

    Args:
        dy: `[rows, out]`.
        x: `[tokens, in]`; `[rows, in]` without `rows`.
        offsets: `[experts + 1]` int32 or int64, ascending.
        rows: the row of x that belongs to each row of dy; default: the same.

    Returns:
        `[experts, out, in]` in the dtype of x; sums are float32, rounded once.
    """
    return _op(dy, x, offsets, rows)


def _validate(dy, x, offsets, rows):
    _check.rank("dy", dy, "[rows, out]")
    _check.rank("x", x, "[rows, in]")
    _check.same_dtype("dy", dy, "x", x)
    _check.rank("offsets", offsets, "[experts + 1]")
    _check.dtype("offsets", offsets, INDICES)
    if rows is not None:
        _check.dtype("rows", rows, INDICES)
    count = x.shape[0] if rows is None else rows.shape[0]
    if dy.shape[0] != count:
        _check.fail(f"expected as many rows of 'dy' as of {'x' if rows is None else 'rows'} "
                    f"({count}), found {dy.shape[0]}")


@kernels
def kernel(
    dtype: torch.dtype, out: int, width: int, offsets_dtype: torch.dtype,
    rows_dtype: torch.dtype | None, experts: int,
) -> Kernel:
    inputs = [
        Tensor("dy", ("r", out), dtype),
        Tensor("x", ("r" if rows_dtype is None else "n", width), dtype),
        Tensor("offsets", (experts + 1,), offsets_dtype),
    ]
    if rows_dtype is not None:
        inputs.append(Tensor("rows", ("r",), rows_dtype, clause="rows"))
    return Kernel("grouped_outer", tuple(inputs), (Tensor("dw", (experts, out, width), dtype),))


def _run(dy, x, offsets, rows=None):
    _validate(dy, x, offsets, rows)
    experts = offsets.shape[0] - 1
    if not has_kernel(dy, x, offsets, rows):
        return _plain(dy, x if rows is None else x.index_select(0, rows), offsets, experts)
    run = kernel(dy.dtype, dy.shape[1], x.shape[1], offsets.dtype,
                 None if rows is None else rows.dtype, experts)
    operands = [contiguous(dy), contiguous(x), contiguous(offsets)]
    (dw,) = run(*operands, *(() if rows is None else (contiguous(rows),)))
    return dw


def _plain(dy, x, offsets, experts):
    dy, x = dy.contiguous(), x.contiguous()
    if are_grouped(dy, x):
        return multiply_columns(dy, x, offsets)
    dw = x.new_zeros((experts, dy.shape[1], x.shape[1]))
    for e, begin, end in runs(offsets):
        torch.mm(dy[begin:end].T, x[begin:end], out=dw[e])
    return dw


def _fake(dy, x, offsets, rows=None):
    _validate(dy, x, offsets, rows)
    return x.new_empty((offsets.shape[0] - 1, dy.shape[1], x.shape[1]))


_op = define(
    "grouped_outer(Tensor dy, Tensor x, Tensor offsets, Tensor? rows=None) -> Tensor",
    kernel=_run, fake=_fake, key="CompositeExplicitAutograd", is_gradient=True,
    promote=("dy", "x"),
)
