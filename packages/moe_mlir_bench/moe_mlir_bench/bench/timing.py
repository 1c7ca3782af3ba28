"""What rows measure with: rivals in turns, one call alone, and memory."""

import ctypes
import time
from collections.abc import Callable

from moe_mlir._support.timing import Turns, clock, count_sets

__all__ = ["Turns", "clock", "count_sets", "peak_mb", "thread_us"]


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
