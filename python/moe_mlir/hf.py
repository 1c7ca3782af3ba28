"""Runs the routers and experts of transformers models by moe ops, without a compiler.

    moe_mlir.hf.patch(model)                    # routers; weights stay where they are
    model.set_experts_implementation("moe")     # experts; importing this module registers it

Both keep the numerics of the model: the dtypes of scores and gates, the
renormalisation, and its eps. `torch.compile(backend="moe")` needs neither, but where
experts run in a Python loop, as those of Switch and DBRX do: patch such a model
before you compile it.
"""

import functools

import torch

from ._support.changes import Changes
from ._support.modules import require_module
from ._transformers.experts_interface import experts_forward, register_experts
from .patching.expert_loops import FORMS, is_expert_loop, known_experts, loop_forward
from .patching.kernel_layers import kernel_mapping
from .patching.known_forwards import EXPERTS, ROUTERS
from .patching.model_code import is_model_class
from .patching.raised_forward import RaisedForward, try_forward
from .patching.report import Kept
from .patching.router_modules import experts_inside, selecting_method, selects_experts

# ---- routers -------------------------------------------------------------------------


def patch(model: torch.nn.Module) -> Changes:
    """Makes the routers of a transformers model run on moe ops, in place.

    A router is a module of transformers, or of code that came with a checkpoint, whose forward
    selects experts; where that runs them as well, it is the method of the module that selects.
    It is traced alone, for each kind of call at the first such call, and the
    selection in its graph becomes one op; routers of all layers share their graphs. What cannot
    be traced or recognised runs the module's own forward. Experts that run in a Python loop over
    those that were hit are replaced as well, where the result is the same on random tokens.

    Parameters and their names do not change, so checkpoints and optimizers keep
    working; `unpatch` undoes it. Hooks of accelerate are kept, so a model that is
    offloaded or distributed by a device map can be patched before or after.

    Args:
        model: any module; one without routers is not changed.

    Returns:
        the number of newly patched routers, a `Changes`: its `summary()` lists them, experts that
        ran in a loop, and modules that select experts and stay as they are, each with the reason.
        One warning names the latter as well.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> model = transformers.AutoModelForCausalLM.from_pretrained("checkpoint")
        >>> moe_mlir.hf.patch(model)
        2
    """
    require_module(model)
    dtype = getattr(model, "dtype", None)
    kept, changed = Kept(), {}
    replaced = 0
    for name, module in model.named_modules():
        if _is_patched(module):
            continue
        forward, reason = _new_forward(module, dtype)
        place = _place_of_forward(module)
        reason = reason or (_why_not(module, place) if forward else "")
        if reason:
            kept.add(name, module, reason)
        elif forward is not None:
            setattr(module, place, forward)
            replaced += _counts(module)
            what = "router" if _counts(module) else "experts"
            changed[name] = f"{type(module).__name__}, {what} by moe ops"
    kept.warn()
    return Changes(replaced, changed, kept.reasons())


def unpatch(model: torch.nn.Module) -> int:
    """Undoes `patch`; returns the number of routers."""
    require_module(model)
    restored = 0
    for module in model.modules():
        if not _is_patched(module):
            continue
        place = _place_of_forward(module)
        if place == "_old_forward":
            setattr(module, place, type(module).forward.__get__(module))
        else:
            delattr(module, place)
        restored += _counts(module)
    return restored


def _new_forward(module, dtype):
    """(forward, ""), (None, why a module keeps its own), or (None, "") for other modules."""
    function, reason = _known_forward(module), ""
    if function is None and is_expert_loop(module):
        function, reason = loop_forward(module)
    if function is not None or reason:
        # A partial, not a method: a method is pickled by a name that the class does not have.
        return function and functools.partial(function, module), reason
    if not selects_experts(module):
        return None, ""
    method = selecting_method(module)
    if not method:
        return None, ("the block selects experts in its own forward, which runs them as well "
                      f"(in '{experts_inside(module)}'), and has no router to replace; "
                      'model.compile(backend="moe") replaces selections wherever they are')
    traced = try_forward(module, dtype if isinstance(dtype, torch.dtype) else None, method)
    if traced.run is None:
        return None, "; ".join(traced.reasons)
    return RaisedForward(module, method), ""


def _known_forward(module):
    """The forward that a class of transformers is known to need; None for all others."""
    router = ROUTERS.get(type(module).__name__) if is_model_class(type(module)) else None
    return router or known_experts(module)


def _counts(module) -> bool:
    """Whether a patched module is a router."""
    return type(module).__name__ not in EXPERTS and not is_expert_loop(module)


def _place_of_forward(module) -> str:
    """The attribute that holds the forward, or the method that selects.

    accelerate's hooks keep the forward in one of their own.
    """
    method = "forward" if _known_forward(module) or is_expert_loop(module) else \
        selecting_method(module) or "forward"
    return "_old_forward" if method == "forward" and "_hf_hook" in vars(module) else method


def _is_patched(module) -> bool:
    forward = vars(module).get(_place_of_forward(module))
    if isinstance(forward, RaisedForward):
        return forward.module is module
    return (isinstance(forward, functools.partial) and forward.args == (module,)
            and (forward.func is _known_forward(module) or forward.func in FORMS))


def _why_not(module, place) -> str:
    """Why a router must keep the forward that it has; empty if ours computes the same."""
    forward = vars(module).get(place)
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return ""
    return ("expected the forward of its class, found another on the instance, "
            f"{getattr(forward, '__qualname__', type(forward).__name__)}; patch the model before "
            "what wraps it")


__all__ = ["experts_forward", "kernel_mapping", "patch", "register_experts", "unpatch"]


def __dir__() -> list[str]:
    return sorted(__all__)
