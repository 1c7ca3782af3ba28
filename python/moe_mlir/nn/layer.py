"""Experts behind a router."""

import inspect
from typing import Any, Literal

import torch

from ..ops._check import Checker
from ..ops._expert_activation import ACTIVATIONS, GLUS, ExpertActivation
from ._router import Device, Router, Routing, factory_kwargs, repr_of


class MoELayer(torch.nn.Module):
    """Experts behind a router: every token reaches all its experts, unless a capacity is given.

        y = sum_a gate_a W_out[e_a] act(W_in[e_a] h + b_in[e_a]) + b_out[e_a]

    Its parameters are `w_in` [experts, features, d_model], `w_out` [experts, d_model,
    d_hidden] and, with `bias`, `b_in` [experts, features] and `b_out` [experts, d_model]. Features
    are d_hidden, or 2 d_hidden with a gate: first those of the gate, then those that it multiplies,
    as in transformers' `gate_up_proj`. Shared experts lie side by side in `shared_in`,
    `shared_out`, `shared_b_in` and `shared_b_out`.

    `forward` returns the mixed outputs and the `Routing`; the router's own
    inputs and state go through as keywords.

    Args:
        d_hidden: features between the two layers of an expert.
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu2" or "none"; with a gate "swiglu",
            "geglu", "geglu_tanh" or "reglu" (https://arxiv.org/abs/2002.05202); or an
            `experts.ExpertActivation`, for limits, for example.
        bias: whether both layers of the experts, and of shared ones, have biases.
        shared: experts that every token visits with weight 1, outside of the routing.
        capacity_factor: an expert takes k floor(cf ceil(T / E)) choices at most;
            dropped ones contribute 0, without renormalising.
        priority: who is dropped: "position" keeps earlier tokens, "gate" those
            with the largest top gate (V-MoE's batch priority).
        device, dtype: of the experts' weights, as in torch.nn; the router has its own.

    Raises:
        ValueError: for an activation, a priority or sizes that are none of these.
        TypeError: the router's forward takes no mask, or, in a call, returns a tuple.

    >>> layer = MoELayer(SMoE(16, 8, 2), d_hidden=32, shared=1)
    >>> y, routing = layer(torch.randn(2, 5, 16))
    >>> y.shape
    torch.Size([2, 5, 16])
    >>> gated = MoELayer(SMoE(16, 8, 2), d_hidden=32, activation="swiglu", bias=True)
    >>> [name for name in gated.state_dict() if not name.startswith("router.")]
    ['w_in', 'w_out', 'b_in', 'b_out']
    >>> gated.w_in.shape
    torch.Size([8, 64, 16])
    """

    w_in: torch.nn.Parameter
    w_out: torch.nn.Parameter
    b_in: torch.nn.Parameter | None
    b_out: torch.nn.Parameter | None
    shared_in: torch.nn.Parameter | None
    shared_out: torch.nn.Parameter | None
    shared_b_in: torch.nn.Parameter | None
    shared_b_out: torch.nn.Parameter | None

    def __init__(
        self,
        router: Router,
        d_hidden: int,
        *,
        activation: str | ExpertActivation = "gelu",
        bias: bool = False,
        shared: int = 0,
        capacity_factor: float | None = None,
        priority: Literal["position", "gate"] = "position",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check = Checker("MoELayer")
        check.choice("priority", priority, ("position", "gate"))
        d_hidden, shared = check.integer("d_hidden", d_hidden), check.integer("shared", shared)
        _check_forward(router)
        self.router = router
        self.d_hidden, self.shared = d_hidden, shared
        self.capacity_factor, self.priority = capacity_factor, priority
        self.activation = _activation(check, activation)
        features = d_hidden if self.activation.gate == "none" else 2 * d_hidden
        self.activation.validate(check, features)
        experts, d_model = router.num_experts, router.d_model
        factory = factory_kwargs("MoELayer", device, dtype)

        def own(name: str, there: int | bool, *shape: int) -> None:
            weight = torch.nn.Parameter(torch.empty(shape, **factory)) if there else None
            self.register_parameter(name, weight)

        own("w_in", True, experts, features, d_model)
        own("w_out", True, experts, d_model, d_hidden)
        own("b_in", bias, experts, features)
        own("b_out", bias, experts, d_model)
        own("shared_in", shared, shared * features, d_model)
        own("shared_out", shared, d_model, shared * d_hidden)
        own("shared_b_in", shared and bias, shared * features)
        own("shared_b_out", shared and bias, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights and biases as torch.nn.Linear does: uniformly, by the layer's inputs."""
        d_model, d_hidden = self.w_out.shape[1:]
        for name in ("w_in", "w_out", "shared_in", "shared_out", "b_in", "b_out",
                     "shared_b_in", "shared_b_out"):  # fmt: skip
            weight = getattr(self, name)
            if weight is not None:
                bound = (d_model if name.endswith("in") else d_hidden) ** -0.5
                torch.nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        name = _name(self.activation)
        return repr_of({
            "num_experts": self.w_in.shape[0],
            "d_hidden": self.d_hidden,
            "activation": self.activation if name is None else name,
            "bias": self.b_in is not None,
            "shared": self.shared,
            "capacity_factor": self.capacity_factor,
            "priority": None if self.capacity_factor is None else self.priority,
        })  # fmt: skip

    def forward(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        **state: Any,
    ) -> tuple[torch.Tensor, Routing]:
        routing = self.router(h, mask, **state)
        if isinstance(routing, tuple):
            raise TypeError(f"MoELayer: expected {type(self.router).__name__} to return an nn.Routing, "
                            f"found a tuple of {len(routing)}; return nn.Routing(gates, indices)")
        y = self._routed(h, mask, routing)
        if self.shared_in is not None and self.shared_out is not None:
            linear = torch.nn.functional.linear
            hidden = self.activation(linear(h, self.shared_in, self.shared_b_in))
            y = y + linear(hidden, self.shared_out, self.shared_b_out)
        return y, routing

    def _routed(
        self, h: torch.Tensor, mask: torch.Tensor | None, routing: Routing
    ) -> torch.Tensor:
        if routing.dispatch is not None and routing.combine is not None:
            return self._soft(h, mask, routing.dispatch, routing.combine)
        from ..experts import run_experts

        indices = routing.indices
        if self.capacity_factor is not None:
            indices = self._kept(routing)
        return run_experts(h, routing.gates, indices, self.w_in, self.w_out, b_in=self.b_in,
                           b_out=self.b_out, activation=self.activation)  # fmt: skip

    def _kept(self, routing: Routing) -> torch.Tensor:
        """The choices that find room, -1 for the others."""
        indices = routing.indices
        tokens, experts = indices[..., 0].numel(), self.router.num_experts
        slots, _, _ = self.router.ops.dispatch(
            indices.reshape(tokens, -1),
            experts,
            capacity_factor=self.capacity_factor,
            priority=routing.gates[..., 0].reshape(-1) if self.priority == "gate" else None,
        )
        return torch.where(slots.reshape(indices.shape) >= 0, indices, -1)

    def _soft(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None,
        dispatch: torch.Tensor,
        combine: torch.Tensor,
    ) -> torch.Tensor:
        """Each expert on its slots, averages of the tokens; outputs averaged back."""
        if mask is not None:
            h = torch.where(mask[..., None], h, torch.zeros_like(h))
        slots = torch.einsum("...nep,...nd->...epd", dispatch.to(h.dtype), h)
        hidden = torch.einsum("...epd,ehd->...eph", slots, self.w_in)
        if self.b_in is not None:
            hidden = hidden + self.b_in[:, None]
        outputs = torch.einsum("...eph,edh->...epd", self.activation(hidden), self.w_out)
        if self.b_out is not None:
            outputs = outputs + self.b_out[:, None]
        return torch.einsum("...nep,...epd->...nd", combine.to(h.dtype), outputs)


def _check_forward(router: Router) -> None:
    """A router of one's own may have another forward than the layer calls."""
    try:
        inspect.signature(router.forward).bind(None, None)
    except TypeError:
        raise TypeError(
            f"MoELayer: expected {type(router).__name__}.forward to take (h, mask=None, **state), "
            f"found {inspect.signature(router.forward)}; or override `logits` or `scores` instead"
        ) from None


def _activation(check: Checker, given: Any) -> ExpertActivation:
    if isinstance(given, ExpertActivation):
        return given
    if not isinstance(given, str):
        check.fail(f"expected 'activation' to be a name or an ExpertActivation, found "
                   f"{type(given).__name__}", TypeError)  # fmt: skip
    check.choice("activation", given, (*ACTIVATIONS, *GLUS))
    return ExpertActivation.named(given)


def _name(activation: ExpertActivation) -> str | None:
    """The name that gives an activation, if there is one."""
    names = (*ACTIVATIONS, *GLUS)
    return next((name for name in names if ExpertActivation.named(name) == activation), None)
