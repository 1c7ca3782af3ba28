"""torch.compile(model, backend="moe"): routers become moe ops, Inductor does the rest.

The graph is rewritten before autograd sees it, so that training runs the moe
ops' own gradients. A rewrite after AOT autograd would come too late: by then
the chain's intermediate probabilities are saved for backward and both the
chain and the op would run.
"""

import logging

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from .fx.attention import find_rows
from .fx.match import find_routers
from .fx.raise_routing import raise_routing
from .importer.locations import describe

_log = logging.getLogger("moe_mlir.backend")
_RESTS = ("inductor", "eager")


def moe(module: torch.fx.GraphModule, example_inputs, *, mode=None, options=None):
    """The backend. torch.compile hands on `mode` and `options`, which go to Inductor.

    options["rest"] says who runs what is no router: "inductor", or "eager" to
    call torch's kernels one by one, which compiles in no time.
    """
    options = dict(options or {})
    rest = options.pop("rest", "inductor")
    if rest not in _RESTS:
        raise ValueError(f"expected options['rest'] to be one of {_RESTS}, found {rest!r}")
    raised = _raise_before_autograd(module)
    graph = module if raised is None else raised
    if rest == "eager":
        return _run_eagerly(graph, example_inputs)
    return _run_on_inductor(graph, example_inputs, mode, options)


def _run_on_inductor(graph, example_inputs, mode, options):
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError

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
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, example_inputs)


def trace_before_autograd(module):
    """Dynamo's graph in ATen before dispatch, and the graphs that routers may be in.

    Returns (module, graphs): one module that computes what `module` does, and
    those of its graphs that were traced. Regions under a functorch transform
    cannot be traced before dispatch; they stay as Dynamo wrote them, between
    the others. Without fake tensors there are no graphs.
    """
    parts = _transform_regions(module.graph)
    if not parts:
        traced = _trace(module)
        return (module, []) if traced is None else (traced, [traced])
    whole = split_module(module, None, parts.__getitem__, keep_original_order=True)
    graphs = []
    for name, piece in list(whole.named_children()):
        traced = None if _transform_regions(piece.graph) else _trace(piece)
        if traced is not None:
            setattr(whole, name, traced)
            graphs.append(traced)
    return whole, graphs


def _transform_regions(graph) -> dict:
    """The region of each node: odd under a functorch transform; empty where there is none."""
    parts, depth, region = {}, 0, 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        enters, leaves = name.endswith("_increment_nesting"), name.endswith("_decrement_nesting")
        if enters:
            region += depth == 0
            depth += 1
        parts[node] = region
        if leaves:
            depth -= 1
            region += depth == 0
    return parts if region else {}


def _trace(module):
    fakes = [n.meta["example_value"] for n in module.graph.nodes if n.op == "placeholder"]
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    if mode is None:
        return None
    # Run node by node, so that the new graph keeps the lines of the user's code.
    with mode, torch.fx.traceback.preserve_node_meta():
        interpreter = torch.fx.Interpreter(module)
        traced = make_fx(interpreter.run, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    constants = [getattr(traced, n.target) for n in traced.graph.nodes if n.op == "get_attr"]
    # A fake constant is a value that tracing lost sight of.
    return None if any(isinstance(c, FakeTensor) for c in constants) else traced


def _raise_before_autograd(module):
    """The graph in ATen before dispatch, with routers and attention raised; None without any."""
    whole, graphs = trace_before_autograd(module)
    sites = [site.describe() for graph in graphs for site in find_routers(graph.graph)]
    for site in sites:
        _log.info("%s: %s", site.location, site.reason or f"raised ({site.form})")
    rows = [rows for graph in graphs for rows in find_rows(graph.graph)]
    for taker in rows:
        _log.info("%s: %s", describe(taker.taker), taker.left or "takes its attention's rows")
    if not any(site.recognised for site in sites) and all(taker.reason for taker in rows):
        return None
    for graph in graphs:
        raise_routing(graph)
    return whole


def register() -> None:
    """Makes the name "moe" known to torch.compile where no entry point does."""
    if "moe" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(moe, name="moe")
