"""The memory that a program updates in place, which no other operand may show.

The trace saw each tensor under one name: code that writes a cache while it
reads an input would take old values for new ones if both were one memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


def aliasing_pair(operands: Sequence[Any],
                updated: Collection[int]) -> tuple[int, int] | None:
    """An updated operand and another one that share memory, by position; None if all are apart.

    Operands are tensors, or arrays of numpy.
    """
    return _first_shared(_spans(operands, range(len(operands))), updated)


class UpdatedMemory:
    """Whether operands are apart, for calls most of whose operands stay where they are."""

    def __init__(self, updated: Iterable[int], inputs: Iterable[int]):
        self._updated = frozenset(updated)
        # Inputs come with each call; weights and what is updated stay.
        self._moving = [i for i in inputs if i not in self._updated]
        self._layout = _Layout([], [], [])

    def is_disjoint(self, operands: Sequence[torch.Tensor]) -> bool:
        """Whether no updated operand shares memory with another; all are contiguous."""
        addresses = [tensor.data_ptr() for tensor in operands]
        moving = [(addresses[i], operands[i]) for i in self._moving]
        for i in self._moving:
            addresses[i] = 0
        layout = self._layout
        if addresses != layout.addresses:
            spans = _spans(operands, sorted({*range(len(operands))} - {*self._moving}))
            if _first_shared(spans, self._updated) is not None:
                return False
            written = [span for span in spans if span[2] in self._updated]
            layout = self._layout = _Layout(addresses, [begin for begin, _, _ in written],
                                            [end for _, end, _ in written])
        for begin, tensor in moving:
            # The only one that may overlap is the first that ends behind its begin.
            i = bisect_right(layout.ends, begin)
            if i < len(layout.ends) and layout.begins[i] < begin + tensor.nbytes:
                return False
        return True


class _Layout(NamedTuple):
    """Where operands lie (0 for those that move), and the updated ones in the order of memory."""

    addresses: list[int]
    begins: list[int]
    ends: list[int]


def _first_shared(spans, updated):
    last, end = -1, 0
    for begin, stop, position in spans:
        if begin < end and (position in updated or last in updated):
            return (position, last) if position in updated else (last, position)
        if stop > end:
            last, end = position, stop
    return None


def _spans(operands, positions):
    """(begin, end, position) of the memory that operands with elements may show, in its order."""
    return sorted((*_span(operands[position]), position) for position in positions
                  if 0 not in operands[position].shape)


def _span(operand) -> tuple[int, int]:
    """Where the elements of a tensor or an array lie; strides of arrays may be negative."""
    if hasattr(operand, "data_ptr"):
        begin, size = operand.data_ptr(), operand.element_size()
        strides = [size * stride for stride in operand.stride()]
    else:
        begin, size, strides = operand.ctypes.data, operand.itemsize, operand.strides
    reach = [(n - 1) * stride for n, stride in zip(operand.shape, strides)]
    return (begin + sum(r for r in reach if r < 0),
            begin + sum(r for r in reach if r > 0) + size)


__all__ = ["UpdatedMemory", "aliasing_pair"]
