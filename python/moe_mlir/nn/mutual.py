"""Mutual-Inform SMoE (P0): tokens inform each other's choice of experts."""

import math
from typing import Any, Literal

import torch

from ._composed import ComposedRouter
from ._router import Device


class SimilaritySMoE(ComposedRouter):
    """Expert probabilities mixed over similar tokens, then TopM_Renormalize: P0 (5), (11).

    `base` puts it on another router: P0's Similarity-XMoE is
    `SimilaritySMoE(d, e, k, causal=True, base=XMoE(d, e, k))`, likewise
    SMoEDropout, GLaM and VMoE.

    Args:
        causal: may a token see only itself and earlier ones? No default: a
            language model needs True, the paper's own formula is False.
        tau: temperature; `learn_tau` makes it a parameter.
        similarity: give the similarity its own matrix `ws`, initially the identity.
        window, restrict, precision: as in `moe_mlir.similarity_inform`.

    >>> routing = SimilaritySMoE(16, 8, 2, causal=True)(torch.randn(1, 4, 16))
    >>> torch.allclose(routing.probs.sum(-1), torch.ones(1, 4))
    True
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        causal: bool,
        tau: float = 1.0,
        learn_tau: bool = False,
        similarity: bool = False,
        window: int | None = None,
        restrict: Literal["all", "entropy"] = "all",
        precision: Literal["ieee", "tf32"] = "ieee",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.causal, self.window = causal, window
        self.restrict, self.precision = restrict, precision
        self._own_number("tau", tau, learn_tau)
        self.ws = None
        if similarity:
            self.ws = torch.nn.Parameter(torch.eye(d_model, **self._factory))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.ws is not None:
            torch.nn.init.eye_(self.ws)

    def mix(
        self, h: torch.Tensor, p: torch.Tensor, z: torch.Tensor | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        p, _ = self.ops.similarity_inform(
            h,
            p,
            causal=self.causal,
            ws=None if self.ws is None else self.ws.to(h.dtype),
            tau=self.tau,
            mask=mask,
            window=self.window,
            restrict=self.restrict,
            precision=self.precision,
        )
        return p, {}


class AttentionSMoE(ComposedRouter):
    """Expert probabilities mixed by the posterior of the layer's own attention: P0 (13), (17).

    `forward` takes the attention's q, k, v (or vp), its output u and `wo`, the
    heads' output projections times the number of heads. A token that sees no
    key keeps its own probabilities. head_mode="min_entropy" is the paper's head
    approximation (17), "all" its full posterior (13).

    Causal in full is "all" alone: equation (15) chooses the head of "min_entropy" by the mean
    entropy over all rows of the sequence, so that later tokens can change which head mixes
    earlier ones, and a model that decodes token by token can route otherwise than in training.

    The router chooses a head by its entropy. If `moe_mlir.attention` is the layer's
    attention, pass its `row_lse` and `row_entropy`; otherwise the router computes them
    in a second pass over the keys of all heads.

    >>> router = AttentionSMoE(16, 8, 2, causal=True)
    >>> h, heads = torch.randn(1, 4, 16), torch.randn(1, 2, 4, 8)
    >>> wo = torch.randn(2, 16, 8)
    >>> out, row_lse, row_entropy = moe_mlir.attention(heads, heads, heads, causal=True)
    >>> u = torch.einsum("bhnw,hdw->bnd", out, wo) / 2
    >>> routing = router(h + u, q=heads, k=heads, u=u, v=heads, wo=wo,
    ...                  row_lse=row_lse, row_entropy=row_entropy)
    >>> routing.gates.shape
    torch.Size([1, 4, 2])
    """

    masks_own_keys = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        causal: bool,
        sigma: float = 1.0,
        learn_sigma: bool = False,
        scale: float | None = None,
        head_mode: Literal["min_entropy", "all"] | int = "min_entropy",
        head_scope: Literal["sequence", "batch"] = "sequence",
        window: int | None = None,
        exclude_self: bool = False,
        precision: Literal["ieee", "tf32"] = "ieee",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        self.attributes = dict(
            causal=causal,
            scale=scale,
            head_mode=head_mode,
            head_scope=head_scope,
            window=window,
            exclude_self=exclude_self,
            precision=precision,
        )
        self._own_number("sigma", sigma, learn_sigma)

    def mix(
        self,
        h: torch.Tensor,
        p: torch.Tensor,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        u: torch.Tensor,
        vp: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        wo: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        head_prior: torch.Tensor | None = None,
        row_lse: torch.Tensor | None = None,
        row_entropy: torch.Tensor | None = None,
        query_mask: torch.Tensor | None = None,
        cached_probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """`query_mask` [batch, n]: the real tokens of h where `mask` covers cached keys too.
        `cached_probs` [batch, nk - n, experts]: those of keys before h, from `state`.

        `row_lse` and `row_entropy` are what `moe_mlir.attention` returned beside
        the attention's output; with them the router adds no pass over all heads.
        """
        keys = p if cached_probs is None else torch.cat([cached_probs, p], dim=-2)
        mixed, _, prior_lse, _ = self.ops.attention_posterior(
            q,
            k,
            u,
            keys,
            vp=vp,
            v=v,
            wo=wo,
            bias=bias,
            head_prior=head_prior,
            mask=mask,
            query_mask=query_mask,
            row_lse=row_lse,
            row_entropy=row_entropy,
            sigma=self.sigma,
            return_lse=True,
            **self.attributes,
        )
        blind = (prior_lse == -math.inf).all(dim=1)
        return torch.where(blind[..., None], p.to(mixed.dtype), mixed), {"cached_probs": keys}
