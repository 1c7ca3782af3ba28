"""Statistics over tokens: dispersion of clusters, the graph of experts."""

from typing import Any

import torch

import moe_mlir
from moe_mlir import reference

from ..rows import Case, Goal, assert_within, normal


def mad_dispersion(n: int, d: int, e: int, **options: Any) -> Case:
    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        assign = torch.randint(0, e, (n,), generator=generator)
        return normal(n, d, seed=seed), assign

    def eager(h, assign):
        """As the paper's public code: index_reduce with mean."""
        zero = torch.zeros(e, d)
        mean = zero.index_reduce(0, assign, h, "mean", include_self=False)
        spread = (h - mean[assign]).abs()
        return zero.index_reduce(0, assign, spread, "mean", include_self=False), mean

    def index_add(h, assign):
        size = torch.bincount(assign, minlength=e).clamp(min=1)[:, None]
        zero = torch.zeros(e, d)
        mean = zero.index_add(0, assign, h) / size
        return zero.index_add(0, assign, (h - mean[assign]).abs()) / size, mean

    def check(values, results):
        h, assign = values
        s, mean, _ = reference.mad_dispersion(h.double(), assign, e)
        r = 2**-22 * float(h.abs().max())
        assert_within(results[0], s, 1e-5 * float(s.max()) + r, "s")
        assert_within(results[1], mean, 4 * r, "mean")

    return Case(
        op="mad_dispersion",
        shape=dict(n=n, d=d, e=e),
        dtype=torch.float32,
        inputs=inputs,
        ours=lambda h, assign: moe_mlir.mad_dispersion(h, assign, e),
        eager=eager,
        flops=4 * n * d,
        # Twice, but the second time a cluster's rows can lie in a cache.
        moved=n * d * 4,
        check=check,
        # Inductor is quick on index_add only, and both give the same means.
        compiled=index_add,
        peer=("index_add", index_add),
        **options,
    )


def adjacency_update(n: int, e: int, k: int, **options: Any) -> Case:
    """Counting co-selections and blending them into the graph, from given choices."""

    def inputs(seed):
        choices = normal(n, e, seed=seed).topk(k).indices
        return normal(e, e, seed=seed + 1).abs(), choices

    def eager(a, chosen):
        selected = torch.zeros(n, e).scatter(-1, chosen, 1.0)
        counts = selected.T @ selected
        return 0.9 * a + 0.1 * counts / counts.sum(1, keepdim=True).clamp(min=1)

    def check(values, result):
        a, chosen = values
        assert_within(result, reference.adjacency_update(a.double(), chosen), 1e-6, "a")

    return Case(
        op="adjacency_update",
        shape=dict(n=n, e=e, k=k),
        dtype=torch.float32,
        inputs=inputs,
        ours=moe_mlir.adjacency_update,
        eager=eager,
        moved=8 * n * k + 8 * e * e,
        check=check,
        **options,
    )


def adjacency_step(n: int, e: int, k: int, **options: Any) -> Case:
    """The whole Symphony step: softmax, mix, selection, update."""

    def ours(z, a):
        gates, indices = moe_mlir.topk_renorm(
            moe_mlir.adjacency_gate(z.softmax(-1), a), k, kind="probs", renorm=False
        )
        _, base = moe_mlir.topk_renorm(z, k)
        return gates, indices, moe_mlir.adjacency_update(a, base)

    def eager(z, a):
        p = z.softmax(-1)
        gates, indices = torch.topk(p @ a.T, k)
        base = torch.topk(p, k).indices
        selected = torch.zeros_like(z).scatter(-1, base, 1.0)
        counts = selected.T @ selected
        share = counts / counts.sum(1, keepdim=True).clamp(min=1)
        return gates, indices, 0.9 * a + 0.1 * share

    def check(values, results):
        z, a = (x.double() for x in values)
        expected = reference.adjacency_update(a, reference.topk_renorm(z, k)[1])
        assert_within(results[2], expected, 1e-6, "a")
        smoothed = reference.adjacency_gate(z.softmax(-1), a)
        assert_within(results[0], smoothed.topk(k).values, 1e-5, "gates")

    return Case(
        op="adjacency_step",
        shape=dict(n=n, e=e, k=k),
        dtype=torch.float32,
        inputs=lambda seed: (normal(n, e, seed=seed), normal(e, e, seed=seed + 1).abs()),
        ours=ours,
        eager=eager,
        flops=2 * n * e * e,
        moved=n * (4 * e + 12 * k) + 8 * e * e,
        exps=n * e,
        check=check,
        **options,
    )


ROWS = [
    mad_dispersion(
        4096, 512, 16, goals=(Goal("eager_ratio", 10), Goal("ratio", 1.1)),
        why="Rows of 2 KiB come from memory in pieces of 512 bytes, by cluster: a third of the "
        "time is waiting for them (540 of 830 us are left where they lie in the third cache), a "
        "twelfth sorts the tokens, and the rest adds rows, by fours in f32 and then in f64.",
    ),
    mad_dispersion(16384, 512, 64, goals=(Goal("eager_ratio", 20), Goal("ratio", 1.5))),
    adjacency_update(4096, 64, 8, goals=(Goal("ratio", 8),)),
    adjacency_step(
        4096, 64, 8, goals=(Goal("ratio", 8),),
        why="Of its time 37 % (with AVX2 35 %) are the gate's product, at 0.72 (0.84) of the peak of "
        "multiplications, 23 % (24 %) the softmax in front, which is torch's own, 34 % (35 %) two "
        "selections and 6 % the counts. With the product at the peak the ratio would be a ninth (a "
        "seventeenth) higher.",
    ),
]
