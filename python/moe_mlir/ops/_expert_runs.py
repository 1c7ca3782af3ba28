"""What the ops on the rows of experts share.

On a GPU rows of few tokens are multiplied by kernels of our own, which read each weight once, and
rows of many by torch's grouped product where it takes them, else by our kernel of sm_90a: none asks
the GPU how many rows an expert has, so that a call can be captured in a CUDA graph. What none takes
is a product an expert, and waits.
"""

import torch

from .._torch.core import grouped_mm
from ._check import ACTIVATIONS

# As in lib/Conversion/MoEToGPU/Experts: rows of an expert, on average, up to which reading its
# weights takes longer than multiplying them, and features that a step of the kernel takes.
FEW_ROWS, _CHUNK = 16, 64
# Elements of 16 bytes, of which rows consist for the kernel of warpgroups.
_UNIT = 8


def has_kernel(*tensors: torch.Tensor | None) -> bool:
    """Whether these are what a kernel of the CPU takes; float64, and other devices, are torch's."""
    return all(x is None or x.device.type == "cpu" and
               (not x.is_floating_point() or x.dtype in ACTIVATIONS) for x in tensors)


def has_gpu_kernel(rows: int, *weights: torch.Tensor, transposed: bool) -> bool:
    """Whether a GPU's kernel takes the weights of the same experts, and torch's product is no better."""
    return (_has_kernel_of_few_rows(rows, *weights, transposed=transposed)
            or not are_grouped(*weights) and _has_kernel_of_warpgroups(*weights))


def _has_kernel_of_warpgroups(*weights: torch.Tensor) -> bool:
    return all(w.is_cuda and w.dim() == 3 and w.dtype in (torch.bfloat16, torch.float16)
               and w.numel() > 0 and w.shape[1] % _UNIT == 0 and w.shape[2] % _UNIT == 0
               and w.is_contiguous() and _has_warpgroups(w.device) for w in weights)


def _has_warpgroups(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def _has_kernel_of_few_rows(rows: int, *weights: torch.Tensor, transposed: bool) -> bool:
    return not transposed and all(
        w.is_cuda and w.dim() == 3 and w.dtype in (torch.bfloat16, torch.float16)
        and rows <= FEW_ROWS * w.shape[0]
        and w.shape[1] > 0 and w.shape[2] > 0 and w.shape[2] % _CHUNK == 0 and w.is_contiguous()
        for w in weights)


def runs(offsets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of the runs that have rows."""
    bounds = offsets.tolist()
    return [(e, b, t) for e, (b, t) in enumerate(zip(bounds, bounds[1:])) if t > b]


# ---- torch's grouped product -----------------------------------------------------


def are_grouped(*matrices: torch.Tensor) -> bool:
    """Whether torch multiplies these by groups on a GPU without asking it for their sizes."""
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0 and x.is_contiguous()
               and x.shape[-1] % 8 == 0 and x.shape[-1] > 0 and x.data_ptr() % 16 == 0
               for x in matrices)


def legal(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Offsets that ascend and stay in the rows, as any others are read: torch trusts what it gets."""
    return offsets.clamp(0, rows).cummax(0).values


def multiply_groups(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
                    offsets: torch.Tensor, transposed: bool) -> torch.Tensor:
    """`grouped_linear` without an activation by torch's product; rows of no expert hold anything.

    The offsets are `legal`.
    """
    experts = w.shape[0]
    ends = offsets.narrow(0, 1, experts).to(torch.int32)
    z = grouped_mm(x, w if transposed else w.mT, offs=ends)
    if bias is None:
        return z
    row = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(ends, row, right=True).clamp_(max=experts - 1)
    return z + bias.to(z.dtype).index_select(0, expert)


def clear_rows_of_none(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The rows, with zeros in those that no expert has."""
    row = torch.arange(rows.shape[0], device=rows.device)
    is_of_expert = (row >= offsets.narrow(0, 0, 1)) & (row < offsets.narrow(0, offsets.shape[0] - 1, 1))
    return torch.where(is_of_expert.unsqueeze(1), rows, 0)


def sum_runs(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The sum of each expert's rows `[rows, f]`, in one order; 0 for one without rows."""
    experts, offsets = offsets.shape[0] - 1, offsets.to(torch.int64)
    if rows.is_cuda:
        # index_add_ adds in the order in which the GPU's threads come.
        return torch.segment_reduce(rows, "sum", offsets=offsets.clamp(0, rows.shape[0]), axis=0,
                                    unsafe=True, initial=0)
    expert = torch.searchsorted(offsets, torch.arange(rows.shape[0], device=rows.device),
                                right=True) - 1
    # Those of no expert have a sum behind the last.
    expert = torch.where(expert < 0, experts, expert)
    return rows.new_zeros((experts + 1, rows.shape[1])).index_add_(0, expert, rows)[:experts]


def add_rows(rows: torch.Tensor, to: torch.Tensor, count: int) -> torch.Tensor:
    """`[count, f]`, of which row to_i is the sum of those rows, added in one order."""
    sums = rows.new_zeros((count, rows.shape[1]))
    if rows.is_cuda:
        return sums.index_put_((to.to(torch.int64),), rows, accumulate=True)
    return sums.index_add_(0, to, rows)


def multiply_columns(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_outer` by torch's product; experts without rows have 0."""
    experts, offsets = offsets.shape[0] - 1, legal(offsets, x.shape[0])
    begins, ends = (offsets.narrow(0, first, experts) for first in (0, 1))
    dw = grouped_mm(dy.T, x, offs=ends.to(torch.int32))
    return dw.masked_fill_((ends <= begins).view(experts, 1, 1), 0)
