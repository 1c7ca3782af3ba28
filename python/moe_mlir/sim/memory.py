"""Arrays as a kernel's memory: which bytes it may touch, and where."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_ALLOCATION_ALIGNMENT = 256  # what cudaMalloc promises


def is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "element_size")


def shape_of(array: Any) -> tuple[list[int], int]:
    if is_tensor(array):
        return list(array.shape), array.element_size()
    return list(array.shape), array.itemsize


class Region:
    """Host bytes that the kernel may touch: one array, or the union of
    arrays that overlap. The kernel works on an aligned copy, so that sector
    counts and alignment findings do not depend on where the host allocator
    put the array; an array that starts inside a larger one keeps its offset
    from an aligned start."""

    def __init__(self, start: int, size: int, base: int, name: str):
        self.start, self.end, self.base = start, start + size, base
        self.name = name
        self.read_only = True

    def stage(self) -> None:
        size = self.end - self.start
        bias = (self.start - self.base) % _ALLOCATION_ALIGNMENT
        self._copy: np.ndarray = np.empty(size + 2 * _ALLOCATION_ALIGNMENT, np.uint8)
        address = self._copy.ctypes.data
        self.address = address + -address % _ALLOCATION_ALIGNMENT + bias
        ctypes.memmove(self.address, self.start, size)

    def write_back(self) -> None:
        """Changes what the kernel changed: weights of an artifact lie in memory that cannot be."""
        if not self.read_only and not np.array_equal(_bytes_at(self.start, self.end - self.start),
                                                     _bytes_at(self.address, self.end - self.start)):
            ctypes.memmove(self.start, self.address, self.end - self.start)


def _bytes_at(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class HostArray:
    def __init__(self, array: Any, what: str):
        if is_tensor(array):
            if getattr(array, "device", None) is not None:
                if array.device.type != "cpu":
                    raise ValueError(
                        f"expected {what} to be on the cpu, found "
                        f"{array.device}"
                    )
            if not array.is_contiguous():
                raise ValueError(
                    f"expected {what} to be contiguous, found strides "
                    f"{tuple(array.stride())}: pass .contiguous()"
                )
            self.start = array.data_ptr()
            self.size = array.numel() * array.element_size()
            self.base = array.untyped_storage().data_ptr()
            self.read_only = False
            return
        if not array.flags.c_contiguous:
            raise ValueError(
                f"expected {what} to be contiguous, found strides "
                f"{array.strides}: pass numpy.ascontiguousarray(...)"
            )
        self.start = array.ctypes.data
        self.size = array.nbytes
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        self.base = root.ctypes.data
        self.read_only = not array.flags.writeable


def regions_of(arrays: list[HostArray], names: list[str]) -> list[Region]:
    """Merges arrays that share bytes: they are one allocation."""
    merged: list[Region] = []
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].start)
    for i in order:
        array = arrays[i]
        last = merged[-1] if merged else None
        if last is not None and array.size and array.start < last.end:
            last.end = max(last.end, array.start + array.size)
        elif last is not None and array.size == 0 and array.start <= last.end:
            pass
        else:
            last = Region(array.start, array.size, array.base, names[i])
            merged.append(last)
        last.read_only &= array.read_only
    for region in merged:
        region.stage()
    return merged


def device_address(array: HostArray, regions: list[Region]) -> int:
    # Arrays may touch: an address belongs to the last region that starts there.
    region = [r for r in regions if r.start <= array.start][-1]
    return region.address + (array.start - region.start)
