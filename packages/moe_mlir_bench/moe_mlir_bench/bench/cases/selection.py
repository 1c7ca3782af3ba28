"""Selecting experts: top-k with gates, the router GEMM in front of it, its gradient."""

from typing import Any

import torch

import moe_mlir
from moe_mlir import reference

from ..rows import Case, Goal, assert_within, check_gradients, normal

_ULP = 2.0**-24


def _eager_topk(z, k):
    """Softmax, topk, renormalise: the router of most models."""
    weights, indices = torch.topk(z.softmax(-1), k)
    return weights / weights.sum(-1, keepdim=True), indices


def _check_selection(z, gates, indices):
    expected, order = reference.topk_renorm(z.double(), gates.shape[-1])
    assert torch.equal(indices, order), "the selected experts differ from the reference"
    assert_within(gates, expected, 1e-6 + 8 * _ULP * float(z.abs().max()), "gates")


def topk_renorm(n: int, e: int, k: int, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    return Case(
        op="topk_renorm",
        shape=dict(n=n, e=e, k=k),
        dtype=dtype,
        inputs=lambda seed: (normal(n, e, seed=seed, dtype=dtype),),
        ours=lambda z: moe_mlir.topk_renorm(z, k),
        eager=lambda z: _eager_topk(z, k),
        moved=n * (e * dtype.itemsize + k * 12),
        exps=n * k,
        check=lambda inputs, results: _check_selection(inputs[0], *results),
        **options,
    )


def grouped_topk(n: int, e: int, k: int, groups: int, kept: int, **options: Any) -> Case:
    """DeepSeek-V3's form: sigmoid scores, a choice bias, the best groups by their two best."""

    def eager(z, bias):
        scores = z.sigmoid()
        choice = scores + bias
        of_group = choice.view(n, groups, -1).topk(2, dim=-1).values.sum(-1)
        best = of_group.topk(kept, dim=-1).indices
        mask = torch.zeros_like(of_group).scatter_(1, best, 1.0)
        mask = mask[..., None].expand(n, groups, e // groups).reshape(n, e)
        indices = choice.masked_fill(mask == 0, -torch.inf).topk(k, dim=-1).indices
        weights = scores.gather(1, indices)
        return weights / weights.sum(-1, keepdim=True), indices

    def ours(z, bias):
        return moe_mlir.grouped_topk(z, k, bias=bias, n_group=groups, topk_group=kept)

    def check(inputs, results):
        z, bias = (x.double() for x in inputs)
        expected, _ = eager(z, bias)
        assert_within(results[0], expected, 1e-5, "gates")

    return Case(
        op="grouped_topk",
        shape=dict(n=n, e=e, k=k, groups=groups, kept=kept),
        dtype=torch.float32,
        inputs=lambda seed: (normal(n, e, seed=seed), 0.01 * normal(e, seed=seed + 1)),
        ours=ours,
        eager=eager,
        moved=n * (4 * e + 12 * k),
        exps=n * e,
        check=check,
        **options,
    )


def topk_backward(n: int, e: int, k: int, *, renorm: bool, **options: Any) -> Case:
    """The gradient by the logits, from the cotangent of the gates."""

    def eager(z):
        weights = torch.topk(z.softmax(-1), k).values
        return weights / weights.sum(-1, keepdim=True) if renorm else weights

    return Case(
        op="topk_renorm_backward",
        shape=dict(n=n, e=e, k=k, renorm=renorm),
        dtype=torch.float32,
        inputs=lambda seed: (normal(n, e, seed=seed), normal(n, k, seed=seed + 1)),
        ours=lambda z: moe_mlir.topk_renorm(z, k, renorm=renorm)[0],
        eager=eager,
        gradients=(0,),
        # Written, and without renorm the scores read too.
        moved=n * (4 * e * (1 if renorm else 2) + 16 * k),
        exps=0 if renorm else n * e,
        check=check_gradients(eager, (0,)),
        **options,
    )


def router(
    n: int,
    d: int,
    e: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    """The router GEMM and the selection on its logits."""

    def ours(h, weight):
        return moe_mlir.topk_renorm(moe_mlir.router_logits(h, weight), k)

    def check(inputs, results):
        z = reference.router_logits(*(x.double() for x in inputs))
        gates, indices = results
        # Near ties may select differently: judge the gates of the same experts.
        chosen = z.gather(-1, indices)
        tol = 1e-6 + (8 + d**0.5) * _ULP * float(z.abs().max())
        kth = z.topk(k).values[:, -1:]
        assert bool((chosen >= kth - tol).all()), "a selected expert is below the k-th best"
        assert_within(gates, chosen.softmax(-1), 2 * tol, "gates")

    return Case(
        op="router",
        shape=dict(n=n, d=d, e=e, k=k),
        dtype=dtype,
        inputs=lambda seed: (
            normal(n, d, seed=seed, dtype=dtype),
            normal(e, d, seed=seed + 1, dtype=dtype) / d**0.5,
        ),
        ours=ours,
        eager=lambda h, weight: _eager_topk((h @ weight.T).float(), k),
        peer=("gemm", lambda h, weight: torch.nn.functional.linear(h, weight)),
        flops=2 * n * d * e,
        moved=(n * d + e * d) * dtype.itemsize + n * k * 12,
        check=check,
        **options,
    )


_FROM_MEMORY = "Rotated scores come from memory; behind a router's GEMM they lie in the caches."

ROWS = [
    topk_renorm(4096, 16, 2, goals=(Goal("ratio", 20),), why=_FROM_MEMORY),
    topk_renorm(4096, 64, 8, goals=(Goal("ratio", 15),), why=_FROM_MEMORY),
    topk_renorm(4096, 256, 8, goals=(Goal("ratio", 15),), why=_FROM_MEMORY),
    topk_renorm(4096, 128, 6),
    topk_renorm(4096, 160, 6),
    topk_renorm(4096, 256, 6),
    topk_renorm(4096, 512, 32),
    topk_renorm(4096, 1024, 32),
    topk_renorm(4096, 2048, 32),
    topk_renorm(1, 128, 8, quick=False),
    topk_renorm(4096, 128, 8, dtype=torch.bfloat16, quick=False),
    grouped_topk(4096, 256, 8, 8, 4, quick=False),
    topk_backward(4096, 64, 8, renorm=True, quick=False),
    topk_backward(4096, 64, 8, renorm=False, quick=False),
    router(4096, 1024, 64, 8, goals=(Goal("ratio", 3, beside_fast=1.3),)),
    router(4096, 352, 16, 2, quick=False),
    router(4096, 1024, 64, 8, dtype=torch.bfloat16, quick=False),
]
