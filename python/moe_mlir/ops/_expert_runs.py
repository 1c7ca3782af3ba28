"""What the ops on the rows of experts share."""

import torch

from ._check import ACTIVATIONS


def has_kernel(*tensors: torch.Tensor | None) -> bool:
    """Whether these are what a kernel takes; float64, and other devices, are torch's."""
    return all(x is None or x.device.type == "cpu" and
               (not x.is_floating_point() or x.dtype in ACTIVATIONS) for x in tensors)


def runs(offsets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of the runs that have rows."""
    bounds = offsets.tolist()
    return [(e, b, t) for e, (b, t) in enumerate(zip(bounds, bounds[1:])) if t > b]
