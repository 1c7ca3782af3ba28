"""Run PTX kernels on the CPU, with checks.

>>> import numpy as np
>>> from moe_mlir import sim
>>> x = np.arange(64, dtype=np.float32)
>>> report = sim.launch(ptx, "scale", grid=1, block=64, args=[x, 2.0, 64])
>>> print(report)            # findings, if any, and the counters
>>> assert report.ok

Arrays are NumPy arrays or anything with `data_ptr()` on the CPU (torch
tensors); they are read and written in place, and each is one bounds-checked
allocation. Scalars take their type from the kernel's `.param`.
"""

from .arguments import TensorMap
from .module import ALLOWANCES, CHECKS, Module, PtxError, launch
from .report import Finding, Report, SharedEvent
from .triton import compile_triton, launch_triton

__all__ = [
    "ALLOWANCES",
    "CHECKS",
    "Finding",
    "Module",
    "PtxError",
    "Report",
    "SharedEvent",
    "TensorMap",
    "compile_triton",
    "launch",
    "launch_triton",
]


def __dir__() -> list[str]:
    return sorted(__all__)
