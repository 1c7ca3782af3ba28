"""How to launch the kernels of a compiled function: grids, workspace, parameters.

A kernel takes, in this order: every argument and result of its function, a
workspace if there is one, every dynamic size of the tensors, and the size of
the workspace; of a function with many of them, those that the manifest lists
(docs/Architecture.md).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from .sizes import evaluate_expression, expression_sources

_FORMATS = {"f32": "f", "f64": "d", "f16": "e", "i1": "?", "i8": "b", "i16": "h", "i32": "i",
            "i64": "q", "index": "q"}
# Kernels read 16 bytes at once from where a buffer begins.
ALIGNMENT = 16
# Rows, columns and positions are 32-bit numbers in kernels.
MAX_SIZE = 2**31 - 1
# Blocks of a grid along x, y and z, on all chips.
MAX_BLOCKS = (2**31 - 1, 2**16 - 1, 2**16 - 1)


def _address(value) -> int:
    return value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data


def _aligned_copy(array):
    """A copy of a NumPy array, which promises no more than its elements' alignment."""
    import numpy

    memory = numpy.empty(array.nbytes + ALIGNMENT, numpy.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class KernelLaunch:
    name: str
    grid: tuple
    block_size: int
    dynamic_smem: int
    # Which of the function's parameters it takes; None for all.
    parameters: tuple[int, ...] | None = None

    def take(self, parameters: Sequence[Any]) -> list[Any]:
        """Its own of the parameters of the function."""
        if self.parameters is None:
            return list(parameters)
        return [parameters[number] for number in self.parameters]


class LaunchPlan:
    """The `functions` entry of a manifest, ready for buffers of any size."""

    def __init__(self, description: dict):
        self.name = description["name"]
        self.arguments = description["arguments"]
        self.results = description["results"]
        self._kernels = description["kernels"]
        self._workspace = description.get("workspace")
        # Of numbers, as struct writes them; of buffers None.
        self._formats = [None if "shape" in entry else _FORMATS[entry["dtype"]]
                         for entry in [*self.arguments, *self.results]]

    @property
    def kernel_names(self) -> list[str]:
        return [kernel["name"] for kernel in self._kernels]

    def align(self, buffers: Sequence[Any]) -> list[Any]:
        """The buffers, with a copy of each argument that kernels cannot read where it lies."""
        if all([format is not None or _address(value) % ALIGNMENT == 0
                for value, format in zip(buffers, self._formats, strict=True)]):
            return list(buffers)
        described = [*self.arguments, *self.results]
        buffers = list(buffers)
        for position, (value, entry) in enumerate(zip(buffers, described, strict=True)):
            if "shape" not in entry or _address(value) % ALIGNMENT == 0:
                continue
            if position >= len(self.arguments):
                raise ValueError(
                    f"{self.name}: expected the buffer of result {position - len(self.arguments)} "
                    f"at a multiple of {ALIGNMENT} bytes, found an address that is "
                    f"{_address(value) % ALIGNMENT} past one")
            buffers[position] = value.clone() if hasattr(value, "clone") else _aligned_copy(value)
        return buffers

    def put_back(self, buffers: Sequence[Any], aligned: Sequence[Any]) -> None:
        """Stores in `buffers` what a call has updated in copies that `align` made of them."""
        for buffer, copy, entry in zip(buffers, aligned, self.arguments):
            if copy is not buffer and entry.get("updated"):
                buffer[...] = copy

    def encode(self, buffers: Sequence[Any]) -> list[int]:
        """Addresses of buffers, and the bits of numbers."""
        return [buffer.data_ptr() if format is None else
                int.from_bytes(struct.pack("<" + format, buffer), "little")
                for buffer, format in zip(buffers, self._formats, strict=True)]

    def sizes(self, buffers: Sequence[Any]) -> list[int]:
        """The dynamic sizes of the buffers, in the order of the kernels' parameters."""
        sizes = []
        described = [*self.arguments, *self.results]
        for position, (value, entry) in enumerate(zip(buffers, described, strict=True)):
            shape = entry.get("shape", ())
            for dim, (size, static) in enumerate(
                    zip(getattr(value, "shape", ()), shape, strict=True)):
                if size > MAX_SIZE:
                    (source,) = expression_sources(["arg", position, dim], len(self.arguments))
                    raise ValueError(
                        f"{self.name}: expected sizes of at most {MAX_SIZE}, which kernels count "
                        f"in 32 bits, found {size} as {source}")
                if static < 0:
                    sizes.append(size)
        return sizes

    def workspace(self, buffers: Sequence[Any]) -> int | None:
        """Bytes of the workspace; None if the kernels take none."""
        return None if self._workspace is None else evaluate_expression(self._workspace, buffers)

    def launches(self, buffers: Sequence[Any]) -> list[KernelLaunch]:
        """The kernels in order, without those that have nothing to do."""
        launches = (
            KernelLaunch(
                kernel["name"],
                self._grid(kernel, buffers),
                kernel["block_size"],
                kernel["dynamic_smem"],
                tuple(kernel["parameters"]) if "parameters" in kernel else None,
            )
            for kernel in self._kernels
        )
        return [launch for launch in launches if 0 not in launch.grid]

    def _grid(self, kernel, buffers) -> tuple:
        # Of the buffers that are here: a grid depends on no data.
        grid = tuple(cast(int, evaluate_expression(size, buffers)) for size in kernel["grid"])
        for dim, (count, most) in enumerate(zip(grid, MAX_BLOCKS)):
            if count > most:
                sources = (" and ".join(expression_sources(kernel["grid"][dim], len(self.arguments)))
                           or "static sizes")
                raise ValueError(
                    f"{self.name}: expected at most {most} blocks along {'xyz'[dim]} of kernel "
                    f"'{kernel['name']}', found {count}, by {sources}: split the batch")
        return grid
