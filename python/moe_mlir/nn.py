"""Router modules: a row of docs/Spec.md section 4 each, and a layer that runs experts.

`forward(h, mask=None, **state)` returns a `Routing`; what a method carries
from call to call is its `state`, which goes back in as `**state`. With
`impl="torch"` a router runs the plain-torch meaning of its ops instead of the
compiled kernels.
"""

import math
from dataclasses import dataclass, field

import torch

from . import reference

__all__ = [
    "ACMoE",
    "AttentionSMoE",
    "MoELayer",
    "Router",
    "Routing",
    "SMoE",
    "SimilaritySMoE",
    "SymphonySMoE",
    "update_routers",
]


@dataclass
class Routing:
    """Where tokens go. `gates` and `indices` are [.., k], the others [.., experts]."""

    gates: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    state: dict = field(default_factory=dict)


class Router(torch.nn.Module):
    """The linear router that every method starts from: `weight` and `bias`."""

    def __init__(self, d_model, num_experts, k, *, bias=True, route_scale=1.0, impl="moe"):
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(
                f"{type(self).__name__}: expected 'k' in [1, {num_experts}] "
                f"(the number of experts), found {k}"
            )
        if impl not in ("moe", "torch"):
            raise ValueError(
                f"{type(self).__name__}: expected 'impl' to be 'moe' or 'torch', found {impl!r}"
            )
        self.d_model, self.num_experts, self.k = d_model, num_experts, k
        self.route_scale, self.impl = route_scale, impl
        self.weight = torch.nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = torch.nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        bound = 1 / math.sqrt(self.d_model)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    @property
    def ops(self):
        """The namespace of the routing ops: compiled kernels or plain torch."""
        if self.impl == "torch":
            return reference
        from . import ops

        return ops

    def logits(self, h):
        return self.ops.router_logits(h, self.weight, self.bias)

    def select(self, scores, mask, *, kind, renorm):
        return self.ops.topk_renorm(
            scores, self.k, kind=kind, renorm=renorm, route_scale=self.route_scale, mask=mask
        )

    def extra_repr(self):
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"


class SMoE(Router):
    """softmax(TopK(W h + b)); with renorm=False TopK(softmax(W h + b))."""

    def __init__(self, d_model, num_experts, k, *, renorm=True, **options):
        super().__init__(d_model, num_experts, k, **options)
        self.renorm = renorm

    def forward(self, h, mask=None):
        z = self.logits(h)
        gates, indices = self.select(z, mask, kind="logits", renorm=self.renorm)
        return Routing(gates, indices, logits=z)


class SimilaritySMoE(Router):
    """Expert probabilities mixed over similar tokens, then TopM_Renormalize.

    Args:
        causal: may a token see only itself and earlier ones? No default: a
            language model needs True, the paper's own formula is False.
        tau: temperature; `learn_tau` makes it a parameter.
        similarity: give the similarity its own matrix `ws`, initially the identity.
    """

    def __init__(
        self,
        d_model,
        num_experts,
        k,
        *,
        causal,
        tau=1.0,
        learn_tau=False,
        similarity=False,
        window=None,
        restrict="all",
        precision="ieee",
        **options,
    ):
        super().__init__(d_model, num_experts, k, **options)
        self.causal, self.window = causal, window
        self.restrict, self.precision = restrict, precision
        self.tau = torch.nn.Parameter(torch.tensor(float(tau))) if learn_tau else float(tau)
        self.ws = torch.nn.Parameter(torch.eye(d_model)) if similarity else None

    def forward(self, h, mask=None):
        z = self.logits(h)
        p, _ = self.ops.similarity_inform(
            h,
            z.softmax(dim=-1),
            causal=self.causal,
            ws=None if self.ws is None else self.ws.to(h.dtype),
            tau=self.tau,
            mask=mask,
            window=self.window,
            restrict=self.restrict,
            precision=self.precision,
        )
        gates, indices = self.select(p, mask, kind="probs", renorm=True)
        return Routing(gates, indices, probs=p, logits=z)


class AttentionSMoE(Router):
    """Expert probabilities mixed by the posterior of the layer's own attention.

    `forward` takes the attention's q, k, v (or vp), its output u and `wo`, the
    heads' output projections times the number of heads. A token that sees no
    key keeps its own probabilities.
    """

    def __init__(
        self,
        d_model,
        num_experts,
        k,
        *,
        causal,
        sigma=1.0,
        learn_sigma=False,
        scale=None,
        head_mode="min_entropy",
        head_scope="sequence",
        window=None,
        exclude_self=False,
        precision="ieee",
        **options,
    ):
        super().__init__(d_model, num_experts, k, **options)
        self.attributes = dict(
            causal=causal,
            scale=scale,
            head_mode=head_mode,
            head_scope=head_scope,
            window=window,
            exclude_self=exclude_self,
            precision=precision,
        )
        sigma = float(sigma)
        self.sigma = torch.nn.Parameter(torch.tensor(sigma)) if learn_sigma else sigma

    def forward(
        self,
        h,
        mask=None,
        *,
        q,
        k,
        u,
        vp=None,
        v=None,
        wo=None,
        bias=None,
        head_prior=None,
        cached_probs=None,
    ):
        """`cached_probs` [batch, nk - n, experts]: those of keys before h, from `state`."""
        z = self.logits(h)
        own = z.softmax(dim=-1)
        keys = own if cached_probs is None else torch.cat([cached_probs, own], dim=-2)
        p, _, prior_lse, _ = self.ops.attention_posterior(
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
            sigma=self.sigma,
            return_lse=True,
            **self.attributes,
        )
        blind = (prior_lse == -math.inf).all(dim=1)
        p = torch.where(blind[..., None], own.to(p.dtype), p)
        query_mask = None if mask is None else mask[:, -h.shape[-2] :]
        gates, indices = self.select(p, query_mask, kind="probs", renorm=True)
        return Routing(gates, indices, probs=p, logits=z, state={"cached_probs": keys})


class ACMoE(Router):
    """Logits in a metric that stretches what the tokens of an expert agree on.

    The metric M comes from the clusters of the previous layer's experts, so
    `state` goes to the next layer's router: `prev_indices`, `prev_gates` and
    `prev_h`. Without them M is the identity: plain SMoE.

    Args:
        stat_source: tokens that build M, "previous" (those that the previous
            layer routed) or "current".
        mix: how many of the previous experts a token's M blends.
    """

    def __init__(
        self,
        d_model,
        num_experts,
        k,
        *,
        measure="mad",
        eps=1e-4,
        clamp=None,
        scale="cluster",
        include_empty=False,
        stat_source="previous",
        mix=1,
        bias=False,
        **options,
    ):
        super().__init__(d_model, num_experts, k, bias=bias, **options)
        if stat_source not in ("previous", "current"):
            raise ValueError(
                "ACMoE: expected 'stat_source' to be 'previous' or 'current', "
                f"found {stat_source!r}"
            )
        self.measure, self.stat_source, self.mix = measure, stat_source, mix
        self.weights = dict(eps=eps, clamp=clamp, scale=scale, include_empty=include_empty)

    def forward(self, h, mask=None, *, prev_indices=None, prev_gates=None, prev_h=None):
        if prev_indices is None:
            z = self.logits(h)
        else:
            z = self._metric_logits(h, mask, prev_indices, prev_gates, prev_h)
        gates, indices = self.select(z, mask, kind="logits", renorm=True)
        state = {"prev_indices": indices, "prev_gates": gates.detach(), "prev_h": h.detach()}
        return Routing(gates, indices, logits=z, state=state)

    def _metric_logits(self, h, mask, prev_indices, prev_gates, prev_h):
        source = h if self.stat_source == "current" else prev_h
        s, _, count = self.ops.mad_dispersion(
            source, prev_indices[..., 0], self.num_experts, measure=self.measure, mask=mask
        )
        metric = reference.dispersion_weights(s, count, **self.weights)
        mixed = prev_indices[..., : self.mix]
        shares = prev_gates[..., : self.mix] if self.mix > 1 else None
        return reference.ac_logits(h, metric, mixed, self.weight, prev_gates=shares, bias=self.bias)


class SymphonySMoE(Router):
    """Probabilities smoothed over a learnt graph of experts, TopK without renormalising.

    The graph `adjacency` starts at zero, so the first step routes nothing
    (docs/Spec.md E17). In training mode a forward only counts co-selections;
    `update_routers(model)`, once per optimizer step, moves the graph. A forward
    that changed the graph while a backward still reads it would give silently
    wrong gradients, under activation checkpointing in any form.

    A caller that passes `adjacency` carries the graph itself: the updated one
    is in `state`, and the buffers are left alone.
    """

    def __init__(
        self,
        d_model,
        num_experts,
        k,
        *,
        beta=0.9,
        norm="row",
        diagonal=True,
        threshold=0.0,
        cold_start="literal",
        renorm=False,
        **options,
    ):
        super().__init__(d_model, num_experts, k, **options)
        self.threshold, self.cold_start, self.renorm = threshold, cold_start, renorm
        self.update = dict(beta=beta, norm=norm, diagonal=diagonal)
        square = (num_experts, num_experts)
        self.register_buffer("adjacency", torch.zeros(square))
        self.register_buffer("co_selections", torch.zeros(square, dtype=torch.int64))

    def forward(self, h, mask=None, *, adjacency=None):
        z = self.logits(h)
        p = z.softmax(dim=-1)
        graph = self.adjacency if adjacency is None else adjacency
        g = self.ops.adjacency_gate(p, graph, threshold=self.threshold, cold_start=self.cold_start)
        gates, indices = self.select(g, mask, kind="probs", renorm=self.renorm)
        state = {}
        if self.training or adjacency is not None:
            # The graph learns from the base scores, not from the smoothed ones.
            _, base = self.select(z.detach(), mask, kind="logits", renorm=True)
            if adjacency is not None:
                updated = self.ops.adjacency_update(adjacency, base, mask=mask, **self.update)
                state["adjacency"] = updated
            else:
                counts = reference.co_selections(base, self.num_experts, mask=mask)
                self.co_selections.add_(counts)
        return Routing(gates, indices, probs=g, logits=z, state=state)

    @torch.no_grad()
    def update_adjacency(self):
        """Applies the co-selections counted since the last call."""
        blended = reference.blend_counts(self.adjacency, self.co_selections, **self.update)
        self.adjacency.copy_(blended)
        self.co_selections.zero_()


def update_routers(model):
    """Applies what the routers of a model counted; once per optimizer step.

    With data-parallel training, sum the `co_selections` buffers over the ranks first.
    """
    for module in model.modules():
        if isinstance(module, SymphonySMoE):
            module.update_adjacency()


class MoELayer(torch.nn.Module):
    """Experts behind a router, dropless: every token reaches all its experts.

    `w_in` [experts, d_hidden, d_model], `w_out` [experts, d_model, d_hidden].
    `forward` returns the mixed outputs and the `Routing`.
    """

    def __init__(self, router, d_hidden):
        super().__init__()
        self.router = router
        experts, d_model = router.num_experts, router.d_model
        self.w_in = torch.nn.Parameter(torch.empty(experts, d_hidden, d_model))
        self.w_out = torch.nn.Parameter(torch.empty(experts, d_model, d_hidden))
        torch.nn.init.uniform_(self.w_in, -(d_model**-0.5), d_model**-0.5)
        torch.nn.init.uniform_(self.w_out, -(d_hidden**-0.5), d_hidden**-0.5)

    def forward(self, h, mask=None, **state):
        from .experts import run_experts

        routing = self.router(h, mask, **state)
        y = run_experts(h, routing.gates, routing.indices, self.w_in, self.w_out)
        return y, routing
