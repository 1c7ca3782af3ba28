"""ACMoE (P3): routing in a metric that the clusters of the previous layer define."""

import math
from typing import Any, Literal

import torch

from ..formulas import DISPERSION_PRESETS
from ._router import Device, LinearRouter, Routing, Scores, real_tokens


class ACMoE(LinearRouter):
    """Logits h^T M e_k, M stretching what the tokens of an expert agree on: P3 Def. 1, 2.

    The metric comes from the clusters of the previous layer's experts, so
    `state` goes to the next layer's router: `prev_indices`, `prev_gates` and
    `prev_h`. Without them M is the identity: plain SMoE (Remark 1).

    Args:
        measure: "mad", "variance" (C.5) or "pairwise" (Theorem 1).
        mix: how many of the previous experts a token's M blends (Mix-r, C.6).
        stat_source: tokens that build M, "previous" (those that the previous
            layer routed, the paper) or "current" (the authors' code).
        preset: "lm", "swin" or "softmoe" for the weights of the authors' code,
            else `eps`, `clamp`, `scale`, `include_empty` of `dispersion_weights`.
        d_embedding: X-MoE's expert embeddings `emb` in that many dims behind
            `omega` instead of a `weight`.

    >>> first, second = ACMoE(16, 8, 2), ACMoE(16, 8, 2, preset="lm", mix=2)
    >>> h = torch.randn(20, 16)
    >>> routing = second(h + 1, **first(h).state)
    >>> sorted(routing.state)
    ['prev_gates', 'prev_h', 'prev_indices']
    """

    # Instead of the op: `moe_mlir.distributed.share_statistics` sets it.
    dispersion = None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        measure: Literal["mad", "variance", "pairwise"] = "mad",
        preset: Literal["lm", "swin", "softmoe"] | None = None,
        eps: float = 1e-4,
        clamp: float | None = None,
        scale: Literal[
            "cluster", "feature", "global", "global_preclamp", "dispersion", "none"
        ] = "cluster",
        include_empty: bool = False,
        stat_source: Literal["previous", "current"] = "previous",
        mix: int = 1,
        d_embedding: int | None = None,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.d_embedding = d_embedding
        super().__init__(d_model, num_experts, k, bias=bias, device=device, dtype=dtype, **options)
        if stat_source not in ("previous", "current"):
            raise ValueError(
                "ACMoE: expected 'stat_source' to be 'previous' or 'current', "
                f"found {stat_source!r}"
            )
        if not 1 <= mix <= num_experts:
            raise ValueError(f"ACMoE: expected 'mix' in [1, {num_experts}], found {mix}")
        self.measure, self.stat_source, self.mix = measure, stat_source, mix
        self.weights = dispersion_options(
            preset, eps=eps, clamp=clamp, scale=scale, include_empty=include_empty
        )

    def _own(self, name: str, value: torch.Tensor | None) -> None:
        if name == "weight" and self.d_embedding is not None:
            self.weight = None
            width, factory = self.d_embedding, self._factory
            self.omega = torch.nn.Parameter(torch.empty(width, self.d_model, **factory))
            self.emb = torch.nn.Parameter(torch.empty(self.num_experts, width, **factory))
        else:
            super()._own(name, value)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            return super().reset_parameters()
        bound = 1 / math.sqrt(self.d_model)
        torch.nn.init.uniform_(self.omega, -bound, bound)
        torch.nn.init.normal_(self.emb)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def repr_options(self) -> dict[str, Any]:
        mine = {"measure": self.measure, "stat_source": self.stat_source, "mix": self.mix}
        width = {"d_embedding": self.d_embedding}
        return {**mine, **self.weights, **width, **super().repr_options()}

    def embeddings(self) -> torch.Tensor:
        """e_k [E, D]; X-MoE's are normalised in their own space and carried to the tokens'."""
        if self.weight is not None:
            return self.weight
        return torch.nn.functional.normalize(self.emb, dim=-1) @ self.omega

    def logits(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        prev_indices: torch.Tensor | None = None,
        prev_gates: torch.Tensor | None = None,
        prev_h: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if prev_indices is None:
            return self.ops.router_logits(h, self.embeddings(), self.bias)
        measure = self.dispersion or self.ops.mad_dispersion
        s, _, count = measure(
            h if self.stat_source == "current" else prev_h,
            prev_indices[..., 0],
            self.num_experts,
            measure=self.measure,
            mask=mask,
        )
        metric = self.ops.dispersion_weights(s, count, **self.weights)
        return self.ops.ac_logits(
            h,
            metric,
            prev_indices[..., : self.mix],
            self.embeddings(),
            prev_gates=None if self.mix == 1 or prev_gates is None else prev_gates[..., : self.mix],
            bias=self.bias,
        )

    def carried(
        self, h: torch.Tensor, gates: torch.Tensor, indices: torch.Tensor
    ) -> dict[str, Any]:
        """What the next layer's router needs."""
        return {"prev_indices": indices, "prev_gates": gates.detach(), "prev_h": h.detach()}

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
        z = self.logits(h, mask, prev_indices=prev_indices, prev_gates=prev_gates, prev_h=prev_h)
        return Scores(z, state=self.carried(h, *self.choose(None, z, mask)))

    def settle(
        self, gates: torch.Tensor, indices: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        return self.carried(state["prev_h"], gates, indices)

    def forward(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        prev_indices: torch.Tensor | None = None,
        prev_gates: torch.Tensor | None = None,
        prev_h: torch.Tensor | None = None,
    ) -> Routing:
        h = real_tokens(h, mask)
        z = self.logits(h, mask, prev_indices=prev_indices, prev_gates=prev_gates, prev_h=prev_h)
        gates, indices = self.choose(None, z, mask)
        return Routing(gates, indices, logits=z, state=self.carried(h, gates, indices))


def dispersion_options(
    preset: Literal["lm", "swin", "softmoe"] | None, **options: Any
) -> dict[str, Any]:
    """Keywords of `dispersion_weights`: a preset of the authors' code, or the given ones."""
    if preset is None:
        return options
    if preset not in DISPERSION_PRESETS:
        raise ValueError(
            f"expected 'preset' to be one of {', '.join(map(repr, DISPERSION_PRESETS))}, "
            f"found {preset!r}"
        )
    return dict(DISPERSION_PRESETS[preset])
