"""Methods on top of other routers: the base is asked in one place, where it cannot be dropped."""

from typing import Any

import torch

from .._support.keywords import with_new_names
from ._router import (
    Device,
    LinearRouter,
    Router,
    Scores,
    called_scores,
    init_linear,
    keywords_of,
    real_tokens,
)


def _definer(router: Router, name: str) -> int:
    """How far up its classes a router's method is defined."""
    return next(i for i, cls in enumerate(type(router).__mro__) if name in vars(cls))


class ComposedRouter(Router):
    """A method on top of another router's scores, by default of a linear router's.

    The method is `mix` alone: the base's scores in, its own out. Whatever else
    the base is stays: its selection (groups, a bias for the choice, a
    threshold) is applied to the method's scores, its operands and state go in
    and out with the method's, it counts in training, and k is its. An input or
    state of the base that the method has, too, is named `base_<name>`.

    Args:
        base: the router that gives the scores (`XMoE`, `SMoEDropout`, ...). It
            decides k; without it the router has its own `weight` and `bias`.
        renorm: whether gates are renormalised over the chosen experts. By
            default as the method's paper has it, or as the base has it where
            the gates are of its own kind: raw on purpose, of groups, of a threshold.
    """

    # `mix` changes the scores.
    kind = "probs"
    # Whether the paper renormalises gates.
    paper_renorm = True
    masks_own_keys = False
    # Old name of an input of `mix` -> the one that it has now.
    renamed_inputs: dict[str, str] = {}

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        base: Router | None = None,
        bias: bool = True,
        renorm: bool | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        if base is None:
            linear = LinearRouter(d_model, num_experts, k, bias=bias, device=device, dtype=dtype)
            self.weight, self.bias = linear.weight, linear.bias
        else:
            self.check_base(base)
        self.base = base
        if renorm is None:
            kept = base if base is not None and base.keeps_gates else None
            renorm = self.paper_renorm if kept is None else kept.renorm
        self.renorm = renorm

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.base is None:
            init_linear(self.weight, self.bias)

    def repr_options(self) -> dict[str, Any]:
        bias = self.bias is not None if self.base is None else None
        return {"bias": bias, "renorm": self.renorm, **super().repr_options()}

    def check_base(self, base: Router) -> None:
        """Refuses a base that is no router, of other sizes, or that makes no sense here."""
        name, found = type(self).__name__, type(base).__name__
        if not isinstance(base, Router):
            raise TypeError(f"{name}: expected 'base' to be a router or None, found {found}")
        if (base.d_model, base.num_experts, base.k) != (self.d_model, self.num_experts, self._k):
            raise ValueError(
                f"{name}: expected 'base' with d_model, num_experts, k = "
                f"{(self.d_model, self.num_experts, self._k)}, found "
                f"{(base.d_model, base.num_experts, base.k)}"
            )
        refused = base.refuses_methods
        if refused is None and _definer(base, "forward") < _definer(base, "scores"):
            refused = (
                "its forward is its own and its scores are not, so a method would drop what the "
                "forward does; let it override logits, scores or choose instead"
            )
        if refused is not None:
            raise ValueError(
                f"{name}: expected a 'base' that scores the experts of each token, "
                f"found {found}: {refused}"
            )

    @property
    def k(self) -> int:
        """The base's k where there is one: a schedule may move it."""
        base = self._modules.get("base")
        return self._k if base is None else base.k

    @k.setter
    def k(self, k: int) -> None:
        self._k = k
        base = self._modules.get("base")
        if base is not None:
            base.k = k

    @property
    def keeps_gates(self) -> bool:
        return self.base is not None and self.base.keeps_gates

    @property
    def thresholds(self) -> bool:
        return self.base is not None and self.base.thresholds

    @property
    def masks_keys(self) -> bool:
        return self.masks_own_keys or (self.base is not None and self.base.masks_keys)

    @property
    def gate_scale(self) -> float:
        return self.route_scale * (1.0 if self.base is None else self.base.gate_scale)

    @property
    def choice_bias(self) -> torch.Tensor | None:
        return None if self.base is None else self.base.choice_bias

    # ------------------------------------------------------------ names of inputs and state

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.own_inputs = keywords_of(cls.mix)

    @property
    def inputs(self) -> tuple[str, ...]:
        theirs = () if self.base is None else self.base.inputs
        return (*self.own_inputs, *(self.outer_name(name) for name in theirs))

    def outer_name(self, name: str) -> str:
        """What this router calls its base's input or state: `base_` in front of one it has, too."""
        root = name
        while root.startswith("base_"):
            root = root.removeprefix("base_")
        return f"base_{name}" if root in self.own_inputs else name

    @property
    def old_inputs(self) -> dict[str, str]:
        """Old name -> new one of the inputs of this router and of those below it."""
        below = getattr(self.base, "old_inputs", {})
        theirs = {self.outer_name(old): self.outer_name(new) for old, new in below.items()}
        return {**theirs, **self.renamed_inputs}

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the method's inputs, the base's under the base's names)."""
        old = self.old_inputs
        if any(name in old for name in state):
            state = with_new_names(f"nn.{type(self).__name__}", state, old)
        own = {name: value for name, value in state.items() if name in self.own_inputs}
        names = () if self.base is None else self.base.inputs
        theirs = {n: state[self.outer_name(n)] for n in names if self.outer_name(n) in state}
        if len(own) + len(theirs) < len(state):
            unknown = next(n for n in state if n not in self.inputs)
            raise TypeError(
                f"{type(self).__name__}: expected inputs among "
                f"{', '.join(self.inputs) or '(none)'}, found {unknown!r}"
            )
        return own, theirs

    def join(self, own: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
        return {**own, **{self.outer_name(name): value for name, value in theirs.items()}}

    # ------------------------------------------------------------ the three steps

    def mix(
        self, h: torch.Tensor, p: torch.Tensor, z: torch.Tensor | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """(scores, state) of the method from the base's scores p and logits z."""
        raise NotImplementedError(f"{type(self).__name__} has no 'mix'")

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        if self.base is None:
            return self.ops.router_logits(h, self.weight, self.bias)
        return self.base.logits(h)

    def base_scores(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        **state: Any,
    ) -> Scores:
        """What the method starts from."""
        if self.base is None:
            return Scores(self.logits(real_tokens(h, self.token_mask(h, mask))))
        mask = mask if self.base.masks_keys else self.token_mask(h, mask)
        scores = called_scores(self.base, h, mask, **state)
        if scores.soft:
            raise ValueError(
                f"{type(self).__name__}: expected a 'base' that scores the experts of each token, "
                f"found {type(self.base).__name__}, whose {', '.join(scores.soft)} a method would drop"
            )
        return scores

    def base_choice(
        self, p: torch.Tensor, z: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Indices that the base alone chooses by its scores."""
        p, z = p.detach(), None if z is None else z.detach()
        if self.base is None:
            return self.select(z, mask, kind="logits", renorm=True)[1]
        return self.base.choose(p, z if self.base.kind == "logits" else None, mask)[1]

    def scores(self, h: torch.Tensor, mask: torch.Tensor | None = None, **state: Any) -> Scores:
        own, theirs = self.split(state)
        h = real_tokens(h, self.token_mask(h, mask))
        scores = self.base_scores(h, mask, **theirs)
        p, left = self.mix(h, scores.probs, scores.logits, mask, **own)
        return Scores(scores.logits, self.kind, p, self.join(left, scores.state))

    def choose(
        self,
        p: torch.Tensor | None,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        renorm: bool | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        renorm = self.renorm if renorm is None else renorm
        scale = self.gate_scale if scale is None else scale
        if self.base is None:
            return super().choose(p, z, mask, renorm=renorm, scale=scale)
        return self.base.choose(p, z, mask, renorm=renorm, scale=scale)

    def settle(
        self, gates: torch.Tensor, indices: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        if self.base is None:
            return state
        own, theirs = self.split(state)
        return self.join(own, self.base.settle(gates, indices, theirs))
