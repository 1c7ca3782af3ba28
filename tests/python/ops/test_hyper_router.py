"""moe.hyper_router on the CPU against the float64 reference."""

import pytest
import torch
from op_judge import DTYPES, assert_close, logit_tolerance, random, strided, unaligned

import moe_mlir
from moe_mlir import reference


def operands(width, hidden, experts, d, dtype=torch.float32, seed=0):
    g = random(seed)
    rows = experts * (d + 1)
    shapes = ((width,), (hidden, width), (hidden,), (rows, hidden), (rows,))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def check(operands, experts):
    actual = moe_mlir.hyper_router(*operands, experts)
    expected = reference.hyper_router(*(t.double() for t in operands), experts)
    hidden = operands[1].shape[0]
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        # Two products: the hidden layer's rounding passes through the second.
        assert_close(a, b, 2 * logit_tolerance(expected[0], max(hidden, operands[0].numel())))
    return actual


@pytest.mark.parametrize(
    "width,hidden,experts,d", [(1, 1, 1, 1), (3, 5, 4, 8), (32, 64, 16, 33), (7, 13, 33, 17)]
)
def test_equals_reference_for_any_sizes(width, hidden, experts, d):
    weight, bias = check(operands(width, hidden, experts, d), experts)
    assert weight.shape == (experts, d) and bias.shape == (experts,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    check(operands(6, 9, 4, 8, dtype), 4)


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    check(list(map(layout, operands(6, 9, 4, 8))), 4)


def test_the_bias_is_the_last_column():
    """The rows of the network's output are [weights of the expert, its bias]."""
    e, w1, b1, w2, b2 = (torch.zeros(s) for s in ((2,), (3, 2), (3,), (6, 3), (6,)))
    b2[:] = torch.arange(6)
    weight, bias = check([e, w1, b1, w2, b2], 2)
    assert weight.tolist() == [[0, 1], [3, 4]] and bias.tolist() == [2, 5]


def test_nan_passes_the_relu():
    x = operands(3, 5, 4, 8)
    x[2][1] = torch.nan
    weight, bias = moe_mlir.hyper_router(*x, 4)
    assert bool(weight.isnan().all()) and bool(bias.isnan().all())
