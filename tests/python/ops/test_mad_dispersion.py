"""moe.mad_dispersion on the CPU against the float64 reference; tests named after edge rules."""

import pytest
import torch
from op_judge import DTYPES, assert_close, largest, random, strided, unaligned

import moe_mlir
from moe_mlir import reference

MEASURES = ("mad", "variance", "pairwise")


def tolerance(s, h, measure):
    """docs/Spec.md 1: relative to s, with r for the rounding of the f32 mean."""
    r = 2**-22 * largest(h.double())
    if measure == "variance":
        return 1e-5 * s + r * s.sqrt() + r * r
    return 1e-5 * s + r


def check(h, assign, experts, *, measure="mad", mask=None):
    s, mean, count = moe_mlir.mad_dispersion(h, assign, experts, measure=measure, mask=mask)
    want_s, want_mean, want_count = reference.mad_dispersion(
        h.double(), assign, experts, measure=measure, mask=mask
    )
    assert s.dtype == mean.dtype == torch.float32
    assert torch.equal(count, want_count)
    used = h.reshape(-1, h.shape[-1])
    used = used[used.isfinite().all(-1)]
    excess = (s.double() - want_s).abs() - tolerance(want_s, used, measure)
    finite = want_s.isfinite()
    assert not excess[finite].numel() or float(excess[finite].max()) <= 0
    assert torch.equal(s.isnan(), want_s.isnan())
    assert_close(mean[finite], want_mean[finite], 2**-21 * largest(used) + 1e-30, "mean")
    return s, mean, count


def operands(n, width, experts, seed=0, dtype=torch.float32):
    g = random(seed)
    h = torch.randn(n, width, generator=g).to(dtype)
    return h, torch.randint(0, experts, (n,), generator=g, dtype=torch.int32)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("width,experts", [(1, 1), (13, 3), (352, 16), (33, 100)])
def test_equals_reference_for_any_width_and_experts(measure, width, experts):
    for n in (0, 1, 2, 7, 100):
        check(*operands(n, width, experts, seed=n), experts, measure=measure)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    for measure in MEASURES:
        h, assign = operands(64, 13, 3, dtype=dtype)
        check(h, assign.long(), 3, measure=measure)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_large_common_offset_needs_two_passes(measure):
    """One-pass E[x^2] - E[x]^2 misses the bound here by orders of magnitude."""
    h, assign = operands(100, 13, 3)
    check(1e-2 * h + 1000.0, assign, 3, measure=measure)


def test_a_constant_feature_has_no_dispersion():
    h, assign = operands(100, 13, 3)
    h[:, 4] = 0.1
    s, mean, _ = check(h, assign, 3)
    assert float(s[:, 4].max()) < 1e-7
    assert_close(mean[:, 4], torch.full((3,), 0.1).double(), 1e-6)


def test_leading_dims():
    h, assign = operands(24, 13, 3)
    mask = torch.rand(24, generator=random(2)) > 0.3
    shaped = check(h.view(2, 12, 13), assign.view(2, 12), 3, mask=mask.view(2, 12))
    flat = check(h, assign, 3, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(shaped, flat, strict=True))


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    h, assign = operands(24, 13, 3)
    check(layout(h), layout(assign), 3)


def test_mad_dispersion_e3_nan_stays_in_its_cluster():
    h, assign = operands(30, 13, 3)
    assign[4] = 1
    h[4, 5] = torch.nan
    s, mean, _ = moe_mlir.mad_dispersion(h, assign, 3)
    assert bool(s[1, 5].isnan()) and bool(mean[1, 5].isnan())
    s[1, 5] = mean[1, 5] = 0
    assert not s.isnan().any() and not mean.isnan().any()


@pytest.mark.parametrize("measure", MEASURES)
def test_mad_dispersion_e10_masked_and_unassigned_tokens_are_in_no_cluster(measure):
    h, assign = operands(60, 13, 3)
    mask = torch.rand(60, generator=random(2)) > 0.3
    assign[::7] = -1
    assign[1::11] = 3  # one past the last expert
    _, _, count = check(h, assign, 3, measure=measure, mask=mask)
    assert int(count.sum()) == int((mask & (assign >= 0) & (assign < 3)).sum())
    check(h, assign, 3, measure=measure, mask=torch.zeros(60, dtype=torch.bool))


def test_mad_dispersion_e11_garbage_of_masked_tokens_does_not_leak():
    h, assign = operands(60, 13, 3)
    mask = torch.rand(60, generator=random(2)) > 0.3
    h[~mask] = torch.nan
    s, mean, _ = check(h, assign, 3, mask=mask)
    assert not s.isnan().any() and not mean.isnan().any()


def test_mad_dispersion_e12_no_tokens():
    s, mean, count = moe_mlir.mad_dispersion(
        torch.empty(0, 13), torch.empty(0, dtype=torch.int32), 3
    )
    assert not s.any() and not mean.any() and not count.any()


@pytest.mark.parametrize("measure", MEASURES)
def test_mad_dispersion_e13_a_singleton_has_no_dispersion(measure):
    h, _ = operands(3, 13, 3)
    s, mean, count = check(h, torch.tensor([2, 0, 1], dtype=torch.int32), 3, measure=measure)
    assert not s.any() and count.tolist() == [1, 1, 1]
    assert torch.equal(mean, h[[1, 2, 0]])


@pytest.mark.parametrize("measure", MEASURES)
def test_mad_dispersion_e14_an_empty_cluster_is_zero(measure):
    h, assign = operands(30, 13, 3)
    assign[assign == 1] = 2
    s, mean, count = check(h, assign, 3, measure=measure)
    assert not s[1].any() and not mean[1].any() and int(count[1]) == 0
