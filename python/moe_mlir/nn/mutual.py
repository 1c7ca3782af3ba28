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

    def repr_options(self) -> dict[str, Any]:
        mine = {"causal": self.causal, "tau": self.tau, "similarity": self.ws is not None}
        others = {"window": self.window, "restrict": self.restrict, "precision": self.precision}
        return {**mine, **others, **super().repr_options()}

    def mix(
        self, h: torch.Tensor, p: torch.Tensor, z: torch.Tensor | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        p, _ = self.ops.similarity_inform(
            h,
            p,
            causal=self.causal,
            weight=None if self.ws is None else self.ws.to(h.dtype),
            tau=self.tau,
            mask=mask,
            window=self.window,
            restrict=self.restrict,
            precision=self.precision,
        )
        return p, {}


class AttentionSMoE(ComposedRouter):
    """Expert probabilities mixed by the posterior of the layer's own attention: P0 (13), (17).

    `forward` takes the attention's q, k, v (or `projected_v`), its output `attn_output`
    and `wo`, the heads' output projections times the number of heads. A token that sees no
    key keeps its own probabilities. head_mode="min_entropy" is the paper's head
    approximation (17), "all" its full posterior (13).

    Args:
        causal: may a token see only itself and earlier ones? No default: a
            language model needs True, the paper's own formula is False.
        sigma: deviation of the Gaussians; `learn_sigma` makes it a parameter.
        head_mode: "min_entropy", "all", or the index of a fixed head.
        head_scope: whose entropies choose the head of "min_entropy". "sequence" is
            equation (15): one head a sequence, the least mean entropy over all its rows;
            "batch" has one head for the whole batch. With both, later tokens can change
            how earlier ones are routed. "prefix" chooses a head for each token, by the
            rows up to its own: the causal form of (15), the same in training and in
            decoding. It costs what "all" does. Default: "prefix" where `causal`, else
            "sequence".
        scale, window, exclude_self, precision: as in `moe_mlir.attention_posterior`.

    The router chooses a head by its entropy. If `moe_mlir.attention` is the layer's
    attention, pass its `row_lse` and `row_entropy`; otherwise the router computes them
    in a second pass over the keys of all heads.

    >>> router = AttentionSMoE(16, 8, 2, causal=True)
    >>> h, heads = torch.randn(1, 4, 16), torch.randn(1, 2, 4, 8)
    >>> wo = torch.randn(2, 16, 8)
    >>> out, row_lse, row_entropy = moe_mlir.attention(heads, heads, heads, causal=True)
    >>> u = torch.einsum("bhnw,hdw->bnd", out, wo) / 2
    >>> routing = router(h + u, q=heads, k=heads, attn_output=u, v=heads, wo=wo,
    ...                  row_lse=row_lse, row_entropy=row_entropy)
    >>> routing.gates.shape
    torch.Size([1, 4, 2])
    """

    masks_own_keys = True
    renamed_inputs = {"u": "attn_output", "vp": "projected_v"}

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
        head_scope: Literal["sequence", "batch", "prefix"] | None = None,
        window: int | None = None,
        exclude_self: bool = False,
        precision: Literal["ieee", "tf32"] = "ieee",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_experts, k, device=device, dtype=dtype, **options)
        if head_scope is None:
            head_scope = "prefix" if causal else "sequence"
        elif head_scope not in ("sequence", "batch", "prefix"):
            raise ValueError(
                "AttentionSMoE: expected 'head_scope' to be 'sequence', 'batch' or 'prefix', "
                f"found {head_scope!r}"
            )
        elif head_scope == "prefix" and not causal:
            raise ValueError(
                "AttentionSMoE: expected 'head_scope' to be 'sequence' or 'batch' with "
                "causal=False, found 'prefix', which chooses heads for causal attention"
            )
        self.head_mode, self.head_scope = head_mode, head_scope
        # What decides the attention's weights.
        self.pairs = dict(
            causal=causal,
            scale=scale,
            window=window,
            exclude_self=exclude_self,
            precision=precision,
        )
        self._own_number("sigma", sigma, learn_sigma)

    def repr_options(self) -> dict[str, Any]:
        heads = {"head_mode": self.head_mode, "head_scope": self.head_scope}
        return {"sigma": self.sigma, **heads, **self.pairs, **super().repr_options()}

    def mix(
        self,
        h: torch.Tensor,
        p: torch.Tensor,
        z: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        attn_output: torch.Tensor,
        projected_v: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        wo: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        head_prior: torch.Tensor | None = None,
        row_lse: torch.Tensor | None = None,
        row_entropy: torch.Tensor | None = None,
        query_mask: torch.Tensor | None = None,
        cached_probs: torch.Tensor | None = None,
        cached_entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """`query_mask` [batch, n]: the real tokens of h where `mask` covers cached keys too.
        `cached_probs` [batch, nk - n, experts]: those of keys before h, from `state`.
        `cached_entropy` [batch, heads]: with head_scope "prefix", the summed entropies of
        the rows before h, from `state`.

        `row_lse` and `row_entropy` are what `moe_mlir.attention` returned beside
        the attention's output; with them the router adds no pass over all heads.
        """
        keys = p if cached_probs is None else torch.cat([cached_probs, p], dim=-2)
        state = {"cached_probs": keys}
        mode: Any = self.head_mode
        chosen = None
        if self._check_head_inputs(head_prior, cached_probs, cached_entropy):
            rows = row_entropy
            if rows is None:
                _, rows = self.ops.attention_entropy(q, k, bias=bias, mask=mask, **self.pairs)
            real = self.token_mask(h, mask) if query_mask is None else query_mask
            before_and_at = _running_sums(rows, real, cached_entropy)
            state["cached_entropy"] = before_and_at[..., -1]
            # The posterior of all heads, with all the weight on one, is that of the one.
            chosen = _lowest_head(before_and_at[..., 1:].transpose(-1, -2))
            mode, head_prior = "all", chosen.to(torch.float32)
        mixed, _, prior_lse, _ = self.ops.attention_posterior(
            q,
            k,
            attn_output,
            keys,
            projected_v=projected_v,
            v=v,
            wo=wo,
            bias=bias,
            head_prior=head_prior,
            mask=mask,
            query_mask=query_mask,
            row_lse=row_lse,
            row_entropy=row_entropy,
            sigma=self.sigma,
            head_mode=mode,
            head_scope="sequence" if self.head_scope == "prefix" else self.head_scope,
            return_lse=True,
            **self.pairs,
        )
        hidden = prior_lse == -math.inf
        if chosen is not None:
            hidden = hidden | ~chosen.transpose(-1, -2)
        blind = hidden.all(dim=1)
        return torch.where(blind[..., None], p.to(mixed.dtype), mixed), state

    def _check_head_inputs(
        self,
        head_prior: torch.Tensor | None,
        cached_probs: torch.Tensor | None,
        cached_entropy: torch.Tensor | None,
    ) -> bool:
        """Whether each token has a head of its own; refuses inputs that do not fit this."""
        by_prefix = self.head_mode == "min_entropy" and self.head_scope == "prefix"
        if by_prefix and head_prior is not None:
            raise ValueError(
                "AttentionSMoE: expected 'head_prior' with head_mode='all' only, found it with "
                "head_mode='min_entropy'"
            )
        if by_prefix and (cached_probs is None) != (cached_entropy is None):
            found = "cached_probs" if cached_entropy is None else "cached_entropy"
            raise ValueError(
                "AttentionSMoE: expected 'cached_probs' and 'cached_entropy' together, as a "
                f"call's state has them, found '{found}' only"
            )
        if not by_prefix and cached_entropy is not None:
            raise ValueError(
                "AttentionSMoE: expected no 'cached_entropy' with head_mode="
                f"{self.head_mode!r} and head_scope={self.head_scope!r}, found one"
            )
        return by_prefix


def _running_sums(
    rows: torch.Tensor, real: torch.Tensor | None, before: torch.Tensor | None
) -> torch.Tensor:
    """Sums [B,H,1+N] of the entropies [B,H,N] of real rows: `before` them, and up to each.

    All heads have as many rows, so the least sum is the least mean. Sums are
    float64: in float32 a long sequence would add rows to a total that hardly sees them.
    """
    rows = rows.detach().to(torch.float64)
    if real is not None:
        rows = torch.where(real[..., None, :], rows, 0.0)
    start = rows.new_zeros(rows.shape[:2]) if before is None else before.to(torch.float64)
    start = start[..., None]
    return torch.cat([start, start + rows.cumsum(dim=-1)], dim=-1)


def _lowest_head(sums: torch.Tensor) -> torch.Tensor:
    """Where [.., H] the least sum is: NaN last, ties to the lower head (E19)."""
    sums = torch.where(sums.isnan(), math.inf, sums)
    least = sums == sums.amin(dim=-1, keepdim=True)
    return least & (least.cumsum(dim=-1) == 1)
