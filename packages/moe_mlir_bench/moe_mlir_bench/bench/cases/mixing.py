"""Mixing expert probabilities over tokens: similarity and the attention posterior."""

from typing import Any, Literal

import torch

import moe_mlir
from moe_mlir import reference

from ..rows import Case, Goal, assert_within, check_gradients, normal

_ULP = 2.0**-24


def _pairs(b, n, causal):
    return b * (n * (n + 1) / 2 if causal else n * n)


def _products(b, n):
    """Of tokens with themselves: u_i.u_j is u_j.u_i."""
    return _pairs(b, n, causal=True)


# ----------------------------------------------------------------- similarity


def _similarity_inputs(b, n, d, e, dtype=torch.float32, keys=False):
    def tokens(seed):
        # |u|^2 about 4: a broad mixture, not the one-hot of LayerNorm scale.
        return (normal(b, n, d, seed=seed) * (4 / d) ** 0.5).to(dtype)

    def inputs(seed):
        own = (tokens(seed), normal(b, n, e, seed=seed + 1).softmax(-1))
        return (*own, tokens(seed + 2)) if keys else own

    return inputs


def _eager_similarity(n, causal):
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril()

    def eager(u, probs, uk=None):
        logits = u @ (u if uk is None else uk).mT
        if causal:
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits.softmax(-1) @ probs.to(u.dtype)

    return eager


def _sdpa_similarity(causal):
    def sdpa(u, probs, uk=None):
        attention = torch.nn.functional.scaled_dot_product_attention
        keys = u if uk is None else uk
        return attention(u, keys, probs.to(u.dtype), is_causal=causal, scale=1.0)

    return sdpa


def _each_pair_twice(causal):
    """Ours with keys that are a copy of the queries, which it cannot know."""
    copies = {}

    def mix(u, probs):
        if u.data_ptr() not in copies:
            copies[u.data_ptr()] = u.clone()
        return moe_mlir.similarity_inform(u, probs, keys=copies[u.data_ptr()], causal=causal)[0]

    return mix


def similarity_inform(
    b: int,
    n: int,
    d: int,
    e: int,
    causal: bool,
    dtype: torch.dtype = torch.float32,
    keys: bool = False,
    beside_own: bool = False,
    **options: Any,
) -> Case:
    """Tokens with themselves, or with `keys` of their own. `beside_own`: the peer is the form
    that takes every pair twice, not SDPA."""

    def ours(u, probs, uk=None):
        return moe_mlir.similarity_inform(u, probs, keys=uk, causal=causal)

    def check(values, results):
        u, probs, *given = (x.double() for x in values)
        uk = given[0] if given else None
        expected, _ = reference.similarity_inform(u, probs, keys=uk, causal=causal)
        tol = 1e-6 + 8 * _ULP * float((u @ (u if uk is None else uk).mT).abs().max())
        assert_within(results[0], expected, tol, "p")

    pairs = _pairs(b, n, causal)
    products = pairs if keys else _products(b, n)
    twice = ("each pair twice", _each_pair_twice(causal))
    return Case(
        op="similarity_inform",
        shape=dict(b=b, n=n, d=d, e=e, causal=causal) | (dict(keys=True) if keys else {}),
        dtype=dtype,
        inputs=_similarity_inputs(b, n, d, e, dtype, keys),
        ours=ours,
        eager=_eager_similarity(n, causal),
        flops=2 * (products * d + pairs * e),
        moved=b * n * ((2 if keys else 1) * d * dtype.itemsize + 8 * e + 4),
        exps=pairs,
        check=check,
        peer=twice if beside_own else ("sdpa", _sdpa_similarity(causal)),
        **options,
    )


def similarity_backward(b: int, n: int, d: int, e: int, causal: bool, **options: Any) -> Case:
    def inputs(seed):
        u, probs = _similarity_inputs(b, n, d, e)(seed)
        return u, probs, normal(b, n, e, seed=seed + 2)

    eager = _eager_similarity(n, causal)
    pairs = _pairs(b, n, causal)
    return Case(
        op="similarity_inform_backward",
        shape=dict(b=b, n=n, d=d, e=e, causal=causal),
        dtype=torch.float32,
        inputs=inputs,
        ours=lambda u, probs: moe_mlir.similarity_inform(u, probs, causal=causal)[0],
        eager=eager,
        gradients=(0, 1),
        # The logits again and their gradient times the tokens of either side, once
        # for a symmetric pair; and three products with e.
        flops=2 * (3 * _products(b, n) * d + 3 * pairs * e),
        moved=b * n * (8 * d + 16 * e + 4),
        exps=pairs,
        check=check_gradients(eager, (0, 1)),
        **options,
    )


# ------------------------------------------------------------------ posterior


def _posterior_inputs(b, heads, n, width, d, e):
    def inputs(seed):
        def part(offset, *shape, scale=1.0):
            return scale * normal(*shape, seed=seed + offset)

        return (
            part(0, b, heads, n, width),
            part(1, b, heads, n, width),
            part(2, b, n, d, scale=d**-0.5),
            part(3, b, n, e).softmax(-1),
            part(4, b, heads, n, width, scale=width**-0.5),
            part(5, heads, d, width, scale=d**-0.5),
        )

    return inputs


def _eager_posterior(n, width, causal, mode):
    """P0 (13), (17) as written: v' = W_O v, squared distances, an N x N posterior."""
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril()

    def of_head(logits, u, means, e):
        distance = (u[:, :, None, :] - means[:, None]).square().sum(-1)
        return (logits - distance / 2).softmax(-1) @ e

    def eager(q, k, u, e, v, wo):
        logits = q @ k.mT * width**-0.5
        if causal:
            logits = logits.masked_fill(hidden, -torch.inf)
        prior = logits.softmax(-1)
        means = torch.einsum("bhjc,hdc->bhjd", v, wo)
        entropy = -(prior * prior.clamp_min(1e-30).log()).sum(-1).mean(-1)
        if mode == "min_entropy":
            rows = torch.arange(q.shape[0])
            head = entropy.argmin(1)
            return of_head(logits[rows, head], u, means[rows, head], e)
        squares = means.square().sum(-1)[:, :, None] / 2 - torch.einsum(
            "bid,bhjd->bhij", u, means
        )
        joint = prior * torch.exp(-squares)
        joint = joint / joint.sum((1, 3), keepdim=True)
        return torch.einsum("bhij,bje->bie", joint, e)

    return eager


def _posterior_check(causal, mode):
    def check(values, results):
        q, k, u, e, v, wo = (x.double() for x in values)
        expected = reference.attention_posterior(
            q, k, u, e, v=v, wo=wo, causal=causal, head_mode=mode
        )[0]
        found = results[0] if isinstance(results, tuple) else results
        assert_within(found, expected, 1e-4, "p")

    return check


def attention_posterior(
    b: int,
    heads: int,
    n: int,
    width: int,
    d: int,
    e: int,
    causal: bool,
    mode: Literal["min_entropy", "all"] | int,
    **options: Any,
) -> Case:
    chosen = heads if mode == "all" else 1
    pairs = _pairs(b, n, causal)
    return Case(
        op="attention_posterior",
        shape=dict(b=b, h=heads, n=n, dh=width, d=d, e=e, causal=causal, mode=mode),
        dtype=torch.float32,
        inputs=_posterior_inputs(b, heads, n, width, d, e),
        ours=lambda q, k, u, e, v, wo: moe_mlir.attention_posterior(
            q, k, u, e, v=v, wo=wo, causal=causal, head_mode=mode
        )[0],
        eager=_eager_posterior(n, width, causal, mode),
        # The prior of every head; of those that take part the joint and the mix.
        flops=2 * pairs * (heads * width + chosen * (2 * width + e)),
        moved=4 * b * n * (3 * heads * width + d + 2 * e),
        exps=pairs * (heads + chosen),
        check=_posterior_check(causal, mode),
        **options,
    )


def posterior_backward(
    b: int,
    heads: int,
    n: int,
    width: int,
    d: int,
    e: int,
    causal: bool,
    **options: Any,
) -> Case:
    def inputs(seed):
        return *_posterior_inputs(b, heads, n, width, d, e)(seed), normal(b, n, e, seed=seed + 9)

    def ours(q, k, u, e, v, wo):
        return moe_mlir.attention_posterior(q, k, u, e, v=v, wo=wo, causal=causal)[0]

    eager = _eager_posterior(n, width, causal, "min_entropy")
    places = (0, 1, 2, 3, 4, 5)
    pairs = _pairs(b, n, causal)
    return Case(
        op="attention_posterior_backward",
        shape=dict(b=b, h=heads, n=n, dh=width, d=d, e=e, causal=causal),
        dtype=torch.float32,
        inputs=inputs,
        ours=ours,
        eager=eager,
        gradients=places,
        flops=2 * pairs * (6 * width + 2 * e),
        moved=8 * b * n * (3 * heads * width + d + 2 * e),
        exps=pairs,
        check=check_gradients(eager, places, tol=1e-3),
        **options,
    )


# ------------------------------------------------------------------ attention


def _eager_attention(n, width, causal):
    """The output, and the mean entropies by which a head is chosen: P0 (15)."""
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril()

    def eager(q, k, v):
        logits = q @ k.mT * width**-0.5
        if causal:
            logits = logits.masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        return weights @ v, entropy

    return eager


def attention(b: int, heads: int, n: int, width: int, causal: bool, **options: Any) -> Case:
    """With the entropies of its rows; the peer is SDPA, which has none."""

    def inputs(seed):
        return tuple(normal(b, heads, n, width, seed=seed + i) for i in range(3))

    def ours(q, k, v):
        out, _, row_entropy = moe_mlir.attention(q, k, v, causal=causal)
        return out, row_entropy

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def check(values, results):
        out, _, row_entropy = reference.attention(*(x.double() for x in values), causal=causal)
        assert_within(results[0], out, 1e-4, "out")
        assert_within(results[1], row_entropy, 1e-4, "row_entropy")

    pairs = _pairs(b, n, causal) * heads
    return Case(
        op="attention",
        shape=dict(b=b, h=heads, n=n, dh=width, causal=causal),
        dtype=torch.float32,
        inputs=inputs,
        ours=ours,
        eager=_eager_attention(n, width, causal),
        flops=4 * pairs * width,
        moved=16 * b * heads * n * width,
        exps=pairs,
        check=check,
        peer=("sdpa", sdpa),
        **options,
    )


# Shares are samples of a profile on a Zen 4 with AVX2, where the goals are missed.
_KEYS_PACKED = (
    "With AVX2 three quarters of the time are the loops of products, which run at the peak; 10 % "
    "begin and end their chains of 64 products, which keep log-sum-exps in tolerance, and ask for "
    "the next rows; 8 % are exponentials, running maxima and sums, 3 % products with values and "
    "2 % packing keys for 192 queries. Twice or four times as many queries, or no requests, "
    "change nothing or cost 2 to 5 %."
)
_EACH_PAIR_ONCE = (
    "Of 12 blocks of columns each is met twice within itself, a twelfth more than the limit counts; "
    "exponentials are taken for either role of a pair."
)
_THREE_PRODUCTS = (
    "Torch keeps the matrix of tokens by tokens and needs two products of all pairs; ours takes "
    "three of half of them, one of which computes the matrix again, in memory linear in the tokens. "
    "With AVX2 82 % of the time are loops of multiply-adds and 7 % begin and end their sums over "
    "16 columns, as many as 16 registers leave; 1.5x would take 89 % of the limit."
)
_RATIO = Goal("ratio", 2, beside_fast=1.3)
_OWN = Goal("peer_ratio", 1.6)
_AT_LIMIT = (Goal("percent_of_limit", 85),)

ROWS = [
    similarity_inform(
        1, 768, 352, 16, causal=False, beside_own=True, goals=(_RATIO, _OWN), why=_EACH_PAIR_ONCE
    ),
    similarity_inform(
        1, 4096, 352, 16, causal=False, beside_own=True, goals=(_RATIO, _OWN), why=_EACH_PAIR_ONCE
    ),
    similarity_inform(
        1, 768, 352, 16, causal=False, keys=True, goals=_AT_LIMIT, why=_KEYS_PACKED
    ),
    similarity_inform(
        1, 4096, 352, 16, causal=False, keys=True, goals=_AT_LIMIT, why=_KEYS_PACKED
    ),
    similarity_inform(4, 512, 352, 16, causal=True, goals=(_RATIO,)),
    similarity_inform(1, 4096, 352, 16, causal=True, quick=False),
    similarity_inform(
        1, 768, 352, 16, causal=False, dtype=torch.bfloat16, goals=(Goal("ratio", 1.2),)
    ),
    similarity_backward(
        1, 768, 352, 16, causal=False, goals=(Goal("ratio", 1.5),), why=_THREE_PRODUCTS
    ),
    similarity_backward(
        1, 768, 352, 16, causal=True, goals=(Goal("ratio", 1.5),), why=_THREE_PRODUCTS
    ),
    attention(4, 8, 512, 44, causal=True),
    attention(1, 8, 2048, 64, causal=True, quick=False),
    attention_posterior(
        1, 8, 512, 44, 352, 16, causal=True, mode="min_entropy", goals=(Goal("eager_ratio", 5),)
    ),
    attention_posterior(
        1, 8, 512, 44, 352, 16, causal=True, mode="all", goals=(Goal("eager_ratio", 5),)
    ),
    posterior_backward(1, 8, 512, 44, 352, 16, causal=True, goals=(Goal("ratio", 1.5),)),
]
