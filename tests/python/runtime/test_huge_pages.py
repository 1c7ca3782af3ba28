"""Memory of weights: large pages whatever the heap held before."""

import mmap
import re

import pytest
import torch

from moe_mlir._support.huge_pages import empty

LARGE = 2 << 20


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_is_large_begins_with_a_page(dtype):
    x = empty((3, LARGE), dtype)
    assert x.shape == (3, LARGE) and x.dtype == dtype and x.is_contiguous()
    assert x.data_ptr() % LARGE == 0
    # A copy or a pickle takes no more than the tensor.
    assert x.untyped_storage().nbytes() == x.nbytes and x.storage_offset() == 0
    x.zero_()
    assert not x.float().any()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (7, 3)])
def test_what_is_small_is_as_torch_has_it(shape):
    assert empty(shape, torch.float32).shape == shape


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_the_system_is_asked_for_memory_that_nobody_touched():
    # Of the heap, which torch's own tensors of this size come from.
    torch.empty(LARGE * 4, dtype=torch.int8).fill_(1)
    assert "hg" in _flags(empty((LARGE * 4,), torch.int8))


def _flags(x):
    """The flags of the memory region of a tensor, as the kernel has them."""
    is_of_x, flags = False, None
    with open("/proc/self/smaps") as file:
        for line in file:
            if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_of_x = int(region[1], 16) <= x.data_ptr() < int(region[2], 16)
            elif is_of_x and line.startswith("VmFlags:"):
                flags = line.split()[1:]
    assert flags is not None
    return flags
