"""Kernels for parts of the rows, whose number is no expression of the sizes: the least of two."""

import math

import pytest
import torch
from support import Function

import moe_mlir

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3


def joined(x):
    return torch.cat([x[:2].tanh(), x[2:]]).softmax(-1)


def written(x):
    return x.tanh().slice_scatter(x[:2].exp(), 0, 1, 3).softmax(-1)


def product(x):
    return (x[:2] @ W).softmax(-1)


def two_products(x):
    return torch.cat([(x[:5] @ W).softmax(-1), (x[5:] @ W).tanh()])


def many_rows(x):
    """Of more blocks than one."""
    return torch.cat([(x[:40] @ W).softmax(-1), (x[40:] @ W).tanh()]), x[30:].sum(0)


def places(x):
    return x.index_copy(0, torch.arange(x.shape[0]).roll(1)[:3], x[:3].tanh())


def place_of_a_token(x):
    return torch.zeros(1, 8).scatter(1, x[:1].argmax(-1, keepdim=True), 2.0) + x


def run(function, x, rows=None):
    compiled = moe_mlir.compile(Function(function), (x,), target="sm_90a")
    for count in rows or (x.shape[0],):
        given = torch.randn(count, *x.shape[1:], generator=torch.Generator().manual_seed(count))
        with moe_mlir.simulate(chip="sm_90a"):
            yield given, compiled(given)


@pytest.mark.parametrize(
    "function", (joined, written, product, two_products, many_rows, places, place_of_a_token),
    ids=lambda f: f.__name__)
def test_parts_of_rows(function):
    for x, found in run(function, torch.randn(9, 8), rows=(9, 3, 50, 100)):
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [10000.0, 2.0, 0.37, 1e-30, 1.0000001, 1.0])
def test_powers_of_a_constant(base):
    """To 2 ulp, wherever the result is a normal number; infinities and NaN as torch."""
    reach = min(120 / max(abs(math.log2(base)), 1e-9), 1e9)
    special = torch.tensor([0, 1, -1, torch.inf, -torch.inf, torch.nan, 1e30, -1e30])

    def power(x):
        return base ** (x * reach).where(x.abs() < 1, special)
    x = torch.linspace(-1.1, 1.1, 4096).view(-1, 8)
    compiled = moe_mlir.compile(Function(power), (x,), target="sm_90a")
    with moe_mlir.simulate(chip="sm_90a"):
        found = compiled(x)
    exponents = (x * reach).where(x.abs() < 1, special)
    wanted = torch.tensor(base).double() ** exponents.double()
    wanted = wanted.where((wanted > 2e-38) | wanted.isnan(), 0).float().double()
    torch.testing.assert_close(found.double().where((found > 2e-38) | found.isnan(), 0), wanted,
                               rtol=2.4e-7, atol=0, equal_nan=True)
