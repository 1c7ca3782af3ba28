"""Score ops on random and adversarial tokens, against the float64 reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    SEEDS,
    TOKENS,
    choice,
    examples,
    features,
    generator,
    normal,
    op,
    padding,
    selections,
    uniform,
)  # fmt: skip
from op_judge import assert_close, assert_same_bits, largest, logit_tolerance, score_tolerance

from moe_mlir import reference

# (features, experts, bias)
SIZES = (
    (1, 1, False), (7, 3, True), (33, 17, True), (64, 257, False), (353, 16, True),
    (16, 1024, False),
)  # fmt: skip


@given(st.sampled_from(SIZES), TOKENS, SEEDS)
@examples
def test_router_logits(sizes, n, seed):
    d, experts, biased = sizes
    g = generator(seed)
    h, weight = features(n, d, g), normal(experts, d, g=g, scale=d**-0.5)
    bias = normal(experts, g=g) if biased else None
    h = h * choice((1.0, 1.0, 1e15, 1e-30), g)
    if n and uniform(1, g=g) < 0.2:
        h[n // 2, d // 2] = choice((torch.nan, torch.inf), g)
    z = op("router_logits")(h, weight, bias)
    wide = [None if x is None else x.double() for x in (h, weight, bias)]
    expected = reference.router_logits(*wide)
    # Terms may cancel: what bounds the rounding are their magnitudes.
    terms = wide[0].abs() @ wide[1].abs().T
    assert_close(z, expected, logit_tolerance(terms, d))
    if n:
        t = seed % n
        assert_same_bits(op("router_logits")(h[t : t + 1], weight, bias), z[t : t + 1])


# (features, embedding width or none, experts, norms)
COSINE = (
    (7, None, 3, True, True), (16, 8, 16, True, True), (33, 5, 1, False, True),
    (8, 8, 257, True, False),
)  # fmt: skip


@given(st.sampled_from(COSINE), TOKENS, SEEDS)
@examples
def test_cosine_logits(sizes, n, seed):
    d, width, experts, norm_token, norm_emb = sizes
    g = generator(seed)
    h, tau = features(n, d, g), choice((1.0, 0.07), g)
    omega = None if width is None else normal(width, d, g=g, scale=d**-0.5)
    emb = normal(experts, width or d, g=g)
    emb[0] *= choice((1.0, 0.0, 1e-6), g)
    options = dict(tau=tau, norm_token=norm_token, norm_emb=norm_emb)
    z = op("cosine_logits")(h, omega, emb, **options)
    wide = [None if x is None else x.double() for x in (h, omega, emb)]
    expected = reference.cosine_logits(*wide, **options)
    # The projection's own rounding is relative to its terms, not to its length.
    token = wide[0] if omega is None else wide[0] @ wide[1].T
    terms = wide[0].abs() if omega is None else wide[0].abs() @ wide[1].abs().T
    lengths = token.norm(dim=-1, keepdim=True).clamp(min=1e-4)
    growth = (terms.norm(dim=-1, keepdim=True) / lengths).clamp(min=1)
    for t in range(n):
        limit = max(1.0, largest(expected)) if norm_token else logit_tolerance(terms, d) * 2**24
        tol = 1e-6 + (8 + d**0.5) * 2**-24 * max(limit, 1 / tau) * float(growth[t])
        assert_close(z[t], expected[t], 4 * tol)


@given(st.sampled_from(((3, 5, 4, 2), (8, 16, 7, 33), (1, 1, 1, 1))), SEEDS)
@examples
def test_hyper_router(sizes, seed):
    width, hidden, experts, d = sizes
    g = generator(seed)
    rows = experts * (d + 1)
    shapes = ((width,), (hidden, width), (hidden,), (rows, hidden), (rows,))
    network = [normal(*shape, g=g, scale=choice((1.0, 0.1), g)) for shape in shapes]
    weight, bias = op("hyper_router")(*network, experts)
    expected = reference.hyper_router(*(x.double() for x in network), experts)
    tol = logit_tolerance(torch.cat([x.reshape(-1) for x in expected]), hidden + width)
    # Two products in a row: the second carries the first one's error by its row sums.
    tol *= 2 + float(network[3].abs().sum(-1).max())
    for found, wanted in zip((weight, bias), expected, strict=True):
        assert_close(found, wanted, tol)


# (features, experts, r, bias)
AC = ((7, 3, 1, False), (33, 16, 1, True), (16, 17, 2, False), (8, 257, 8, True))


@given(st.sampled_from(AC), TOKENS, SEEDS)
@examples
def test_ac_logits(sizes, n, seed):
    d, experts, r, biased = sizes
    g = generator(seed)
    h, emb = features(n, d, g), normal(experts, d, g=g, scale=d**-0.5)
    m = normal(experts, d, g=g).exp()
    prev = selections(n, experts, r, g)
    gates = uniform(n, r, g=g) * choice((1.0, 0.0), g) if r > 1 else None
    bias = normal(experts, g=g) if biased else None
    z = op("ac_logits")(h, m, prev, emb, prev_gates=gates, bias=bias)
    wide = [x.double() for x in (h, m, emb)]
    options = dict(
        prev_gates=None if gates is None else gates.double(),
        bias=None if bias is None else bias.double(),
    )
    expected = reference.ac_logits(wide[0], wide[1], prev, wide[2], **options)
    options["bias"] = None
    terms = reference.ac_logits(wide[0].abs(), wide[1], prev, wide[2].abs(), **options)
    assert_close(z, expected, 2 * logit_tolerance(terms, d))
    if n:
        t = slice(seed % n, seed % n + 1)
        one = op("ac_logits")(
            h[t], m, prev[t], emb, prev_gates=None if gates is None else gates[t], bias=bias
        )
        assert_same_bits(one, z[t])


# (features, experts, slots, metric, masked)
SOFT = (
    (7, 3, 1, False, True), (16, 8, 2, True, True), (33, 17, 1, False, False),
    (8, 64, 4, True, False),
)  # fmt: skip


@given(st.sampled_from(SOFT), TOKENS, SEEDS)
@examples
def test_soft_dispatch(sizes, n, seed):
    d, experts, slots, metric, masked = sizes
    g = generator(seed)
    x, phi = features(n, d, g)[None], normal(d, experts, slots, g=g)
    m = normal(1, n, d, g=g).exp() if metric else None
    mask = padding(n, g)[None] if masked else None
    scale = choice((1.0, 10.0), g)
    found = op("soft_dispatch")(x, phi, scale=scale, mask=mask, metric=m)
    wide = [None if t is None else t.double() for t in (x, phi, m)]
    expected = reference.soft_dispatch(*wide[:2], scale=scale, mask=mask, metric=wide[2])
    size = 1.0 if m is None else largest(m)
    tol = score_tolerance(scale * size * (8 + d**0.5))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, tol)
