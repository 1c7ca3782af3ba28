"""Routers that compare tokens with expert embeddings: X-MoE and StableMoE."""

import math
from typing import Any, Literal

import torch

from ._router import Device, Router, Routing, Scores, real_tokens


class XMoE(Router):
    """cos(Omega h, e_j) / tau in a small space, then softmax over the top k: P4 App. C.

    The authors' public code of P0 and P4 is `d_embedding=8, norm_token=False,
    finite="tensor"`: only the experts' side is normalised, no temperature.

    Args:
        d_embedding: width of the space; None compares in the tokens' own.
        tau: temperature; `learn_tau` makes it a parameter.
        finite: "row" or "tensor" replaces non-finite scores by the least
            finite one there; None leaves them.

    >>> routing = XMoE(16, 8, 2, tau=0.3)(torch.randn(4, 16))
    >>> bool((routing.logits.abs() <= 1 / 0.3 + 1e-4).all())
    True
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        d_embedding: int | None = 8,
        tau: float = 1.0,
        learn_tau: bool = False,
        eps: float = 1e-4,
        norm_token: bool = True,
        norm_emb: bool = True,
        finite: Literal["row", "tensor"] | None = None,
        renorm: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.attributes = dict(eps=eps, norm_token=norm_token, norm_emb=norm_emb)
        self.finite, self.renorm = finite, renorm
        width = d_model if d_embedding is None else d_embedding
        self.omega = None
        if d_embedding is not None:
            self.omega = torch.nn.Parameter(torch.empty(width, d_model, **self._factory))
        self.emb = torch.nn.Parameter(torch.empty(num_experts, width, **self._factory))
        self._own_number("tau", tau, learn_tau)
        self.reset_parameters()

    def repr_options(self) -> dict[str, Any]:
        width = None if self.omega is None else self.omega.shape[0]
        mine = {"d_embedding": width, "tau": self.tau, **self.attributes}
        return {**mine, "finite": self.finite, "renorm": self.renorm, **super().repr_options()}

    @property
    def keeps_gates(self) -> bool:
        return not self.renorm

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.omega is not None:
            bound = 1 / math.sqrt(self.d_model)
            torch.nn.init.uniform_(self.omega, -bound, bound)
        torch.nn.init.normal_(self.emb)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        z = self.ops.cosine_logits(h, self.omega, self.emb, tau=self.tau, **self.attributes)
        return z if self.finite is None else self.ops.make_finite(z, scope=self.finite)


class StableMoE(XMoE):
    """StableMoE as P3 and P4 benchmark it: one stage, h . c_e / |c_e|, softmax over the top 2.

    For the method of its own paper see `TwoStageStableMoE`.

    >>> StableMoE(16, 8)(torch.randn(4, 16)).indices.shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        norm_token: bool = False,
        d_embedding: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            d_model,
            num_experts,
            k,
            norm_token=norm_token,
            d_embedding=d_embedding,
            device=device,
            dtype=dtype,
            **options,
        )


class TwoStageStableMoE(Router):
    """StableMoE: a learnt top-1 assignment that is distilled into tokens and then frozen.

    Stage 1: a = argmax_e h . c_e, gate sigmoid(h . c_a), while `distill_loss`
    teaches a small embedding of the token alone to give the same assignment.
    Stage 2 (`freeze()`): the assignment is the frozen embedding's, so that it
    never changes again; the gate still learns.

    Args:
        vocabulary: tokens that the embedding knows.
        d_distill: its width.

    >>> router = TwoStageStableMoE(16, 8, vocabulary=100)
    >>> tokens, h = torch.arange(5), torch.randn(5, 16)
    >>> first = router(h, tokens=tokens)
    >>> loss = router.distill_loss(tokens, first.indices)
    >>> router.freeze()
    >>> a, b = router(h, tokens=tokens), router(torch.randn(5, 16), tokens=tokens)
    >>> bool((a.indices == b.indices).all())
    True
    """

    refuses_methods = (
        "in its second stage the choice is a frozen table of tokens, which no scores can move"
    )

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 1,
        *,
        vocabulary: int,
        d_distill: int = 50,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        if k != 1:
            raise ValueError(f"TwoStageStableMoE: expected 'k' to be 1, found {k}")
        factory = self._factory
        self.centroids = torch.nn.Parameter(torch.empty(num_experts, d_model, **factory))
        self.token_embedding = torch.nn.Parameter(torch.empty(vocabulary, d_distill, **factory))
        self.distilled = torch.nn.Parameter(torch.empty(num_experts, d_distill, **factory))
        self._own_exact("frozen", dtype=torch.bool)
        self.register_load_state_dict_post_hook(_follow_stage)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts stage 1."""
        super().reset_parameters()
        for parameter in (self.centroids, self.distilled):
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))
        torch.nn.init.normal_(self.token_embedding)
        self.frozen.fill_(False)
        self._enter_stage(1)

    def _enter_stage(self, stage: int) -> None:
        self.stage = stage
        for parameter in (self.token_embedding, self.distilled):
            parameter.requires_grad_(stage == 1)

    def repr_options(self) -> dict[str, Any]:
        vocabulary, d_distill = self.token_embedding.shape
        mine = {"vocabulary": vocabulary, "d_distill": d_distill, "stage": self.stage}
        return {**mine, **super().repr_options()}

    def freeze(self) -> None:
        """Starts stage 2."""
        self.frozen.fill_(True)
        self._enter_stage(2)

    def distilled_logits(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the tokens' own assignment; a masked position may hold any id (E10)."""
        known = tokens if mask is None else tokens.masked_fill(~mask, 0)
        return self.ops.router_logits(self.token_embedding[known], self.distilled)

    def distill_loss(
        self,
        tokens: torch.Tensor,
        indices: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Cross entropy of the token's own assignment against the one that was made.

        The mean over real tokens; 0 where there is none.
        """
        # A masked token has index -1.
        target = indices[..., 0] if mask is None else indices[..., 0].masked_fill(~mask, -1)
        real = target >= 0
        z = self.distilled_logits(tokens, real).reshape(-1, self.num_experts)
        total = torch.nn.functional.cross_entropy(
            z, target.reshape(-1), ignore_index=-1, reduction="sum")
        return total / real.sum().clamp(min=1)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self.ops.router_logits(h, self.centroids)

    def scores(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        tokens: torch.Tensor | None = None,
    ) -> Scores:
        return Scores(self.logits(real_tokens(h, mask)), score="sigmoid")

    def forward(
        self,
        h: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        tokens: torch.Tensor | None = None,
    ) -> Routing:
        z = self.logits(real_tokens(h, mask))
        chooser = z
        if self.stage == 2:
            if tokens is None:
                raise ValueError("TwoStageStableMoE: expected 'tokens' in stage 2, found None")
            chooser = self.distilled_logits(tokens, mask)
        _, indices = self.select(chooser.detach(), mask, kind="logits", renorm=True)
        gates = z.gather(-1, indices.clamp(min=0)).sigmoid() * self.route_scale
        return Routing(torch.where(indices >= 0, gates, 0.0), indices, logits=z)


def _follow_stage(router: TwoStageStableMoE, _: object) -> None:
    router._enter_stage(2 if bool(router.frozen) else 1)
