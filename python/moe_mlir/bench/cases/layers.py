"""What a method's routing adds to a whole layer, beside the papers' own overheads.

The layer is the papers' language model at its medium size: causal attention,
then experts of the model's width. A method's routing and that of plain SMoE are
timed in turns on the same tokens; what the method adds is held against the
time of the layer with SMoE.
"""

import statistics
from dataclasses import dataclass

import torch

import moe_mlir
from moe_mlir import nn

from .. import timing
from ..rows import Goal, make_record, make_title, normal

_HEADS = 8


class _Tokens:
    """A batch of tokens and what the attention before the experts made of them."""

    def __init__(self, b, n, d):
        h = normal(b, n, d, seed=0)
        self.h = torch.nn.functional.layer_norm(h, (d,))
        self.weights = normal(3, d, d, seed=1) / d**0.5
        self.wo = normal(d, d, seed=2) / d**0.5
        self.q, self.k, self.v, self.u = self.attend()

    def attend(self):
        b, n, d = self.h.shape
        q, k, v = (
            (self.h @ w.T).view(b, n, _HEADS, d // _HEADS).transpose(1, 2) for w in self.weights
        )
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return q, k, v, o.transpose(1, 2).reshape(b, n, d) @ self.wo.T

    def output_projections(self):
        """The heads' slices of the output projection, times the number of heads."""
        d = self.wo.shape[0]
        slices = self.wo.view(d, _HEADS, d // _HEADS).transpose(0, 1)
        return (_HEADS * slices).contiguous()


def _similarity(tokens, sizes):
    router = nn.SimilaritySMoE(*sizes, causal=True)
    return router, lambda: router(tokens.h)


def _attention(tokens, sizes):
    router = nn.AttentionSMoE(*sizes, causal=True)
    wo = tokens.output_projections()
    inputs = dict(q=tokens.q.contiguous(), k=tokens.k.contiguous(), v=tokens.v.contiguous())
    return router, lambda: router(tokens.h, u=tokens.u, wo=wo, **inputs)


def _acmoe(tokens, sizes):
    router = nn.ACMoE(*sizes)
    state = nn.ACMoE(*sizes)(tokens.h).state
    return router, lambda: router(tokens.h, **state)


def _symphony(tokens, sizes):
    router = nn.SymphonySMoE(*sizes)
    graph = torch.rand(sizes[1], sizes[1])
    return router, lambda: router(tokens.h, adjacency=graph)


@dataclass
class Overhead:
    """One method; `paper` is its published ratio of a model with it to one without."""

    method: str
    make: object
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
    why: str = ""

    @property
    def shape(self):
        sizes = dict(b=self.b, n=self.n, d=self.d, e=self.e, k=self.k)
        return dict(method=self.method, **sizes)

    @property
    def title(self):
        return make_title(self.op, self.shape, self.dtype)

    @property
    def goals(self):
        memory = Goal("memory_overhead", 1.001, at_most=True)
        return (Goal("overhead", self.paper, at_most=True), memory)

    def measure(self, context):
        torch.manual_seed(0)
        sizes = (self.d, self.e, self.k)
        tokens = _Tokens(self.b, self.n, self.d)
        plain = nn.SMoE(*sizes)
        router, route = self.make(tokens, sizes)
        self._check(router, route())
        layer = nn.MoELayer(plain, self.d)
        thunks = {"ours": [route], "smoe": [lambda: plain(tokens.h)]}
        samples = timing.Turns(thunks, context.threads).samples(context.rounds)
        whole = {"layer": [lambda: (tokens.attend(), layer(tokens.h))]}
        base = min(timing.Turns(whole, context.threads).samples(3)["layer"])
        ours, smoe = min(samples["ours"]), min(samples["smoe"])
        peaks = [timing.peak_mb(run) for run in (route, thunks["smoe"][0], whole["layer"][0])]
        return make_record(
            self,
            context,
            ours_us=ours,
            ours_median_us=statistics.median(samples["ours"]),
            smoe_us=smoe,
            layer_us=base,
            overhead=1 + (ours - smoe) / base,
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
    Overhead(
        "attention", _attention, 1.070, products=352 + 2 * 44 + 16, exps=_HEADS + 1,
        why="The entropies of all heads, whose products and exponentials are most of the limit, and "
        "then the mixing by one of them; heads are 44 wide, so that the softmax around a product "
        "takes half as long as the product.",
    ),
    Overhead("acmoe", _acmoe, 1.006),
    Overhead("symphony", _symphony, 1.012),
]
