"""Clocks and memory: rivals take turns on fresh inputs, each sample long enough to trust."""

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .machine import cache_bytes

_SAMPLE_SECONDS = 2e-3
_MOST_CALLS = 1000
_MOST_SETS = 256
_LEAST_ROUNDS = 3


def clock(threads: int) -> Callable[[], float]:
    """CPU time of the measuring thread, which a busy machine disturbs least; wall for several."""
    return time.thread_time if threads == 1 else time.perf_counter


def count_sets(inputs: Iterable[Any], *, most: int = _MOST_SETS) -> int:
    """How many sets like `inputs` rotate past the caches."""
    size = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, torch.Tensor))
    return max(4, min(most, -(-2 * cache_bytes() // max(size, 1))))


class Turns:
    """`{name: [thunk of each input set]}`, timed in turns."""

    def __init__(self, thunks: Mapping[str, Sequence[Callable[[], object]]], threads: int) -> None:
        self._thunks, self._now = thunks, clock(threads)
        self._next = {name: 0 for name in thunks}
        self._calls = {name: self._calls_per_sample(name) for name in thunks}

    def samples(self, rounds: int, seconds: float = float("inf")) -> dict[str, list[float]]:
        """Microseconds a call: name -> one sample a round; no round begins after `seconds`."""
        taken: dict[str, list[float]] = {name: [] for name in self._thunks}
        end = time.monotonic() + seconds
        for done in range(rounds):
            if done >= _LEAST_ROUNDS and time.monotonic() > end:
                break
            for name in self._thunks:
                taken[name].append(self._sample(name))
        return taken

    def _sample(self, name):
        thunks, calls, first = self._thunks[name], self._calls[name], self._next[name]
        chosen = [thunks[(first + i) % len(thunks)] for i in range(calls)]
        self._next[name] = (first + calls) % len(thunks)
        start = self._now()
        for run in chosen:
            run()
        return (self._now() - start) / calls * 1e6

    def _calls_per_sample(self, name):
        for run in self._thunks[name][:2]:
            run()
        start = self._now()
        self._thunks[name][0]()
        elapsed = max(self._now() - start, 1e-7)
        return max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS / elapsed)))


def thread_us(run: Callable[[], object], repeats: int = 5) -> float:
    """The least CPU time of one call, in microseconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best * 1e6


def peak_mb(run: Callable[[], object]) -> float | None:
    """Memory that one call adds at its peak, results included; None where unknown."""
    try:
        before = _reset_peak()
        results = run()
        peak = _status_kb("VmHWM")
        del results
        return round((peak - before) / 1024, 2)
    except OSError:
        return None


def _reset_peak():
    # Freed memory that the allocator kept would hide what the call takes.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status_kb("VmRSS")


def _status_kb(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))
