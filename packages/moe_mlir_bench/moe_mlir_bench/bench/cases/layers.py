"""What a method's routing adds to a whole layer, beside the papers' own overheads.

The layer is the papers' language model at its medium size: causal attention,
then experts of the model's width. What a method replaces (routing, and where it
reads the attention's entropies the attention itself) and what plain SMoE has in
its place are timed in turns on the same tokens; what the method adds is held
against the time of the layer with SMoE.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import moe_mlir
from moe_mlir import nn

from .. import timing
from ..rows import Context, Goal, make_record, make_title, normal

_HEADS = 8


class _Tokens:
    """A batch of tokens and what the attention before the experts made of them."""

    def __init__(self, b, n, d):
        h = normal(b, n, d, seed=0)
        self.h = torch.nn.functional.layer_norm(h, (d,))
        self.weights = normal(3, d, d, seed=1) / d**0.5
        self.wo = normal(d, d, seed=2) / d**0.5
        self.q, self.k, self.v = (
            (self.h @ w.T).view(b, n, _HEADS, d // _HEADS).transpose(1, 2).contiguous()
            for w in self.weights
        )
        self.u = self.project(self.attend_in_torch())

    def attend_in_torch(self):
        return torch.nn.functional.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=True
        )

    def attend(self):
        """The mixing kernel as attention, without entropies: heads are batches of their own."""
        q, k, v = (x.flatten(0, 1) for x in (self.q, self.k, self.v))
        tau = q.shape[-1] ** 0.5
        out, _ = moe_mlir.similarity_inform(q, v, keys=k, tau=tau, causal=True)
        return out.view(self.q.shape)

    def project(self, attended):
        return attended.transpose(1, 2).reshape(self.h.shape) @ self.wo.T

    def run_layer(self, experts, attend):
        """The layer: products of q, k and v, attention, output product, routing and experts."""
        for w in self.weights:
            self.h @ w.T
        self.project(attend())
        return experts(self.h)

    def output_projections(self):
        """The heads' slices of the output projection, times the number of heads."""
        d = self.wo.shape[0]
        slices = self.wo.view(d, _HEADS, d // _HEADS).transpose(0, 1)
        return (_HEADS * slices).contiguous()


def _similarity(tokens, sizes):
    router = nn.SimilaritySMoE(*sizes, causal=True)
    return router, lambda: router(tokens.h)


def _attention(tokens, sizes, head_scope="sequence"):
    """With the attention that emits its entropies, and the head of equation (15)."""
    router = nn.AttentionSMoE(*sizes, causal=True, head_scope=head_scope)
    wo, qkv = tokens.output_projections(), (tokens.q, tokens.k, tokens.v)

    def route():
        _, row_lse, row_entropy = moe_mlir.attention(*qkv, causal=True)
        rows = dict(row_lse=row_lse, row_entropy=row_entropy)
        return router(tokens.h, q=tokens.q, k=tokens.k, v=tokens.v, attn_output=tokens.u, wo=wo, **rows)

    return router, route


def _attention_beside(tokens, sizes):
    """Beside another attention: the entropies of all heads take a pass of their own."""
    router = nn.AttentionSMoE(*sizes, causal=True, head_scope="sequence")
    wo = tokens.output_projections()
    return router, lambda: router(
        tokens.h, q=tokens.q, k=tokens.k, v=tokens.v, attn_output=tokens.u, wo=wo
    )


def _attention_prefix(tokens, sizes):
    """Each token's head by the rows up to its own, which causal models have by default."""
    return _attention(tokens, sizes, "prefix")


def _acmoe(tokens, sizes):
    router = nn.ACMoE(*sizes)
    state = nn.ACMoE(*sizes)(tokens.h).state
    return router, lambda: router(tokens.h, **state)


def _symphony(tokens, sizes):
    router = nn.SymphonySMoE(*sizes, cold_start="literal")
    graph = torch.rand(sizes[1], sizes[1])
    return router, lambda: router(tokens.h, adjacency=graph)


@dataclass
class Overhead:
    """One method; `paper` is its published ratio of a model with it to one without."""

    method: str
    make: Callable
    paper: float
    b: int = 48
    n: int = 512
    d: int = 352
    e: int = 16
    k: int = 2
    dtype: torch.dtype = torch.float32
    op: str = "layer"
    quick: bool = False
    # Of all pairs of tokens, for each: multiply-adds and exponentials.
    products: int = 0
    exps: int = 0
    # Whether the method's attention is ours, because it reads the entropies.
    with_attention: bool = False
    has_goal: bool = True
    why: str = ""

    @property
    def shape(self) -> dict[str, Any]:
        sizes = dict(b=self.b, n=self.n, d=self.d, e=self.e, k=self.k)
        return dict(method=self.method, **sizes)

    @property
    def title(self) -> str:
        return make_title(self.op, self.shape, self.dtype)

    @property
    def goals(self) -> tuple[Goal, ...]:
        if not self.has_goal:
            return ()
        memory = Goal("memory_overhead", 1.001, at_most=True)
        return (Goal("overhead", self.paper, at_most=True), memory)

    def measure(self, context: Context) -> dict[str, Any]:
        torch.manual_seed(0)
        sizes = (self.d, self.e, self.k)
        tokens = _Tokens(self.b, self.n, self.d)
        plain = nn.SMoE(*sizes)
        router, route = self.make(tokens, sizes)
        self._check(router, route())
        experts = nn.MoELayer(plain, self.d)
        attend = tokens.attend if self.with_attention else tokens.attend_in_torch

        def smoe():
            if self.with_attention:
                attend()
            return plain(tokens.h)

        thunks = {"ours": [route], "smoe": [smoe]}
        samples = timing.Turns(thunks, context.threads).samples(context.rounds)
        whole = {"layer": [lambda: tokens.run_layer(experts, attend)]}
        base = min(timing.Turns(whole, context.threads).samples(3)["layer"])
        ours_us, smoe_us = min(samples["ours"]), min(samples["smoe"])
        peaks = [timing.peak_mb(run) for run in (route, smoe, whole["layer"][0])]
        return make_record(
            self,
            context,
            ours_us=ours_us,
            ours_median_us=statistics.median(samples["ours"]),
            smoe_us=smoe_us,
            layer_us=base,
            overhead=1 + (ours_us - smoe_us) / base,
            paper_overhead=self.paper,
            limit_overhead=self._limit(context.machine, base),
            memory_overhead=_memory_overhead(*peaks),
            peak_mb=peaks[0],
        )

    def _limit(self, machine, layer_us):
        """The overhead, were pairs of tokens all the work and the core at its peaks."""
        if not self.products:
            return None
        pairs = self.b * self.n * (self.n + 1) / 2
        limit = machine.limit(2 * pairs * self.products, 0, pairs * self.exps)
        # Exponentials are polynomials on the units that multiply.
        return 1 + (limit.flops_us + limit.exps_us) / layer_us

    def _check(self, router, routing):
        assert routing.indices.shape == (self.b, self.n, self.k), "expected k choices a token"
        chosen = routing.indices
        assert bool(((chosen >= 0) & (chosen < self.e)).all()), "an index is no expert"
        assert bool(torch.isfinite(routing.gates).all()), "a gate is not finite"


def _memory_overhead(ours, smoe, layer):
    """The peak of the layer, had its routing the method's peak."""
    if None in (ours, smoe, layer):
        return None
    # Routing comes before the experts, whose peak is higher: what counts is what
    # lies above it.
    return max(layer, ours) / max(layer, smoe)


ROWS = [
    Overhead("similarity", _similarity, 1.048, products=352 + 16, exps=1),
    # The attention emits the entropies: what is left is the mixing by one head.
    Overhead(
        "attention", _attention, 1.070, products=2 * 44 + 16, exps=1, with_attention=True,
    ),
    Overhead(
        "attention_prefix", _attention_prefix, 1.070, has_goal=False, with_attention=True,
        products=_HEADS * (2 * 2 * 44 + 16), exps=2 * _HEADS,
    ),
    Overhead(
        "attention_beside_torch", _attention_beside, 1.070, has_goal=False,
        products=352 + 2 * 44 + 16, exps=_HEADS + 1,
    ),
    Overhead("acmoe", _acmoe, 1.006),
    Overhead("symphony", _symphony, 1.012),
]
