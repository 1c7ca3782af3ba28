"""moe.cosine_logits on the CPU against the float64 reference."""

import pytest
import torch
from op_judge import DTYPES, assert_close, largest, logit_tolerance, random, strided, unaligned

import moe_mlir
from moe_mlir import reference


def operands(n, width, space, experts, dtype=torch.float32, seed=0):
    """h, omega (None for space None), emb."""
    g = random(seed)
    h = torch.randn(n, width, generator=g).to(dtype)
    omega = None if space is None else torch.randn(space, width, generator=g).to(dtype)
    emb = torch.randn(experts, width if space is None else space, generator=g).to(dtype)
    return h, omega, emb


def check(h, omega, emb, **options):
    z = moe_mlir.cosine_logits(h, omega, emb, **options)
    wide = [None if t is None else t.double() for t in (h, omega, emb)]
    expected = reference.cosine_logits(*wide, **options)
    assert z.dtype == torch.float32
    assert_close(z, expected, tolerance(*wide, expected, **options))
    return z


def tolerance(h, omega, emb, z, *, tau=1.0, norm_token=True, norm_emb=True, eps=1e-4):
    """That of logits, where L is the largest product that a direction stands for.

    Products of long directions may cancel: their rounding is that of
    |x| |e| / tau, which |z| only reaches for parallel ones.
    """
    x = h if omega is None else h @ omega.T
    lengths = [
        1.0 if normed else largest(v.norm(dim=-1)) for v, normed in ((x, norm_token), (emb, norm_emb))
    ]
    scale = torch.full((1,), lengths[0] * lengths[1] / float(tau), dtype=torch.float64)
    return max(logit_tolerance(z, h.shape[-1]), logit_tolerance(scale, h.shape[-1]))


@pytest.mark.parametrize("width,experts", [(1, 1), (13, 7), (352, 16), (64, 257), (37, 100)])
def test_equals_reference_for_any_width_and_experts(width, experts):
    for n in (0, 1, 2, 7, 64, 100):
        check(*operands(n, width, None, experts, seed=n))
        check(*operands(n, width, 8, experts, seed=n), tau=0.3)


@pytest.mark.parametrize("norm_token", (True, False))
@pytest.mark.parametrize("norm_emb", (True, False))
@pytest.mark.parametrize("space", (None, 5))
def test_every_form(norm_token, norm_emb, space):
    x = operands(9, 33, space, 8)
    options = dict(norm_token=norm_token, norm_emb=norm_emb)
    check(*x, **options)
    check(*x, tau=0.07, **options)
    check(*x, tau=torch.tensor(2.5), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    check(*operands(9, 33, None, 8, dtype))
    check(*operands(9, 33, 6, 8, dtype), tau=0.3)


def test_mixed_dtypes_and_leading_dims():
    h, omega, emb = operands(12, 13, 6, 7)
    assert check(h.view(2, 3, 2, 13).bfloat16(), omega, emb.half()).shape == (2, 3, 2, 7)
    assert check(h[0], omega, emb).shape == (7,)


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    check(*map(layout, operands(11, 33, 6, 8)))


def test_cosine_logits_e12_no_tokens():
    _, omega, emb = operands(0, 13, 6, 7)
    assert moe_mlir.cosine_logits(torch.empty(2, 0, 13), omega, emb).shape == (2, 0, 7)


def test_a_token_of_zeros_has_logits_of_zero():
    h, omega, emb = operands(4, 13, 6, 7)
    h[2] = 0.0
    assert not check(h, omega, emb)[2].any()
    emb[3] = 0.0
    assert not check(h, omega, emb)[:, 3].any()


def test_short_vectors_are_divided_by_eps():
    h, omega, emb = operands(4, 13, None, 7)
    check(1e-6 * h, omega, 1e-7 * emb, eps=1e-4)
    check(1e-6 * h, omega, 1e-7 * emb, eps=1e-30)
    check(h, omega, emb, eps=100.0)


def test_norms_do_not_overflow():
    """Squares of 1e25 are no f32."""
    h, _, emb = operands(4, 13, None, 7)
    check(1e25 * h, None, emb)
    check(h, None, 1e25 * emb)
    check(1e-25 * h, None, 1e-15 * emb, eps=1e-38)


def test_nan_and_infinity_stay_in_their_row():
    h, omega, emb = operands(4, 13, None, 7)
    h[1, 3], h[2, 5] = torch.nan, torch.inf
    z = check(h, omega, emb)
    assert bool(z[1:3].isnan().all()) and not z[[0, 3]].isnan().any()


def test_the_norm_of_a_token_does_not_change_the_selection():
    h, omega, emb = operands(50, 33, 6, 16)
    of_directions = moe_mlir.cosine_logits(h, omega, emb)
    of_vectors = moe_mlir.cosine_logits(h, omega, emb, norm_token=False)
    for k in (1, 2, 8):
        _, first = moe_mlir.topk_renorm(of_directions, k)
        _, second = moe_mlir.topk_renorm(of_vectors, k)
        assert torch.equal(first, second)
