"""Token-mixing ops on random and adversarial tokens, against the float64 reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    SEEDS,
    choice,
    examples,
    features,
    generator,
    normal,
    op,
    padding,
    uniform,
    with_garbage,
)  # fmt: skip
from op_judge import assert_close, assert_same_bits, largest, score_tolerance

from moe_mlir import reference

BATCH = st.sampled_from((0, 1, 2))
LENGTH = st.sampled_from((0, 1, 2, 3, 17, 40))


def routing(batch, n, experts, g):
    """Expert probabilities, some of them one-hot."""
    return normal(batch, n, experts, g=g, scale=choice((1.0, 30.0), g)).softmax(-1)


def tokens(batch, n, d, g):
    return torch.stack([features(n, d, g) for _ in range(batch)]) if batch else torch.empty(0, n, d)


# (features, experts, causal, masked, own keys, ws, window, restrict, tau)
SIMILARITY = (
    (1, 1, True, False, False, False, None, "all", 1.0),
    (7, 3, True, True, False, False, None, "all", 12.0),
    (16, 8, False, True, False, True, None, "all", 1.0),
    (33, 17, True, True, False, False, 5, "all", 0.1),
    (12, 257, False, False, False, False, None, "entropy", 1.0),
    (8, 16, True, True, True, False, None, "all", 12.0),
)


@given(st.sampled_from(SIMILARITY), BATCH, LENGTH, SEEDS)
@examples
def test_similarity_inform(form, batch, n, seed):
    d, experts, causal, masked, own_keys, matrix, window, restrict, tau = form
    g = generator(seed)
    nk = n + 3 if own_keys else n
    u, e = tokens(batch, n, d, g), routing(batch, nk, experts, g)
    uk = tokens(batch, nk, d, g) if own_keys else None
    ws = normal(d, d, g=g, scale=d**-0.5) if matrix else None
    mask = torch.stack([padding(nk, g) for _ in range(batch)]) if masked and batch else None
    mask = torch.empty(0, nk, dtype=torch.bool) if masked and not batch else mask
    clean = [None if x is None else x.double() for x in (u, e, uk, ws)]
    if masked and batch:  # E11
        e = with_garbage(e, mask, g)
        u, uk = (u, with_garbage(uk, mask, g)) if own_keys else (with_garbage(u, mask, g), None)
    options = dict(causal=causal, tau=tau, mask=mask, window=window, restrict=restrict)
    p, lse = op("similarity_inform")(u, e, keys=uk, weight=ws, **options)
    expected, expected_lse = reference.similarity_inform(
        clean[0], clean[1], keys=clean[2], weight=clean[3], **options
    )
    keys = clean[0] if clean[2] is None else clean[2]
    queries = clean[0] if ws is None else clean[0] @ clean[3]
    size = largest(queries @ keys.mT) / tau
    tol = score_tolerance(size)
    if restrict == "entropy":
        # H decides who is admitted: near ties of the levels may fall either way.
        level = reference.entropy(clean[1])
        gaps = (level[..., None, :] - level[..., :, None]).abs()
        if bool(((gaps < 1e-5) & (gaps > 0)).any()):
            return
    if tol < 1:
        assert_close(p, expected, tol, "p")
        assert_close(lse, expected_lse, tol * max(1.0, size) + 1e-5, "lse")
    if batch:
        b = slice(seed % batch, seed % batch + 1)
        part = {**options, "mask": None if mask is None else mask[b]}
        alone = op("similarity_inform")(u[b], e[b], keys=None if uk is None else uk[b], weight=ws, **part)
        for a, c in zip(alone, (p, lse), strict=True):
            assert_same_bits(a, c[b], "one sequence of the batch")


# (heads, head width, value width or none for vp, features, experts, causal, masked, mode, sigma)
POSTERIOR = (
    (2, 4, 4, 7, 3, True, True, "min_entropy", 1.0),
    (1, 5, None, 8, 16, False, False, "min_entropy", 0.6),
    (3, 4, 4, 12, 8, True, True, "all", 3.0),
    (2, 8, None, 5, 1, False, True, "all", 1.0),
    (2, 3, 3, 6, 17, True, False, 1, 0.6),
)


@given(st.sampled_from(POSTERIOR), BATCH, LENGTH, SEEDS)
@examples
def test_attention_posterior(form, batch, n, seed):
    heads, dh, dv, d, experts, causal, masked, mode, sigma = form
    g = generator(seed)
    spread = choice((0.3, 1.0, 3.0), g)
    x = dict(q=normal(batch, heads, n, dh, g=g, scale=spread), k=normal(batch, heads, n, dh, g=g))
    x["attn_output"], x["probs"] = normal(batch, n, d, g=g), routing(batch, n, experts, g)
    if dv is None:
        x["projected_v"] = normal(batch, heads, n, d, g=g)
    else:
        x["v"], x["wo"] = normal(batch, heads, n, dv, g=g), normal(heads, d, dv, g=g, scale=0.5)
    mask = uniform(batch, n, g=g) > 0.3 if masked else None
    wide = {name: t.double() for name, t in x.items()}
    if masked:  # E11
        for name in ("q", "k", "v", "projected_v"):
            if name in x:
                x[name] = with_garbage(x[name], mask[:, None].expand(x[name].shape[:-1]), g)
        x["attn_output"], x["probs"] = with_garbage(x["attn_output"], mask, g), with_garbage(x["probs"], mask, g)
    options = dict(causal=causal, sigma=sigma, mask=mask)
    p, head = op("attention_posterior")(**x, head_mode=mode, **options)
    means = wide["projected_v"] if dv is None else wide["v"] @ wide["wo"].mT
    size = (
        largest(wide["q"] @ wide["k"].mT) * dh**-0.5
        + largest(wide["attn_output"][:, None] @ means.mT) / sigma**2
        + largest(means.square().sum(-1)) / (2 * sigma**2)
    )
    tol = score_tolerance(size)
    if mode == "min_entropy":
        entropy, _ = reference.attention_entropy(wide["q"], wide["k"], causal=causal, mask=mask)
        chosen = entropy.gather(1, head[:, None])[:, 0]
        assert bool((chosen <= entropy.amin(-1) + 10 * tol).all()), "not the lowest entropy"
    for b in range(batch):
        of = {name: t if name == "wo" else t[b : b + 1] for name, t in wide.items()}
        part = {**options, "mask": None if mask is None else mask[b : b + 1]}
        with_head = mode if mode == "all" else int(head[b])
        expected, _ = reference.attention_posterior(**of, head_mode=with_head, **part)
        if tol < 1:
            assert_close(p[b : b + 1], expected, tol, f"sequence {b}")


# (heads, head width, value width, causal, masked)
ATTENTION = ((1, 4, 4, True, False), (3, 7, 2, False, True), (2, 8, 9, True, True))


@given(st.sampled_from(ATTENTION), BATCH, LENGTH, SEEDS)
@examples
def test_attention(form, batch, n, seed):
    heads, dh, dv, causal, masked = form
    g = generator(seed)
    q, k = (normal(batch, heads, n, dh, g=g, scale=choice((0.3, 3.0), g)) for _ in range(2))
    v = normal(batch, heads, n, dv, g=g)
    mask = uniform(batch, n, g=g) > 0.3 if masked else None
    wide = q.double(), k.double(), v.double()
    if masked:  # E11
        q, k, v = (with_garbage(x, mask[:, None].expand(x.shape[:-1]), g) for x in (q, k, v))
    out, row_lse, row_entropy = op("attention")(q, k, v, causal=causal, mask=mask)
    expected, lse, entropy = reference.attention(*wide, causal=causal, mask=mask)
    size = largest(wide[0] @ wide[1].mT) * dh**-0.5
    tol = score_tolerance(size)
    assert_close(out, expected, tol * max(1.0, largest(wide[2])), "out")
    assert_close(row_lse, lse, tol * max(1.0, size) + 1e-5, "row_lse")
    # H = LSE - sum A l subtracts two numbers of the logits' size.
    assert_close(row_entropy, entropy, 4 * tol * max(1.0, size), "row_entropy")
    # The pass for the entropies alone takes the same steps.
    alone = op("attention_entropy")(q, k, causal=causal, mask=mask)[1]
    assert_same_bits(row_entropy, alone, "the entropies alone")


# (heads, head width, causal, masked)
ENTROPY = ((1, 4, True, False), (3, 7, False, True), (2, 8, True, True))


@given(st.sampled_from(ENTROPY), BATCH, LENGTH, SEEDS)
@examples
def test_attention_entropy(form, batch, n, seed):
    heads, dh, causal, masked = form
    g = generator(seed)
    q, k = (normal(batch, heads, n, dh, g=g, scale=choice((0.3, 3.0), g)) for _ in range(2))
    mask = uniform(batch, n, g=g) > 0.3 if masked else None
    wide = q.double(), k.double()
    if masked:
        q, k = (with_garbage(x, mask[:, None].expand(x.shape[:-1]), g) for x in (q, k))
    found = op("attention_entropy")(q, k, causal=causal, mask=mask)
    expected = reference.attention_entropy(*wide, causal=causal, mask=mask)
    size = largest(wide[0] @ wide[1].mT) * dh**-0.5
    for a, b in zip(found, expected, strict=True):
        # H = LSE - sum A l subtracts two numbers of the logits' size.
        assert_close(a, b, 4 * score_tolerance(size) * max(1.0, size))
