"""What an expert computes between its layers, found by trying it.

Models write the same few functions in many ways (`chunk` or strided slices, the
clamp in front of or behind the activation, in float32 or not). What is done to
the first layer's features is evaluated on a grid of gates and factors, and
compared with every `ExpertActivation` that the numbers at hand allow. What
agrees with none is run as it is.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .ops._expert_activation import ExpertActivation

# What modules that compute in float32 leave of a float64 argument.
_RTOL, _ATOL = 1e-5, 1e-6
_GRID = (-1e4, -60.0, -20.0, -9.0, -7.5, -5.0, -3.0, -1.5, -0.6, -0.1, 0.0, 0.2, 0.7, 1.3, 2.5, 4.0,
         6.0, 8.0, 12.0, 30.0, 90.0, 1e4)
# What was found of a module, and for which of its numbers. Not on the module: export takes what
# is set there for state.
_found: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def find_activation(
    function: Callable[[torch.Tensor], torch.Tensor], features: int,
    limits: Iterable[float] = (), alphas: Iterable[float] = (),
) -> ExpertActivation | None:
    """The activation that a function of float64 rows `[.., features]` is; None if none that is known.

    `limits` and `alphas` are the numbers that its limits and its alpha may be, beside the usual.
    """
    limits, alphas = ([x for x in dict.fromkeys(map(abs, given)) if 0 < x < float("inf")]
                      for given in (limits, alphas))
    with _disable_current_modes(), torch.no_grad():
        grid = torch.tensor(_GRID, dtype=torch.float64)
        found = _match(function, _fill(grid, features), _candidates((), alphas, "none"))
        if found is not None or features % 2:
            return found
        a, u = (_fill(x, features // 2) for x in torch.cartesian_prod(grid, grid).T)
        for gate, z in (("concatenated", torch.cat([a, u], dim=-1)),
                        ("interleaved", torch.stack([a, u], dim=-1).flatten(-2))):
            found = _match(function, z, _candidates(limits, alphas, gate))
            if found is not None:
                return found
    return None


def _fill(x: torch.Tensor, width: int) -> torch.Tensor:
    """All elements of x, some of them again, as rows of a width."""
    rows = -(-len(x) // width)
    return x.repeat(rows * width // len(x) + 1)[:rows * width].view(rows, width)


def _match(function, z, candidates) -> ExpertActivation | None:
    try:
        wanted = function(z.clone())  # which the function may write
    except Exception:  # noqa: BLE001  whatever a model's own code raises on a row of its own kind
        return None
    if not isinstance(wanted, torch.Tensor):
        return None
    for candidate in candidates:
        y = candidate(z)
        if y.shape == wanted.shape and torch.allclose(wanted.to(y.dtype), y, rtol=_RTOL, atol=_ATOL,
                                                      equal_nan=True):
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


# ---- modules of transformers ------------------------------------------------------


def activation_of(module: torch.nn.Module) -> ExpertActivation | None:
    """What an experts module does to the features of its first layer; None if that is not known."""
    if torch.compiler.is_dynamo_compiling():
        # Nothing can be tried while code is traced; `fx` knows the activation in the graph, but
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
        function, 2 * len(_GRID),
        [x for name, x in named if "limit" in name or "cap" in name],
        [x for name, x in named if "alpha" in name])
    # A gate that is none, or an activation that gates: not what the module's widths say.
    return found if found is not None and (found.gate != "none") == module.has_gate else None
