"""Integers of 8 and 16 bits, with a sign and without: as in eager."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_operators import Function, check

import moe_mlir
from moe_mlir.frontends.import_program import main
from moe_mlir.importer import ImportFailed

NARROW = [torch.uint8, torch.int8, torch.int16]


def numbers(dtype):
    """The type's limits, and what a sign or the lack of one makes another number of."""
    limits = torch.iinfo(dtype)
    found = {0, 1, 2, 7, 100, 127, limits.max - 1, limits.max, limits.min, limits.max // 2 + 1}
    return torch.tensor(sorted(found), dtype=dtype)


def pairs(dtype):
    x, y = torch.tensor(list(itertools.product(numbers(dtype).tolist(), repeat=2)),
                        dtype=dtype).unbind(1)
    return x.clone(), y.clone()


def every_pair(x, y):
    return [x + y, x - y, x * y, x + 300, x - 1, 3 - x, -x, x ** 2, x.abs(), x.relu(), x / y, x / 7,
            torch.maximum(x, y), torch.minimum(x, y), x & y, x | y, x ^ y, ~x, x & 6,
            x < y, x <= y, x > y, x >= y, x == y, x != y, x > -1, x < 200, x == 256,
            x << (y & 15), x >> (y & 15), x << 3, x >> 3, x >> 9, x << 9, x >> -1,
            torch.where(x > y, x, y), torch.where(x > 1, x, -1), x.masked_fill(x > 1, -1),
            x.clamp(3, 120), x.clamp(min=y), x & (x > y), x + y.long(), x > y.to(torch.int8)]


@pytest.mark.parametrize("dtype", NARROW)
def test_pairs(dtype):
    check(every_pair, pairs(dtype), later=tuple(t[:5].clone() for t in pairs(dtype)), rtol=0,
          atol=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_division(dtype):
    def function(x, y):
        return [x // y, x % y, torch.div(x, y, rounding_mode="trunc"), x // 3, x % 7, x % 200]
    x, y = pairs(dtype)
    check(function, (x[y != 0], y[y != 0]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_conversions_and_reductions(dtype):
    def function(x, f, other):
        rows = x[None].expand(3, -1)
        return [x.float(), x.double(), x.half(), x.long(), x.int(), x.to(torch.int16), x.bool(),
                x.to(torch.int8), x.to(torch.uint8), f.to(dtype), other.to(dtype),
                rows.sum(1), rows.sum(1, dtype=dtype), rows.amax(1), rows.amin(1), rows.max(1),
                rows.argmax(1), rows.argmin(1), x.max(), x.min(), rows.cumsum(1),
                rows.cumsum(1, dtype=dtype), rows.float().mean(1)]
    f = torch.tensor([0.0, 1.9, -1.0, -1.5, 127.0, 128.5, 200.0, 255.9, 256.0, 300.7, -200.5])
    other = torch.tensor([0, -1, 128, 255, 256, 300, -200, 2 ** 40 + 3])
    check(function, (numbers(dtype), f, other), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_moving_elements(dtype):
    def function(x, i):
        rows = torch.cat((x[None], x[None] * 2))
        return [F.pad(rows, (1, 2), value=100), rows.roll(1, -1), rows.t().reshape(-1), rows[:, i],
                rows.gather(1, i[None]), rows.scatter(1, i[None], 100), rows.repeat(2, 1),
                torch.full_like(x, 100), torch.zeros_like(x), x.new_full((2, 3), -1),
                rows.index_select(1, i), torch.arange(0, 250, 50, dtype=dtype),
                torch.eye(3, dtype=dtype), rows[:, 1::2]]
    check(function, (numbers(dtype), torch.tensor([3, 0, 1])))


def test_an_identity_and_masks():
    def function(x):
        n = x.shape[1]
        return torch.eye(n), torch.eye(n, 4, dtype=torch.bool), x * torch.eye(n)[..., :1]
    check(function, (torch.randn(2, 3, 5),), later=(torch.randn(1, 7, 5),))


@pytest.mark.parametrize(("function", "message"), [
    (lambda x: x.any(), "dtype uint8; convert the operand"),
    (lambda x: x[None] @ x[:, None], "dtype uint8; convert the operand"),
    (lambda x: x.clamp(max=256), "the bound 256 for uint8; expected -255 to 255"),
    (lambda x: x.to(torch.int8).clamp(min=-129), "the bound -129 for int8; expected -128 to 127"),
])
def test_what_uint8_is_refused_for(function, message):
    with pytest.raises(ImportFailed, match=message):
        moe_mlir.export(Function(function), (torch.arange(9, dtype=torch.uint8),))


def test_an_artifact_has_no_uint8(tmp_path, capsys):
    """Its manifest would say int8."""
    program = torch.export.export(Function(lambda x: x.float() + 1),
                                  (torch.arange(9, dtype=torch.uint8),))
    torch.export.save(program, tmp_path / "bytes.pt2")
    assert main([str(tmp_path / "bytes.pt2"), str(tmp_path)]) == 1
    assert "an artifact has, found uint8 of ['inputs_0']; convert" in capsys.readouterr().err


def test_extremes_of_bools_are_or_and_and():
    """As numbers of one bit with a sign, True is less than False."""
    x, y = torch.tensor([[True, True, False, False]]), torch.tensor([True, False, True, False])
    check(lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.max(x, y), torch.clamp_min(x, y),
                        torch.clamp_max(x, y), x.signbit(), x.isnan(), x.nansum(), x.amax(-1)), (x, y))


def test_integers_are_numbers():
    check(lambda x: (x.isnan(), x.nansum(), x.isinf(), torch.heaviside(x, x), x.nan_to_num()), (torch.arange(-2, 3),))
