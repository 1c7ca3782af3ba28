"""moe_mlir.attention on the CPU against the float64 reference, and its rows in the posterior."""

import math

import pytest
import torch
from op_judge import DTYPES, assert_close, largest, random, score_tolerance, strided, unaligned

import moe_mlir
from moe_mlir import reference


def operands(n, nk=None, heads=3, width=8, values=8, batch=2, dtype=torch.float32, seed=0):
    g = random(seed)
    nk = n if nk is None else nk
    q = torch.randn(batch, heads, n, width, generator=g).to(dtype)
    k = torch.randn(batch, heads, nk, width, generator=g).to(dtype)
    return q, k, torch.randn(batch, heads, nk, values, generator=g).to(dtype)


def check(q, k, v, **options):
    actual = moe_mlir.attention(q, k, v, **options)
    wide = dict(options)
    if options.get("bias") is not None:
        wide["bias"] = options["bias"].double()
    expected = reference.attention(q.double(), k.double(), v.double(), **wide)
    scale = options.get("scale") or 1 / math.sqrt(q.shape[-1])
    logits = q.double() @ k.double().transpose(-1, -2) * scale
    if options.get("bias") is not None:
        logits = logits + wide["bias"]
    tol = score_tolerance(largest(logits))
    out, row_lse, row_entropy = actual
    assert out.dtype == q.dtype and row_lse.dtype == row_entropy.dtype == torch.float32
    # The result is rounded once to the dtype of q.
    ulp = torch.finfo(q.dtype).eps * largest(v.double())
    assert_close(out, expected[0], tol * max(1.0, largest(v.double())) + ulp, "out")
    assert_close(row_lse, expected[1], tol, "row_lse")
    assert_close(row_entropy, expected[2], tol, "row_entropy")
    return actual


@pytest.mark.parametrize("causal", (True, False))
def test_equals_reference_for_any_size(causal):
    for n, nk in ((0, 0), (1, 1), (2, 2), (7, 7), (64, 64), (100, 100), (3, 70), (1, 33), (0, 5)):
        check(*operands(n, nk, seed=n), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    check(*operands(33, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width,values", [(1, 1), (44, 44), (5, 80), (160, 3), (6, 129)])
def test_equals_reference_for_other_widths(width, values, dtype):
    # Queries of an odd position see an odd number of keys, of which pairs are made.
    check(*operands(70, width=width, values=values, dtype=dtype), causal=True)
    check(*operands(3, 70, width=width, values=values, dtype=dtype), causal=True, window=5)


def test_equals_torch():
    q, k, v = operands(50, width=44, values=44)
    out, *_ = moe_mlir.attention(q, k, v, causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(out, wanted.double(), 1e-5)


@pytest.mark.parametrize("exclude_self", (True, False))
@pytest.mark.parametrize("window", (None, 1, 5))
def test_visibility(exclude_self, window):
    for n, nk in ((20, 20), (9, 31)):
        check(*operands(n, nk), causal=True, exclude_self=exclude_self, window=window)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_bias(shape):
    bias = torch.randn(*shape, 20, 20, generator=random(3))
    check(*operands(20), causal=True, bias=bias)


# Blocks of 64 keys or 32, groups of six queries: ends of a cache, and what lies in the middle.
HIDDEN = {
    "behind": lambda i, j: j > 70 + i,
    "before": lambda i, j: j < 130 + 3 * i,
    "window": lambda i, j: (j < 20 + 8 * i) | (j > 120 + 8 * i),
    "hole": lambda i, j: (j >= 60) & (j < 260) & (i != 9),
    "queries": lambda i, j: (i >= 6) & (i < 12) | (j % 7 == 0),
    "all": lambda i, j: (i >= 0) & (j >= 0),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_bias_hides_blocks_of_keys(hidden, causal, dtype):
    n, nk = 23, 300
    q, k, v = operands(n, nk, seed=n)
    hides = HIDDEN[hidden](torch.arange(n)[:, None], torch.arange(nk))
    bias = torch.randn(1, 3, n, nk, generator=random(4)).to(dtype).masked_fill(hides, -math.inf)
    found = moe_mlir.attention(q, k, v, causal=causal, bias=bias)
    wanted = reference.attention(q.double(), k.double(), v.double(), causal=causal,
                                 bias=bias.double())
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 1e-5)
    # What nobody sees is not read where it fills a block.
    nobody = hides.all(0)
    if hidden in ("behind", "all"):
        whole = nobody.clone()
        whole[:128 if hidden == "behind" else 0] = False
        k, v = (torch.where(whole[:, None], torch.nan, t) for t in (k, v))
        for a, b in zip(moe_mlir.attention(q, k, v, causal=causal, bias=bias), found, strict=True):
            assert torch.equal(a, b)


def test_a_bias_that_is_not_a_number_hides_nothing():
    bias = torch.full((1, 1, 9, 130), -math.inf)
    bias[0, 0, 4, 100] = torch.nan
    out, row_lse, _ = moe_mlir.attention(*operands(9, 130, batch=1), bias=bias, causal=False)
    assert out[:, :, 4].isnan().all() and row_lse[:, :, 4].isnan().all()
    rest = [i for i in range(9) if i != 4]
    assert not out[:, :, rest].any() and bool((row_lse[:, :, rest] == -math.inf).all())


def test_mask_hides_keys_and_queries_of_the_same_tokens():
    mask = torch.rand(2, 20, generator=random(5)) > 0.4
    check(*operands(20), causal=False, mask=mask)
    check(*operands(7, 20), causal=True, mask=mask)


def test_attention_e6_nothing_is_visible():
    out, row_lse, row_entropy = check(
        *operands(6), causal=True, mask=torch.zeros(2, 6, dtype=torch.bool)
    )
    assert not out.any() and not row_entropy.any() and bool((row_lse == -math.inf).all())


def test_attention_e11_garbage_in_padding_does_not_leak():
    x = operands(20)
    mask = torch.rand(2, 20, generator=random(5)) > 0.4
    clean = moe_mlir.attention(*x, causal=False, mask=mask)
    x = (torch.where(mask[:, None, :, None], t, torch.nan) for t in x)
    for a, b in zip(moe_mlir.attention(*x, causal=False, mask=mask), clean, strict=True):
        assert torch.equal(a, b)


def test_strided_and_unaligned_operands():
    plain = check(*operands(11), causal=True)
    for form in (strided, unaligned):
        for a, b in zip(
            moe_mlir.attention(*map(form, operands(11)), causal=True), plain, strict=True
        ):
            assert torch.equal(a, b)


# ------------------------------------------------------------------- gradients


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("bias_shape", (None, (1, 3), (2, 1)))
def test_gradients_equal_the_reference(causal, bias_shape):
    g = random(7)
    x = [t.requires_grad_() for t in operands(19, 19, values=5)]
    options = dict(causal=causal, mask=torch.rand(2, 19, generator=g) > 0.2)
    if bias_shape is not None:
        options["bias"] = torch.randn(*bias_shape, 19, 19, generator=g).requires_grad_()
    weights = [torch.randn(2, 3, 19, 5, generator=g), torch.randn(2, 3, 19, generator=g)]

    def gradients(op, wide):
        leaves = [*x, *([options["bias"]] if bias_shape else [])]
        leaves = [t.detach().double() if wide else t.detach() for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        rest = dict(options, **({"bias": leaves[3]} if bias_shape else {}))
        out, row_lse, row_entropy = op(*leaves[:3], **rest)
        assert not row_entropy.requires_grad
        finite = torch.where(row_lse == -math.inf, 0, row_lse)
        total = (out * weights[0]).sum() + (finite * weights[1]).sum()
        return torch.autograd.grad(total, leaves)

    found = gradients(moe_mlir.attention, False)
    wanted = gradients(reference.attention, True)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 2e-5)


def test_gradients_in_16_bit_have_its_dtype():
    x = [t.requires_grad_() for t in operands(9, dtype=torch.bfloat16)]
    out, *_ = moe_mlir.attention(*x, causal=True)
    for grad in torch.autograd.grad(out.float().sum(), x):
        assert grad.dtype == torch.bfloat16 and bool(torch.isfinite(grad).all())


# ----------------------------------------------------- the rows in the posterior


def posterior(n=21, nk=None, seed=0):
    g = random(seed)
    q, k, v = operands(n, nk, seed=seed)
    nk = k.shape[2]
    return dict(
        q=q,
        k=k,
        v=v,
        attn_output=torch.randn(2, n, 10, generator=g),
        probs=torch.randn(2, nk, 5, generator=g).softmax(-1),
        wo=0.4 * torch.randn(3, 10, 8, generator=g),
    )


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("mode", ("min_entropy", "all", 1))
def test_the_posterior_takes_the_rows_of_the_attention(mode, masked):
    """Bit for bit: both come from the same loop over the keys."""
    x = posterior()
    options = dict(causal=True, head_mode=mode, return_lse=True)
    mask = torch.rand(2, 21, generator=random(5)) > 0.4 if masked else None
    alone = moe_mlir.attention_posterior(**x, **options, mask=mask)
    # Rows of masked queries may hold anything.
    _, row_lse, row_entropy = moe_mlir.attention(x["q"], x["k"], x["v"], causal=True)
    if masked:
        _, row_lse, row_entropy = moe_mlir.attention(x["q"], x["k"], x["v"], causal=True, mask=mask)
        for rows in (row_lse, row_entropy):
            rows.masked_fill_(~mask[:, None], 7.0)
    given = moe_mlir.attention_posterior(
        **x, **options, mask=mask, row_lse=row_lse, row_entropy=row_entropy
    )
    for a, b in zip(given, alone, strict=True):
        assert torch.equal(a, b)


def test_the_posterior_chooses_the_head_by_the_given_rows():
    x = posterior()
    row_lse = torch.zeros(2, 3, 21)
    row_entropy = torch.ones(2, 3, 21)
    row_entropy[:, 2] = 0.5
    _, head = moe_mlir.attention_posterior(
        **x, causal=True, row_lse=row_lse, row_entropy=row_entropy
    )
    assert head.tolist() == [2, 2]


def test_gradients_do_not_need_the_rows():
    x = {name: t.requires_grad_() for name, t in posterior().items()}
    _, row_lse, row_entropy = moe_mlir.attention(x["q"], x["k"], x["v"], causal=True)
    weights = torch.randn(2, 21, 5, generator=random(9))

    def gradients(**rows):
        p, _ = moe_mlir.attention_posterior(**x, causal=True, **rows)
        return torch.autograd.grad((p * weights).sum(), list(x.values()))

    given = gradients(row_lse=row_lse, row_entropy=row_entropy)
    for a, b in zip(given, gradients(), strict=True):
        assert torch.equal(a, b)


def test_one_of_the_rows_is_refused():
    with pytest.raises(ValueError, match="expected 'row_lse' and 'row_entropy' together"):
        moe_mlir.attention_posterior(**posterior(), causal=True, row_lse=torch.zeros(2, 3, 21))
    with pytest.raises(ValueError, match="expected 'row_entropy' to have shape"):
        moe_mlir.attention_posterior(
            **posterior(),
            causal=True,
            row_lse=torch.zeros(2, 3, 21),
            row_entropy=torch.zeros(2, 3, 20),
        )


def test_wrong_values_are_refused():
    q, k, v = operands(5)
    with pytest.raises(ValueError, match=r"attention: expected 'v' to have shape"):
        moe_mlir.attention(q, k, v[:, :, :4], causal=True)
    with pytest.raises(ValueError, match=r"attention: expected 'v' to have 4 dims"):
        moe_mlir.attention(q, k, v[0], causal=True)
    with pytest.raises(TypeError, match=r"attention: expected 'k' to have the dtype of 'q'"):
        moe_mlir.attention(q, k.half(), v, causal=True)
