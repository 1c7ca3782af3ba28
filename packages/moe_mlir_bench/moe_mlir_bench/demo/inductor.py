"""The rival that torch brings: the same eager model, compiled by Inductor."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import torch

from moe_mlir._support.progress import Clock
from moe_mlir._torch import dynamo

# On one idle core it takes 10 s a model.
_SECONDS = 180.0


class _OutOfTime(BaseException):
    """Not an Exception: those of a compilation are caught and wrapped on their way."""


def compile_inductor(
    model: torch.nn.Module, inputs: torch.Tensor, label: str, seconds: float = _SECONDS
) -> tuple[dict[str, Callable[..., torch.Tensor]], str]:
    """The model compiled for these inputs as `inductor`; or nothing, and why there is none."""
    compiled = torch.compile(model, dynamic=False)
    try:
        with Clock(f"compiling {label} with Inductor"), _time_limit(seconds):
            with torch.inference_mode():
                compiled(inputs)
    except _OutOfTime:
        dynamo.reset()
        return {}, f"it was not compiled after {seconds:g} s"
    except Exception as error:  # whatever its compilers raise: no C++ compiler is the usual one
        return {}, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return {"inductor": compiled}, ""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises in the main thread when the time is over; other threads have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number, frame):
        raise _OutOfTime
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
