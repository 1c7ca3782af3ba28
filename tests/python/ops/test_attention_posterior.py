"""moe.attention_posterior on the CPU against the float64 reference; tests named after edge rules."""

import math

import pytest
import torch
from op_judge import assert_close, largest, random, score_tolerance, strided, unaligned

import moe_mlir
from moe_mlir import reference

TENSORS = ("q", "k", "attn_output", "probs", "projected_v", "v", "wo", "bias", "head_prior")


def operands(n=21, *, nk=None, batch=2, heads=3, width=6, d=10, experts=5, means=False,
             dtype=torch.float32, seed=0):  # fmt: skip
    g = random(seed)
    nk = n if nk is None else nk

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    x = dict(
        q=normal(batch, heads, n, width),
        k=normal(batch, heads, nk, width),
        attn_output=normal(batch, n, d),
        probs=normal(batch, nk, experts).float().softmax(-1).to(dtype),
    )
    if means:
        x["projected_v"] = normal(batch, heads, nk, d)
    else:
        x["v"] = normal(batch, heads, nk, width)
        x["wo"] = (0.4 * normal(heads, d, width)).to(dtype)
    return x


def largest_logit(q, k, attn_output, *, projected_v=None, v=None, wo=None, sigma=1.0, scale=None, **_):
    """L of docs/Spec.md 1: prior, cross term and norm term, without the bias."""
    q, k, u, vp, v, wo = (
        None if t is None else t.double().nan_to_num(0, 0, 0)
        for t in (q, k, attn_output, projected_v, v, wo)
    )
    means = vp if vp is not None else v @ wo.mT
    square = float(sigma) ** 2
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    prior = largest(q @ k.mT) * abs(scale)
    return (
        prior + largest(u[:, None] @ means.mT) / square + largest((means**2).sum(-1)) / (2 * square)
    )


def check(causal=True, **options):
    """Every result against the reference, the heads exactly (the inputs have no near ties)."""
    results = moe_mlir.attention_posterior(causal=causal, return_lse=True, **options)
    wide = {
        name: t.double() if name in TENSORS and t is not None else t for name, t in options.items()
    }
    expected = reference.attention_posterior(causal=causal, return_lse=True, **wide)
    tol = score_tolerance(
        largest_logit(**options) + largest(options.get("bias", torch.zeros(1)).double())
    )
    assert torch.equal(results[1], expected[1])
    for name, actual, wanted in zip(
        ("p", "head", "prior", "posterior"), results, expected, strict=True
    ):
        if name != "head":
            assert_close(actual, wanted, tol, name)
    return results


MODES = ("min_entropy", "all", 1)
# One kernel takes most of a second to compile, so the tests share widths, and
# go through the pairs of options rather than through all their products.
FORMS = [
    ("min_entropy", False, True),
    ("min_entropy", True, False),
    ("all", False, True),
    ("all", True, False),
    (1, False, True),
]


@pytest.mark.parametrize("mode,means,causal", FORMS)
def test_equals_reference_for_every_mode(mode, means, causal):
    for n in (1, 2, 7, 64):
        check(causal, **operands(n, means=means, seed=n), head_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_sigma_is_visible(mode):
    """The Gaussian term is no small correction at these sizes."""
    x = operands()
    p, *_ = check(**x, head_mode=mode)
    wide, *_ = check(**x, head_mode=mode, sigma=torch.tensor(3.0))
    check(**x, head_mode=mode, sigma=torch.tensor(0.7))
    assert float((p - wide).abs().max()) > 1e-3


def test_sigma_and_scale_as_numbers():
    check(**operands(), sigma=0.7, scale=0.2)


@pytest.mark.parametrize(
    "mode,dtype", [("all", torch.bfloat16), ("min_entropy", torch.bfloat16), (1, torch.float16)]
)
def test_equals_reference_in_16_bit(mode, dtype):
    check(**operands(dtype=dtype), head_mode=mode)


@pytest.mark.parametrize(
    "mode,heads,experts", [("min_entropy", 1, 1), ("all", 2, 17), ("min_entropy", 8, 16)]
)
def test_any_heads_and_experts(mode, heads, experts):
    check(**operands(heads=heads, experts=experts, width=5, d=7), head_mode=mode)


@pytest.mark.parametrize(
    "mode,shape",
    [
        ("min_entropy", (21, 21)),
        ("all", (1, 3, 21, 21)),
        (1, (2, 1, 21, 21)),
        ("min_entropy", (2, 3, 21, 21)),
    ],
)
def test_bias_of_any_broadcast(mode, shape):
    bias = torch.randn(*shape, generator=random(7))
    bias[..., 3] = -math.inf  # a key that the bias hides
    check(**operands(), bias=bias, head_mode=mode)


def test_head_prior():
    prior = torch.rand(2, 21, 3, generator=random(7)) + 0.1
    prior[0, :, 1] = 0.0
    check(**operands(), head_prior=prior, head_mode="all")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n,nk", [(1, 9), (7, 30), (9, 4)])
def test_cached_keys_align_at_the_end(mode, n, nk):
    check(**operands(n, nk=nk), head_mode=mode)
    mask = torch.rand(2, nk, generator=random(3)) > 0.3
    check(**operands(n, nk=nk), head_mode=mode, mask=mask)


def test_window():
    check(**operands(), head_mode="all", window=5)


def test_exclude_self_with_and_without_causality():
    check(False, **operands(), exclude_self=True)
    check(**operands(), head_mode="all", exclude_self=True)


def test_exclude_self_in_a_window_leaves_as_many_keys():
    check(**operands(6, nk=20), window=5, exclude_self=True)


def test_head_scope():
    x = operands(batch=4)
    mask = torch.rand(4, 21, generator=random(3)) > 0.3
    check(**x, head_scope="sequence", mask=mask)
    _, head, *_ = check(**x, head_scope="batch", mask=mask)
    assert len(set(head.tolist())) == 1


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    check(**{name: layout(t) for name, t in operands().items()})


# ---------------------------------------------------------------- edge rules


@pytest.mark.parametrize("mode", MODES)
def test_attention_posterior_e10_masked_tokens_take_no_part(mode):
    mask = torch.rand(2, 21, generator=random(3)) > 0.4
    mask[1, 0] = False
    p, *_ = check(**operands(), mask=mask, head_mode=mode)
    assert not p[~mask].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", (9, 21))
def test_queries_have_a_mask_of_their_own(mode, n):
    x = operands(n, nk=21)
    mask = torch.rand(2, 21, generator=random(3)) > 0.3
    query_mask = torch.rand(2, n, generator=random(4)) > 0.3
    for masks in (dict(mask=mask, query_mask=query_mask), dict(query_mask=query_mask)):
        p, *_ = check(**x, head_mode=mode, causal=False, **masks)
        assert not p[~query_mask].any() and p[query_mask].any()


@pytest.mark.parametrize("mode", MODES)
def test_the_mask_of_as_many_keys_is_the_default_of_the_queries_mask(mode):
    mask = torch.rand(2, 21, generator=random(3)) > 0.4
    options = dict(**operands(), causal=True, head_mode=mode, mask=mask)
    default, _ = moe_mlir.attention_posterior(**options)
    same, _ = moe_mlir.attention_posterior(**options, query_mask=mask)
    none, _ = moe_mlir.attention_posterior(**options, query_mask=torch.ones_like(mask))
    assert torch.equal(default, same) and not torch.equal(default, none)


def test_a_query_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"'query_mask'.*\[batch, n\]"):
        moe_mlir.attention_posterior(
            **operands(9, nk=21), causal=True, query_mask=torch.ones(2, 21).bool()
        )


@pytest.mark.parametrize("mode", MODES)
def test_attention_posterior_e11_garbage_of_masked_tokens_does_not_leak(mode):
    x = operands()
    mask = torch.rand(2, 21, generator=random(3)) > 0.4
    for name in ("q", "k", "v"):
        x[name][(~mask)[:, None].expand(x[name].shape[:3])] = math.nan
    for name in ("attn_output", "probs"):
        x[name][~mask] = math.nan
    p, *_ = check(**x, mask=mask, head_mode=mode)
    assert not p.isnan().any()


@pytest.mark.parametrize("mode", MODES)
def test_attention_posterior_e6_without_a_visible_key(mode):
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1] = False
    p, _, prior, posterior = check(**operands(), mask=mask, head_mode=mode)
    assert not p[1].any()
    assert bool((prior[1] == -math.inf).all()) and bool((posterior[1] == -math.inf).all())


def test_attention_posterior_e6_the_first_query_that_may_not_see_itself():
    p, *_ = check(**operands(), exclude_self=True, head_mode="all")
    assert not p[:, 0].any()


@pytest.mark.parametrize("mode", ("min_entropy", "all"))
@pytest.mark.parametrize("batch,n", ((0, 4), (2, 0)))
def test_attention_posterior_e12_no_tokens(mode, batch, n):
    p, head = moe_mlir.attention_posterior(**operands(n, batch=batch), causal=True, head_mode=mode)
    assert p.shape == (batch, n, 5) and head.shape == (batch,)


@pytest.mark.parametrize("mode", MODES)
def test_attention_posterior_e13_one_token_keeps_its_probabilities(mode):
    x = operands(1)
    p, *_ = check(**x, head_mode=mode)
    assert_close(p, x["probs"].double(), 1e-6)


def test_attention_posterior_e19_equal_heads_choose_the_lowest():
    x = operands()
    for name in ("q", "k"):
        x[name][:, 1:] = x[name][:, :1]
    _, head, *_ = check(**x)
    assert head.tolist() == [0, 0]
    x["q"][:, 1:] *= 20  # heads 1 and 2 are surer, and equal to one another
    _, head, *_ = check(**x)
    assert head.tolist() == [1, 1]
