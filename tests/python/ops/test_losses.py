"""moe.balance_loss, moe.z_loss and moe.bias_update against the float64 references."""

import math

import pytest
import torch
from op_judge import DTYPES, assert_close, gradient_tolerance, largest, random

import moe_mlir
from moe_mlir import reference


def routing(n, experts, k, seed=0):
    z = 2 * torch.randn(n, experts, generator=random(seed))
    return z, z.softmax(-1), z.argsort(-1, descending=True)[:, :k]


def check_balance(p, idx, **options):
    loss = moe_mlir.balance_loss(p, idx, **options)
    expected = reference.balance_loss(p.double(), idx, **options)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_close(loss, expected, 1e-6 * max(1.0, float(expected)))
    return loss


@pytest.mark.parametrize("experts,k", [(1, 1), (8, 2), (16, 8), (257, 3)])
@pytest.mark.parametrize("divide_by", ("tokens", "assignments"))
def test_balance_loss(experts, k, divide_by):
    for n in (0, 1, 7, 300):
        _, p, idx = routing(n, experts, k, n)
        check_balance(p, idx, divide_by=divide_by)
        check_balance(p, idx.int(), divide_by=divide_by)


def test_balance_loss_of_a_balanced_router_is_1():
    idx = torch.arange(8)[:, None]
    assert float(check_balance(torch.full((8, 8), 0.125), idx)) == 1.0


def test_balance_loss_e10_e11_masked_tokens_count_nowhere():
    _, p, idx = routing(30, 8, 2)
    mask = torch.rand(30, generator=random(1)) > 0.4
    clean = check_balance(p, idx, mask=mask)
    assert_close(clean, reference.balance_loss(p[mask].double(), idx[mask]), 1e-6)
    p[~mask], idx[~mask] = math.nan, -1
    assert torch.equal(moe_mlir.balance_loss(p, idx, mask=mask), clean)
    assert float(moe_mlir.balance_loss(p, idx, mask=torch.zeros(30, dtype=torch.bool))) == 0.0


def test_balance_loss_sums_many_tokens_accurately():
    _, p, idx = routing(20000, 4, 1)
    check_balance(p.view(4, 5000, 4), idx.view(4, 5000, 1))


@pytest.mark.parametrize("divide_by", ("tokens", "assignments"))
def test_balance_loss_gradient(divide_by):
    _, p, idx = routing(40, 8, 2)
    mask = torch.rand(40, generator=random(1)) > 0.4
    for options in ({}, dict(mask=mask)):
        grads = []
        for function, dtype in (
            (moe_mlir.balance_loss, torch.float32),
            (reference.balance_loss, torch.float64),
        ):
            leaf = p.detach().clone().to(dtype).requires_grad_()
            (3 * function(leaf, idx, divide_by=divide_by, **options)).backward()
            grads.append(leaf.grad)
        assert_close(*grads, gradient_tolerance(1e-6, grads[1]))


# ---------------------------------------------------------------------- z_loss


def check_z(z, **options):
    loss = moe_mlir.z_loss(z, **options)
    expected = reference.z_loss(z.double(), **options)
    assert_close(loss, expected, 2e-6 * max(1.0, largest(expected)))
    return loss


@pytest.mark.parametrize("dtype", DTYPES)
def test_z_loss(dtype):
    for n, experts in ((0, 4), (1, 1), (7, 3), (300, 16), (5, 257)):
        z, _, _ = routing(n, experts, 1, n)
        check_z(z.to(dtype))


def test_z_loss_large_logits_and_rows_without_support():
    z, _, _ = routing(9, 6, 1)
    check_z(1000 * z)
    z[2] = -math.inf
    z[3, 1:] = -math.inf
    check_z(z)


def test_z_loss_e10_masked_tokens_do_not_count():
    z, _, _ = routing(4 * 9, 6, 1)
    mask = torch.rand(36, generator=random(1)) > 0.4
    z[~mask] = math.nan
    loss = check_z(z.view(4, 9, 6), mask=mask.view(4, 9))
    assert_close(loss, reference.z_loss(z[mask].double()), 1e-5)
    assert float(check_z(z, mask=torch.zeros(36, dtype=torch.bool))) == 0.0


def test_z_loss_gradient():
    z, _, _ = routing(40, 8, 1)
    z[3], z[4, 2] = -math.inf, -math.inf
    mask = torch.rand(40, generator=random(1)) > 0.4
    for options in ({}, dict(mask=mask)):
        grads = []
        for function, dtype in ((moe_mlir.z_loss, torch.float32), (reference.z_loss, torch.float64)):
            leaf = z.detach().clone().to(dtype).requires_grad_()
            (0.5 * function(leaf, **options)).backward()
            grads.append(leaf.grad)
        assert_close(*grads, gradient_tolerance(2e-6, grads[1]))


# ----------------------------------------------------------------- bias_update


@pytest.mark.parametrize("count_dtype", (torch.int32, torch.int64))
def test_bias_update(count_dtype):
    for experts in (1, 2, 7, 256):
        bias = torch.randn(experts, generator=random(0))
        counts = torch.randint(0, 50, (experts,), generator=random(1)).to(count_dtype)
        new = moe_mlir.bias_update(bias, counts, gamma=0.01)
        assert_close(new, reference.bias_update(bias.double(), counts, gamma=0.01), 1e-6)


def test_bias_update_is_exact_at_the_mean_and_for_large_counts():
    bias = torch.zeros(3)
    assert not moe_mlir.bias_update(bias, torch.tensor([5, 5, 5])).any()
    counts = torch.tensor([2**40 + 1, 2**40, 2**40 - 1])
    new = moe_mlir.bias_update(bias, counts, gamma=1.0)
    assert new.tolist() == [-1.0, 0.0, 1.0]


def test_bias_update_has_no_gradient_and_leaves_its_operand_alone():
    bias = torch.zeros(3, requires_grad=True)
    new = moe_mlir.bias_update(bias, torch.tensor([1, 2, 3]))
    assert not new.requires_grad and not bias.any()
