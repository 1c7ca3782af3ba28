"""SymphonySMoE (P4): probabilities smoothed over a learnt graph of experts."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from .._support.log import warn_user
from ..formulas import blend_counts, co_selections
from ._composed import ComposedRouter
from ._router import Device, Router, add_counts, sum_over_ranks

_INITS = {
    "zero": torch.nn.init.zeros_,
    "uniform": torch.nn.init.uniform_,
    "kaiming": torch.nn.init.kaiming_uniform_,
    "xavier": torch.nn.init.xavier_uniform_,
}


class ExpertGraph(Router):
    """The adjacency A [E, E] of a router and the co-selections that will move it.

    In training a forward only adds to the integer buffer `co_selections`;
    `update_routers(model)`, once per optimizer step, blends them into
    `adjacency`.
    """

    wide_buffers: tuple[str, ...] = ("adjacency",)
    counters: tuple[str, ...] = ("co_selections",)

    def make_graph(
        self,
        *,
        beta: float,
        norm: Literal["row", "col", "eq7"],
        diagonal: bool,
        init: Literal["zero", "uniform", "kaiming", "xavier"] = "zero",
    ) -> None:
        if not 0 <= beta <= 1:
            raise ValueError(f"{type(self).__name__}: expected 'beta' in [0, 1], found {beta}")
        if norm not in ("row", "col", "eq7"):
            raise ValueError(
                f"{type(self).__name__}: expected 'norm' to be 'row', 'col' or 'eq7', "
                f"found {norm!r}"
            )
        if norm == "eq7" and not diagonal:
            raise ValueError(
                f"{type(self).__name__}: expected diagonal=True with norm='eq7', found False"
            )
        if init not in _INITS:
            raise ValueError(
                f"{type(self).__name__}: expected 'init' to be one of "
                f"{', '.join(map(repr, _INITS))}, found {init!r}"
            )
        self.blend: dict[str, Any] = dict(beta=beta, norm=norm, diagonal=diagonal)
        self.graph_init = init
        square = (self.num_experts, self.num_experts)
        self._own_buffer("adjacency", *square)
        self._own_exact("co_selections", *square)
        self._reset_graph()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        # A base class asks before there is a graph.
        if "adjacency" in self._buffers:
            self._reset_graph()

    def repr_options(self) -> dict[str, Any]:
        # A class that has a graph only if asked for it may have none.
        graph = self.blend if "adjacency" in self._buffers else {}
        return {**graph, **super().repr_options()}

    def _reset_graph(self) -> None:
        self.co_selections.zero_()
        _INITS[self.graph_init](self.adjacency)

    def count(self, indices: torch.Tensor, mask: torch.Tensor | None) -> None:
        if self.counts_now():
            counts = co_selections(indices, self.num_experts, mask=mask)
            add_counts(self.co_selections, counts)

    @torch.no_grad()
    def update_adjacency(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Applies the co-selections counted since the last call."""
        counts = sum_over_ranks(self.co_selections, process_group)
        self.adjacency.copy_(blend_counts(self.adjacency, counts, **self.blend))
        self.co_selections.zero_()


def threshold_of(threshold: float | None, init: str) -> float:
    """The threshold that a graph of experts is used with; see `SymphonySMoE`."""
    if threshold is not None:
        return threshold
    return -torch.finfo(torch.float32).max if init in ("kaiming", "xavier") else 0.0


class SymphonySMoE(ExpertGraph, ComposedRouter):
    """Probabilities smoothed over a graph of experts, TopK without renormalising: P4 Algorithm 1.

    g = A softmax(z), A a moving average of how often experts are chosen
    together, by the base scores (C21). A starts at zero, so the first step
    routes nothing (E17), unless `cold_start="base"`. A router that is made
    without `cold_start` warns of that.

    `base` puts it on another router: XMoE, or a SimilaritySMoE, whose mixed
    probabilities it then smooths and counts (App. H).

    A caller that passes `adjacency` carries the graph itself, Algorithm 1 to
    the letter: the updated one is in `state`, and the buffers are left alone.

    Args:
        beta, norm, diagonal: of `adjacency_update`.
        threshold: entries of A below it are dropped at use (G.3: 0.05). None (default) is 0, which
            drops nothing of an A that counts made, or with an `init` that draws negative entries
            no threshold: Algorithm 1, line 11, reads all of A.
        cold_start: "base" routes by the base probabilities where A gives nothing yet;
            "literal" (default) does as the paper says.
        init: of A, "zero" (best in Table 13), "uniform", "kaiming", "xavier".

    >>> router = SymphonySMoE(16, 8, 2, cold_start="literal")
    >>> h = torch.randn(4, 16)
    >>> bool(router(h).gates.any())
    False
    >>> update_routers(router)
    >>> bool(router(h).gates.any())
    True
    """

    paper_renorm = False

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        beta: float = 0.9,
        norm: Literal["row", "col", "eq7"] = "row",
        diagonal: bool = True,
        threshold: float | None = None,
        cold_start: Literal["literal", "base"] | None = None,
        init: Literal["zero", "uniform", "kaiming", "xavier"] = "zero",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        if cold_start is None and init == "zero":
            warn_user("SymphonySMoE has gates of zero until the first update_routers(model): its "
                      "graph of experts is empty; pass cold_start='base' to route by the base "
                      "probabilities until then, or cold_start='literal' to keep the paper's rule")
        self.threshold = threshold_of(threshold, init)
        self.cold_start = cold_start or "literal"
        self.make_graph(beta=beta, norm=norm, diagonal=diagonal, init=init)

    def repr_options(self) -> dict[str, Any]:
        mine = {"threshold": self.threshold, "cold_start": self.cold_start}
        return {**mine, **super().repr_options()}

    def mix(
        self,
        h: torch.Tensor,
        p: torch.Tensor,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        adjacency: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        graph = self.adjacency if adjacency is None else adjacency
        g = self.ops.adjacency_gate(p, graph, threshold=self.threshold, cold_start=self.cold_start)
        mask, state = self.token_mask(h, mask), {}
        # The graph learns from the base scores, not from the smoothed ones (C21).
        if adjacency is not None:
            chosen = self.base_choice(p, z, mask)
            updated = self.ops.adjacency_update(adjacency, chosen, mask=mask, **self.blend)
            state["adjacency"] = updated
        elif self.training:
            self.count(self.base_choice(p, z, mask), mask)
        return g, state

    def update(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.update_adjacency(process_group)
