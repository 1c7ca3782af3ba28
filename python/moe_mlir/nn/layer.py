"""Experts behind a router."""

from typing import Any, Literal

import torch

from ..ops._check import Checker
from ._router import Device, Router, Routing, factory_kwargs


class MoELayer(torch.nn.Module):
    """Experts behind a router: every token reaches all its experts, unless a capacity is given.

    `w_in` [experts, d_hidden, d_model], `w_out` [experts, d_model, d_hidden].
    `forward` returns the mixed outputs and the `Routing`; the router's own
    inputs and state go through as keywords.

    Args:
        shared: experts that every token visits with weight 1, outside of the routing.
        capacity_factor: an expert takes k floor(cf ceil(T / E)) choices at most;
            dropped ones contribute 0, without renormalising.
        priority: who is dropped: "position" keeps earlier tokens, "gate" those
            with the largest top gate (V-MoE's batch priority).
        device, dtype: of the experts' weights, as in torch.nn; the router has its own.

    >>> layer = MoELayer(SMoE(16, 8, 2), d_hidden=32, shared=1)
    >>> y, routing = layer(torch.randn(2, 5, 16))
    >>> y.shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        router: Router,
        d_hidden: int,
        *,
        shared: int = 0,
        capacity_factor: float | None = None,
        priority: Literal["position", "gate"] = "position",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if priority not in ("position", "gate"):
            raise ValueError(
                f"MoELayer: expected 'priority' to be 'position' or 'gate', found {priority!r}"
            )
        check = Checker("MoELayer")
        d_hidden, shared = check.integer("d_hidden", d_hidden), check.integer("shared", shared)
        self.router = router
        self.capacity_factor, self.priority = capacity_factor, priority
        experts, d_model = router.num_experts, router.d_model
        factory = factory_kwargs("MoELayer", device, dtype)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, **factory))

        self.w_in = weight(experts, d_hidden, d_model)
        self.w_out = weight(experts, d_model, d_hidden)
        self.shared_in: torch.nn.Parameter | None = None
        self.shared_out: torch.nn.Parameter | None = None
        if shared:
            self.shared_in = weight(shared * d_hidden, d_model)
            self.shared_out = weight(d_model, shared * d_hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        d_hidden, d_model = self.w_in.shape[1:]
        for weight, fan in ((self.w_in, d_model), (self.w_out, d_hidden),
                            (self.shared_in, d_model), (self.shared_out, d_hidden)):  # fmt: skip
            if weight is not None:
                torch.nn.init.uniform_(weight, -(fan**-0.5), fan**-0.5)

    def forward(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        **state: Any,
    ) -> tuple[torch.Tensor, Routing]:
        routing = self.router(h, mask, **state)
        y = self._routed(h, mask, routing)
        if self.shared_in is not None and self.shared_out is not None:
            hidden = torch.nn.functional.gelu(h @ self.shared_in.T)
            y = y + hidden @ self.shared_out.T
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
        return run_experts(h, routing.gates, indices, self.w_in, self.w_out)

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
        hidden = torch.nn.functional.gelu(torch.einsum("...epd,ehd->...eph", slots, self.w_in))
        outputs = torch.einsum("...eph,edh->...epd", hidden, self.w_out)
        return torch.einsum("...nep,...epd->...nd", combine.to(h.dtype), outputs)
