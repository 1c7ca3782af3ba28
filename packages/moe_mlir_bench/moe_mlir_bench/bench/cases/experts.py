"""The experts behind a router: every run of rows through its expert's weights."""

from typing import Any

import torch

from moe_mlir.experts import run_experts

from ..rows import Case, Goal, assert_within, normal


def grouped_gemm(rows: int, d: int, hidden: int, e: int, **options: Any) -> Case:
    """One layer of all experts on uneven runs of rows, beside one GEMM of the same work."""

    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        experts = torch.randint(0, e, (rows,), generator=generator)
        counts = torch.bincount(experts, minlength=e)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        x = normal(rows, d, seed=seed)
        return x, normal(e, hidden, d, seed=seed + 1) / d**0.5, offsets

    def ours(x, w, offsets):
        return torch.ops.moe.grouped_linear(x, w, None, offsets)

    def eager(x, w, offsets):
        """A mask an expert: what models without a kernel do."""
        ids = torch.arange(e).repeat_interleave(offsets.diff())
        y = x.new_zeros(x.shape[0], hidden)
        for expert in range(e):
            (mine,) = torch.where(ids == expert)
            y.index_copy_(0, mine, x[mine] @ w[expert].T)
        return y

    def one_gemm(x, w, offsets):
        return x @ w[0].T

    def check(values, y):
        assert_within(y, eager(*(x.double() if x.is_floating_point() else x for x in values)),
                      1e-4, "y")

    return Case(
        op="grouped_linear",
        shape=dict(rows=rows, d=d, hidden=hidden, e=e),
        dtype=torch.float32,
        inputs=inputs,
        ours=ours,
        eager=eager,
        peer=("gemm", one_gemm),
        flops=2 * rows * d * hidden,
        moved=4 * (rows * (d + hidden) + e * d * hidden),
        check=check,
        **options,
    )


def experts_layer(n: int, d: int, hidden: int, e: int, k: int, **options: Any) -> Case:
    """Dispatch, both layers and combine, beside the loop over experts of most models."""

    def inputs(seed):
        gates, indices = normal(n, e, seed=seed).softmax(-1).topk(k)
        w_in = normal(e, hidden, d, seed=seed + 1) / d**0.5
        w_out = normal(e, d, hidden, seed=seed + 2) / hidden**0.5
        return normal(n, d, seed=seed + 3), gates, indices, w_in, w_out

    def eager(x, gates, indices, w_in, w_out):
        y = torch.zeros_like(x)
        for expert in range(e):
            token, place = torch.where(indices == expert)
            out = torch.nn.functional.gelu(x[token] @ w_in[expert].T) @ w_out[expert].T
            y.index_add_(0, token, out * gates[token, place, None])
        return y

    def check(values, y):
        expected = eager(*(x.double() if x.is_floating_point() else x for x in values))
        assert_within(y, expected, 1e-4, "y")

    return Case(
        op="run_experts",
        shape=dict(n=n, d=d, hidden=hidden, e=e, k=k),
        dtype=torch.float32,
        inputs=inputs,
        ours=run_experts,
        eager=eager,
        flops=4 * n * k * d * hidden,
        moved=4 * (2 * n * d + 2 * e * d * hidden),
        check=check,
        **options,
    )


ROWS = [
    grouped_gemm(
        8192, 352, 352, 16, goals=(Goal("peer_ratio", 0.9),),
        why="It is the library's GEMM, once an expert, on fewer rows at a time.",
    ),
    experts_layer(4096, 352, 352, 16, 2, quick=False),
]
