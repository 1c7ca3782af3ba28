"""NaN, infinities, denormals, and remainders in imported ops: as in eager."""

import itertools

import pytest
import torch
from test_operators import Function

import moe_mlir

NAN, INF = float("nan"), float("inf")
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 3.0, 1e20, -1e20, 1e-40, -1e-45, 1e38, INF, -INF, NAN]
ROWS = torch.tensor(list(itertools.permutations([1.0, NAN, INF, -INF, 3.0], 4)))


def check(function, *inputs, rtol=2e-6, atol=1e-37):
    model = Function(function)
    found = moe_mlir.compile(model, inputs)(*inputs)
    for ours, eager in zip(torch.utils._pytree.tree_leaves(found),
                           torch.utils._pytree.tree_leaves(model(*inputs)), strict=True):
        torch.testing.assert_close(ours, eager, rtol=rtol, atol=atol, equal_nan=True)


PAIRS = {
    "%": lambda x, y: x % y, "//": lambda x, y: x // y, "/": lambda x, y: x / y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "maximum": torch.maximum, "minimum": torch.minimum,
    "compare": lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y),
    "where": lambda x, y: torch.where(x > y, x, y),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", PAIRS)
def test_pairs_of_numbers(case, dtype):
    # Of a remainder by a denormal float32, eager's vectors make NaN, its scalar code the number.
    small = [x for x in NUMBERS if not (case in ("%", "//") and 0 < abs(x) < 1e-38)]
    x, y = torch.cartesian_prod(torch.tensor(NUMBERS), torch.tensor(small)).to(dtype).unbind(1)
    check(PAIRS[case], x.clone(), y.clone())


UNARY = {
    "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "abs": torch.abs, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "exp": torch.exp, "expm1": torch.expm1, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "relu": torch.relu, "erf": torch.erf, "reciprocal": torch.reciprocal,
    "silu": torch.nn.functional.silu, "isnan": torch.isnan,
    "clamp": lambda x: x.clamp(-1.5, 2.0), "square": lambda x: x ** 2, "softplus":
    torch.nn.functional.softplus, "to bool": lambda x: x.bool(), "nan_to_num": torch.nan_to_num,
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("case", UNARY)
def test_single_numbers(case):
    check(UNARY[case], torch.tensor(NUMBERS))


@pytest.mark.parametrize("case", ["argmax", "argmin", "max", "min", "amax", "amin", "sum"])
def test_rows_with_nan(case):
    check(lambda x: getattr(x, case)(1), ROWS)


def test_positions_of_extremes_without_a_dim():
    check(lambda x: (x.argmax(), x.argmin(), x.max(), x.min()), ROWS[:3].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_top_k_takes_a_nan_once_and_first(k, dtype):
    x = ROWS.to(dtype)
    found = moe_mlir.compile(Function(lambda x: x.topk(k)), (x,))(x)
    eager = x.topk(k)
    torch.testing.assert_close(found.values, eager.values, equal_nan=True)
    # Without equal scores in a row there is one order.
    assert torch.equal(found.indices, eager.indices)


def test_logarithms_of_denormals():
    x = torch.tensor([1e-38, 1e-39, 3e-42, 1.4e-45, 2 ** -126.0, 2 ** -149.0])
    check(lambda x: (x.log(), x.log2()), x)


def test_a_variance_without_freedom():
    check(lambda x: (x.var(1), x.var(1, correction=3)), torch.tensor([[1.0], [2.0]]))
