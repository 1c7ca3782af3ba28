"""moe.threshold_renorm, moe.densify and moe.make_finite against the float64 references."""

import math

import pytest
import torch
from op_judge import DTYPES, assert_close, gradient_tolerance, random, strided

import moe_mlir
from moe_mlir import reference


def probabilities(n, experts, seed=0):
    return (2 * torch.randn(n, experts, generator=random(seed))).softmax(-1)


def check(p, theta, **options):
    gates, count = moe_mlir.threshold_renorm(p, theta, **options)
    expected = reference.threshold_renorm(p.double(), float(theta), **options)
    assert gates.dtype == torch.float32 and count.dtype == torch.int64
    assert_close(gates, expected[0], 1e-6)
    assert torch.equal(count, expected[1])
    return gates, count


@pytest.mark.parametrize("experts,renorm", [(1, True), (2, False), (7, True), (257, True)])
def test_equals_reference(experts, renorm):
    for n in (0, 1, 5, 33):
        for theta in (0.0625, 0.5, 0.0, 2.0):
            check(probabilities(n, experts, n), torch.tensor(theta), renorm=renorm)
    check(probabilities(9, experts), 0.0625, renorm=renorm)


def test_threshold_renorm_e20_strictly_above_or_the_best():
    p = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5], [0.2, 0.4, 0.4]])
    gates, count = check(p, 0.5)
    assert count.tolist() == [1, 1, 1]
    assert gates.argmax(-1).tolist() == [1, 2, 1]
    _, count = check(p, 0.25)
    assert count.tolist() == [1, 1, 2]


def test_threshold_renorm_e3_e5_e6_special_values():
    p = torch.tensor(
        [
            [0.5, math.nan, 0.5],
            [-math.inf, -math.inf, -math.inf],
            [0.0, 0.0, 0.0],
            [math.nan, -math.inf, 0.01],
            [math.nan, math.nan, math.nan],
        ]
    )
    gates, count = check(p, 0.05)
    assert gates[0].isnan().all() and not gates[1:3].any()
    assert count.tolist() == [2, 1, 1, 1, 1]


def test_threshold_renorm_e10_masked_tokens():
    p = probabilities(20, 7)
    mask = torch.rand(20, generator=random(1)) > 0.4
    p[~mask] = math.nan
    gates, count = check(p, 0.1, mask=mask)
    assert not gates[~mask].any() and not count[~mask].any()


def test_threshold_renorm_leading_dims_dtypes_and_learned_theta():
    p = probabilities(24, 8)
    gates, count = check(p, torch.tensor(0.1))
    shaped = moe_mlir.threshold_renorm(strided(p).view(24, 8).unflatten(0, (2, 3, 4)), 0.1)
    assert_close(shaped[0].flatten(0, 2), gates.double(), 0)
    assert torch.equal(shaped[1].flatten(), count)
    for dtype in DTYPES[1:]:
        check(p.to(dtype), 0.0625)


@pytest.mark.parametrize("renorm", (True, False))
def test_threshold_renorm_gradient(renorm):
    p = probabilities(12, 7)
    p[3] = 0  # a zero sum has no gradient
    mask = torch.rand(12, generator=random(1)) > 0.3
    cotangent = torch.randn(12, 7, generator=random(2))
    grads = []
    for function, dtype in (
        (moe_mlir.threshold_renorm, torch.float32),
        (reference.threshold_renorm, torch.float64),
    ):
        leaf = p.detach().clone().to(dtype).requires_grad_()
        gates, _ = function(leaf, 0.3, renorm=renorm, mask=mask)
        (gates * cotangent.to(dtype)).sum().backward()
        grads.append(leaf.grad)
    assert_close(grads[0], grads[1], gradient_tolerance(1e-6, grads[1]))


@pytest.mark.parametrize("renorm", (True, False))
def test_threshold_renorm_straight_through_theta(renorm):
    """theta moves a mask of ones that multiplies the gates of the selected experts."""
    p = probabilities(12, 7)
    cotangent = torch.randn(12, 7, generator=random(2))
    grads = []
    for function, dtype in (
        (moe_mlir.threshold_renorm, torch.float32),
        (reference.threshold_renorm, torch.float64),
    ):
        theta = torch.tensor(0.1, dtype=dtype, requires_grad=True)
        gates, _ = function(p.to(dtype), theta, renorm=renorm)
        (gates * cotangent.to(dtype)).sum().backward()
        grads.append(theta.grad)
    assert_close(grads[0], grads[1], gradient_tolerance(1e-6, grads[1]))
    assert float(grads[1].abs()) > 0.1


# --------------------------------------------------------------------- densify


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64))
def test_densify(index_dtype):
    for n, k, experts in ((0, 2, 4), (1, 1, 1), (13, 3, 9), (40, 8, 257)):
        indices = torch.rand(n, experts, generator=random(n)).argsort(-1)[:, :k].to(index_dtype)
        gates = torch.rand(n, k, generator=random(1))
        indices[::3, 0] = -1
        dense = moe_mlir.densify(gates, indices, experts)
        expected = reference.densify(gates.double(), indices, experts)
        assert_close(dense, expected, 0 if not n else 1e-7)


def test_densify_indices_out_of_range_are_nowhere():
    dense = moe_mlir.densify(torch.ones(1, 3), torch.tensor([[4, 2**40, 1]]), 4)
    assert dense.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_densify_gradient():
    gates = torch.rand(5, 2, generator=random(0)).requires_grad_()
    indices = torch.tensor([[0, 2], [1, -1], [3, 0], [2, 1], [0, 9]])
    cotangent = torch.randn(5, 4, generator=random(1))
    moe_mlir.densify(gates, indices, 4).backward(cotangent)
    inside = (indices >= 0) & (indices < 4)
    expected = cotangent.gather(-1, indices.clamp(0, 3)) * inside
    assert torch.equal(gates.grad, expected)


def test_densify_undoes_a_selection():
    z = torch.randn(9, 6, generator=random(0))
    gates, indices = moe_mlir.topk_renorm(z, 6, renorm=True)
    assert_close(moe_mlir.densify(gates, indices, 6), z.double().softmax(-1), 1e-6)


# ----------------------------------------------------------------- make_finite


@pytest.mark.parametrize("scope", ("row", "tensor"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_make_finite(scope, dtype):
    x = torch.randn(3, 4, 7, generator=random(0)).to(dtype)
    x[0, 0, 1], x[1, 2, 3], x[2, 1, 0] = math.nan, math.inf, -math.inf
    x[1, 1] = math.nan
    finite = moe_mlir.make_finite(x, scope=scope)
    expected = reference.make_finite(x.double(), scope=scope)
    assert finite.dtype == torch.float32
    assert_close(finite, expected, 0)
    assert finite.isfinite().all()
    assert moe_mlir.make_finite(x[:0], scope=scope).shape == (0, 4, 7)


def test_make_finite_without_a_finite_score():
    x = torch.full((2, 3), math.nan)
    assert not moe_mlir.make_finite(x, scope="tensor").any()


def test_make_finite_gradient_passes_through_finite_scores_only():
    x = torch.tensor([[1.0, math.nan, -2.0]], requires_grad=True)
    moe_mlir.make_finite(x).sum().backward()
    assert x.grad.tolist() == [[1.0, 0.0, 1.0]]
