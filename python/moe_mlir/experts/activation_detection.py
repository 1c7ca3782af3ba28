"""What an expert computes between its layers, found by the formula that its code leaves.

Models write the same few functions in many ways (`chunk` or strided slices, the
clamp in front of or behind the activation, in float32 or not). The code is run
once on `Features`, which stand for those of the first layer, and the formula of
its result is compared with that of every `ExpertActivation` that the numbers at
hand allow. What has none of these formulas is run as it is.
"""

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..ops._expert_activation import ExpertActivation
from .symbolic_features import Features

_log = logging.getLogger("moe_mlir.experts")
# What was found of a module, and for which of its numbers. Not on the module: export takes what
# is set there for state.
_found: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def find_activation(
    function: Callable[[Any], Any], features: int,
    limits: Iterable[float] = (), alphas: Iterable[float] = (),
    dtype: torch.dtype = torch.float32,
) -> ExpertActivation | None:
    """The activation that a function of rows `[.., features]` is; None if none that is known.

    `limits` and `alphas` are the numbers that its limits and its alpha may be, beside the usual;
    `dtype` is that of the rows.
    """
    limits, alphas = ([x for x in dict.fromkeys(map(abs, given)) if 0 < x < float("inf")]
                      for given in (limits, alphas))
    try:
        wanted = function(Features.of_layer(features, dtype))
    except Exception as error:  # noqa: BLE001  whatever a model's own code raises
        _log.debug("an activation runs as it is: %s", error)
        return None
    if not isinstance(wanted, Features):
        return None
    gates = ("none",) if wanted.slices[2] == features else ("concatenated", "interleaved")
    for gate in gates:
        for candidate in _candidates(limits, alphas, gate):
            if candidate(Features.of_layer(features, dtype)) == wanted:
                return candidate
    return None


def _candidates(limits, alphas, gate) -> Iterator[ExpertActivation]:
    """Every activation with these numbers; the usual ones first."""
    acts = [("silu", alpha) for alpha in dict.fromkeys((1.0, *alphas, 1.702))]
    acts += [(name, 1.0) for name in ("gelu", "gelu_tanh", "relu", "relu2", "none")]
    if gate == "none":
        yield from (ExpertActivation(act, alpha) for act, alpha in acts)
        return
    bounded = [("clamp", None, None)]
    for bound in ("clamp", "clamp_activated", "softcap"):
        bounded += [(bound, limit, None if up == limit else up)
                    for limit, up in itertools.product(limits, limits)]
    for (bound, limit, up), offset, (act, alpha) in itertools.product(bounded, (0.0, 1.0), acts):
        if bound != "softcap" or act == "silu":
            yield ExpertActivation(act, alpha, gate, bound, limit, up, offset)


# Of a module, whose code is the same for any even number.
_ANY_FEATURES = 8

# ---- modules of transformers ------------------------------------------------------


def activation_of(module: torch.nn.Module) -> ExpertActivation | None:
    """What an experts module does to the features of its first layer; None if that is not known."""
    if torch.compiler.is_dynamo_compiling():
        # Nothing can be tried while code is traced; `raising` knows the activation in the graph, but
        # for weights in panels, which only kernels multiply.
        return _known_when_packed(module)
    key = _key(module)
    known = _found.get(module)
    if known is None or known[0] != key:
        known = _found[module] = (key, _try(module))
    return known[1]


def keep_activation(module: torch.nn.Module, activation: ExpertActivation | None) -> None:
    """What traced code takes for `activation_of(module)`; None: nothing."""
    numbers = [(name, x) for name, x in _numbers(module) if name in vars(module)]
    act_fn = type(getattr(module, "act_fn", None))
    module._moe_packed_for = activation and (numbers, act_fn, activation)


def _known_when_packed(module):
    numbers, act_fn, activation = getattr(module, "_moe_packed_for", None) or ((), None, None)
    if activation is None or type(getattr(module, "act_fn", None)) is not act_fn:
        return None
    for name, x in numbers:
        if getattr(module, name) != x:
            return None  # Another limit, for one: it has to be packed again.
    return activation


def _key(module):
    """What the function depends on: its code, and the numbers that the module and its parts hold."""
    function = type(module)._apply_gate if module.has_gate else None
    return function, getattr(module, "act_fn", None), tuple(_numbers(module))


def _numbers(module) -> list[tuple[str, float]]:
    """By name; those of the parts of `act_fn` as well."""
    act_fn = module._modules.get("act_fn")
    parts = () if act_fn is None else act_fn.modules()
    return [(name, x) for part in (module, *parts) for name, x in vars(part).items()
            if isinstance(x, (float, int)) and not isinstance(x, bool)]


def _try(module):
    act_fn = module._modules.get("act_fn")
    if act_fn is not None and any(True for _ in act_fn.parameters()):
        return None  # What it computes changes in training.
    named = _numbers(module)
    function = module._apply_gate if module.has_gate else module.act_fn
    found = find_activation(
        function, _ANY_FEATURES,
        [x for name, x in named if "limit" in name or "cap" in name],
        [x for name, x in named if "alpha" in name])
    # A gate that is none, or an activation that gates: not what the module's widths say.
    return found if found is not None and (found.gate != "none") == module.has_gate else None
