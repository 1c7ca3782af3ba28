"""moe.soft_dispatch on the CPU against the float64 reference."""

import math

import pytest
import torch
from op_judge import DTYPES, assert_close, gradient_tolerance, random, score_tolerance

import moe_mlir
from moe_mlir import reference


def operands(*batch, n=17, d=12, experts=5, slots=2, seed=0):
    g = random(seed)
    return torch.randn(*batch, n, d, generator=g), torch.randn(d, experts, slots, generator=g)


def check(x, phi, scale=1.0, **options):
    results = moe_mlir.soft_dispatch(x, phi, scale=scale, **options)
    wide = {k: v.double() if k == "metric" and v is not None else v for k, v in options.items()}
    expected = reference.soft_dispatch(x.double(), phi.double(), scale=float(scale), **wide)
    m = options.get("metric")
    level = abs(float(scale)) * (1.0 if m is None else float(m.nan_to_num().abs().max()))
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, wanted, score_tolerance(level))
    return results


@pytest.mark.parametrize("n", (0, 1, 2, 7, 64))
@pytest.mark.parametrize("d,experts,slots", [(1, 1, 1), (13, 4, 3), (32, 16, 1)])
def test_equals_reference(n, d, experts, slots):
    x, phi = operands(n=n, d=d, experts=experts, slots=slots)
    to_slots, to_tokens = check(x, phi, scale=4.0)
    if n:
        ones = torch.ones(())
        assert_close(to_slots.sum(0), ones.expand(experts, slots).double(), 1e-5)
        assert_close(to_tokens.sum((-2, -1)), ones.expand(n).double(), 1e-5)


def test_batches_do_not_mix():
    x, phi = operands(2, 3)
    whole = check(x, phi)
    for actual, wanted in zip(check(x[1, 2], phi), whole, strict=True):
        assert torch.equal(actual, wanted[1, 2])


def test_e10_e11_masked_tokens_are_in_no_slot_and_do_not_leak():
    x, phi = operands(2)
    mask = torch.rand(2, 17, generator=random(1)) > 0.3
    m = torch.rand(2, 17, 12, generator=random(2))
    clean = check(x, phi, mask=mask, metric=m)
    x[~mask], m[~mask] = math.nan, math.inf
    for actual, wanted in zip(check(x, phi, mask=mask, metric=m), clean, strict=True):
        assert torch.equal(actual, wanted)
        assert not actual[~mask].any()


def test_e6_without_a_real_token_all_weights_are_0():
    x, phi = operands()
    for weights in check(x, phi, mask=torch.zeros(17, dtype=torch.bool)):
        assert not weights.any()


def test_a_zero_token_has_uniform_logits():
    x, phi = operands()
    x[3] = 0
    _, to_tokens = check(x, phi)
    assert_close(to_tokens[3], torch.full((5, 2), 0.1).double(), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_a_learned_scale(dtype):
    x, phi = operands()
    check(x.to(dtype), phi.to(dtype), scale=torch.tensor(3.0))


def test_soft_acmoe_metric():
    x, phi = operands(2)
    check(x, phi, scale=5.0, metric=3 * torch.rand(2, 17, 12, generator=random(1)))


def test_gradient():
    x, phi = operands(2)
    x[0, 3] = 0  # a token at the eps of its norm
    m = torch.rand(2, 17, 12, generator=random(1))
    mask = torch.rand(2, 17, generator=random(2)) > 0.3
    scale = torch.tensor(2.5)
    cotangents = [torch.randn(2, 17, 5, 2, generator=random(s)) for s in (3, 4)]
    for options in ({}, dict(mask=mask), dict(metric=m), dict(mask=mask, metric=m)):
        grads = []
        for function, dtype in (
            (moe_mlir.soft_dispatch, torch.float32),
            (reference.soft_dispatch, torch.float64),
        ):
            leaves = [v.detach().clone().to(dtype).requires_grad_() for v in (x, phi, scale)]
            wide = {k: v.to(dtype) if k == "metric" else v for k, v in options.items()}
            results = function(leaves[0], leaves[1], scale=leaves[2], eps=1e-2, **wide)
            sum((r * c.to(dtype)).sum() for r, c in zip(results, cotangents)).backward()
            grads.append([leaf.grad for leaf in leaves])
        for name, actual, wanted in zip(("x", "phi", "scale"), *grads, strict=True):
            if name == "x":  # the reference divides 0 by 0 in the norm of a zero token
                keep = torch.ones(2, 17, dtype=torch.bool)
                keep[0, 3] = False
                assert actual.isfinite().all()
                actual, wanted = actual[keep], wanted[keep]
            assert_close(actual, wanted, gradient_tolerance(score_tolerance(5), wanted), name)
