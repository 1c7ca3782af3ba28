"""Soft mixtures: SoftMoE, Soft-ACMoE (P3 C.7), SymphonySoftMoE (P4 E.4)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..formulas import mix_metric
from ._router import Device, Router, Scores, real_tokens
from .clusters import dispersion_options
from .symphony import ExpertGraph, threshold_of


class SoftMoE(Router):
    """Every expert works on averages of all tokens: docs/Spec.md 3.8.

    The result's `dispatch` and `combine` [.., N, E, slots] are what `MoELayer`
    runs; `gates` and `indices` list the k experts with the largest share of a
    token's combine weights, for metrics. Tokens mix over the whole sequence,
    also with later ones.

    Args:
        k: experts to list.
        slots: averages an expert works on.
        scale: of the logits, a parameter.

    >>> routing = SoftMoE(16, 4, slots=2)(torch.randn(1, 6, 16))
    >>> routing.dispatch.shape
    torch.Size([1, 6, 4, 2])
    >>> torch.allclose(routing.combine.sum((-1, -2)), torch.ones(1, 6))
    True
    """

    kind = "probs"
    renorm = False
    source = "its weights are those of its own slots, over all tokens"
    refuses_methods = (
        "its experts work on averages of all tokens, by weights of slots that scores of tokens "
        "cannot replace; SoftACMoE and SymphonySoftMoE are its forms of ACMoE and Symphony"
    )

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        slots: int = 1,
        scale: float = 1.0,
        eps: float = 1e-6,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        k = min(k, num_experts)
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.slots, self.eps = slots, eps
        self.phi = torch.nn.Parameter(torch.empty(d_model, num_experts, slots, **self._factory))
        self._own_number("scale", scale, learns=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        torch.nn.init.normal_(self.phi, std=1 / math.sqrt(self.d_model))

    def repr_options(self) -> dict[str, Any]:
        mine = {"slots": self.slots, "scale": self.scale, "eps": self.eps}
        return {**mine, **super().repr_options()}

    def weights(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None,
        m: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.soft_dispatch(
            h, self.phi, scale=self.scale, eps=self.eps, mask=mask, metric=m
        )

    def shares(
        self,
        dispatch: torch.Tensor,
        combine: torch.Tensor,
        state: dict[str, Any] | None = None,
    ) -> Scores:
        """An expert's score is its share in the token's combine weights; there are no logits."""
        soft = dict(dispatch=dispatch, combine=combine)
        return Scores(None, self.kind, combine.sum(dim=-1), state or {}, soft=soft)

    def scores(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> Scores:
        return self.shares(*self.weights(real_tokens(h, mask), mask))


class SoftACMoE(SoftMoE):
    """SoftMoE whose logits use ACMoE's metric, mixed over a token's 8 best slots: P3 C.7.

    `state` goes to the next layer, as in `ACMoE`. The slots stay averages of
    the tokens themselves.

    >>> first, second = SoftACMoE(16, 4, slots=4), SoftACMoE(16, 4, slots=4)
    >>> h = torch.randn(1, 6, 16)
    >>> routing = second(h, **first(h).state)
    >>> routing.state["prev_indices"].shape
    torch.Size([1, 6, 8])
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        mix: int = 8,
        measure: Literal["mad", "variance", "pairwise"] = "mad",
        preset: Literal["lm", "swin", "softmoe"] = "softmoe",
        eps: float = 1e-6,
        stat_source: Literal["previous", "current"] = "previous",
        weights: dict[str, Any] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, eps=eps, device=device, dtype=dtype, **options)
        self.mix, self.measure, self.stat_source = mix, measure, stat_source
        self.weights_of = dispersion_options(None if weights else preset, **(weights or {}))

    def repr_options(self) -> dict[str, Any]:
        mine = {"mix": self.mix, "measure": self.measure, "stat_source": self.stat_source}
        return {**super().repr_options(), **mine, "weights": self.weights_of}

    def scores(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        prev_indices: torch.Tensor | None = None,
        prev_gates: torch.Tensor | None = None,
        prev_h: torch.Tensor | None = None,
    ) -> Scores:
        h = real_tokens(h, mask)
        m = None
        if prev_indices is not None:
            s, _, count = self.ops.mad_dispersion(
                h if self.stat_source == "current" else prev_h,
                prev_indices[..., 0],
                self.num_experts,
                measure=self.measure,
                mask=mask,
            )
            metric = self.ops.dispersion_weights(s, count, **self.weights_of)
            m = mix_metric(metric, prev_indices, prev_gates)
        dispatch, combine = self.weights(h, mask, m)

        # The softmax over the best slots' logits is their combine weights, renormalised.
        flat = combine.detach().flatten(-2)
        best, slot = self.ops.topk_renorm(
            flat, min(self.mix, flat.shape[-1]), kind="probs", renorm=True, mask=mask
        )
        expert = torch.where(slot < 0, -1, slot // self.slots)
        state = {"prev_indices": expert, "prev_gates": best, "prev_h": h.detach()}
        return self.shares(dispatch, combine, state)


class SymphonySoftMoE(ExpertGraph, SoftMoE):
    """SoftMoE whose combine weights are mixed over a graph of experts: P4 E.4.

    The graph counts the two experts with the largest share of each token's
    combine weights (decided: E.4 defines nothing).

    >>> router = SymphonySoftMoE(16, 4)
    >>> h = torch.randn(1, 6, 16)
    >>> bool(router(h).combine.any())
    False
    >>> update_routers(router)
    >>> bool(router(h).combine.any())
    True
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        beta: float = 0.9,
        norm: Literal["row", "col", "eq7"] = "row",
        diagonal: bool = True,
        threshold: float | None = None,
        cold_start: Literal["literal", "base"] = "literal",
        init: Literal["zero", "uniform", "kaiming", "xavier"] = "zero",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.threshold, self.cold_start = threshold_of(threshold, init), cold_start
        self.make_graph(beta=beta, norm=norm, diagonal=diagonal, init=init)

    def repr_options(self) -> dict[str, Any]:
        mine = {"threshold": self.threshold, "cold_start": self.cold_start}
        return {**super().repr_options(), **mine}

    def scores(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> Scores:
        dispatch, combine = self.weights(real_tokens(h, mask), mask)
        if self.training:
            self.count(self.choose(combine.detach().sum(dim=-1), None, mask)[1], mask)
        mixed = self.ops.adjacency_gate(
            combine.transpose(-1, -2),
            self.adjacency,
            threshold=self.threshold,
            cold_start=self.cold_start,
        ).transpose(-1, -2)
        return self.shares(dispatch, mixed)

    def update(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.update_adjacency(process_group)
