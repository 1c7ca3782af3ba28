"""moe.attention_entropy on the CPU against the float64 reference."""

import math

import pytest
import torch
from op_judge import DTYPES, assert_close, largest, random, score_tolerance, strided

import moe_mlir
from moe_mlir import reference


def operands(n, nk=None, heads=3, width=8, batch=2, dtype=torch.float32, seed=0):
    g = random(seed)
    q = torch.randn(batch, heads, n, width, generator=g).to(dtype)
    k = torch.randn(batch, heads, n if nk is None else nk, width, generator=g).to(dtype)
    return q, k


def check(q, k, **options):
    actual = moe_mlir.attention_entropy(q, k, **options)
    wide = dict(options)
    if options.get("bias") is not None:
        wide["bias"] = options["bias"].double()
    expected = reference.attention_entropy(q.double(), k.double(), **wide)
    scale = options.get("scale") or 1 / math.sqrt(q.shape[-1])
    logits = q.double() @ k.double().transpose(-1, -2) * scale
    atol = score_tolerance(largest(logits))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b, atol)
    return actual


@pytest.mark.parametrize("causal", (True, False))
def test_equals_reference_for_any_size(causal):
    for n, nk in ((0, 0), (1, 1), (2, 2), (7, 7), (64, 64), (100, 100), (3, 70), (1, 33), (0, 5)):
        check(*operands(n, nk, seed=n), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    check(*operands(33, dtype=dtype), causal=True)


@pytest.mark.parametrize("exclude_self", (True, False))
@pytest.mark.parametrize("window", (None, 1, 5))
def test_visibility(exclude_self, window):
    for n, nk in ((20, 20), (9, 31)):
        check(*operands(n, nk), causal=True, exclude_self=exclude_self, window=window)
        check(*operands(n, nk), causal=False, exclude_self=exclude_self, window=window)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_bias(shape):
    bias = torch.randn(*shape, 20, 20, generator=random(3))
    check(*operands(20), causal=True, bias=bias)


def test_mask_hides_keys_and_queries_of_the_same_tokens():
    mask = torch.rand(2, 20, generator=random(5)) > 0.4
    check(*operands(20), causal=False, mask=mask)
    check(*operands(7, 20), causal=True, mask=mask)


def test_attention_entropy_e6_nothing_is_visible():
    entropy, rows = check(*operands(6), causal=True, mask=torch.zeros(2, 6, dtype=torch.bool))
    assert not entropy.any() and not rows.any()


def test_attention_entropy_e11_garbage_in_padding_does_not_leak():
    q, k = operands(20)
    mask = torch.rand(2, 20, generator=random(5)) > 0.4
    clean = moe_mlir.attention_entropy(q, k, causal=False, mask=mask)
    q, k = (torch.where(mask[:, None, :, None], x, torch.nan) for x in (q, k))
    for a, b in zip(moe_mlir.attention_entropy(q, k, causal=False, mask=mask), clean, strict=True):
        assert torch.equal(a, b)


def test_attention_entropy_e12_no_tokens():
    entropy, rows = check(*operands(0), causal=True)
    assert entropy.tolist() == [[0.0] * 3] * 2 and rows.shape == (2, 3, 0)


def test_an_unmasked_query_that_sees_no_key_counts_as_sure():
    q, k = operands(2)
    entropy, rows = check(q, k, causal=True, exclude_self=True)
    assert not rows[..., 0].any()
    assert_close(entropy, rows.double().mean(-1), 1e-7)


def test_equal_logits_have_the_entropy_of_their_number():
    q, k = operands(40)
    _, rows = check(torch.zeros_like(q), k, causal=True)
    assert_close(rows[0, 0], torch.arange(1, 41).double().log(), 1e-6)


def test_one_sure_key_has_entropy_0():
    """0 ln 0 = 0, also where weights underflow."""
    q, k = operands(30, width=16)
    check(30 * q, 30 * k, causal=False)
    check(300 * q, 300 * q, causal=False)


def test_strided_operands():
    check(*map(strided, operands(11)), causal=True)


def test_means_over_many_rows_keep_their_digits():
    check(*operands(1500, heads=1, batch=1, width=4), causal=True, window=64)
