"""torch.compile(model, backend="moe"): replaces routers and experts with moe ops for Inductor.

The graph is rewritten before autograd sees it, so that training runs the moe
ops' own gradients. A rewrite after AOT autograd would come too late: by then
the chain's intermediate probabilities are saved for backward and both the
chain and the op would run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.core import is_any_autocast_enabled
from ..graph.locations import describe
from ..raising.attention import find_rows
from ..raising.before_autograd import trace_before_autograd
from ..raising.experts import raise_experts
from ..raising.join_experts import join_experts
from ..raising.match import find_routers
from ..raising.raise_routing import raise_routing
from ..raising.words import FORM_NAMES, describe_site

_log = logging.getLogger("moe_mlir.backend")
_RESTS = ("inductor", "eager")


def moe(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend. torch.compile hands on `mode` and `options`, which go to Inductor.

    options["rest"] selects what runs everything but routers and experts: "inductor", or
    "eager", which calls torch's kernels one by one and needs no compilation.
    """
    options = dict(options or {})
    rest = options.pop("rest", "inductor")
    if rest not in _RESTS:
        raise ValueError(f"expected options['rest'] to be one of {_RESTS}, found {rest!r}")
    raised = _raise_before_autograd(module, _trains(example_inputs))
    graph = module if raised is None else raised
    if rest == "eager":
        return _run_eagerly(graph, example_inputs)
    return _run_on_inductor(graph, example_inputs, mode, options)


def _run_on_inductor(graph, example_inputs, mode, options):
    from .._torch.inductor import InductorError, compile_fx, list_mode_options

    patches = {**(list_mode_options(mode) if mode else {}), **options}
    try:
        return compile_fx(graph, example_inputs, config_patches=patches or None)
    except InductorError as error:
        # Inductor cannot keep every size open: torch 2.13 asks whether an open
        # token count is 1 where it lowers bmm. The graph itself can.
        if "GuardOnDataDependentSymNode" not in str(error):
            raise
        _log.warning(
            "Inductor needs a size of this graph to be known, the routers stay compiled and the "
            "rest runs eagerly; mark the size dynamic instead of unbacked to have Inductor "
            "(torch says: %s)", str(error).splitlines()[0])
        return _run_eagerly(graph, example_inputs)


def _run_eagerly(graph, example_inputs):
    """One graph with autograd, its ops called one by one."""
    from .._torch.dynamo import aot_eager

    return aot_eager(graph, example_inputs)


def _trains(inputs) -> bool:
    """Whether there is a backward to come; as AOT autograd asks."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _raise_before_autograd(module, trains=False):
    """The graph in ATen before dispatch, with what we know of it raised; None without any."""
    whole, graphs = trace_before_autograd(module)
    sites = [describe_site(site) for graph in graphs for site in find_routers(graph.graph)]
    for site in sites:
        form = FORM_NAMES.get(site.form, site.form)
        _log.info("%s: %s", site.location, site.reason or f"recognised: {form}")
    rows = [rows for graph in graphs for rows in find_rows(graph.graph)]
    for taker in rows:
        _log.info("%s: %s", describe(taker.taker), taker.left or "takes its attention's rows")
    is_raised = any(site.recognised for site in sites) or any(not taker.reason for taker in rows)
    for graph in graphs if is_raised else ():
        raise_routing(graph)
    changed = [_raise_experts(graph, trains) for graph in graphs]
    return whole if is_raised or any(changed) else None


def _raise_experts(module, trains) -> bool:
    """Experts on the CPU: torch's grouped products on other devices are libraries'."""
    if is_any_autocast_enabled() or any(
            getattr(node.target, "__name__", "") == "_enter_autocast" for node in module.graph.nodes):
        return False  # Autocast casts our products, not transformers'.
    changes = raise_experts(module.graph, "cpu")
    changes += 0 if trains else join_experts(module.graph)
    if changes:
        module.recompile()
    return changes > 0


def register() -> None:
    """Makes the name "moe" known to torch.compile where no entry point does."""
    from .._torch.dynamo import list_backends, register_backend

    if "moe" not in list_backends(exclude_tags=()):
        register_backend(moe, name="moe")
