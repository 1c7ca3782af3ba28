"""What all routers share: the result, the contract, selection, updates."""

from __future__ import annotations

import functools
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.distributed as dist

from .. import ops, reference
from .._torch.core import active_ddp_module, is_in_backward, pytree
from ..formulas import LogitScore, map_scores
from ..ops._check import Checker

# What torch takes for a device; None is torch's default.
Device: TypeAlias = torch.device | str | int | None


@dataclass
class Routing:
    """The result of a router. `gates` and `indices` are [.., k], the others [.., experts].

    An index of -1 means no expert. Pass `state` to the next call (or the next
    layer) as `**state`. Soft routers also return `dispatch` and `combine`, each
    [.., tokens, experts, slots]; a threshold router returns `count` [..].
    """

    gates: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    state: dict[str, Any] = field(default_factory=dict)
    count: torch.Tensor | None = None
    dispatch: torch.Tensor | None = None
    combine: torch.Tensor | None = None


# A model may return a Routing and still be exported.
pytree.register_dataclass(Routing)


@dataclass
class Scores:
    """What a router finds of the experts of each token, before it chooses.

    Unpacks, and is indexed, as (probs, logits, state).

    Args:
        logits: [.., experts], or None where there are none.
        kind: what experts are chosen by: "logits", which keep their order
            where scores saturate, or "probs".
        given: the scores [.., experts] where the router has computed them;
            without them they are a function of the logits, `score` of
            `moe_mlir.grouped_topk` or the softmax.
        state: goes to the next call or layer; `Router.settle` completes it.
        soft: `dispatch` and `combine` of a soft router.

    >>> scores = SMoE(16, 8, 2).scores(torch.randn(4, 16))
    >>> scores.kind, scores.probs.shape
    ('logits', torch.Size([4, 8]))
    """

    logits: torch.Tensor | None
    kind: Literal["logits", "probs"] = "logits"
    given: torch.Tensor | None = None
    state: dict[str, Any] = field(default_factory=dict)
    score: LogitScore | None = None
    soft: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def probs(self) -> torch.Tensor:
        """The scores; of logits they are computed at each request, which a choice never makes."""
        if self.given is not None:
            return self.given
        if self.logits is None:
            raise ValueError("nn.Scores: expected 'logits' or 'given', found neither")
        if self.score is not None:
            return map_scores(self.logits, self.score)
        return self.logits.softmax(dim=-1)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.probs, self.logits, self.state))

    def __getitem__(self, place: int | slice) -> Any:
        return (self.probs, self.logits, self.state)[place]

    def __len__(self) -> int:
        return 3


def scores_of(router: Router, *args: Any, **state: Any) -> Scores:
    """`router.scores`, of a class that still returns (scores, logits, state), too."""
    scores = router.scores(*args, **state)
    if isinstance(scores, Scores):
        return scores
    warnings.warn(
        f"{type(router).__name__}: expected 'scores' to return nn.Scores, found a tuple; "
        "return nn.Scores(logits, given=scores, state=state)",
        DeprecationWarning,
        stacklevel=3,
    )
    p, z, state = scores
    return Scores(z, "probs" if z is None else router.kind, p, state)


def or_scores_alone(forward: Callable[..., Routing]) -> Callable[..., Routing]:
    """A router's forward that also gives the scores alone, for `called_scores`."""

    @functools.wraps(forward)
    def either(self: Router, *args: Any, scores_alone: bool = False, **inputs: Any) -> Routing:
        if scores_alone:
            scores = scores_of(self, *args, **inputs)
            return Routing(None, None, *scores, **scores.soft)
        return forward(self, *args, **inputs)

    return either


def called_scores(
    router: Router, h: torch.Tensor, mask: torch.Tensor | None, **state: Any
) -> Scores:
    """`router.scores`, by a call of the router where hooks have to see one.

    Hooks bring the weights of a router that is offloaded or sharded by itself,
    or compute them. They meet a Routing without gates and indices.
    """
    if not _has_hooks(router):
        return scores_of(router, h, mask, **state)
    routing = router(h, mask, scores_alone=True, **state)
    slots = dict(dispatch=routing.dispatch, combine=routing.combine)
    soft = {name: value for name, value in slots.items() if value is not None}
    return Scores(routing.logits, router.kind, routing.probs, routing.state, soft=soft)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module is more than its class's forward; accelerate replaces that."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks,
             module._backward_hooks)  # fmt: skip
    return any(hooks) or "forward" in vars(module)


class Router(torch.nn.Module):
    """Sizes, the implementation of the ops, the contract of all routers, and selection.

    A forward is three steps, which a method on top of a router goes through as
    well (`ComposedRouter`): `scores`, the scores of the experts and what they
    carry; `choose`, the experts and gates by the router's own rule; `settle`,
    what the choice leaves behind.

    Args:
        d_model: features of a token.
        num_experts: experts to choose from.
        k: experts a token.
        route_scale: factor of all gates.
        impl: "moe" for compiled kernels, "torch" for the plain-torch meaning.
        device, dtype: of the parameters, as in torch.nn. Buffers that small
            steps move are float32 at least, and counts int64.
    """

    # What experts are chosen by: "logits", or "probs" where scores are more than a function of them.
    kind: Literal["logits", "probs"] = "logits"
    # Whether gates are renormalised over the chosen experts.
    renorm: bool = True
    # Whether `renorm` holds under a method on top, too.
    keeps_gates: bool = False
    # Whether a token may have fewer than k experts.
    thresholds: bool = False
    # Whether the mask is of the keys, of which h may be the last.
    masks_keys: bool = False
    # Why no method can stand on this router; None where one can.
    refuses_methods: str | None = None
    # Where the scores come from, which is why there is no `base` under them.
    source = "its scores come from weights of its own"
    own_inputs: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.own_inputs = keywords_of(cls.scores) or keywords_of(cls.logits)
        if "forward" in vars(cls):
            cls.forward = or_scores_alone(cls.forward)  # type: ignore[method-assign]

    # Integer buffers that a forward in training adds to, of this rank alone.
    counters: tuple[str, ...] = ()
    # Buffers that small steps move: `.bfloat16()` and `.half()` would stop them, and leave them.
    wide_buffers: tuple[str, ...] = ()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        before = {name: self._buffers.get(name) for name in self.wide_buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if buffer is not None and is_narrow(self._buffers[name]):
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        # With assign=True a buffer is what the file has.
        for name in self.wide_buffers:
            buffer = self._buffers.get(name)
            if buffer is not None and is_narrow(buffer):
                self._buffers[name] = buffer.float()

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        route_scale: float = 1.0,
        impl: Literal["moe", "torch"] = "moe",
        base: Router | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check = Checker(name)
        d_model = check.integer("d_model", d_model)
        num_experts = check.integer("num_experts", num_experts)
        k = check.integer("k", k)
        if not 1 <= k <= num_experts:
            raise ValueError(
                f"{name}: expected 'k' in [1, {num_experts}] (the number of experts), found {k}"
            )
        if impl not in ("moe", "torch"):
            raise ValueError(f"{name}: expected 'impl' to be 'moe' or 'torch', found {impl!r}")
        if base is not None:
            raise ValueError(
                f"{name}: expected no 'base', found {type(base).__name__}: {self.source}"
            )
        self.d_model, self.num_experts, self.k = d_model, num_experts, k
        self.route_scale, self.impl = route_scale, impl
        self._factory = factory_kwargs(name, device, dtype)
        # The first values of parameters that are numbers.
        self._numbers: dict[str, float] = {}

    def reset_parameters(self) -> None:
        """Gives the router's own parameters and buffers their first values, as `to_empty` asks for."""
        for name, value in self._numbers.items():
            torch.nn.init.constant_(getattr(self, name), value)

    def _own_number(self, name: str, value: float, learns: bool) -> None:
        """An attribute that is a number, or a parameter that starts as this number."""
        number: Any = float(value)
        if learns:
            self._numbers[name] = number
            number = torch.nn.Parameter(torch.tensor(number, **self._factory))
        setattr(self, name, number)

    def _own_buffer(self, name: str, *shape: int, persistent: bool = True) -> None:
        """A buffer of zeros, in float32 or what is wider."""
        narrow = self._factory["dtype"] is None or self._factory["dtype"].itemsize < 4
        options = dict(self._factory, dtype=torch.float32) if narrow else self._factory
        self.register_buffer(name, torch.zeros(shape, **options), persistent=persistent)

    def _own_exact(self, name: str, *shape: int, dtype: torch.dtype = torch.int64) -> None:
        """A buffer of zeros that no change of the parameters' dtype touches."""
        device = self._factory["device"]
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if hasattr(Router, name):
            raise KeyError(
                f"{type(self).__name__}: expected a parameter by a name that nn.Router does not have, "
                f"found '{name}'; choose another, such as '{name}_weight'"
            )
        super().register_parameter(name, param)

    @property
    def ops(self) -> Any:
        """The namespace of the routing ops: compiled kernels or plain torch."""
        if self.impl == "torch":
            return reference
        return ops

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what `forward` takes beside h and mask: operands, and state of a call before."""
        return self.own_inputs

    @property
    def gate_scale(self) -> float:
        return self.route_scale

    @property
    def choice_bias(self) -> torch.Tensor | None:
        """What is added to the scores [experts] for the choice alone, or None."""
        return None

    def token_mask(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of h's own tokens."""
        if mask is None or not self.masks_keys:
            return mask
        return mask[..., mask.shape[-1] - h.shape[-2] :]

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no router logits")

    def scores(self, h: torch.Tensor, mask: torch.Tensor | None = None, **state: Any) -> Scores:
        """The scores before the choice: all that a forward, or a method on top, builds on.

        `state` is what a call or a layer before left. In `train()` what learns
        from the scores counts here.
        """
        return Scores(self.logits(real_tokens(h, mask), **state))

    def choose(
        self,
        p: torch.Tensor | None,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        renorm: bool | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gates, indices) by the rule of this router.

        From the router's own scores, of logits z, which keep their order where
        scores saturate; or, with z None, from the scores p of a method on top.
        `renorm` and `scale` are the router's own where they are None.
        """
        renorm = self.renorm if renorm is None else renorm
        if z is None:
            return self.select(p, mask, kind="probs", renorm=renorm, scale=scale)
        return self.select(z, mask, kind="logits", renorm=renorm, scale=scale)

    def select(
        self,
        scores: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        kind: Literal["logits", "probs"],
        renorm: bool,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Where jit traces, sizes are tensors, whose comparison it would warn of.
        if not torch.jit.is_tracing() and scores.shape[-1] != self.num_experts:
            raise ValueError(
                f"{type(self).__name__}: expected {kind} of {self.num_experts} experts, "
                f"found shape {list(scores.shape)}"
            )
        return self.ops.topk_renorm(
            scores,
            self.k,
            kind=kind,
            renorm=renorm,
            route_scale=self.gate_scale if scale is None else scale,
            mask=mask,
        )

    def settle(
        self, gates: torch.Tensor, indices: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """The state after a choice, by this router or by a method on top; counts it in training."""
        return state

    @or_scores_alone
    def forward(self, h: torch.Tensor, mask: torch.Tensor | None = None, **state: Any) -> Routing:
        scores = scores_of(self, h, mask, **state)
        z = scores.logits if scores.kind == "logits" else None
        gates, indices = self.choose(scores.given, z, self.token_mask(h, mask))
        state = self.settle(gates, indices, scores.state)
        count = (indices >= 0).sum(dim=-1) if self.thresholds else None
        return Routing(gates, indices, scores.given, scores.logits, state, count, **scores.soft)

    def update(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Applies what was counted since the last optimizer step; see `update_routers`."""

    def counts_now(self) -> bool:
        """Whether this forward counts: in training, and not when a checkpoint recomputes it."""
        if not self.training:
            return False
        spare_counts_of_ddp()
        if torch.compiler.is_compiling():
            return True
        # Inside of a backward the forward was counted before.
        return not is_in_backward()

    def repr_options(self) -> dict[str, Any]:
        """What the repr says behind the sizes, by the constructor's names; None is left out."""
        return {
            "route_scale": None if self.route_scale == 1 else self.route_scale,
            "impl": None if self.impl == "moe" else self.impl,
        }

    def extra_repr(self) -> str:
        sizes = {"d_model": self.d_model, "num_experts": self.num_experts, "k": self.k}
        return repr_of({**sizes, **self.repr_options()})


def repr_of(options: dict[str, Any]) -> str:
    """Options as the keywords of a call; a parameter, whose value changes, is "learned"."""
    return ", ".join(
        f"{name}={'learned' if isinstance(value, torch.Tensor) else repr(value)}"
        for name, value in options.items()
        if value is not None
    )


def factory_kwargs(name: str, device: Device, dtype: torch.dtype | None) -> dict[str, Any]:
    """`device` and `dtype` for the constructors of a module's parameters."""
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(
            f"{name}: expected 'dtype' to be a floating-point type or None, found {dtype}"
        )
    return {"device": device, "dtype": dtype}


def init_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The first values of W [.., D] and b."""
    bound = 1 / math.sqrt(weight.shape[-1])
    torch.nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        torch.nn.init.zeros_(bias)


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names that a method of a router takes besides the tokens, the mask and the scores."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return tuple(
        p.name
        for p in parameters
        if p.kind not in variable and p.name not in ("self", "h", "p", "z", "mask")
    )


def is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


# Threads may share a module: an addition in place is not one step.
_counting = threading.Lock()


def add_counts(counter: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds to a counter of a router."""
    if torch.compiler.is_compiling():
        counter.add_(counts)
        return
    with _counting:
        counter.add_(counts)


@torch.compiler.assume_constant_result
def spare_counts_of_ddp() -> bool:
    """Takes the counts of a DistributedDataParallel's routers out of what it broadcasts.

    Before a forward it gives all ranks the buffers of rank 0, where a step has
    several forwards the counts of the first as well. Asked inside of a forward
    (in compiled code once, when it is traced), as a router does not know what
    wraps it; the first forward comes before any counts.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    ddp = active_ddp_module()
    if ddp is not None and not getattr(ddp, "_moe_counts_spared", False):
        ddp._moe_counts_spared = True
        for path, module in ddp.module.named_modules():
            names = getattr(module, "counters", ()) if isinstance(module, Router) else ()
            ddp.parameters_to_ignore.update(f"{path}.{n}" if path else n for n in names)
    return True


class LinearRouter(Router):
    """Logits W h + b. `weight` [E, D] and `bias` [E] train, or are fixed where `frozen`."""

    frozen = False

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self._own("weight", torch.empty(num_experts, d_model, **self._factory))
        self._own("bias", torch.empty(num_experts, **self._factory) if bias else None)
        self.reset_parameters()

    def _own(self, name: str, value: torch.Tensor | None) -> None:
        if self.frozen or value is None:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, torch.nn.Parameter(value))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_linear(self.weight, self.bias)

    def repr_options(self) -> dict[str, Any]:
        return {"bias": self.bias is not None, **super().repr_options()}

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self.ops.router_logits(h, self.weight, self.bias)


def real_tokens(h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """h with masked tokens at 0, so that their garbage reaches no gradient (E11)."""
    return h if mask is None else torch.where(mask[..., None], h, torch.zeros_like(h))


def linear_increase(step: int, total_steps: int, k_min: int, k_max: int) -> int:
    """clip(round_half_even((k_max - k_min) step / total) + k_min, k_min, k_max); docs/Spec.md 3.2.

    >>> [linear_increase(step, 8, 2, 6) for step in range(0, 10)]
    [2, 2, 3, 4, 4, 4, 5, 6, 6, 6]
    """
    grown = round(Fraction((k_max - k_min) * step, total_steps)) + k_min
    return min(max(grown, k_min), k_max)


class ScheduledK(Router):
    """A k that grows with the optimizer steps; `update_routers` advances it.

    The step is saved with the model as a buffer; what runs reads Python numbers
    only, so that nothing is read back from the device.
    """

    def schedule_k(self, k_max: int | None, total_steps: int | None) -> None:
        if k_max is not None and not self.k <= k_max <= self.num_experts:
            raise ValueError(
                f"{type(self).__name__}: expected 'k_max' in [{self.k}, {self.num_experts}] "
                f"(k and the number of experts), found {k_max}"
            )
        if (k_max is None) != (total_steps is None):
            raise ValueError(
                f"{type(self).__name__}: expected 'k_max' and 'total_steps' together, "
                f"found {k_max} and {total_steps}"
            )
        check = Checker(type(self).__name__)
        self.k_min, self.k_max = self.k, check.integer("k_max", k_max, optional=True)
        self.total_steps = check.integer("total_steps", total_steps, optional=True)
        self.steps_done = 0
        self._own_exact("step")
        self.register_load_state_dict_post_hook(_follow_step)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        # A base class asks before there is a schedule.
        if "step" in self._buffers:
            self.set_step(0)

    def repr_options(self) -> dict[str, Any]:
        schedule = {"k_max": self.k_max, "total_steps": self.total_steps}
        return {**schedule, **super().repr_options()}

    def set_step(self, step: int) -> None:
        self.step.fill_(step)
        self.steps_done = step
        if self.total_steps is not None:
            self.k = linear_increase(step, self.total_steps, self.k_min, self.k_max)

    def update(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.set_step(self.steps_done + 1)


def _follow_step(router: ScheduledK, _: object) -> None:
    router.set_step(int(router.step))


@torch.no_grad()
def update_routers(
    model: torch.nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Updates adjacencies, expert biases, and schedules of k. Call it once per optimizer step.

    Routers only count in a forward: if a forward changed what the backward still
    reads, gradients would be silently wrong, also under activation checkpointing.
    If torch.distributed is initialised, the counts are summed over the ranks of
    `process_group` first.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.update(process_group)


def sum_over_ranks(counts: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """Adds the counts of all ranks in place, if there are ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=process_group)
    return counts
