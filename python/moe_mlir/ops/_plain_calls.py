"""Calls of an op on plain CPU tensors: what Python did once is not done again.

The native half (python/src/PlainCalls.h) knows a call by the dtypes and shapes
of its tensors and the values of its other arguments. A form that is new runs in
Python, where arguments are checked and the kernel is chosen; if all of that came
to one kernel on the arguments themselves, later calls of the form run it at
once.
"""

from typing import Any

import torch

from .._native import native
from .._torch.core import modes_that_see_ops
from ..sim.simulation import active_simulation, intercept


class PlainCalls:
    """The plain calls of one op; `kernel` is its function in Python."""

    def __init__(self, kernel):
        self._kernel = kernel
        self._calls: Any = None
        # Replaced by the native function, which is loaded at the first call.
        self.replay = self._load

    def _load(self, *args):
        try:
            calls = native().PlainCalls
        except ImportError:
            # Fake tensors need no compiler, and packed kernels of a GPU; what needs one says what
            # to install. Python looks for what is not there again at each import.
            self.replay = _never
            return None
        self._calls = calls(_PLAIN_TENSORS, torch.dtype, _MODES, torch.is_grad_enabled)
        self.replay = self._calls.replay
        return self.replay(*args)

    def run(self, args):
        """Runs the kernel on plain arguments and remembers what it did."""
        recorder = _Recorder()
        with intercept(recorder):
            results = self._kernel(*args)
        if len(recorder.runs) == 1:
            ((kernel, tensors),) = recorder.runs
            self._calls.remember(args, kernel.function, tensors, results)
        else:
            self._calls.remember(args, None, [], results)
        return results


def _never(*args):
    """No call is known."""


class _Recorder:
    """Runs the kernels of a call as they would without it."""

    def __init__(self):
        self.runs = []

    def run(self, kernel, tensors):
        kernel.function(*tensors)
        self.runs.append((kernel, tensors))


# A true result of any of them: something wants to see the op itself.
_MODES = modes_that_see_ops(active_simulation)

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def are_plain(args):
    """Whether the tensors among them are nothing but memory of the CPU or a GPU, and nothing observes."""
    if any(mode() for mode in _MODES):
        return False
    grad = torch.is_grad_enabled()
    for arg in args:
        if type(arg) in _PLAIN_TENSORS:
            if not (arg.is_cpu or arg.is_cuda) or arg.is_neg() or (grad and arg.requires_grad):
                return False
        elif isinstance(arg, torch.Tensor):
            return False
    return True
