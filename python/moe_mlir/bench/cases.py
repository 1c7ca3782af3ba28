"""What is measured: every shape for which docs state a goal, and a few beside them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import moe_mlir
from moe_mlir import reference

ULP = 2.0**-24


@dataclass
class Case:
    """One row: `inputs(seed)` feeds `ours`, `eager` and `peer` alike."""

    op: str
    shape: dict
    dtype: torch.dtype
    inputs: Callable
    ours: Callable
    eager: Callable
    flops: float
    moved: float  # bytes that must be read or written once
    check: Callable  # (inputs, results of ours) -> None, raises AssertionError
    peer: tuple | None = None  # (name, function)
    quick: bool = True

    @property
    def title(self):
        shape = " ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.op} {shape} {str(self.dtype).removeprefix('torch.')}"


def _normal(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def _assert_within(actual, expected, tol, what):
    error = float((actual.double() - expected).abs().max())
    assert error <= tol, f"{what}: error {error:.2e} exceeds {tol:.2e}"


# ------------------------------------------------------------------ selection


def _eager_topk(z, k):
    """Softmax, topk, renormalise: the router of most models."""
    weights, indices = torch.topk(z.softmax(-1), k)
    return weights / weights.sum(-1, keepdim=True), indices


def _check_selection(z, gates, indices):
    expected, order = reference.topk_renorm(z.double(), gates.shape[-1])
    assert torch.equal(indices, order), "the selected experts differ from the reference"
    _assert_within(gates, expected, 1e-6 + 8 * ULP * float(z.abs().max()), "gates")


def topk_renorm(n, e, k, dtype=torch.float32, quick=True):
    return Case(
        op="topk_renorm",
        shape=dict(n=n, e=e, k=k),
        dtype=dtype,
        inputs=lambda seed: (_normal(n, e, seed=seed, dtype=dtype),),
        ours=lambda z: moe_mlir.topk_renorm(z, k),
        eager=lambda z: _eager_topk(z, k),
        flops=0,
        moved=n * (e * dtype.itemsize + k * 12),
        check=lambda inputs, results: _check_selection(inputs[0], *results),
        quick=quick,
    )


def router(n, d, e, k, dtype=torch.float32, quick=True):
    """The router GEMM and the selection on its logits."""

    def ours(h, weight):
        return moe_mlir.topk_renorm(moe_mlir.router_logits(h, weight), k)

    def check(inputs, results):
        z = reference.router_logits(*(x.double() for x in inputs))
        gates, indices = results
        # Near ties may select differently: judge the gates of the same experts.
        chosen = z.gather(-1, indices)
        tol = 1e-6 + (8 + d**0.5) * ULP * float(z.abs().max())
        kth = z.topk(k).values[:, -1:]
        assert bool((chosen >= kth - tol).all()), "a selected expert is below the k-th best"
        _assert_within(gates, chosen.softmax(-1), 2 * tol, "gates")

    return Case(
        op="router",
        shape=dict(n=n, d=d, e=e, k=k),
        dtype=dtype,
        inputs=lambda seed: (
            _normal(n, d, seed=seed, dtype=dtype),
            _normal(e, d, seed=seed + 1, dtype=dtype) / d**0.5,
        ),
        ours=ours,
        eager=lambda h, weight: _eager_topk((h @ weight.T).float(), k),
        flops=2 * n * d * e,
        moved=(n * d + e * d) * dtype.itemsize + n * k * 12,
        check=check,
        quick=quick,
    )


# --------------------------------------------------------------------- mixing


def similarity_inform(b, n, d, e, causal, dtype=torch.float32, quick=True):
    def inputs(seed):
        # |u|^2 about 16: a broad mixture, not the one-hot of LayerNorm scale.
        u = _normal(b, n, d, seed=seed) * (16 / d) ** 0.5
        return u.to(dtype), _normal(b, n, e, seed=seed + 1).softmax(-1)

    def eager(u, probs):
        logits = u @ u.mT
        if causal:
            logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        return logits.softmax(-1) @ probs.to(u.dtype)

    def sdpa(u, probs):
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(u, u, probs.to(u.dtype), is_causal=causal, scale=1.0)

    def check(values, results):
        u, probs = (x.double() for x in values)
        expected, _ = reference.similarity_inform(u, probs, causal=causal)
        tol = 1e-6 + 8 * ULP * float((u @ u.mT).abs().max())
        _assert_within(results[0], expected, tol, "p")

    pairs = b * (n * (n + 1) / 2 if causal else n * n)
    return Case(
        op="similarity_inform",
        shape=dict(b=b, n=n, d=d, e=e, causal=causal),
        dtype=dtype,
        inputs=inputs,
        ours=lambda u, probs: moe_mlir.similarity_inform(u, probs, causal=causal),
        eager=eager,
        flops=2 * pairs * (d + e),
        moved=b * n * (d * dtype.itemsize + 8 * e + 4),
        check=check,
        peer=("sdpa", sdpa),
        quick=quick,
    )


# ----------------------------------------------------------------- statistics


def mad_dispersion(n, d, e, quick=True):
    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        assign = torch.randint(0, e, (n,), generator=generator)
        return _normal(n, d, seed=seed), assign

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
        _assert_within(results[0], s, 1e-5 * float(s.max()) + r, "s")
        _assert_within(results[1], mean, 4 * r, "mean")

    return Case(
        op="mad_dispersion",
        shape=dict(n=n, d=d, e=e),
        dtype=torch.float32,
        inputs=inputs,
        ours=lambda h, assign: moe_mlir.mad_dispersion(h, assign, e),
        eager=eager,
        flops=4 * n * d,
        moved=2 * n * d * 4,
        check=check,
        peer=("index_add", index_add),
        quick=quick,
    )


def adjacency_step(n, e, k, quick=True):
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
        _assert_within(results[2], expected, 1e-6, "a")
        smoothed = reference.adjacency_gate(z.softmax(-1), a)
        _assert_within(results[0], smoothed.topk(k).values, 1e-5, "gates")

    return Case(
        op="adjacency_step",
        shape=dict(n=n, e=e, k=k),
        dtype=torch.float32,
        inputs=lambda seed: (_normal(n, e, seed=seed), _normal(e, e, seed=seed + 1).abs()),
        ours=ours,
        eager=eager,
        flops=2 * n * e * e,
        moved=n * (4 * e + 12 * k) + 8 * e * e,
        check=check,
        quick=quick,
    )


CASES = [
    topk_renorm(4096, 16, 2),
    topk_renorm(4096, 64, 8),
    topk_renorm(4096, 256, 8),
    topk_renorm(1, 128, 8, quick=False),
    topk_renorm(4096, 128, 8, dtype=torch.bfloat16, quick=False),
    router(4096, 1024, 64, 8),
    router(4096, 352, 16, 2, quick=False),
    similarity_inform(1, 768, 352, 16, causal=False),
    similarity_inform(4, 512, 352, 16, causal=True),
    similarity_inform(1, 768, 352, 16, causal=False, dtype=torch.bfloat16),
    similarity_inform(1, 4096, 352, 16, causal=True, quick=False),
    mad_dispersion(4096, 512, 16),
    mad_dispersion(16384, 512, 64, quick=False),
    adjacency_step(4096, 64, 8),
]
