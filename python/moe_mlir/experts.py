"""Dropless execution of the experts that a router selected.

`run_experts` sorts the (token, choice) pairs by expert, runs each expert on
its run of rows, and adds the results back with their gates:

    dispatch      which row of the sorted order each pair goes to, where each
                  expert's rows start, how many it has
    token_rows    the token of each row: the inverse of dispatch
    grouped_linear  row r of expert e's run is multiplied by w[e]
    combine       the sum of each token's rows, weighed by their gates

They are torch ops (`torch.ops.moe.*`), so that a traced model keeps them
as one node each whatever the routing; sizes depend on shapes alone, [T * k]
rows, never on data.
"""

import warnings
from collections.abc import Callable

import torch

from .ops import combine, dispatch
from .ops._library import define


def run_experts(
    x: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    *,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """y_t = sum_a gates_ta expert_{indices_ta}(x_t), for tokens of any leading dims.

    Args:
        x: tokens `[.., d]`.
        gates: `[.., k]`.
        indices: experts `[.., k]`; -1 selects nothing.
        w_in: `[experts, hidden, d]`.
        w_out: `[experts, d, hidden]`.
        b_in: `[experts, hidden]`, or None.
        b_out: `[experts, d]`, or None.
        activation: between the two layers; default: gelu.

    Returns:
        `[.., d]` in the dtype of x.
    """
    activation = activation or torch.nn.functional.gelu

    def expert(rows, offsets):
        hidden = activation(torch.ops.moe.grouped_linear(rows, w_in, b_in, offsets))
        return torch.ops.moe.grouped_linear(hidden, w_out, b_out, offsets)
    return run_rows(x, gates, indices, _num_experts(w_in), expert)


def _num_experts(w):
    """The first size of a weight; torch.jit.trace makes a tensor of it, but no weight changes its shape."""
    if not torch.jit.is_tracing():
        return w.shape[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(w.shape[0])


def run_rows(
    x: torch.Tensor,
    gates: torch.Tensor,
    indices: torch.Tensor,
    num_experts: int,
    expert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """As `run_experts`, with the experts given as a function.

    `expert(rows, offsets)` maps the rows of all (token, choice) pairs, sorted by
    expert, to as many rows: expert e has rows `offsets[e]` to `offsets[e + 1]`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    chosen = indices.reshape(-1, indices.shape[-1])
    weights = gates.reshape(-1, gates.shape[-1])
    slots, offsets, _ = dispatch(chosen, num_experts)
    outputs = expert(tokens[torch.ops.moe.token_rows(slots)], offsets)
    return _combine(outputs, weights, slots).reshape(*x.shape[:-1], outputs.shape[-1])


def _combine(outputs, gates, slots):
    """The op, or its meaning for float64, which the op does not take."""
    if outputs.dtype != torch.float64:
        return combine(outputs, gates, slots)
    gates = torch.where(slots >= 0, gates.to(outputs.dtype), 0.0)
    return (outputs[slots.clamp(min=0)] * gates.unsqueeze(-1)).sum(dim=1)


# ---- rows ----------------------------------------------------------------------


def _check_indices(name, indices):
    if indices.dim() != 2:
        raise ValueError(f"{name}: expected 2 dims [tokens, k], found {indices.dim()}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, found {indices.dtype}")


def _token_rows(slots):
    """The token of each row; rows behind the last pair stay at token 0."""
    _check_indices("token_rows: slots", slots)
    tokens = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1).expand(slots.shape)
    rows = torch.zeros(slots.numel(), dtype=torch.int64, device=slots.device)
    valid = slots >= 0
    rows[slots[valid]] = tokens[valid]
    return rows


def _token_rows_fake(slots):
    return slots.new_empty((slots.shape[0] * slots.shape[1],), dtype=torch.int64)


define("token_rows(Tensor slots) -> Tensor", kernel=_token_rows, fake=_token_rows_fake,
       key="CompositeExplicitAutograd")


# ---- grouped linear ---------------------------------------------------------------


def _check_grouped(x, w, bias, offsets):
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2]:
        raise ValueError("grouped_linear: expected x [rows, in] and w [experts, out, in], found "
                         f"{tuple(x.shape)} and {tuple(w.shape)}")
    if x.dtype != w.dtype:
        raise TypeError(f"grouped_linear: expected x and w of one dtype, found {x.dtype} and "
                        f"{w.dtype}")
    if bias is not None and tuple(bias.shape) != (w.shape[0], w.shape[1]):
        raise ValueError(f"grouped_linear: expected bias [experts, out] {tuple(w.shape[:2])}, "
                         f"found {tuple(bias.shape)}")
    if tuple(offsets.shape) != (w.shape[0] + 1,):
        raise ValueError(f"grouped_linear: expected {w.shape[0] + 1} offsets, found "
                         f"{tuple(offsets.shape)}")


def _segments(offsets):
    bounds = offsets.tolist()
    return [(e, b, t) for e, (b, t) in enumerate(zip(bounds, bounds[1:])) if t > b]


def _grouped_linear(x, w, bias, offsets):
    """Rows [offsets[e], offsets[e+1]) times w[e]; rows behind the last run are 0."""
    _check_grouped(x, w, bias, offsets)
    segments = _segments(offsets)
    y = x.new_empty((x.shape[0], w.shape[1]))
    if not _cover(segments, x.shape[0]):
        y.zero_()
    for e, begin, end in segments:
        # In place: a result that is copied to its rows costs a tenth of the product.
        if bias is None:
            torch.mm(x[begin:end], w[e].T, out=y[begin:end])
        else:
            torch.addmm(bias[e], x[begin:end], w[e].T, out=y[begin:end])
    return y


def _cover(segments, rows):
    """Whether every row is in a segment, each beginning where the one before ends."""
    reached = 0
    for _, begin, end in segments:
        if begin != reached:
            return False
        reached = end
    return reached == rows


def _grouped_linear_fake(x, w, bias, offsets):
    _check_grouped(x, w, bias, offsets)
    return x.new_empty((x.shape[0], w.shape[1]))


def _grouped_setup(ctx, inputs, output):
    x, w, bias, offsets = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, w, offsets)


def _grouped_backward(ctx, dy):
    x, w, offsets = ctx.saved_tensors
    dx, dw, dbias = torch.ops.moe.grouped_linear_backward(dy, x, w, offsets)
    return dx, dw, dbias if ctx.has_bias else None, None


def _grouped_backward_kernel(dy, x, w, offsets):
    """dx = dy w[e], dw[e] = dy^T x, dbias[e] = sum of dy, over each expert's rows."""
    dx, dw = torch.zeros_like(x), torch.zeros_like(w)
    dbias = w.new_zeros(w.shape[:2])
    for e, begin, end in _segments(offsets):
        rows = dy[begin:end]
        dx[begin:end] = rows @ w[e]
        dw[e] = rows.t() @ x[begin:end]
        dbias[e] = rows.sum(0)
    return dx, dw, dbias


def _grouped_backward_fake(dy, x, w, offsets):
    return torch.empty_like(x), torch.empty_like(w), w.new_empty(w.shape[:2])


define("grouped_linear_backward(Tensor dy, Tensor x, Tensor w, Tensor offsets) -> "
       "(Tensor dx, Tensor dw, Tensor dbias)",
       kernel=_grouped_backward_kernel, fake=_grouped_backward_fake,
       key="CompositeExplicitAutograd", is_gradient=True)
define("grouped_linear(Tensor x, Tensor w, Tensor? bias, Tensor offsets) -> Tensor",
       kernel=_grouped_linear, fake=_grouped_linear_fake, setup_context=_grouped_setup,
       backward=_grouped_backward, key="CompositeExplicitAutograd", cast=("x", "w", "bias"))
