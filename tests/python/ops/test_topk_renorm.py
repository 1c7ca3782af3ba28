"""moe.topk_renorm on the CPU against the float64 reference; tests named after edge rules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_judge import (
    DTYPES,
    assert_close,
    assert_legal_selection,
    largest,
    random,
    score_tolerance,
    strided,
    unaligned,
)

import moe_mlir
from moe_mlir import reference

TOKENS = (0, 1, 2, 7, 64, 100)
INF, NAN = math.inf, math.nan


def check(scores, k, *, kind="logits", mask=None, **options):
    """The op equals the reference: indices exactly, because it ranks its own operand."""
    gates, indices = moe_mlir.topk_renorm(scores, k, kind=kind, mask=mask, **options)
    wide = scores.double()
    expected, order = reference.topk_renorm(wide, k, kind=kind, mask=mask, **options)
    assert torch.equal(indices, order)
    tol = score_tolerance(largest(wide) if kind == "logits" else 0)
    assert_legal_selection(indices, wide, 0.0, mask)
    scale = max(1.0, abs(options.get("route_scale", 1.0)))
    raw_probs = kind == "probs" and not options.get("renorm", True)
    magnitude = max(1.0, largest(wide)) if raw_probs else 1.0
    assert_close(gates, expected, tol * scale * magnitude, "gates")
    assert gates.dtype == torch.float32
    return gates, indices


def scores_of(kind, *shape, dtype=torch.float32, seed=0):
    z = 4 * torch.randn(*shape, generator=random(seed))
    return (z.softmax(-1) if kind == "probs" else z).to(dtype)


# Every form once and every number of experts with a small, an odd and the largest k.
SHAPES = [
    (1, 1), (2, 1), (2, 2), (3, 2), (7, 3), (7, 7), (16, 2), (16, 16), (17, 5), (64, 8), (64, 1),
    (100, 10), (128, 8), (160, 6), (160, 33), (257, 8), (257, 257),
]  # fmt: skip
FORMS = [("logits", True), ("logits", False), ("probs", True), ("probs", False)]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_equals_reference_for_any_experts_and_k(case):
    experts, k = SHAPES[case]
    kind, renorm = FORMS[case % len(FORMS)]
    for n in TOKENS:
        check(scores_of(kind, n, experts, seed=n), k, kind=kind, renorm=renorm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind,renorm", FORMS)
def test_equals_reference_for_every_dtype_and_form(dtype, kind, renorm):
    for n in (1, 33):
        scores = scores_of(kind, n, 17, dtype=dtype)
        check(scores, 4, kind=kind, renorm=renorm, index_dtype=torch.int32)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_many_experts_in_16_bit(dtype):
    check(scores_of("logits", 40, 128, dtype=dtype), 8)


def test_leading_dims_and_index_dtype():
    scores = scores_of("logits", 2, 3, 5, 16)
    gates, indices = check(scores, 3, index_dtype=torch.int32)
    assert gates.shape == indices.shape == (2, 3, 5, 3)
    assert indices.dtype == torch.int32
    one, _ = check(scores[0, 0, 0], 3, index_dtype=torch.int32)
    assert one.shape == (3,)


def test_route_scale():
    check(scores_of("logits", 9, 16), 3, route_scale=2.5)
    check(scores_of("probs", 9, 16), 3, kind="probs", renorm=False, route_scale=2.5)


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_scores(layout):
    check(layout(scores_of("logits", 12, 64)), 8)
    mask = layout(torch.rand(12, generator=random(1)) > 0.4)
    check(layout(scores_of("logits", 12, 64)), 8, mask=mask)


# ---------------------------------------------------------------- edge rules


def rows(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("experts,k", [(16, 2), (64, 8), (257, 8)])
def test_topk_renorm_e1_ties_go_to_the_lower_index(experts, k):
    scores = torch.randint(0, 3, (50, experts), generator=random(0)).float()
    check(scores, k)
    _, indices = moe_mlir.topk_renorm(torch.zeros(3, experts), k)
    assert indices.tolist() == [list(range(k))] * 3


def test_topk_renorm_e2_both_zeros_are_equal():
    scores = rows([-0.0, 0.0, -0.0, 0.0, -1.0], [0.0, -0.0, 0.0, -0.0, -1.0])
    _, indices = check(scores, 4)
    assert indices.tolist() == [[0, 1, 2, 3]] * 2


def test_topk_renorm_e3_nan_ranks_last_and_shows_in_all_gates():
    scores = rows(
        [NAN, 1.0, 2.0, 3.0, 0.0],
        [NAN, -INF, NAN, 3.0, -INF],
        [NAN] * 5,
        [1.0, NAN, -INF, INF, 2.0],
    )
    gates, indices = check(scores, 4)
    assert indices[0].tolist() == [3, 2, 1, 4]
    assert indices[1].tolist() == [3, 1, 4, 0]
    assert bool(gates.isnan().all())
    check(scores, 1)
    check(scores, 4, renorm=False)
    finite = rows([NAN, 0.25, 0.5, 0.125, 0.0])
    check(finite, 4, kind="probs")
    check(finite, 4, kind="probs", renorm=False)


def test_topk_renorm_e4_infinity_comes_first_and_gates_are_nan():
    scores = rows([0.0, 1.0, INF, 2.0, -1.0], [INF, 1.0, INF, 2.0, -1.0])
    gates, indices = check(scores, 4)
    assert indices[:, 0].tolist() == [2, 0]
    assert bool(gates.isnan().all())
    check(scores, 4, renorm=False)


def test_topk_renorm_e5_minus_infinity_is_outside_the_support():
    scores = rows([-INF, 1.0, -INF, 2.0, -INF], [-INF, -INF, -INF, -INF, -3.0])
    gates, indices = check(scores, 4)
    assert indices.tolist() == [[3, 1, 0, 2], [4, 0, 1, 2]]
    assert gates[:, 2:].tolist() == [[0.0, 0.0]] * 2
    check(scores, 4, renorm=False)


def test_topk_renorm_e6_without_support_gates_are_zero():
    nothing = torch.full((3, 5), -INF)
    for renorm in (True, False):
        gates, indices = check(nothing, 4, renorm=renorm)
        assert indices.tolist() == [[0, 1, 2, 3]] * 3
        assert not gates.any()
        gates, indices = check(torch.zeros(3, 5), 4, kind="probs", renorm=renorm)
        assert indices.tolist() == [[0, 1, 2, 3]] * 3
        assert not gates.any()


def test_topk_renorm_e7_division_is_exact_without_eps():
    scores = rows([1e-30, 3e-30, 0.0, 0.0, 0.0])
    gates, _ = check(scores, 4, kind="probs")
    assert gates[0].tolist() == pytest.approx([0.75, 0.25, 0, 0])


def test_topk_renorm_e9_all_experts_and_a_single_expert():
    gates, indices = check(scores_of("logits", 6, 7), 7)
    assert torch.equal(indices.sort(-1).values, torch.arange(7).expand(6, 7))
    gates, indices = check(torch.full((4, 1), -3.0), 1)
    assert gates.tolist() == [[1.0]] * 4


@pytest.mark.parametrize("renorm", (True, False))
def test_topk_renorm_e10_a_masked_token_goes_nowhere(renorm):
    mask = torch.tensor([True, False, True, False, False, True])
    scores = scores_of("logits", 6, 5)
    gates, indices = check(scores, 4, mask=mask, renorm=renorm)
    assert indices[~mask].tolist() == [[-1] * 4] * 3
    check(scores, 4, mask=torch.zeros(6, dtype=torch.bool), renorm=renorm)


def test_topk_renorm_e11_garbage_of_a_masked_token_does_not_leak():
    scores = scores_of("logits", 6, 5)
    mask = torch.tensor([True, False, True, False, True, True])
    scores[1], scores[3] = NAN, INF
    gates, _ = check(scores, 4, mask=mask)
    assert not gates.isnan().any()


def test_topk_renorm_e12_no_tokens():
    for shape in ((0, 5), (2, 0, 5), (0, 3, 5)):
        gates, indices = moe_mlir.topk_renorm(torch.empty(shape), 4)
        assert gates.shape == indices.shape == (*shape[:-1], 4)


def test_logits_far_below_zero_keep_their_order():
    """A softmax first would underflow to ties."""
    scores = -200 - 3 * torch.arange(16.0).flip(0)[None]
    _, indices = check(scores, 8, renorm=False)
    assert indices[0].tolist() == list(range(15, 7, -1))
    check(1e30 * scores, 8)
    check(1e-40 * scores, 8)


# ------------------------------------------------------------------ adversarial

SPECIAL = (0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e38, -1e38, 1e-38, 1e-45, 88.0, -104.0)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(SPECIAL), min_size=7, max_size=7), max_size=9),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_special_values(values, renorm, rng):
    scores = torch.tensor(values, dtype=torch.float32).reshape(-1, 7)
    gates, indices = moe_mlir.topk_renorm(scores, 3, renorm=renorm)
    mask = torch.tensor([rng.random() < 0.7 for _ in values], dtype=torch.bool)
    expected, order = reference.topk_renorm(scores.double(), 3, renorm=renorm)
    assert torch.equal(indices, order)
    # 1e38 logits reach the tolerance of 1: the comparison then only sees NaN.
    assert_close(gates, expected, score_tolerance(largest(scores)))
    _, masked = moe_mlir.topk_renorm(scores, 3, renorm=renorm, mask=mask)
    assert_legal_selection(masked, scores.double(), 0.0, mask)


@pytest.mark.parametrize("experts,k", [(64, 2), (64, 8), (100, 3), (130, 16), (300, 12)])
def test_special_values_among_many_experts(experts, k):
    """Most experts are dropped before they enter a list, and none of the k best is."""
    generator = random(experts)
    for share in (0.0, 0.02, 0.5, 0.99, 1.0):
        scores = torch.randn(37, experts, generator=generator)
        special = torch.tensor(SPECIAL)[
            torch.randint(len(SPECIAL), (37, experts), generator=generator)
        ]
        nothing = torch.full_like(special, NAN)
        # Some rows have fewer than k scores, some are all ties.
        nothing[::2] = 1.5
        for other in (special, nothing):
            replaced = torch.rand(37, experts, generator=generator) < share
            mixed = torch.where(replaced, other, scores)
            gates, indices = moe_mlir.topk_renorm(mixed, k)
            expected, order = reference.topk_renorm(mixed.double(), k)
            assert torch.equal(indices, order)
            assert_close(gates, expected, score_tolerance(largest(mixed)))


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(0, 40), st.sampled_from((1e-3, 1.0, 30.0, 1e4)))
def test_any_seed_count_and_scale(seed, n, scale):
    scores = scale * torch.randn(n, 16, generator=random(seed))
    check(scores, 2)
