"""moe.grouped_linear: each row times the weight of its expert (docs/Spec.md 3.14)."""

from collections.abc import Sequence

import torch

from ._check import INDICES, Checker
from ._expert_activation import SCHEMA, ExpertActivation
from ._expert_runs import (
    add_rows,
    are_grouped,
    clear_rows_of_none,
    has_gpu_kernel,
    has_kernel,
    legal,
    multiply_groups,
    runs,
    sum_runs,
)
from ._kernel import Kernel, Tensor, contiguous, i64, kernels
from ._library import define
from .grouped_outer import grouped_outer

_check = Checker("grouped_linear")

# The arguments behind the tensors, in the order of the schema.
_OPTIONS = f"bool transposed=False, {SCHEMA}"


def grouped_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    activation: ExpertActivation | None = None,
) -> torch.Tensor:
    """y_i = act(bias_e + w_e x_{rows_i}) for rows offsets_e <= i < offsets_{e+1}, else 0.

    Args:
        x: `[tokens, in]`; `[rows, in]` without `rows`.
        w: `[experts, out, in]`, or `[experts, in, out]` if `transposed`.
        bias: `[experts, out]`, or None.
        offsets: `[experts + 1]` int32 or int64, ascending.
        rows: the row of x that each row of y reads; default: the same.
        activation: what is done to the sums before they are rounded; default: nothing.

    Returns:
        `[rows, out]` in the dtype of x; half of the features with a gate.
    """
    activation = activation or ExpertActivation()
    return _op(x, w, bias, offsets, rows, transposed, *activation.options)


def _arguments(x, w, bias, offsets, rows=None, *options):
    for name, value in (("x", x), ("w", w), ("offsets", offsets)):
        _check.tensor(name, value)
    for name, value in (("bias", bias), ("rows", rows)):
        _check.tensor(name, value, optional=True)
    return x, w, bias, offsets, rows, *options


def _validate(x, w, bias, offsets, rows, transposed, activation):
    order = "[experts, in, out]" if transposed else "[experts, out, in]"
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1 if transposed else 2]:
        _check.fail(f"expected x [rows, in] and w {order}, found {tuple(x.shape)} and "
                    f"{tuple(w.shape)}")
    if x.dtype != w.dtype:
        _check.fail(f"expected x and w of one dtype, found {x.dtype} and {w.dtype}", TypeError)
    experts, out = w.shape[0], w.shape[2 if transposed else 1]
    if bias is not None:
        _check.shape("bias", bias, (experts, out), "[experts, out]")
    _check.dtype("offsets", offsets, INDICES)
    if tuple(offsets.shape) != (experts + 1,):
        _check.fail(f"expected {experts + 1} offsets, found {tuple(offsets.shape)}")
    if rows is not None:
        _check.dtype("rows", rows, INDICES)
        _check.rank("rows", rows, "[rows]")
    activation.validate(_check, out)


def matrices(w: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, bool]:
    """The experts' matrices as they lie in memory, and whether they lie transposed there."""
    if w.requires_grad:
        w = w.detach()
    if not w.is_contiguous() and w.mT.is_contiguous():
        return w.mT, not transposed
    return w.contiguous(), transposed


@kernels
def kernel(
    dtype: torch.dtype, width: int, out: int, offsets_dtype: torch.dtype,
    bias_dtype: torch.dtype | None, rows_dtype: torch.dtype | None, transposed: bool,
    activation: ExpertActivation,
) -> Kernel:
    inputs = [
        Tensor("x", ("r" if rows_dtype is None else "n", width), dtype),
        Tensor("w", ("e", width, out) if transposed else ("e", out, width), dtype),
        Tensor("offsets", ("b",), offsets_dtype),
    ]
    if rows_dtype is not None:
        inputs.append(Tensor("rows", ("r",), rows_dtype, clause="rows"))
    if bias_dtype is not None:
        inputs.append(Tensor("bias", ("e", out), bias_dtype, clause="bias"))
    return Kernel("grouped_linear", tuple(inputs),
                  (Tensor("y", ("r", activation.width(out)), dtype),),
                  attributes(transposed, activation))


def attributes(transposed: bool, activation: ExpertActivation, panels: int = 0) -> tuple:
    """What moe.grouped_linear says of its weight, `panels` columns a panel if any, and after it."""
    layout = [("transposed", "unit")] if transposed else []
    layout += [("packed", i64(panels))] if panels else []
    return (*layout, *activation.attributes())


def _run(x, w, bias, offsets, rows=None, transposed=False, *options):
    activation = ExpertActivation(*options)
    _validate(x, w, bias, offsets, rows, transposed, activation)
    w, transposed = matrices(w, transposed)
    count = x.shape[0] if rows is None else rows.shape[0]
    if not (has_kernel(x, w, bias, offsets, rows) or
            has_gpu_kernel(count, w, transposed=transposed)):
        return _of_torch(x, w, bias, offsets, rows, transposed, activation)
    run = kernel(
        x.dtype, x.shape[1], w.shape[2 if transposed else 1], offsets.dtype,
        None if bias is None else bias.dtype, None if rows is None else rows.dtype, transposed,
        activation,
    )  # fmt: skip
    operands = [contiguous(x), w, contiguous(offsets)]
    operands += [contiguous(each) for each in (rows, bias) if each is not None]
    (y,) = run(*operands)
    return y


def _of_torch(x, w, bias, offsets, rows, transposed, activation):
    """The op in torch: a grouped product, or one an expert."""
    x = (x if rows is None else x.index_select(0, rows)).contiguous()
    if are_grouped(x, w):
        offsets = legal(offsets, x.shape[0])
        z = clear_rows_of_none(multiply_groups(x, w, bias, offsets, transposed), offsets)
        return z if activation.is_identity else activation(z)
    w = w if transposed else w.mT
    z = x.new_zeros((x.shape[0], w.shape[2]))
    for e, begin, end in runs(offsets):
        # In place: a result that is copied to its rows costs a tenth of the product.
        if bias is None:
            torch.mm(x[begin:end], w[e], out=z[begin:end])
        else:
            torch.addmm(bias[e].to(x.dtype), x[begin:end], w[e], out=z[begin:end])
    return z if activation.is_identity else activation(z)


def _fake(x, w, bias, offsets, rows=None, transposed=False, *options):
    activation = ExpertActivation(*options)
    _validate(x, w, bias, offsets, rows, transposed, activation)
    count = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty((count, activation.width(w.shape[2 if transposed else 1])))


def _setup_context(ctx, inputs, output):
    x, w, bias, offsets, rows, *options = inputs
    ctx.options = options
    ctx.save_for_backward(x, w, bias, offsets, rows)


def _backward(ctx, dy):
    x, w, bias, offsets, rows = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    dx, dw, dbias = torch.ops.moe.grouped_linear_backward(
        dy, x, w, offsets, bias, rows, as_bits(needed), *ctx.options)
    grads = [grad if need else None for need, grad in zip(needed, (dx, dw, dbias), strict=True)]
    return *grads, *[None] * (2 + len(ctx.options))


def as_bits(needed: Sequence[bool]) -> int:
    """Which gradients are needed, as an argument that every tracer of torch takes."""
    return sum(1 << n for n, need in enumerate(needed) if need)


_op = define(
    "grouped_linear(Tensor x, Tensor w, Tensor? bias, Tensor offsets, Tensor? rows=None, "
    f"{_OPTIONS}) -> Tensor",
    arguments=_arguments, kernel=_run, fake=_fake, setup_context=_setup_context,
    backward=_backward, key="CompositeExplicitAutograd", cast=("x", "w", "bias"),
)


# ---- gradients ------------------------------------------------------------------


def gradients(dy, x, w, offsets, bias=None, rows=None, needed=7, transposed=False, *options):
    """dx = dz w[e], dw[e] = dz^T x, dbias[e] = sum of dz, over each expert's rows.

    Bits 0, 1 and 2 of `needed` say which are; the others are empty.
    """
    activation, empty = ExpertActivation(*options), dy.new_empty(0)
    dz = dy
    if not activation.is_identity:
        dz = activation.gradient(_run(x, w, bias, offsets, rows, transposed), dy)
    dx = _gradient_of_x(dz, x, w, offsets, rows, transposed) if needed & 1 else empty
    dw = _gradient_of_w(dz, x, offsets, rows, transposed, w) if needed & 2 else empty
    dbias = _gradient_of_bias(dz, offsets, w.dtype) if needed & 4 else empty
    return dx, dw, dbias


def _gradient_of_x(dz, x, w, offsets, rows, transposed):
    dx = _run(dz, w, None, offsets, None, not transposed)
    if rows is None:
        return dx
    wide = torch.promote_types(x.dtype, torch.float32)
    return add_rows(dx.to(wide), rows, x.shape[0]).to(x.dtype)


def _gradient_of_w(dz, x, offsets, rows, transposed, w):
    if not transposed:
        return grouped_outer(dz, x, offsets, rows)
    return grouped_outer(x if rows is None else x[rows], dz, offsets)


def _gradient_of_bias(dz, offsets, dtype):
    """Sums of rows by expert; on a GPU nothing waits, and the order of a sum is fixed."""
    wide = torch.promote_types(dtype, torch.float32)
    return sum_runs(dz.to(wide), offsets).to(dtype)


def _fake_backward(dy, x, w, offsets, bias=None, rows=None, needed=7, transposed=False, *options):
    shapes = (x.shape, w.shape, (w.shape[0], w.shape[2 if transposed else 1]))
    return tuple(x.new_empty(shape if needed >> n & 1 else (0,)) for n, shape in enumerate(shapes))


define(
    "grouped_linear_backward(Tensor dy, Tensor x, Tensor w, Tensor offsets, Tensor? bias=None, "
    f"Tensor? rows=None, int needed=7, {_OPTIONS}) "
    "-> (Tensor dx, Tensor dw, Tensor dbias)",
    kernel=gradients, fake=_fake_backward, key="CompositeExplicitAutograd", is_gradient=True,
)
