"""Statistics of the experts, dispatch and losses on random and adversarial batches."""

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
    probability_rows,
    score_rows,
    selections,
    uniform,
    with_garbage,
)  # fmt: skip
from op_judge import ULP, assert_close, assert_same_bits, largest

from moe_mlir import reference

# (features, experts, measure)
CLUSTERS = (
    (1, 1, "mad"), (7, 3, "variance"), (33, 17, "mad"), (5, 4, "pairwise"), (16, 257, "mad"),
)  # fmt: skip


def clusters(n, experts, g):
    """A cluster a token: some empty, single, or with all tokens; -1 is none."""
    how = choice(("spread", "few", "one", "nowhere"), g)
    assign = torch.randint(experts, (n,), generator=g)
    if how == "few":
        assign = assign % max(1, experts // 3)
    elif how == "one":
        assign = torch.full((n,), experts - 1)
    elif how == "nowhere":
        assign = assign.masked_fill(uniform(n, g=g) < 0.5, -1)
    return assign


@given(st.sampled_from(CLUSTERS), TOKENS, SEEDS)
@examples
def test_mad_dispersion(form, n, seed):
    d, experts, measure = form
    g = generator(seed)
    h, assign, mask = features(n, d, g), clusters(n, experts, g), padding(n, g)
    # A large common offset: one pass over the squares would lose everything.
    h = h + choice((0.0, 0.0, 1e3), g)
    expected = reference.mad_dispersion(h.double(), assign, experts, measure=measure, mask=mask)
    found = op("mad_dispersion")(
        with_garbage(h, mask, g), assign, experts, measure=measure, mask=mask
    )
    s, mean, count = expected
    assert torch.equal(found[2], count)
    r = 2.0**-22 * largest(h)
    spread = r * s.sqrt() + r * r if measure == "variance" else torch.full_like(s, r)
    assert bool(((found[0] - s).abs() <= 1e-5 * s + spread).all()), "dispersion"
    assert_close(found[1], mean, 1e-6 * max(1.0, largest(h)) + r, "mean")


# (scale, experts, features)
WEIGHTS = (
    ("cluster", 4, 7), ("feature", 16, 33), ("global", 3, 1), ("global_preclamp", 17, 5),
    ("dispersion", 4, 8), ("none", 257, 4),
)  # fmt: skip


@given(st.sampled_from(WEIGHTS), SEEDS)
@examples
def test_dispersion_weights(form, seed):
    scale, experts, d = form
    g = generator(seed)
    s = normal(experts, d, g=g).abs().masked_fill(uniform(experts, d, g=g) < 0.2, 0.0)
    count = torch.randint(0, 3, (experts,), generator=g) * choice((1, 0, 1, 1), g)
    s = s.masked_fill((count == 0)[:, None], 0.0)
    options = dict(
        scale=scale, clamp=choice((None, 1.5), g), eps=choice((1e-4, 0.35), g),
        include_empty=choice((False, True), g),
    )  # fmt: skip
    m = op("dispersion_weights")(s, count, **options)
    expected = reference.dispersion_weights(s.double(), count, **options)
    assert bool(((m - expected).abs() <= 1e-5 * expected).all())


# (experts, threshold, cold start)
GATES = (
    (1, 0.0, "literal"), (2, 0.25, "base"), (7, 0.0, "base"), (16, 0.25, "literal"),
    (65, 0.0, "literal"),
)  # fmt: skip


@given(st.sampled_from(GATES), TOKENS, SEEDS)
@examples
def test_adjacency_gate(form, n, seed):
    experts, threshold, cold_start = form
    g = generator(seed)
    p = probability_rows(n, experts, g)
    a = uniform(experts, experts, g=g).masked_fill(uniform(experts, experts, g=g) < 0.3, 0.0)
    a = a * choice((1.0, 1.0, 0.0), g)
    options = dict(threshold=threshold, cold_start=cold_start)
    mixed = op("adjacency_gate")(p, a, **options)
    expected = reference.adjacency_gate(p.double(), a.double(), **options)
    assert_close(mixed, expected, 1e-6 * max(1.0, experts * ULP / 1e-6))
    if n:
        t = slice(seed % n, seed % n + 1)
        assert_same_bits(op("adjacency_gate")(p[t], a, **options), mixed[t])


# (experts, k, norm, diagonal, beta)
UPDATES = (
    (1, 1, "row", True, 0.9), (7, 2, "row", False, 0.9), (16, 2, "col", True, 0.0),
    (65, 8, "eq7", True, 0.9), (257, 4, "row", True, 1.0),
)  # fmt: skip


@given(st.sampled_from(UPDATES), TOKENS, SEEDS)
@examples
def test_adjacency_update(form, n, seed):
    experts, k, norm, diagonal, beta = form
    g = generator(seed)
    a, idx = uniform(experts, experts, g=g), selections(n, experts, k, g)
    options = dict(beta=beta, norm=norm, diagonal=diagonal, mask=padding(n, g))
    updated = op("adjacency_update")(a, idx, **options)
    assert_close(updated, reference.adjacency_update(a.double(), idx, **options), 1e-6)
    # Counts are integers: the order of the tokens leaves every bit.
    order = torch.randperm(n, generator=g)
    shuffled = op("adjacency_update")(a, idx[order], **{**options, "mask": options["mask"][order]})
    assert_same_bits(updated, shuffled)


@given(st.sampled_from(((1, 1), (4, 2), (17, 3), (257, 8))), TOKENS, SEEDS)
@examples
def test_dispatch_and_combine(sizes, n, seed):
    experts, k = sizes
    g = generator(seed)
    idx, mask = selections(n, experts, k, g), padding(n, g)
    priority = torch.randint(4, (n,), generator=g).float() if seed % 2 else None
    options = dict(capacity=choice((None, 1, 3), g), priority=priority, mask=mask)
    found = op("dispatch")(idx, experts, **options)
    for a, b in zip(found, reference.dispatch(idx, experts, **options), strict=True):
        assert torch.equal(a, b)
    slots, offsets, counts = found
    used = slots[slots >= 0].sort().values
    assert torch.equal(used, torch.arange(int(offsets[-1]))), "rows are taken once each"
    assert torch.equal(offsets.diff(), counts)
    rows, gates = normal(n * k, 5, g=g), normal(n, k, g=g)
    y = op("combine")(rows, gates, slots)
    expected = reference.combine(rows.double(), gates.double(), slots)
    assert_close(y, expected, 1e-6 * max(1.0, k * largest(rows) * largest(gates)))


@given(st.sampled_from(((1, 1), (8, 2), (257, 4))), TOKENS, SEEDS)
@examples
def test_balance_loss(sizes, n, seed):
    experts, k = sizes
    g = generator(seed)
    z = score_rows(n, experts, g, ("normal", "wide", "ties", "equal", "masked"))
    p, idx, mask = z.softmax(-1).nan_to_num(0.0), selections(n, experts, k, g), padding(n, g)
    for divide_by in ("tokens", "assignments"):
        options = dict(mask=mask, divide_by=divide_by)
        found = op("balance_loss")(with_garbage(p, mask, g), idx, **options)
        expected = reference.balance_loss(p.double(), idx, **options)
        assert_close(found, expected, 1e-5 * max(1.0, float(expected)))


@given(st.sampled_from((1, 8, 257)), TOKENS, SEEDS)
@examples
def test_z_loss(experts, n, seed):
    g = generator(seed)
    z = score_rows(n, experts, g, ("normal", "wide", "ties", "equal", "masked", "empty"))
    mask = padding(n, g)
    found = op("z_loss")(with_garbage(z, mask, g), mask=mask)
    expected = reference.z_loss(z.double(), mask=mask)
    assert_close(found, expected, 1e-5 * max(1.0, float(expected)))


@given(st.sampled_from((1, 8, 257)), SEEDS)
@examples
def test_bias_update(experts, seed):
    g = generator(seed)
    counts = torch.randint(0, choice((1, 9, 1 << 40), g), (experts,), generator=g)
    bias = normal(experts, g=g)
    moved = op("bias_update")(bias, counts, gamma=0.01)
    assert_close(moved, reference.bias_update(bias.double(), counts, gamma=0.01), 1e-6)
