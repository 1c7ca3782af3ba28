"""Selection ops on random and adversarial rows, against the float64 reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    SEEDS,
    TOKENS,
    examples,
    generator,
    op,
    padding,
    probability_rows,
    score_rows,
    selections,
)  # fmt: skip
from op_judge import (
    assert_close,
    assert_legal_selection,
    assert_same_bits,
    largest,
    score_tolerance,
)  # fmt: skip

from moe_mlir import reference

# (experts, k, kind, renorm, masked): every form, E in 1..257 and 1024, k up to E.
FORMS = (
    (1, 1, "logits", True, False), (2, 2, "probs", True, True), (3, 1, "logits", False, True),
    (16, 2, "logits", True, True), (17, 5, "probs", False, False), (64, 8, "logits", False, False),
    (257, 8, "logits", True, False), (257, 257, "probs", True, False),
    (1024, 32, "logits", True, True),
)  # fmt: skip


def check_gates(gates, expected, scores, scale):
    """Row by row: each row's tolerance follows from its own largest score."""
    for row in range(len(gates)):
        tol = score_tolerance(largest(scores[row])) if scale == "logits" else 1e-6
        if tol < 1:
            assert_close(gates[row], expected[row], tol, f"row {row}")


@given(st.sampled_from(FORMS), TOKENS, SEEDS)
@examples
def test_topk_renorm(form, n, seed):
    experts, k, kind, renorm, masked = form
    g = generator(seed)
    scores = (score_rows if kind == "logits" else probability_rows)(n, experts, g)
    mask = padding(n, g) if masked else None
    gates, indices = op("topk_renorm")(scores, k, kind=kind, renorm=renorm, mask=mask)
    wide = scores.double()
    expected, order = reference.topk_renorm(wide, k, kind=kind, renorm=renorm, mask=mask)
    # It ranks its own operand: the reference's order, E1 and E2.
    assert torch.equal(indices, order)
    assert_legal_selection(indices, wide, 0.0, mask)
    check_gates(gates, expected, wide, kind)


@given(st.sampled_from(FORMS), SEEDS)
@examples
def test_topk_renorm_of_a_token_depends_on_no_other(form, seed):
    experts, k, kind, renorm, masked = form
    g = generator(seed)
    scores = (score_rows if kind == "logits" else probability_rows)(9, experts, g)
    mask = padding(9, g) if masked else None
    whole = op("topk_renorm")(scores, k, kind=kind, renorm=renorm, mask=mask)
    t = seed % 9
    alone = None if mask is None else mask[t : t + 1]
    one = op("topk_renorm")(scores[t : t + 1], k, kind=kind, renorm=renorm, mask=alone)
    for a, b in zip(one, whole, strict=True):
        assert_same_bits(a, b[t : t + 1])


# (experts, k, score, groups kept of, group score, bias)
GROUPED = (
    (16, 4, "sigmoid", 1, 1, "top2", False), (16, 4, "sigmoid", 4, 2, "top2", True),
    (12, 3, "softmax", 3, 1, "max", True), (17, 17, "sqrtsoftplus", 1, 1, "top2", True),
    (256, 8, "sigmoid", 8, 4, "top2", True), (8, 2, "none", 4, 2, "top2", False),
)  # fmt: skip


@given(st.sampled_from(GROUPED), TOKENS, st.booleans(), SEEDS)
@examples
def test_grouped_topk(form, n, renorm, seed):
    experts, k, score, n_group, topk_group, group_score, biased = form
    g = generator(seed)
    kinds = ("normal", "ties", "equal", "masked", "nan", "zeros", "far apart")
    x = score_rows(n, experts, g, kinds)
    if score == "none":
        x = x.softmax(-1)
    elif score == "sqrtsoftplus":
        x = x.clamp(min=-60)  # below it underflows in f32 and not in f64
    bias = torch.rand(experts, generator=g) - 0.5 if biased else None
    mask = padding(n, g)
    options = dict(score=score, n_group=n_group, topk_group=topk_group, group_score=group_score,
                   renorm=renorm, mask=mask)  # fmt: skip
    gates, indices = op("grouped_topk")(x, k, bias=bias, **options)
    wide_bias = None if bias is None else bias.double()
    choice_scores = choice_of(x.double(), wide_bias, score, n_group, topk_group, group_score)
    for t in range(n):
        row, chosen = choice_scores[t], indices[t].tolist()
        if not mask[t]:
            assert chosen == [-1] * k and not gates[t].any()
            continue
        assert len(set(chosen)) == k and all(0 <= i < experts for i in chosen)
        if x[t].isnan().any():
            assert bool(gates[t].isnan().all())
            continue
        if row is None:  # a near tie between groups: any legal choice
            continue
        assert_legal_selection(indices[t : t + 1], row[None], 2e-6 * max(1.0, largest(row)))
        # The gates of these very experts, whatever ties decided.
        forced = dict(score=score, renorm=renorm, forced=indices[t : t + 1])
        expected, _ = reference.grouped_topk(x[t : t + 1].double(), k, **forced)
        kept = row[indices[t]] > -torch.inf
        tol = score_tolerance(largest(x[t]))
        assert_close(gates[t][kept], expected[0][kept], tol)


def choice_of(x, bias, score, n_group, topk_group, group_score):
    """Choice scores of each row; None where groups nearly tie, so that either may stay."""
    from moe_mlir.reference import selection

    mapped = selection.map_scores(x, score)
    plain = bias is None and n_group == 1
    choice = x if plain else mapped if bias is None else mapped + bias
    if n_group == 1:
        return list(choice)
    best = 1 if group_score == "max" else min(2, x.shape[-1] // n_group)
    groups = choice.unflatten(-1, (n_group, -1))
    value = groups.sort(-1, descending=True).values[..., :best].sum(-1)
    ordered = value.sort(-1, descending=True).values
    if topk_group == n_group:
        clear = torch.ones(len(x), dtype=torch.bool)
    else:
        clear = ordered[:, topk_group - 1] - ordered[:, topk_group] > 1e-5
    kept = selection.kept_experts(choice, n_group, topk_group, group_score)
    limited = choice.masked_fill(~kept, -torch.inf)
    return [row if ok else None for row, ok in zip(limited, clear)]


@given(st.sampled_from((1, 2, 7, 16, 257)), TOKENS, st.booleans(), SEEDS)
@examples
def test_threshold_renorm(experts, n, renorm, seed):
    g = generator(seed)
    p = probability_rows(n, experts, g)
    # A power of two that rows of ties can equal exactly (E20).
    theta, options = 0.0625, dict(renorm=renorm, mask=padding(n, g))
    gates, count = op("threshold_renorm")(p, theta, **options)
    expected, expected_count = reference.threshold_renorm(p.double(), theta, **options)
    assert torch.equal(count, expected_count)
    assert_close(gates, expected, 1e-6)


@given(st.sampled_from(((1, 1), (8, 3), (257, 8))), TOKENS, SEEDS)
@examples
def test_densify(sizes, n, seed):
    experts, k = sizes
    g = generator(seed)
    indices = selections(n, experts, k, g)
    gates = torch.randn(n, k, generator=g)
    dense = op("densify")(gates, indices, experts)
    assert_close(dense, reference.densify(gates.double(), indices, experts), 0.0)


@pytest.mark.parametrize("scope", ["row", "tensor"])
@given(st.sampled_from((1, 7, 64)), TOKENS, SEEDS)
@examples
def test_make_finite(scope, experts, n, seed):
    z = score_rows(n, experts, generator(seed))
    finite = op("make_finite")(z, scope=scope)
    assert_close(finite, reference.make_finite(z.double(), scope=scope), 0.0)
