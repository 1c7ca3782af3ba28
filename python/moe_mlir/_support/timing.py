"""Clocks: rivals take turns on fresh inputs, each sample long enough to trust."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

_SAMPLE_SECONDS = 2e-3
_MOST_CALLS = 1000
_MOST_SETS = 256
_LEAST_ROUNDS = 3


def clock(threads: int) -> Callable[[], float]:
    """CPU time of the measuring thread, which a busy machine disturbs least; wall for several."""
    return time.thread_time if threads == 1 else time.perf_counter


def cache_bytes() -> int:
    """The size of the last-level cache that this core sees."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size") as file:
            text = file.read().strip()
        return int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]
    except (OSError, KeyError, ValueError):
        return 32 << 20


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
