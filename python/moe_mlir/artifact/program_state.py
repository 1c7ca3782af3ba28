"""The buffers that a loaded program updates in place, such as a cache of keys and values."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class ProgramState:
    """What a program keeps from call to call.

    Code for a CPU writes into the buffer. Kernels read one place and write
    another, which holds the value once the call is done.
    """

    def __init__(self, function: str, updates: Mapping[int, int | None]):
        """Of each argument that is state its next value among the results, if it is one of them."""
        self._function, self._updates = function, updates
        self._initial: dict[int, Any] = {}
        self._values: dict[int, Any] = {}
        self._next: dict[int, Any] = {}
        self._under_way = threading.Lock()
        self._is_whole = True

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, argument: int, initial: Any) -> None:
        """Takes the first value of a buffer."""
        self._initial[argument] = initial
        self._values[argument] = _copy(initial)
        if self._updates[argument] is not None:
            self._next[argument] = _copy(initial)

    @contextmanager
    def acquired(self) -> Iterator[None]:
        """Keeps others away while a call is under way."""
        if not self._under_way.acquire(blocking=False):
            raise RuntimeError(f"expected one call at a time of '{self._function}', which keeps "
                               "state, found another under way; load the artifact once for each "
                               "sequence")
        try:
            yield
        finally:
            self._under_way.release()

    def reset(self) -> None:
        for argument, initial in self._initial.items():
            self._values[argument] = _copy(initial)
        self._is_whole = True

    def values(self, device: str) -> dict[int, Any]:
        """The value of each argument that is state, on a device."""
        for places in (self._values, self._next):
            for argument, value in places.items():
                if str(getattr(value, "device", device)) != device:
                    places[argument] = value.to(device)
        return self._values

    def places(self) -> dict[int, Any]:
        """Where a call writes each result that is a next value."""
        return {result: self._next[argument] for argument, result in self._updates.items()
                if result is not None}

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Around the code that updates it."""
        if not self._is_whole:
            raise RuntimeError(f"expected a reset of '{self._function}' after a call that failed, "
                               "which may have updated a part of its state, found another call")
        self._is_whole = False
        yield
        for argument in self._next:
            self._values[argument], self._next[argument] = (
                self._next[argument], self._values[argument])
        self._is_whole = True


def _copy(value):
    return value.clone() if hasattr(value, "clone") else value.copy()
