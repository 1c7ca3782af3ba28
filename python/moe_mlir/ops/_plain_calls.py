"""Calls of an op on plain CPU tensors: what Python did once is not done again.

The native half (python/src/PlainCalls.h) knows a call by the dtypes and shapes
of its tensors and the values of its other arguments. A form that is new runs in
Python, where arguments are checked and the kernel is chosen; if all of that came
to one kernel on the arguments themselves, later calls of the form run it at
once.
"""

import functools

import torch

from .._native import native
from ..simulate import active_simulation, intercept


class PlainCalls:
    """The plain calls of one op; `kernel` is its function in Python."""

    def __init__(self, kernel):
        self._kernel = kernel
        self._calls = None
        # Replaced by the native function, which is loaded at the first call.
        self.replay = self._load

    def _load(self, *args):
        try:
            calls = native().PlainCalls
        except ImportError:
            # Fake tensors need no compiler; what needs one says what to install.
            return None
        self._calls = calls(
            (torch.Tensor, torch.nn.Parameter), torch.dtype, _MODES, torch.is_grad_enabled
        )
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


class _Recorder:
    """Runs the kernels of a call as they would without it."""

    def __init__(self):
        self.runs = []

    def run(self, kernel, tensors):
        kernel.function(*tensors)
        self.runs.append((kernel, tensors))


# Modes in front of the dispatcher switch its key on; asking them one by one
# costs more than a small kernel.
_in_pre_dispatch = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)

# A true result of any of them: something wants to see the op itself.
_MODES = (
    torch._C._len_torch_dispatch_stack,
    _in_pre_dispatch,
    torch._C._functorch.peek_interpreter_stack,
    active_simulation,
)
