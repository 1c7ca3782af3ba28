"""Memory in pages of 2 MiB, where the system has them: a core reads it up to 1.5 times as fast."""

import ctypes
import mmap
from collections.abc import Sequence

import torch

_PAGE = 2 << 20


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As `torch.empty` on the CPU; the system is asked for large pages before they are touched."""
    x = torch.empty(shape, dtype=dtype)
    ask(x)
    return x


def ask(x: torch.Tensor) -> bool:
    """Asks the system for large pages for memory that nobody has touched; whether it takes that."""
    begin = -(-x.data_ptr() // _PAGE) * _PAGE
    size = (x.data_ptr() + x.nbytes) // _PAGE * _PAGE - begin
    if size <= 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    # A kernel without them refuses; memory is the same to all but the clock.
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size),
                                     mmap.MADV_HUGEPAGE) == 0
