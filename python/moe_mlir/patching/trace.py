"""Traces a module's forward alone, and replaces the routers in its graph.

A graph stands for one kind of call: modes, types, ranks, and which sizes are 0 or 1, as torch's
own code and that of models may ask for these. All other leading sizes are open.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from .._torch.core import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    enter_autocast,
    pytree,
)
from ..raising.guards import guards_in
from ..raising.match import find_selections
from ..raising.raise_routing import raise_routing
from .call_graph import as_function, drop_idle_calls
from .kinds import OPEN, TIED, Kind
from .model_code import code_of
from .state import ModuleState, NotTraceable

_FIRST_OPEN = 37


@dataclass(frozen=True)
class Traced:
    """One forward for one kind of call: `run(*weights, *inputs)`, or why there is none.

    `reasons` are the matcher's, for selections that stay as they are.
    """

    run: Callable[..., Any] | None = None
    reasons: tuple[str, ...] = ()


def trace_forward(state: ModuleState, weights: Sequence[Kind | None], inputs: Mapping[Any, Any],
                  ) -> Traced:
    """The raised graph of a forward.

    Args:
        state: of the module.
        weights: its tensors.
        inputs: by position (int) or name; a `Kind`, or a number as it is given.
    """
    kind = state.layout[0][1]
    if code_of(kind, state.method).own_gradients:
        return Traced(reasons=("its code has a gradient of its own (torch.autograd.Function)",))
    try:
        graph, spec = _trace(state, weights, inputs)
    except NotTraceable as reason:
        return Traced(reasons=(str(reason),))
    except Exception as error:  # whatever the model's code leads torch to
        return Traced(reasons=(_in_words(error),))
    sites = find_selections(graph.graph)
    reasons = tuple(dict.fromkeys(site.reason.removeprefix("not recognised: ") for site in sites
                                  if site.reason))
    # The layer stays torch's, so that logits are the model's own to the last bit.
    if not raise_routing(graph, layers=False):
        return Traced(reasons=reasons)
    return Traced(_runner(graph, spec), reasons)


def _trace(state, weights, inputs) -> tuple[GraphModule, Any]:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    written, specs = [], []
    count = len(weights)
    names = [name for name, x in inputs.items() if isinstance(x, Kind)]

    def function(*tensors):
        copies = state.copy_with(tensors[:count])
        module = copies[""]
        given = {**inputs, **dict(zip(names, tensors[count:]))}
        positions = [value for name, value in given.items() if isinstance(name, int)]
        named = {name: value for name, value in given.items() if isinstance(name, str)}
        method = getattr(type(module), state.method)
        found, spec = pytree.tree_flatten(method(module, *positions, **named))
        written.append(state.written_in(copies, tensors[:count]))
        specs.append(spec)
        return found
    with _undisturbed():
        fakes = [None if kind is None else _fake(mode, kind) for kind in weights]
        for name in names:
            fakes.append(_fake(mode, inputs[name], *fakes[count:count + 1]))
        with mode:
            graph = make_fx(function, pre_dispatch=True)(*fakes)
    if written[-1]:
        raise NotTraceable(f"its forward sets the attribute '{written[-1]}'")
    if guards_in(environment):
        raise NotTraceable("its forward asks for the number of tokens")
    _require_plain(graph)
    return graph, specs[-1]


def _fake(mode, kind: Kind, *first: torch.Tensor):
    if TIED in kind.shape:
        with mode:
            return torch.empty(first[0].shape[:-1], dtype=kind.dtype, device=kind.device)
    shape = [_FIRST_OPEN + 2 * i if size == OPEN else size for i, size in enumerate(kind.shape)]
    sizes = [DimDynamic.DYNAMIC if size == OPEN else DimDynamic.STATIC for size in kind.shape]
    real = torch.empty(shape, dtype=kind.dtype, device="meta")
    fake = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    with mode:
        return torch.empty_like(fake, device=kind.device)


@contextlib.contextmanager
def _undisturbed():
    """No mode of the caller sees the trace, and nothing is noted for a backward of it."""
    with_gradients = torch.is_grad_enabled()
    # What the code does not take is a reason, and none of torch's errors.
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with disable_current_modes(), torch.inference_mode(False), \
                torch.set_grad_enabled(with_gradients):
            yield
    finally:
        log.disabled = was_disabled


def _require_plain(graph: GraphModule) -> None:
    """Refuses graphs that hold more than calls of operators on the inputs."""
    (output,) = graph.graph.find_nodes(op="output")
    for x in output.args[0]:
        if not isinstance(x, (torch.fx.Node, int, float, bool, str, type(None))):
            raise NotTraceable(f"its forward returns an object of {type(x).__name__}")
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, node.target), FakeTensor):
            raise NotTraceable("its forward makes a tensor that tracing loses sight of")
        if node.target is enter_autocast:
            raise NotTraceable("its forward enters autocast")


def _in_words(error: Exception) -> str:
    text = str(error)
    if "data-dependent" in text or "data dependent" in text or "_local_scalar_dense" in text:
        return "its forward has control flow that depends on data"
    if "_apply()" in text:
        return "its forward casts or moves its layers"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"its forward cannot be traced: {type(error).__name__}: {first.strip()}"


def _runner(graph: GraphModule, spec) -> Callable[..., Any]:
    """The graph as a function that returns what the forward does."""
    drop_idle_calls(graph.graph)
    (output,) = graph.graph.find_nodes(op="output")
    # Most forwards return a tuple of tensors, which the function can make itself.
    is_flat = spec.type is tuple and all(child.is_leaf() for child in spec.children())
    if is_flat:
        output.args = (tuple(output.args[0]),)
    run = as_function(graph.graph)
    return run if is_flat else lambda *tensors: pytree.tree_unflatten(run(*tensors), spec)
