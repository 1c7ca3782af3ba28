"""Experts that run in a Python loop over those that were hit, as one dispatch.

Such a module has `forward(hidden_states, top_k_index, top_k_weights)`, and its code asks `one_hot`
and `nonzero` which experts to run; or it has `forward(rows, sizes)` for rows in the order of their
experts, which it splits. What each expert computes is guessed from the weights, and
the guess replaces the loop only where it gives the same numbers as the loop.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..experts import run_experts, run_rows
from .known_forwards import EXPERTS, has_hooks
from .model_code import code_of, is_model_class
from .router_modules import is_router
from .state import ModuleState, NotTraceable

_TOKENS, _CHOICES = 6, 2
# What both round, relative to the largest number.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
# Why a guess was not right, or "", by all that it depends on.
_verdicts: dict[Any, str] = {}


def is_expert_loop(module: torch.nn.Module) -> bool:
    """Whether a module of a model runs experts in a loop, and is not on transformers' interface."""
    if not is_model_class(type(module)) or hasattr(module, "has_gate"):
        return False
    names = code_of(type(module)).names
    count = len(inspect.signature(type(module).forward).parameters)
    over_hits = {"one_hot", "nonzero"} <= names and count == 4
    over_runs = {"split", "linear", "cat"} <= names and count == 3 and \
        [p.dim() for p in module.parameters()] == [3]
    return (over_hits or over_runs) and "topk" not in names


def known_experts(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """The function of a class of transformers whose experts are known."""
    return EXPERTS.get(type(module).__name__) if is_model_class(type(module)) else None


# ---- what one expert may be -----------------------------------------------------------


def run_stacked(self, hidden_states, top_k_index, top_k_weights):
    """Weights `gate_up_proj` [experts, 2 * width, h] and `down_proj` [experts, h, width].

    An expert without a `down_proj` returns its token as it is; one without either adds nothing.
    """
    if has_hooks(self):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    experts, total = self.down_proj.shape[0], self.gate_up_proj.shape[0]
    activation = getattr(self, "_apply_gate", None) or partial(_gated, self.act_fn)
    chosen = top_k_index
    if total > experts:
        chosen = chosen.masked_fill(chosen >= experts, -1)
    y = run_experts(hidden_states, top_k_weights, chosen, self.gate_up_proj[:experts],
                    self.down_proj, activation=activation)
    if total > experts:
        share = top_k_weights.masked_fill(top_k_index < experts, 0).sum(-1, keepdim=True)
        y = y + hidden_states * share.to(hidden_states.dtype)
    return y.to(hidden_states.dtype)


def _gated(act_fn, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return act_fn(gate) * up


def run_joined(self, hidden_states, top_k_index, top_k_weights):
    """Weights `w1`, `v1` and `w2` [experts * width, h] of a layer `mlp`."""
    if has_hooks(self):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    mlp, width = self.mlp, hidden_states.shape[-1]
    w1, v1, w2 = (w.view(self.num_experts, -1, width) for w in (mlp.w1, mlp.v1, mlp.w2))
    linear = torch.ops.moe.grouped_linear

    def expert(rows, offsets):
        gate, up = (linear(rows, w, None, offsets, None, False) for w in (w1, v1))
        return linear(mlp.activation_fn(gate) * up, w2, None, offsets, None, True)
    y = run_rows(hidden_states.reshape(-1, width), top_k_weights, top_k_index, self.num_experts,
                 expert)
    return y.to(hidden_states.dtype).view(hidden_states.shape[0], -1, width)


def run_split(self, rows, sizes):
    """A `weight` [experts, out, in], for rows in the order of their experts, `sizes` of each."""
    # A trace has a tensor for each number.
    sizes = torch.stack(sizes) if isinstance(sizes[0], torch.Tensor) else \
        torch.tensor(sizes, device=rows.device)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return torch.ops.moe.grouped_linear(rows, self.weight, None, offsets, None, False)


FORMS: tuple[Callable[..., torch.Tensor], ...] = (run_stacked, run_joined, run_split)


def _guess(module):
    """(form, experts that may be chosen, width of a token); None if nothing fits."""
    down, gate_up = (getattr(module, name, None) for name in ("down_proj", "gate_up_proj"))
    if isinstance(down, torch.Tensor) and isinstance(gate_up, torch.Tensor):
        fits = down.dim() == gate_up.dim() == 3 and down.shape[1] == gate_up.shape[2] \
            and 2 * down.shape[2] == gate_up.shape[1] and gate_up.shape[0] >= down.shape[0]
        return (run_stacked, gate_up.shape[0], down.shape[1]) if fits else None
    mlp: Any = getattr(module, "mlp", None)
    weights = [getattr(mlp, name, None) for name in ("w1", "v1", "w2")]
    if all(isinstance(w, torch.Tensor) and w.dim() == 2 for w in weights) \
            and hasattr(mlp, "activation_fn") and type(getattr(module, "num_experts", 0)) is int:
        return run_joined, module.num_experts, mlp.w1.shape[1]
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 3:
        return run_split, weight.shape[0], weight.shape[2]
    return None


# ---- the check ------------------------------------------------------------------------


def loop_forward(module: torch.nn.Module) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """(a function of the module and its inputs, "") that gives what the loop does, or (None, why not).

    Both are run on a few random tokens, for one module of each kind.
    """
    guess = _guess(module)
    if guess is None:
        return None, "its experts run in a loop, and their weights have none of the known layouts"
    if not {"training", "dropout"}.isdisjoint(code_of(type(module)).names):
        return None, "its experts run in a loop that differs in training"
    try:
        state = ModuleState(module)
        key: list[Any] = [state.layout]
        state.add_numbers(key)
        key += [x if x is None else (x.shape, x.dtype, x.device) for x in state.weights()]
        known = tuple(key)
        if known not in _verdicts:
            _verdicts[known] = _compare(module, *guess)
    except NotTraceable as reason:  # nothing that holds for other modules
        return None, str(reason)
    return (None, _verdicts[known]) if _verdicts[known] else (guess[0], "")


def _compare(module, form, experts, width) -> str:
    """Why the form is not the module's forward; empty where both give the same."""
    weight = next(module.parameters())
    if weight.is_meta:
        raise NotTraceable("its experts run in a loop, and there are no weights in memory to "
                           "compare another way with")
    if weight.dtype not in _TOLERANCES:
        return f"its experts run in a loop on weights of {weight.dtype}"
    inputs = _example(form, experts, width, weight)
    try:
        with torch.no_grad():
            expected = type(module).forward(module, *(
                x.clone() if isinstance(x, torch.Tensor) else list(x) for x in inputs))
            found = form(module, *inputs)
    except Exception as error:  # whatever a wrong guess leads to
        return f"its experts run in a loop, and cannot be run at once: {str(error).splitlines()[:1]}"
    largest = expected.abs().max()
    if not (largest > 0 and torch.isfinite(largest)):
        raise NotTraceable("its experts run in a loop, and its weights give no numbers to compare "
                           "another way with")
    same = found.shape == expected.shape and found.dtype == expected.dtype and \
        (found - expected).abs().max() <= _TOLERANCES[weight.dtype] * largest
    return "" if same else "its experts run in a loop that gives other numbers than the known layouts"


def _example(form, experts, width, weight) -> list:
    """Random tokens for a form."""
    generator = torch.Generator().manual_seed(0)
    if form is run_split:
        # The last expert has none.
        sizes = [3] * (experts - 1) + [0]
        rows = torch.randn(sum(sizes), width, generator=generator)
        return [rows.to(weight.dtype).to(weight.device), sizes]
    tokens = (torch.randn(_TOKENS, 1, width, generator=generator) if form is run_joined
              else torch.randn(_TOKENS, width, generator=generator))
    # Both ends of the experts, which may be of other kinds.
    ids = torch.stack([torch.randperm(experts, generator=generator)[:_CHOICES]
                       for _ in range(_TOKENS)])
    ids[0], ids[1] = torch.tensor([0, experts - 1]), torch.tensor([experts - 1, 0])
    gates = torch.rand(_TOKENS, _CHOICES, generator=generator)
    return [x.to(weight.device) for x in (tokens.to(weight.dtype), ids, gates.to(weight.dtype))]


# ---- while a model is traced ------------------------------------------------------------


class _SizesAsTensors(TorchFunctionMode):
    """`sizes.tolist()` of a trace is made of tensors without dims, and no number ends the trace."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.item:
            return args[0]
        return function(*args, **(kwargs or {}))


def _keeping_sizes(module, *args, **kwargs):
    with _SizesAsTensors():
        return type(module).forward(module, *args, **kwargs)


@contextlib.contextmanager
def loops_as_ops(model: torch.nn.Module) -> Iterator[None]:
    """In the context, experts run without loops, which end a trace; where they can be replaced.

    Experts on transformers' interface that run eagerly take its grouped products.
    """
    replaced: list[torch.nn.Module] = []
    configurations: dict[int, Any] = {}
    for module in model.modules():
        if "forward" not in vars(module):
            function = known_experts(module)
            if function is None and is_expert_loop(module):
                function, _ = loop_forward(module)
            if function is not None:
                module.forward = partial(function, module)
                replaced.append(module)
        config = getattr(module, "config", None)
        if hasattr(module, "has_gate") and \
                getattr(config, "_experts_implementation", None) == "eager":
            configurations[id(config)] = config
    counting = _routers_that_count(model)
    for module in counting:
        vars(module)["forward"] = partial(_keeping_sizes, module)
    for config in configurations.values():
        config._experts_implementation = "grouped_mm"
    try:
        yield
    finally:
        for config in configurations.values():
            config._experts_implementation = "eager"
        for module in replaced:
            del module.forward
        for module, forward in counting.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _routers_that_count(model) -> dict[torch.nn.Module, Any]:
    """Routers that tell loops over runs of rows how long these are, with their forwards of now."""
    if not any(getattr(vars(module).get("forward"), "func", None) is run_split
               for module in model.modules()):
        return {}
    return {module: vars(module).get("forward") for module in model.modules()
            if "tolist" in code_of(type(module)).names and is_router(module)}
