"""moe.dispersion_weights on the CPU against the float64 reference; tests named after edge rules."""

import math

import pytest
import torch
from op_judge import assert_close, random, score_tolerance, strided, unaligned

import moe_mlir
from moe_mlir import reference
from moe_mlir.ops.dispersion_weights import SCALES


def operands(experts, width, empty=(), seed=0):
    g = random(seed)
    s = torch.rand(experts, width, generator=g) + 0.01
    count = torch.randint(1, 50, (experts,), generator=g)
    for cluster in empty:
        s[cluster], count[cluster] = 0.0, 0
    return s, count


def check(s, count, **options):
    m = moe_mlir.dispersion_weights(s, count, **options)
    expected = reference.dispersion_weights(s.double(), count, **options)
    assert m.dtype == torch.float32
    # Relative: weights of equal tokens reach 1/eps.
    assert_close(m / expected.abs(), expected / expected.abs(), score_tolerance(1.0))
    return m


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("clamp", (None, 1.5))
@pytest.mark.parametrize("include_empty", (False, True))
def test_every_scaling(scale, clamp, include_empty):
    options = dict(scale=scale, clamp=clamp, include_empty=include_empty)
    for experts, width in ((1, 1), (7, 13), (16, 352)):
        check(*operands(experts, width), **options)
        check(*operands(experts, width, empty=(0,)), **options)


@pytest.mark.parametrize("preset", reference.DISPERSION_PRESETS)
def test_presets_of_the_authors_code(preset):
    check(*operands(16, 64, empty=(3, 5)), **reference.DISPERSION_PRESETS[preset])


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_counts_of_either_width(dtype):
    s, count = operands(5, 9, empty=(1,))
    check(s, count.to(dtype))


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    s, count = operands(5, 9, empty=(1,))
    check(layout(s), count)


def test_each_row_has_mean_1_by_default():
    m = check(*operands(7, 33))
    assert_close(m.mean(dim=1), torch.ones(7).double(), 1e-6)


def test_weights_are_the_optimum_of_theorem_1():
    """M_k / d = w_k with lambda = d / sum_q 1/(s_qk + alpha_k), alpha_k = eps."""
    s, count = operands(7, 33)
    inverse = 1 / (s.double() + 1e-4)
    assert_close(check(s, count) / 33, inverse / inverse.sum(dim=1, keepdim=True), 1e-7)


@pytest.mark.parametrize("scale", SCALES)
def test_dispersion_weights_e14_empty_clusters_are_1_and_do_not_count(scale):
    s, count = operands(6, 9)
    wide = torch.cat([s, torch.zeros(2, 9)])
    m = check(wide, torch.cat([count, torch.zeros(2, dtype=count.dtype)]), scale=scale)
    assert bool((m[6:] == 1).all())
    assert torch.equal(m[:6], check(s, count, scale=scale))


@pytest.mark.parametrize("scale", SCALES)
def test_dispersion_weights_e12_no_cluster_at_all(scale):
    m = moe_mlir.dispersion_weights(torch.zeros(4, 9), torch.zeros(4, dtype=torch.int32), scale=scale)
    assert bool((m == 1).all())


@pytest.mark.parametrize("scale", SCALES)
def test_dispersion_weights_e15_a_cluster_of_equal_tokens_divides_by_eps(scale):
    s, count = operands(6, 9)
    s[2] = 0.0
    s[3, 4] = 0.0
    m = check(s, count, scale=scale, eps=1e-3)
    assert bool(m.isfinite().all())
    if scale == "none":
        assert_close(m[2], torch.full((9,), 1e3).double(), 1e-3)


def test_dispersion_weights_e13_a_cluster_of_one_token_is_plain():
    s, count = operands(6, 9)
    s[2], count[2] = 0.0, 1
    assert_close(check(s, count)[2], torch.ones(9).double(), 1e-6)


def test_trap_3_including_empty_clusters_shrinks_the_live_ones():
    s, count = operands(16, 64, empty=(3,))
    options = reference.DISPERSION_PRESETS["lm"]
    with_empty = check(s, count, **options)[0].mean()
    without = check(s, count, **{**options, "include_empty": False})[0].mean()
    assert with_empty < without / 5


def test_means_of_many_weights_keep_their_digits():
    s, count = operands(64, 1024)
    for scale in ("global", "feature"):
        check(s * 1e-3 + 7.0, count, scale=scale)
    assert math.isclose(float(check(s, count, scale="global").mean()), 1.0, rel_tol=1e-6)
