"""The forward of a patched module, or the method that selects: the raised graph of its own code,
on its own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._torch.core import is_any_autocast_enabled, is_transformed
from .kinds import OPEN, TIED, Kind
from .router_modules import example_calls
from .state import ModuleState, NotTraceable, is_number, is_plain
from .trace import Traced, trace_forward

# Graphs of all patched modules, by what they depend on: layers of a model share theirs.
_TRACED: dict[Any, Traced] = {}
# Far more than the routers of a model need. A number that changes at each call must not fill memory.
_MOST = 512
# Of one module. More kinds of calls have a size that changes each time and is not open.
_MOST_KINDS = 32
_OWN = Traced()


class RaisedForward:
    """Calls a module's forward, or another method, with its router as a moe op where the matcher
    knows it.

    The first call of each kind traces the method. A kind that cannot be raised, and calls
    while torch traces or transforms, run the method of the class. Copies and pickles
    of a module take theirs along, without graphs.
    """

    def __init__(self, module: torch.nn.Module, method: str = "forward") -> None:
        self.module = module
        self.method = method
        self._state: ModuleState | None = None
        self._known: dict[Any, Traced] = {}

    def __reduce__(self):
        return RaisedForward, (self.module, self.method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list = []
        run = self.runner(args, kwargs, tensors)
        if run is None:
            return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
        had_gradients = torch.is_grad_enabled()
        try:
            return run(*tensors)
        finally:
            # A graph with a region without gradients ends it by a call of its own.
            if torch.is_grad_enabled() != had_gradients:
                torch.set_grad_enabled(had_gradients)

    def runner(self, args: tuple, kwargs: Mapping[str, Any], tensors: list) -> Any:
        """What runs this call on `tensors`, which it fills in; None for the method of the class.

        On the way of each call of each router: straight code, and one look-up.
        """
        # A compiler sees the router as it is written, and raises it itself.
        if torch.compiler.is_compiling() or is_transformed():
            return None
        state = self._current_state()
        if state is None or state.has_hooks():
            return None
        key: list = [torch.is_grad_enabled(), torch.get_default_dtype()]
        try:
            state.add_numbers(key)
            weights = state.weights()
        except KeyError:  # an attribute or a weight was taken away
            self._state = None
            return None
        if not (_add_weights(key, weights) and _add_inputs(key, args, kwargs, tensors)):
            return None
        if is_any_autocast_enabled():
            key += autocast_of(tensors)
        known = tuple(key)
        found = self._known.get(known)
        if found is None:
            found = self._trace(state, known, weights, args, kwargs)
        tensors[:0] = weights
        return found.run

    def _current_state(self) -> ModuleState | None:
        if self._state is None or not self._state.is_current():
            self._known.clear()
            try:
                self._state = ModuleState(self.module, self.method)
            except NotTraceable:
                self._state = None
        return self._state

    def _trace(self, state, key, weights, args, kwargs) -> Traced:
        kinds = [None if x is None else Kind(x.shape, x.dtype, x.device) for x in weights]
        given = {**dict(enumerate(args)), **kwargs}
        first = next((x for x in given.values() if isinstance(x, torch.Tensor)), None)
        inputs = {name: Kind(pattern(x, first), x.dtype, x.device) if isinstance(x, torch.Tensor)
                  else x for name, x in given.items()}
        _require_memory(kinds, inputs)
        if len(self._known) >= _MOST_KINDS:
            return _OWN
        self._known[key] = found = trace_shared(state, key, kinds, inputs)
        return found


def trace_shared(state: ModuleState, key: tuple, weights: list, inputs: dict) -> Traced:
    """The graph for a key of a call, which all modules of one layout share."""
    shared = state.layout, key
    found = _TRACED.get(shared)
    if found is None:
        if len(_TRACED) >= _MOST:
            _TRACED.clear()
        had_gradients = torch.is_grad_enabled()
        try:
            _TRACED[shared] = found = trace_forward(state, weights, inputs)
        finally:
            torch.set_grad_enabled(had_gradients)  # a trace that fails may leave them off
    return found


# ---- keys: what one graph takes for granted of a call -------------------------------


def _add_weights(key: list, weights: list) -> bool:
    """Adds type, device and shape of each; False where one is more than memory."""
    for x in weights:
        if x is None:
            key.append(None)
        elif is_plain(x):
            key += x.dtype, x.device, x.shape
        else:
            return False
    return True


def _add_inputs(key: list, args: tuple, kwargs: Mapping[str, Any], tensors: list) -> bool:
    """As `_add_weights`; numbers stand for themselves."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if is_plain(x):
            tensors.append(x)
            key += x.dtype, x.device, pattern(x, tensors[0])
        elif is_number(x):
            key += type(x), x
        else:
            return False
    if kwargs:
        key += kwargs
    return True


def pattern(x: torch.Tensor, first: torch.Tensor) -> tuple[int, ...]:
    """The shape with all sizes open but 0, 1, and the last: code may ask for the width of a token.

    The last of whole numbers, such as ids of tokens, counts tokens; where they are as many as
    the `first` input has, their sizes are its.
    """
    is_float = x.is_floating_point()
    size_of_many = OPEN if is_float or x.shape != first.shape[:-1] else TIED
    shape = [size if size < 2 else size_of_many for size in x.shape]
    if shape and is_float:
        shape[-1] = x.shape[-1]
    return tuple(shape)


def autocast_of(tensors: list) -> list:
    """The state of autocast on the devices of these tensors."""
    return [state for kind in dict.fromkeys(x.device.type for x in tensors)
            if torch.amp.is_autocast_available(kind)
            for state in (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))]


def _require_memory(weights, inputs) -> None:
    given = {x.device.type for x in inputs.values() if isinstance(x, Kind)}
    if "meta" not in given and any(x is not None and x.device.type == "meta" for x in weights):
        raise ValueError(
            "expected the weight of a router in memory, found it on the device 'meta'; load it, or "
            "leave the hooks on that bring it")


# ---- at the time of a patch ----------------------------------------------------------


def try_forward(module: torch.nn.Module, dtype: torch.dtype | None, method: str = "forward") -> Traced:
    """The graph of a likely call; `dtype` is the type of hidden states, if it is known."""
    try:
        state = ModuleState(module, method)
    except NotTraceable as reason:
        return Traced(reasons=(str(reason),))
    # Where accelerate offloads weights, they have no memory yet.
    weights = [None if x is None else Kind(x.shape, x.dtype, torch.device("cpu"))
               for x in state.weights()]
    first = None
    for call in example_calls(module, dtype, method):
        key = [torch.is_grad_enabled(), *weights, *call]
        state.add_numbers(key)
        inputs = dict(enumerate(call))
        found = trace_shared(state, tuple(key), weights, inputs)
        if found.run is not None:
            return found
        first = first or found
    return first or Traced(reasons=("its inputs are not those of a router, hidden states first",))
