"""Operators that read elements in another order, at open sizes: against eager torch."""

import pytest
import torch
from test_operators import Function, check, tokens

import moe_mlir


@pytest.mark.parametrize("count", [1, 2, 9])
def test_rolls_of_open_sizes(count):
    def function(x, ids):
        n = x.shape[1]
        return (x.roll(1, 1), x.roll((-2, 3), (0, 1)), x.roll(2), x.roll((1, -1), (1, -1)),
                x.roll(n - 1, 1), x.roll(-n, -1), ids.roll(-1), ids.roll(1, dims=-1))
    check(function, (tokens(), torch.arange(5)), later=(tokens(1, count), torch.arange(count)))


def test_flips():
    def function(x):
        return x.flip(0), x.flip(1), x.flip(-1, 0), x.flip(()), x[:, :, :1].flip(2), (x > 0).flip(1)
    check(function, (tokens(),), later=(tokens(1, 7),))


def test_parts_without_elements():
    """As of rotary positions of three dims of which one has no part of a head."""
    def function(x):
        first, none = x.split([x.shape[-1], 0], dim=-1)
        rows = x[:, :, :0].unbind(0)
        kept = torch.zeros_like(x)
        kept[..., 3:3] = none
        return torch.cat([first, none.roll(1, 1), none.flip(1)], -1), none.exp(), rows[1] + 1, kept
    check(function, (tokens(2, 5),), later=(tokens(2, 7),))


def test_windows():
    def function(x):
        return (x.unfold(1, 3, 1), x.unfold(1, 2, 2), x.unfold(-1, 4, 3), x.unfold(0, 1, 1),
                x.unfold(1, 3, 1).unfold(-2, 2, 3))
    check(function, (tokens(2, 5),), later=(tokens(3, 8),))


def test_windows_that_do_not_fit_are_an_error():
    model = Function(lambda x: x.unfold(1, 3, 1))
    compiled = moe_mlir.compile(model, (tokens(2, 5),))
    with pytest.raises(ValueError, match="as the model's own code asked"):
        compiled(tokens(2, 2))


def test_unbound_and_repeated():
    def function(x):
        q, k = x.view(x.shape[0], -1, 2, 4).unbind(2)
        return (q - k, *x[..., :3].unbind(-1), x.repeat_interleave(2, 1),
                x[0, 0].repeat_interleave(3), x[:, :0].repeat(1, 2, 1), torch.stack(x[0, 0].unbind()))
    check(function, (tokens(),), later=(tokens(4, 6),))


def test_what_has_no_elements_is_not_computed():
    """Whatever the operators: the sizes of a cut that is empty, as in a cache's buffer, divide nothing."""
    def function(x):
        none = x[:, :0]
        parts = none.reshape(x.shape[0], 0, 2, 4).softmax(-1) @ torch.ones(4, 3)
        return torch.cat((x, none.view(x.shape[0], -1, 8)), 1), parts.sum((1, 2)), parts.flatten(1, 2)
    check(function, (tokens(),), later=(tokens(4, 6),))


def test_triangles():
    def function(x):
        pairs = x @ x.mT
        return (pairs.tril(), pairs.triu(1), pairs.tril(-1), x.tril(2), x.triu(-1), x.tril(-20),
                torch.ones(x.shape[1], 5).tril(-1))
    check(function, (tokens(),), later=(tokens(1, 6),))


REMAINDERS = {
    torch.float32: (2.5, -0.7), torch.float16: (2.5, -0.75), torch.int64: (3, -2),
    torch.int8: (3, -7), torch.uint8: (3, 200)}


@pytest.mark.parametrize("dtype", REMAINDERS)
def test_remainders_with_the_sign_of_the_dividend(dtype):
    left, right = REMAINDERS[dtype]

    def function(x, y):
        return x.fmod(left), x.fmod(right), x.fmod(y)
    x = torch.tensor([0, 1, -1, 7, -8, 100, -128]).to(dtype)
    y = torch.tensor([3, -3, 5, -1, -3, 7, -1]).to(dtype)
    if dtype.is_floating_point:
        x, y = torch.cat((x, torch.tensor([float("nan"), float("inf"), -0.0, 1]).to(dtype))), \
            torch.cat((y, torch.tensor([1, 2, 3, float("inf")]).to(dtype)))
    check(function, (x, y), rtol=0, atol=0)
