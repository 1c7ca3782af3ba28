"""DeepSeek-V3's router: sigmoid scores, a bias for the choice alone, limited groups."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from ..formulas import LogitScore, map_scores
from ._router import Device, LinearRouter, Scores, add_counts, real_tokens, sum_over_ranks
from .symphony import ExpertGraph


class DeepSeekV3Router(ExpertGraph, LinearRouter):
    """Sigmoid scores, chosen with a balancing bias from the best groups: docs/Spec.md 9.1, P4 F.1.

    gates = route_scale s / sum s of the chosen, s without the bias. Training
    counts each expert's load; `update_routers` moves the bias towards balance
    by gamma. With symphony=True s is smoothed over a graph of experts first.

    Args:
        n_group, topk_group, group_score: groups of experts, how many stay, and a group's
            score: "top2", also called "top2_sum" as in IR, is the sum of its two best
            experts' scores, "max" its best (DeepSeek-V2).
        gamma: step of the bias.
        beta, norm, diagonal: of the graph.

    >>> router = DeepSeekV3Router(16, 32, 4, n_group=4, topk_group=2, route_scale=2.5)
    >>> routing = router(torch.randn(64, 16))
    >>> torch.allclose(routing.gates.sum(-1), torch.full((64,), 2.5))
    True
    >>> update_routers(router)
    >>> router.bias.abs().max()
    tensor(0.0010)
    """

    wide_buffers = ("bias", "adjacency")
    counters = ("load", "co_selections")

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        group_score: Literal["top2", "top2_sum", "max"] = "top2",
        score: LogitScore = "sigmoid",
        renorm: bool = True,
        gamma: float = 0.001,
        symphony: bool = False,
        beta: float = 0.9,
        norm: Literal["row", "col", "eq7"] = "row",
        diagonal: bool = True,
        cold_start: Literal["literal", "base"] = "literal",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, bias=False, device=device, dtype=dtype, **options)
        self.groups = dict(n_group=n_group, topk_group=topk_group, group_score=group_score)
        self.score, self.renorm, self.gamma = score, renorm, gamma
        self.symphony, self.cold_start = symphony, cold_start
        # Here the bias is of the choice, not of the logits, and does not train.
        del self.bias
        self._own_buffer("bias", num_experts)
        self._own_exact("load", num_experts)
        if symphony:
            self.make_graph(beta=beta, norm=norm, diagonal=diagonal)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        # A base class asks before there is a load.
        if "load" in self._buffers:
            self.load.zero_()

    def repr_options(self) -> dict[str, Any]:
        mine = {"score": self.score, **self.groups, "renorm": self.renorm, "gamma": self.gamma}
        graph = {"symphony": True, "cold_start": self.cold_start} if self.symphony else {}
        # The bias is always there, and no option.
        return {**mine, **graph, **super().repr_options(), "bias": None}

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self.ops.router_logits(h, self.weight)

    # A method on top changes the scores; the choice and the gates stay this router's.
    keeps_gates = True

    @property
    def kind(self) -> Literal["logits", "probs"]:
        return "probs" if self.symphony else "logits"

    @property
    def choice_bias(self) -> torch.Tensor:
        return self.bias

    def choose(
        self,
        p: torch.Tensor | None,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        renorm: bool | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.grouped_topk(
            p if z is None else z,
            self.k,
            bias=self.bias,
            score="none" if z is None else self.score,
            renorm=self.renorm if renorm is None else renorm,
            route_scale=self.route_scale if scale is None else scale,
            mask=mask,
            **self.groups,
        )

    def scores(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> Scores:
        z = self.logits(real_tokens(h, mask))
        smoothed = self.smoothed(map_scores(z, self.score), z, mask) if self.symphony else None
        return Scores(z, self.kind, smoothed, score=self.score)

    def smoothed(self, s: torch.Tensor, z: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The scores over the graph, which learns from what they alone would choose."""
        if self.training:
            self.count(self.choose(None, z.detach(), mask)[1], mask)
        return self.ops.adjacency_gate(s, self.adjacency, cold_start=self.cold_start)

    def settle(
        self, gates: torch.Tensor, indices: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        if self.counts_now():
            chosen = torch.where(indices >= 0, indices, self.num_experts).reshape(-1)
            load = self.load.new_zeros(self.num_experts + 1)
            add_counts(self.load, load.scatter_add(0, chosen, torch.ones_like(chosen))[:-1])
        return state

    def update(self, process_group: dist.ProcessGroup | None = None) -> None:
        load = sum_over_ranks(self.load, process_group)
        self.bias.copy_(self.ops.bias_update(self.bias, load, gamma=self.gamma))
        self.load.zero_()
        if self.symphony:
            self.update_adjacency(process_group)
