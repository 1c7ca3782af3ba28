"""moe.router_logits on the CPU against the float64 reference."""

import pytest
import torch
from op_judge import DTYPES, assert_close, logit_tolerance, random, strided, unaligned

import moe_mlir
from moe_mlir import reference


def operands(n, width, experts, dtype=torch.float32, seed=0):
    g = random(seed)
    h = torch.randn(n, width, generator=g).to(dtype)
    weight = torch.randn(experts, width, generator=g).to(dtype)
    return h, weight, torch.randn(experts, generator=g).to(dtype)


def check(h, weight, bias=None):
    z = moe_mlir.router_logits(h, weight, bias)
    wide = [None if t is None else t.double() for t in (h, weight, bias)]
    expected = reference.router_logits(*wide)
    assert z.dtype == torch.float32
    assert_close(z, expected, logit_tolerance(expected, h.shape[-1]))
    return z


@pytest.mark.parametrize("width,experts", [(1, 1), (13, 7), (352, 16), (64, 257), (37, 100)])
def test_equals_reference_for_any_width_and_experts(width, experts):
    for n in (0, 1, 2, 7, 64, 100):
        check(*operands(n, width, experts, seed=n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    h, weight, bias = operands(9, 33, 8, dtype)
    check(h, weight, bias)
    check(h, weight)


def test_mixed_dtypes():
    h, weight, bias = operands(9, 33, 8)
    check(h.bfloat16(), weight, bias)
    check(h, weight.bfloat16(), bias.half())


def test_leading_dims():
    h, weight, bias = operands(12, 13, 7)
    z = check(h.view(2, 3, 2, 13), weight, bias)
    assert z.shape == (2, 3, 2, 7)
    assert check(h[0], weight, bias).shape == (7,)


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    check(*map(layout, operands(11, 33, 8)))


def test_router_logits_e12_no_tokens():
    _, weight, bias = operands(0, 13, 7)
    assert moe_mlir.router_logits(torch.empty(2, 0, 13), weight, bias).shape == (2, 0, 7)


def test_nan_and_infinity_stay_in_their_row():
    h, weight, bias = operands(4, 13, 7)
    h[1, 3], h[2, 5] = torch.nan, torch.inf
    z = check(h, weight, bias)
    assert bool(z[1].isnan().all()) and not z[[0, 3]].isnan().any()
