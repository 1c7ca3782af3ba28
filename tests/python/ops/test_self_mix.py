"""Tokens that mix with themselves: each pair is multiplied once, in splits of blocks of rows.

Sizes lie around the blocks' (64 columns, 96 rows, splits of 384; of a gradient 192 and 768), masks and
levels hide either role of a pair, and what one strip gives to another's tokens must not be lost or
counted twice.
"""

import pytest
import torch
from op_judge import assert_close, assert_same_bits, gradient_tolerance, random, score_tolerance

import moe_mlir
from moe_mlir import reference


def operands(batch, n, width=24, experts=5, norm=8.0, dtype=torch.float32):
    g = random(n + width)
    u = (norm / width) ** 0.5 * torch.randn(batch, n, width, generator=g)
    e = torch.randn(batch, n, experts, generator=g).softmax(-1)
    return u.to(dtype), e


def check(u, e, cotangent=True, **options):
    """Results and gradients against the reference in float64."""
    options.setdefault("causal", False)
    mine = [x.clone().requires_grad_() for x in (u, e)]
    wide = [x.double().requires_grad_() for x in (u, e)]
    p, lse = moe_mlir.similarity_inform(*mine, **options)
    expected, expected_lse = reference.similarity_inform(*wide, **options)
    real = u.detach().double().nan_to_num(0, 0, 0)
    tol = score_tolerance(float((real @ real.mT).abs().max()) if u.numel() else 0.0)
    assert_close(p, expected, tol, "p")
    assert_close(lse, expected_lse, tol, "lse")
    if not cotangent:
        return
    dp = torch.randn(p.shape, generator=random(9))
    found = torch.autograd.grad(p, mine, dp)
    exact = torch.autograd.grad(expected, wide, dp.double())
    for name, a, b in zip(("du", "de"), found, exact, strict=True):
        rounding = 2.0**-8 if a.dtype == torch.bfloat16 else 0.0
        bound = gradient_tolerance(tol, b) + rounding * float(b.abs().max())
        assert_close(a, b, bound, name)


@pytest.mark.parametrize("n", (1, 5, 63, 64, 65, 96, 97, 130, 192, 193, 289, 500))
@pytest.mark.parametrize("causal", (True, False))
def test_equals_reference_around_the_sizes_of_blocks(n, causal):
    check(*operands(2, n), causal=causal)


@pytest.mark.parametrize("n", (64, 100, 320, 384, 448, 768, 832))
@pytest.mark.parametrize("causal", (True, False))
def test_whole_vectors_are_summed_where_they_lie(n, causal):
    check(*operands(2, n, width=32, experts=16), causal=causal)


def test_more_blocks_of_rows_than_splits():
    check(*operands(1, 1700, width=8, experts=3), cotangent=False)
    check(*operands(1, 1000, width=8, experts=3))
    check(*operands(1, 3300, width=8, experts=3))


@pytest.mark.parametrize("width,experts", [(1, 2), (352, 16), (37, 6), (16, 33)])
def test_any_width_and_experts(width, experts):
    check(*operands(1, 200, width, experts))


@pytest.mark.parametrize("norm", (1e-3, 352.0, 35200.0))
def test_any_scale_of_the_tokens(norm):
    """No form that needs bounded norms: the largest overflow exp by far."""
    u, e = operands(1, 200, norm=norm)
    check(u, e, cotangent=False)
    check(u * torch.linspace(0.01, 1, 200)[:, None], e, cotangent=False)


@pytest.mark.parametrize("norms", [(0.1, 60.0), (0.1, 80.0), (0.1, 900.0), (900.0, 905.0)])
def test_gradients_where_the_norms_of_tokens_differ(norms):
    """Their lse lie near enough to each other for one exponential a pair, or too far."""
    u, e = operands(2, 230, width=32)
    u[0] *= (torch.linspace(*norms, 230)[:, None] / u[0].square().sum(-1, keepdim=True)).sqrt()
    check(u, e)


def test_bf16_tokens():
    check(*operands(2, 200, width=37, dtype=torch.bfloat16))


@pytest.mark.parametrize("options", ({"window": 2}, {"window": 70}, {"restrict": "entropy"}))
@pytest.mark.parametrize("causal", (True, False))
def test_a_pair_may_have_one_role_only(options, causal):
    check(*operands(2, 230), causal=causal, **options)


@pytest.mark.parametrize("causal", (True, False))
def test_masked_tokens_are_neither_and_their_garbage_does_not_leak(causal):
    u, e = operands(2, 230)
    mask = torch.rand(2, 230, generator=random(3)) < 0.7
    mask[1, :100] = False
    clean = [torch.where(mask[..., None], x, 0.0) for x in (u, e)]
    check(*clean, mask=mask, causal=causal)
    dirty = [torch.where(mask[..., None], x, torch.nan) for x in (u, e)]
    for a, b in zip(
        moe_mlir.similarity_inform(*dirty, mask=mask, causal=causal),
        moe_mlir.similarity_inform(*clean, mask=mask, causal=causal),
        strict=True,
    ):
        assert_same_bits(a, b)
    found = []
    for operand in (dirty, clean):
        leaves = [x.requires_grad_() for x in operand]
        p, _ = moe_mlir.similarity_inform(*leaves, mask=mask, causal=causal)
        found.append(torch.autograd.grad(p, leaves, torch.randn(p.shape, generator=random(4))))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


def test_nan_of_a_token_shows_in_all_that_see_it():
    u, e = operands(1, 230)
    u[0, 150, 3] = torch.nan
    p, _ = moe_mlir.similarity_inform(u, e, causal=False)
    assert bool(p.isnan().all())


@pytest.mark.parametrize("causal", (True, False))
def test_bits_do_not_depend_on_threads_or_on_other_sequences(causal):
    """40 sequences are more than run at once."""
    u, e = operands(40, 200)
    before = torch.get_num_threads()

    def run(u, e):
        leaves = [x.clone().requires_grad_() for x in (u, e)]
        p, lse = moe_mlir.similarity_inform(*leaves, causal=causal)
        return (p, lse, *torch.autograd.grad(p.square().sum(), leaves))

    try:
        torch.set_num_threads(1)
        alone = run(u, e)
        torch.set_num_threads(5)
        together = run(u, e)
    finally:
        torch.set_num_threads(before)
    last = run(u[39:], e[39:])
    for one, many, single in zip(alone, together, last, strict=True):
        assert_same_bits(one, many)
        assert_same_bits(one[39:], single)
