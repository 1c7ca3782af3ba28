"""Writes to places that tensors choose: against eager torch."""

import pytest
import torch
from test_operators import Function, check, tokens

import moe_mlir
from moe_mlir.importer import ImportFailed


def put(x, where, values, accumulate=False):
    return torch.ops.aten.index_put(x, where, values, accumulate)


def test_where_a_mask_holds():
    def function(x, ids):
        clean = ids.clone()
        clean[(ids == 3) | (ids > 6)] = 0
        rows, part, last = x.clone(), x.clone(), x.clone()
        rows[ids > 4] = x[0, 0] * 2
        part[:, ids[0] > 4] = torch.tensor(7.0)
        last[..., x[0, 0] > 0] = -1
        x = x.clone()
        x[x < 0] = 0.5
        return (clean, rows, part, last, x, put(rows, (ids > 4,), x[0, :1], True),
                put(ids, (ids > 4,), torch.tensor(1), True))
    ids = torch.tensor([[3, 5, 1], [9, 0, 4]])
    check(function, (tokens(), ids), later=(tokens(1, 5), torch.arange(5)[None] * 2))


def test_rows_that_add_up():
    """Equal indices: each counts."""
    def function(x, ids, table):
        return (put(table, (ids,), x, True), put(table, (ids[0],), x[0], True),
                table.index_add(0, ids[0], x[0], alpha=2), put(table, (ids,), x[:, :1], True),
                put(table, (ids,), torch.tensor(1.0), True),
                table.scatter_add(0, ids[..., None].expand(-1, -1, 8)[0], x[0]),
                put(table.half(), (ids,), x.half(), True))
    check(function, (tokens(), torch.tensor([[3, 1, 3], [-1, 3, 3]])), torch.randn(5, 8),
          later=(tokens(3, 1), torch.tensor([[4], [4], [0]])))


def test_several_index_tensors():
    def function(x, ids, table):
        rows, columns = ids, ids[:, :1]
        values = table[ids, 0]
        return (put(x, (ids[0], ids[0]), x[0]), put(table, (rows, columns), values),
                put(table, (rows, columns), values, True),
                put(x, (None, ids[0] % 3, ids[0]), values[:1]),
                put(x, (ids[0] % 2, None, ids[0]), torch.tensor(2.0)),
                put(x, (ids[0] % 2, None, ids[0]), x[0, :, 0], True),
                put(x, (None, ids % 2), x[:1, :1, None]),
                put(table, (ids[0, :1], ids[0, 1:]), torch.tensor(5.0)))
    check(function, (tokens(2, 3), torch.tensor([[1, 0, 1], [0, -1, 1]])), torch.randn(5, 8),
          later=(tokens(3, 3), torch.tensor([[1, 0, 1]])))


def test_reading_by_several_index_tensors():
    def function(x, ids):
        return (x[ids % 2, :, ids], x[ids[0] % 2, :, ids], x[:, ids[0], ids],
                x.mT[:, ids, ids[:1]])
    check(function, (tokens(2, 3), torch.tensor([[1, 0, 1], [0, -1, 1]])),
          later=(tokens(2, 3), torch.tensor([[1, 0, 1]])))


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_reductions_into_targets(reduce):
    def function(x, ids):
        return (x.scatter_reduce(1, ids, x * 2, reduce), x.bfloat16().scatter_reduce(
            1, ids, x.bfloat16(), reduce), ids.scatter_reduce(1, ids, ids * 3, reduce))
    x = torch.tensor([[1.0, -2.0, torch.nan, 3.0], [0.0, torch.inf, 5.0, -torch.inf]])
    check(function, (x, torch.tensor([[0, 0, 3, 3], [1, 2, 1, 1]])))


def test_masked_scatter():
    def function(x, mask, source):
        return x.masked_scatter(mask, source), x.masked_scatter(mask[..., :1], source)
    mask = torch.rand(2, 3, 8) > 0.5
    check(function, (tokens(), mask, tokens()),
          later=(tokens(1, 7), torch.zeros(1, 7, 8, dtype=torch.bool), tokens(1, 2)))
    compiled = moe_mlir.compile(Function(lambda x, m, s: x.masked_scatter(m, s)),
                                (tokens(), mask, tokens()))
    with pytest.raises(IndexError, match="found 8"):
        compiled(tokens(), torch.ones_like(mask), tokens(1, 1))


@pytest.mark.parametrize(("function", "message"), [
    (lambda x: put(x, (x > 0,), x[x > 0]), "a value for each place|depends on data"),
    (lambda x: put(x, (x[:, 0, 0] > 0, torch.tensor([0])), x[0]), "a boolean index beside others|"
                                                                 "depends on data"),
    (lambda x: put(x > 0, (torch.tensor([0]),), x[:1] > 1, True), "accumulate=True of booleans"),
    (lambda x: x.scatter_reduce(1, torch.zeros(2, 1, 8).long(), x, "mean"), "reduce='mean'"),
    (lambda x: x.scatter_reduce(1, torch.zeros(2, 1, 8).long(), x, "sum", include_self=False),
     "include_self=False; fill"),
])
def test_writes_without_an_entry(function, message):
    with pytest.raises(ImportFailed, match=message):
        moe_mlir.export(Function(function), (tokens(),))
