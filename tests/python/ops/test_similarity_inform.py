"""moe.similarity_inform on the CPU against the float64 reference; tests named after edge rules."""

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


def operands(batch, n, width, experts, *, nk=None, norm=8.0, dtype=torch.float32, seed=0):
    """Tokens with |u|^2 about `norm`, probabilities, and keys if nk is given."""
    g = random(seed)
    unit = math.sqrt(norm / width)
    u = (unit * torch.randn(batch, n, width, generator=g)).to(dtype)
    keys = n if nk is None else nk
    e = torch.randn(batch, keys, experts, generator=g).softmax(-1).to(dtype)
    uk = None if nk is None else (unit * torch.randn(batch, nk, width, generator=g)).to(dtype)
    return u, e, uk


def largest_logit(u, keys=None, weight=None, tau=1.0):
    """L of docs/Spec.md 1: over all pairs, visible or not, garbage aside."""
    u, uk, ws = (None if t is None else t.double().nan_to_num(0, 0, 0) for t in (u, keys, weight))
    return largest((u if ws is None else u @ ws) @ (u if uk is None else uk).mT / float(tau))


def widen(value):
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def check(u, e, **options):
    p, lse = moe_mlir.similarity_inform(u, e, **options)
    wide = {name: widen(value) for name, value in options.items()}
    expected, expected_lse = reference.similarity_inform(u.double(), e.double(), **wide)
    logit = largest_logit(u, options.get("keys"), options.get("weight"), options.get("tau", 1.0))
    tol = score_tolerance(logit)
    assert_close(p, expected, tol, "p")
    assert_close(lse, expected_lse, tol, "lse")
    assert p.dtype == lse.dtype == torch.float32
    return p, lse


@pytest.mark.parametrize(
    "width,experts", [(1, 1), (13, 3), (32, 16), (352, 16), (24, 64), (9, 257)]
)
@pytest.mark.parametrize("causal", (True, False))
def test_equals_reference_for_any_width_and_experts(width, experts, causal):
    for n in (1, 2, 7, 64, 100):
        u, e, _ = operands(2, n, width, experts, seed=n)
        check(u, e, causal=causal)


@pytest.mark.parametrize("norm", (1.0, 30.0, 352.0, 3520.0))
def test_any_scale_of_the_tokens(norm):
    """LayerNorm-scale tokens give one-hot similarities, small ones a broad mixture."""
    u, e, _ = operands(1, 60, 32, 16, norm=norm)
    check(u, e, causal=True)
    clustered = (u[:, :1] + 0.05 * u).contiguous()
    check(clustered, e, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", (8.0, 352.0))
def test_equals_reference_for_every_dtype(dtype, norm):
    u, e, _ = operands(2, 37, 33, 8, norm=norm, dtype=dtype)
    check(u, e, causal=True)


def test_mixed_dtypes_of_tokens_and_probabilities():
    u, e, _ = operands(1, 20, 33, 8)
    check(u.bfloat16(), e, causal=True)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("n,nk", [(1, 5), (7, 20), (20, 7), (5, 70)])
def test_cached_keys_align_at_the_end(causal, n, nk):
    u, e, uk = operands(2, n, 13, 4, nk=nk)
    check(u, e, keys=uk, causal=causal)


def test_similarity_matrix_square_and_rectangular():
    u, e, _ = operands(2, 19, 12, 4)
    ws = 0.3 * torch.randn(12, 12, generator=random(5))
    check(u, e, weight=ws, causal=True)
    _, e, uk = operands(2, 19, 7, 4, nk=23)
    ws = 0.3 * torch.randn(12, 7, generator=random(6))
    check(u, e, weight=ws, keys=uk, causal=True)


def test_temperature_as_number_and_as_tensor():
    u, e, _ = operands(2, 19, 12, 4)
    fixed, _ = check(u, e, causal=True, tau=2.5)
    learned, _ = check(u, e, causal=True, tau=torch.tensor(2.5))
    assert_close(learned, fixed.double(), 1e-6)


@pytest.mark.parametrize("window", (1, 5, 1000))
def test_window(window):
    u, e, _ = operands(2, 40, 12, 4)
    check(u, e, causal=True, window=window)


def test_window_without_causality_still_sees_the_future():
    u, e, _ = operands(2, 40, 12, 4)
    check(u, e, causal=False, window=5)


@pytest.mark.parametrize("causal", (True, False))
def test_restrict_to_keys_of_no_more_entropy(causal):
    u, e, _ = operands(2, 40, 12, 4)
    e[0, 5] = e[0, 9]  # equal entropies admit one another
    e[1, 7] = torch.tensor([0.0, 1.0, 0.0, 0.0])  # 0 ln 0 = 0
    mask = torch.rand(2, 40, generator=random(3)) > 0.2
    check(u, e, causal=causal, restrict="entropy")
    check(u, e, causal=causal, restrict="entropy", mask=mask)


def test_leading_dims():
    u, e, _ = operands(6, 9, 12, 4)
    p, lse = check(u.view(2, 3, 9, 12), e.view(2, 3, 9, 4), causal=True)
    assert p.shape == (2, 3, 9, 4) and lse.shape == (2, 3, 9)
    p, lse = check(u[0], e[0], causal=True)
    assert p.shape == (9, 4) and lse.shape == (9,)


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    u, e, _ = operands(2, 19, 33, 8)
    check(layout(u), layout(e), causal=True)


def test_selection_on_the_mixture_is_legal():
    u, e, _ = operands(2, 100, 32, 16)
    p, _ = moe_mlir.similarity_inform(u, e, causal=True)
    exact, _ = reference.similarity_inform(u.double(), e.double(), causal=True)
    _, indices = moe_mlir.topk_renorm(p, 2, kind="probs")
    assert_legal_selection(indices, exact, score_tolerance(largest_logit(u)))


# ---------------------------------------------------------------- edge rules


@pytest.mark.parametrize("causal", (True, False))
def test_similarity_inform_e10_masked_tokens_are_no_keys_and_no_queries(causal):
    u, e, _ = operands(3, 40, 12, 4)
    mask = torch.rand(3, 40, generator=random(3)) > 0.4
    mask[2, 0] = False  # the first query of a causal sequence sees no key at all
    p, lse = check(u, e, causal=causal, mask=mask)
    assert not p[~mask].any()
    assert bool((lse[~mask] == -math.inf).all())


def test_similarity_inform_e10_mask_covers_only_the_keys_with_cached_keys():
    u, e, uk = operands(2, 8, 12, 4, nk=20)
    mask = torch.rand(2, 20, generator=random(3)) > 0.4
    check(u, e, keys=uk, causal=True, mask=mask)


def test_similarity_inform_e6_all_keys_masked():
    u, e, _ = operands(2, 11, 12, 4)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1] = False
    p, lse = check(u, e, causal=True, mask=mask)
    assert not p[1].any() and bool((lse[1] == -math.inf).all())
    u, e, uk = operands(1, 30, 12, 4, nk=10)
    p, lse = check(u, e, keys=uk, causal=True, mask=torch.ones(1, 10, dtype=torch.bool))
    assert not p[0, :20].any()  # these stand before the first key


def test_similarity_inform_e11_garbage_of_masked_tokens_does_not_leak():
    u, e, _ = operands(2, 30, 12, 4)
    mask = torch.rand(2, 30, generator=random(3)) > 0.4
    u[~mask] = math.nan
    e[~mask] = math.inf
    p, lse = check(u, e, causal=False, mask=mask)
    assert not p.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("shape", ((0, 5), (2, 0)))
def test_similarity_inform_e12_no_tokens(shape):
    p, lse = moe_mlir.similarity_inform(
        torch.empty(*shape, 12), torch.empty(*shape, 4), causal=True
    )
    assert p.shape == (*shape, 4) and lse.shape == shape


def test_similarity_inform_e12_no_keys():
    u, e, uk = operands(2, 3, 12, 4, nk=0)
    p, lse = moe_mlir.similarity_inform(u, e, keys=uk, causal=False)
    assert not p.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize("causal", (True, False))
def test_similarity_inform_e13_one_token_keeps_its_probabilities(causal):
    u, e, _ = operands(3, 1, 12, 4)
    p, _ = check(u, e, causal=causal)
    assert_close(p, e.double(), 1e-6)


def test_nan_of_a_visible_token_shows_in_the_rows_that_see_it():
    u, e, _ = operands(1, 20, 12, 4)
    u[0, 6, 3] = math.nan
    p, _ = moe_mlir.similarity_inform(u, e, causal=True)
    assert bool(p[0, 6:].isnan().all())


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 70),
    norm=st.sampled_from((0.1, 8.0, 352.0)),
    keep=st.sampled_from((0.1, 0.7, 1.0)),
)
def test_any_seed_count_scale_and_padding(seed, n, norm, keep):
    u, e, _ = operands(2, n, 13, 4, norm=norm, seed=seed)
    mask = torch.rand(2, n, generator=random(seed)) < keep
    check(u, e, causal=True, mask=mask)
