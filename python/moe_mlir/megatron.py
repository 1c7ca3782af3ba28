"""Runs the routers of Megatron-LM (the package megatron-core) by moe ops.

    moe_mlir.megatron.patch()

Megatron's routers select experts by one function, `topk_routing_with_score_function`; here is one
that returns the same, by ops that have kernels and gradients. What Megatron does before and behind
it (the gating layer, losses, padding, capacities, the update of biases) stays its own.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from ._support.log import warn_user
from .ops.densify import densify
from .ops.grouped_topk import grouped_topk

_FUNCTION = "topk_routing_with_score_function"
# Where Megatron looks the function up: where it is defined, and where routers import it.
_MODULES = ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router")
# Megatron's own functions, by the modules that have ours.
_replaced: dict[str, Any] = {}


def topk_routing_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    fused: bool = False,
    router_replay: object | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Megatron's function of this name, by `grouped_topk` and `densify`.

    Args:
        logits: `[n, e]`, float32, which `moe_router_dtype="fp32"` makes them.
        topk: experts of a token.
        use_pre_softmax: whether gates are those of a softmax over all experts, not over the chosen.
        num_groups: groups of experts, of which the best `group_topk` take part: by the sum of
            their best `topk // group_topk` scores, which must be one or two.
        scaling_factor: factor of all gates.
        score_function: "softmax" or "sigmoid"; gates of sigmoids are divided by their sum.
        expert_bias: `[e]`, added to sigmoids for the choice.
        fused: without meaning here: there is one way. TransformerEngine is not asked for.
        router_replay: not taken; recorded choices are Megatron's.

    Returns:
        The gates `[n, e]`, 0 where an expert is not chosen, and which are chosen `[n, e]`, bool. The
        same as Megatron's where scores are finite, up to the last bits of gates; of equal scores the
        expert with the lower number is chosen, where torch leaves the order open.

    Raises:
        ValueError: a call that only Megatron's own function takes; says why.

    Example:
        >>> from moe_mlir.megatron import topk_routing_with_score_function
        >>> gates, chosen = topk_routing_with_score_function(torch.randn(4, 8), 2)
    """
    reason = _why_not(logits, topk, num_groups, group_topk, score_function, router_replay)
    if reason:
        raise ValueError(f"{_FUNCTION}: {reason}")
    return _route(logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor,
                  score_function, expert_bias)


def _route(logits, topk, use_pre_softmax=False, num_groups=None, group_topk=None,
           scaling_factor=None, score_function="softmax", expert_bias=None, fused=False,
           router_replay=None):
    """A call that `_why_not` has nothing against."""
    groups: dict[str, Any] = {}
    if group_topk:
        groups = dict(n_group=num_groups, topk_group=group_topk,
                      group_score="max" if topk // group_topk == 1 else "top2")
    rest: dict[str, Any] = dict(route_scale=scaling_factor or 1.0)
    if score_function == "sigmoid":
        rest |= dict(score="sigmoid", bias=expert_bias, renorm=topk > 1, eps=1e-20 if topk > 1 else 0.0)
    else:
        rest |= dict(score="softmax", renorm=not use_pre_softmax)
        if not use_pre_softmax and groups.get("group_score") == "top2":
            # The sums are those of logits, which sums of probabilities are not in order with.
            chosen = grouped_topk(logits.detach(), topk, score="none", renorm=False, **groups)[1]
            groups = dict(forced=chosen)
    gates, indices = grouped_topk(logits, topk, **rest, **groups)
    experts = logits.shape[-1]
    marks = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    return densify(gates, indices, experts), marks.scatter(1, indices, True)


def _why_not(logits, topk, num_groups, group_topk, score_function, router_replay) -> str:
    """Why a call cannot be taken; empty if it can."""
    if logits.dim() != 2:
        return f"expected logits [tokens, experts], found {list(logits.shape)}"
    if logits.dtype != torch.float32:
        # Megatron rounds scores before it selects by them, which decides ties.
        return (f"expected logits of float32, found {logits.dtype}; configure "
                'moe_router_dtype="fp32"')
    if router_replay is not None:
        return "expected no recorded choices, found a RouterReplay"
    if score_function not in ("softmax", "sigmoid"):
        return f"expected the score function 'softmax' or 'sigmoid', found {score_function!r}"
    if group_topk and topk // group_topk not in (1, 2):
        return (f"expected groups to be chosen by their best one or two experts, found "
                f"{topk // group_topk} ({topk} experts, {group_topk} groups)")
    if group_topk and (not num_groups or topk > group_topk * (logits.shape[-1] // num_groups)):
        return (f"expected 'topk' to be at most the experts of {group_topk} of {num_groups} groups, "
                f"found {topk}")
    return ""


def patch() -> int:
    """Puts `topk_routing_with_score_function` in the place of Megatron's.

    Routers that exist and those that are made later use it, of all models of the process. A call
    that it does not take, as its docstring says, runs Megatron's own function; one warning for each
    reason says so.

    Returns:
        The number of Megatron's modules that were changed, 0 if they were before.

    Raises:
        ImportError: megatron-core is not installed, or has this function in another form.

    Example:
        >>> moe_mlir.megatron.patch()
        2
        >>> moe_mlir.megatron.unpatch()
        2
    """
    changed = 0
    for name in _MODULES:
        module = _import(name)
        if name in _replaced:
            continue
        _replaced[name] = original = getattr(module, _FUNCTION)
        setattr(module, _FUNCTION, _with_fallback(original))
        changed += 1
    return changed


def unpatch() -> int:
    """Undoes `patch`; returns the number of modules that have Megatron's function again."""
    count = len(_replaced)
    for name, original in _replaced.items():
        setattr(_import(name), _FUNCTION, original)
    _replaced.clear()
    return count


def _import(name) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError("expected Megatron-LM, found none: pip install megatron-core") from error
    if name not in _replaced:
        expected, found = (list(inspect.signature(function).parameters) for function in (
            topk_routing_with_score_function, getattr(module, _FUNCTION, lambda: None)))
        if found != expected:
            raise ImportError(f"expected {name}.{_FUNCTION}({', '.join(expected)}), as in megatron-core "
                              f"0.16, found ({', '.join(found)})")
    return module


def _with_fallback(original):
    names = list(inspect.signature(topk_routing_with_score_function).parameters)

    def topk_routing(*args, **kwargs):
        given = dict(zip(names, args), **kwargs)
        reason = _why_not(given["logits"], given["topk"], given.get("num_groups"),
                          given.get("group_topk"), given.get("score_function", "softmax"),
                          given.get("router_replay"))
        if not reason:
            return _route(**given)
        _warn_once(reason)
        return original(*args, **kwargs)
    topk_routing.__name__ = _FUNCTION
    return topk_routing


_said: set[str] = set()


def _warn_once(reason):
    if reason not in _said:
        _said.add(reason)
        warn_user(f"a router of Megatron runs its own selection: {reason}")


__all__ = ["patch", "topk_routing_with_score_function", "unpatch"]


def __dir__() -> list[str]:
    return sorted(__all__)
