"""What torch.autocast does to the arguments of an op.

Products of tokens and weights are cast as torch.linear's operands are. What
takes float32 alone gets float32, as softmax does, and what must agree in dtype
gets the widest, as torch.cat does. All other arguments stay as they are: the
ops compute in float32 whatever they are given, so that a routing decision under
autocast is that of the same scores without it.
"""

import functools

import torch

from .._torch.core import DisableAutocast, is_any_autocast_enabled
from ._panels import cast_panels, is_packed

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_NARROW = (torch.bfloat16, torch.float16)
_ELIGIBLE = (*_NARROW, torch.float32)


class Autocast:
    """The rule of one op; `cast`, `widen` and `promote` are names of its arguments.

    `panels` are those to cast that may be weights in panels.
    """

    def __init__(self, op, cast, widen, promote, panels):
        self._op = op
        places = {argument.name: n for n, argument in enumerate(op._schema.arguments)}
        self._cast, self._widen, self._promote = (
            [places[name] for name in names] for names in (cast, widen, promote)
        )
        self._panels = {places[name] for name in panels}

    def register(self, library):
        for device, key in _KEYS.items():
            library.impl(self._op._opname, functools.partial(self._run, device), key)

    def _run(self, device, *args):
        # A backward that reaches the op's autograd sees what the kernel saw.
        args = self._arguments(device, args)
        with DisableAutocast():
            return self._op(*args)

    def around(self, function):
        """`function` of the op's arguments, run as the op is under autocast."""

        def run(*args):
            if not is_any_autocast_enabled():
                return function(*args)
            device = next(x.device.type for x in args if isinstance(x, torch.Tensor))
            if device in _KEYS and torch.is_autocast_enabled(device):
                args = self._arguments(device, args)
            with DisableAutocast():
                return function(*args)

        return run

    def _arguments(self, device, args):
        args = list(args)
        lower = torch.get_autocast_dtype(device)
        for place in self._cast:
            cast = _cast_panels if place in self._panels and is_packed(args[place]) else _to
            args[place] = cast(args[place], device, lower)
        for place in self._widen:
            args[place] = _to(args[place], device, torch.float32, _NARROW)
        dtypes = [args[place].dtype for place in self._promote if args[place] is not None]
        for place in self._promote:
            args[place] = _to(args[place], device, functools.reduce(torch.promote_types, dtypes))
        return args


def _to(value, device, dtype, eligible=_ELIGIBLE):
    if isinstance(value, torch.Tensor) and value.device.type == device and value.dtype in eligible:
        return value.to(dtype)
    return value


def _cast_panels(value, device, dtype):
    if value.device.type == device and value.dtype in _ELIGIBLE:
        return cast_panels(value, dtype)
    return value


def without_autocast(backward):
    """A gradient of what ran without autocast is computed without it."""

    def run(ctx, *grads):
        if not is_any_autocast_enabled():
            return backward(ctx, *grads)
        with DisableAutocast():
            return backward(ctx, *grads)

    return run
