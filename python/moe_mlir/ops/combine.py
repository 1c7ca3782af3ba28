"""moe.combine: what the experts made of each token, added up (docs/Spec.md 3.10)."""

import torch

from ._check import ACTIVATIONS, INDICES, SCORES, Checker
from ._kernel import Kernel, Tensor, contiguous, kernels, rows
from ._library import define
from ._out import can_write

_check = Checker("combine")


def combine(
    expert_out: torch.Tensor,
    gates: torch.Tensor,
    slots: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_i = shared_i + sum_a gates_ia expert_out[slots_ia].

    Args:
        expert_out: `[rows, d]`, float32, bfloat16 or float16, in `dispatch`'s order.
        gates: `[.., k]`; 16-bit ones are widened to float32.
        slots: `[.., k]` int32 or int64; a slot that is no row (-1) adds nothing.
        shared: `[.., d]` in the dtype of `expert_out`, the shared experts' output.
        out: a tensor for y, which is returned; without gradients. It may be `shared`.

    Returns:
        y `[.., d]` in the dtype of `expert_out`; the sum is formed in float32
        in the order of k and rounded once.
    """
    if out is None:
        return _op(expert_out, gates, slots, shared)
    args = _arguments(expert_out, gates, slots, shared)
    _validate(*args)
    shape = (*gates.shape[:-1], expert_out.shape[1])
    if can_write(_check, args, (out,), shape, (expert_out.dtype,), "[tokens of 'gates', d]"):
        _cpu(*args, out=out)
        return out
    return out.copy_(_op(expert_out, gates, slots, shared))


def _arguments(expert_out, gates, slots, shared):
    _check.tensor("expert_out", expert_out)
    _check.tensor("gates", gates)
    _check.tensor("slots", slots)
    _check.tensor("shared", shared, optional=True)
    _check.dtype("gates", gates, ACTIVATIONS)
    return expert_out, gates.to(torch.float32), slots, shared


def _validate(expert_out, gates, slots, shared):
    _check.dtype("expert_out", expert_out, ACTIVATIONS)
    _check.rank("expert_out", expert_out, "[rows, d]")
    _check.at_least_1d("gates", gates, "[.., k]")
    _check.dtype("gates", gates, SCORES)
    _check.dtype("slots", slots, INDICES)
    _check.shape("slots", slots, gates.shape, "of 'gates'")
    if shared is not None:
        _check.same_dtype("shared", shared, "expert_out", expert_out)
        _check.shape(
            "shared", shared, (*gates.shape[:-1], expert_out.shape[1]),
            "[tokens of 'gates', d of 'expert_out']",
        )  # fmt: skip


@kernels
def kernel(
    dtype: torch.dtype, width: int, k: int, slot_dtype: torch.dtype, has_shared: bool
) -> Kernel:
    inputs = [
        Tensor("expert_out", ("s", width), dtype),
        Tensor("gates", ("n", k), torch.float32),
        Tensor("slots", ("n", k), slot_dtype),
    ]
    if has_shared:
        inputs.append(Tensor("shared", ("n", width), dtype, clause="shared"))
    return Kernel("combine", tuple(inputs), (Tensor("y", ("n", width), dtype),))


def _cpu(expert_out, gates, slots, shared, *, out=None):
    _validate(expert_out, gates, slots, shared)
    width = expert_out.shape[1]
    run = kernel(expert_out.dtype, width, gates.shape[-1], slots.dtype, shared is not None)
    operands = [contiguous(expert_out), rows(gates, 1), rows(slots, 1)]
    if shared is not None:
        operands.append(rows(shared, 1))
    (y,) = run(*operands, out=None if out is None else [out.view(operands[1].shape[0], width)])
    return y.view(*gates.shape[:-1], width)


def _fake(expert_out, gates, slots, shared):
    _validate(expert_out, gates, slots, shared)
    return expert_out.new_empty((*gates.shape[:-1], expert_out.shape[1]))


def _setup_context(ctx, inputs, output):
    expert_out, gates, slots, shared = inputs
    ctx.has_shared = shared is not None
    ctx.save_for_backward(expert_out, gates, slots)


def gradients(dy, expert_out, gates, slots):
    """Those of `expert_out` and of `gates`."""
    count = expert_out.shape[0]
    placed = (slots >= 0) & (slots < count)
    # Assignments without a row read and write a row behind the last.
    row = torch.where(placed, slots, count).to(torch.int64).flatten()
    dtype = torch.promote_types(expert_out.dtype, torch.float32)
    wide = dy.to(dtype)
    padded = torch.nn.functional.pad(expert_out.to(dtype), (0, 0, 0, 1))
    taken = padded[row].view(*slots.shape, expert_out.shape[-1])
    # dg_ia = expert_out[slots_ia] . dy_i, dout[slots_ia] += g_ia dy_i
    dgates = torch.where(placed, (taken * wide[..., None, :]).sum(-1), 0.0)
    shares = (torch.where(placed, gates, 0.0)[..., None] * wide[..., None, :]).flatten(0, -2)
    dout = torch.zeros_like(padded).index_add(0, row, shares)[:count]
    return dout.to(expert_out.dtype), dgates.to(gates.dtype)


def _backward(ctx, dy):
    return *gradients(dy, *ctx.saved_tensors), None, dy if ctx.has_shared else None


_op = define(
    "combine(Tensor expert_out, Tensor gates, Tensor slots, Tensor? shared) -> Tensor",
    arguments=_arguments,
    kernel=_cpu,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    rows=("gates", "slots", "shared"),
    widen=("gates",),
    promote=("expert_out", "shared"),
)
