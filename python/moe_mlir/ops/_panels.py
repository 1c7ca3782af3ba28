"""Weights of experts in panels: the order in which kernels read them (docs/Spec.md 3.14).

A weight `[experts, out, in]` in panels of q columns is a tensor of more dims, whose
shape tells what it is:

    [experts, p, in, q]             float32, float16; p = ceil(out / q)
    [experts, p, in, 2, q/2]        with a concatenated gate: q/2 gates, then their factors
    [experts, p, in/2, q, 2]        bfloat16: two of `in` side by side
    [experts, p, in/2, 2, q/2, 2]   bfloat16 with a concatenated gate

What is behind the last of `out`, or of `in`, is zero. Memory is that of the weight
where `out` is a multiple of q. q is what a kernel's register tile has on this CPU, 64 or
16; another CPU reads the panels as well, more slowly.
"""

import functools
import math

import torch

from .._native import native
from .._support.huge_pages import empty
from ..compiler.host_cpu import features_for
from ..compiler.uncached import target_cpu

_IN_MEMORY = (torch.Tensor, torch.nn.Parameter)


def columns_of_panels() -> int:
    """Those of a kernel's register tile: four vectors of AVX-512, two of AVX2."""
    return columns_for(target_cpu())


@functools.cache
def columns_for(cpu: str) -> int:
    """The same for a CPU by LLVM's name."""
    return 64 if "avx512f" in features_for(cpu) else 16


def columns(w: torch.Tensor) -> int:
    """The columns of a panel of a packed weight."""
    return math.prod(w.shape[3:]) // steps_of(w.dtype)


def is_packed(w: torch.Tensor) -> bool:
    return w.dim() > 3


def steps_of(dtype: torch.dtype) -> int:
    """How many of `in` lie side by side."""
    return 2 if dtype == torch.bfloat16 else 1


def has_halves(w: torch.Tensor) -> bool:
    """Whether the panels of a packed weight have gates, then their factors."""
    return w.dim() == 4 + steps_of(w.dtype)


def packed_shape(
    experts: int, out: int, width: int, dtype: torch.dtype, halves: bool, columns: int,
) -> tuple[int, ...]:
    """The shape of a weight `[experts, out, width]` in panels of so many columns."""
    steps = steps_of(dtype)
    shape = (experts, -(-out // columns), -(-width // steps))
    return (*shape, *((2, columns // 2) if halves else (columns,)), *((2,) if steps == 2 else ()))


def why_no_panels(
    out: int | None, width: int, dtype: torch.dtype, *, columns: int, features: str = "features",
) -> str:
    """Why a weight `[out, width]` should not be packed; empty if it can. Experts name no `out`."""
    if out is not None and out < columns:
        return (f"expected as many outputs as a panel has columns on this CPU, {columns}, found "
                f"{out}")
    if width % steps_of(dtype):
        return f"expected an even number of {features} in bfloat16, found {width}"
    return ""


def pack_weight(
    w: torch.Tensor, *, halves: bool, columns: int | None = None,
) -> torch.Tensor:
    """A weight `[experts, out, in]` of any strides in panels; results are the same, bit by bit.

    `columns` are those of a panel, if it is for another CPU than this one.
    """
    experts, out, width = w.shape
    shape = packed_shape(experts, out, width, w.dtype, halves, columns or columns_of_panels())
    if type(w) in _IN_MEMORY and w.device.type == "cpu":
        panels = empty(shape, w.dtype)
        native().pack_panels(w.detach(), panels, halves, steps_of(w.dtype))
        return panels
    panels = w.new_empty(shape)
    # One expert at a time: what a copy with zeros costs in memory is that of one.
    for mine, weight in zip(panels, w):
        view = _view(mine, halves)
        parts, p, q, t, s = view.shape
        rows = weight.reshape(parts, out // parts, width)
        rows = torch.nn.functional.pad(rows, (0, t * s - width, 0, p * q - out // parts))
        view.copy_(rows.view(view.shape))
    return panels


def cast_panels(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A packed weight in another dtype, in the panels of that dtype."""
    return with_panel_pairing(w.to(dtype), steps_of(w.dtype))


def with_panel_pairing(w: torch.Tensor, steps: int) -> torch.Tensor:
    """Panels with so many of `in` side by side, as those of their dtype."""
    if steps == steps_of(w.dtype):
        return w
    if steps == 2:
        return w.movedim(-1, 3).flatten(2, 3).contiguous()
    if w.shape[2] % 2:
        w = torch.nn.functional.pad(w, (0, 0) * (w.dim() - 3) + (0, 1))
    return w.unflatten(2, (-1, 2)).movedim(3, -1).contiguous()


def unpack_weight(panels: torch.Tensor, out: int, width: int) -> torch.Tensor:
    """The weight `[experts, out, width]` that lies in panels."""
    w = panels.new_empty((panels.shape[0], out, width))
    for weight, mine in zip(w, panels):
        view = _view(mine, has_halves(panels))
        parts, p, q, t, s = view.shape
        rows = view.reshape(parts, p * q, t * s)[:, :out // parts, :width]
        weight.copy_(rows.reshape(out, width))
    return w


def _view(mine: torch.Tensor, halves: bool) -> torch.Tensor:
    """The panels of an expert as `[halves, panels, columns, in / s, s]`."""
    p, t = mine.shape[:2]
    return mine.view(p, t, 2 if halves else 1, -1, steps_of(mine.dtype)).permute(2, 0, 3, 1, 4)


def in_features(w: torch.Tensor) -> int:
    """How many features a packed weight takes; one of bfloat16 takes an even number."""
    return w.shape[2] * steps_of(w.dtype)


def as_operand(w: torch.Tensor) -> torch.Tensor:
    """A packed weight as `moe.grouped_linear` takes it: gates and factors are one dim."""
    return w.contiguous().flatten(3, 4) if has_halves(w) else w.contiguous()
