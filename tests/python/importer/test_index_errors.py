"""Indices out of range and divisors of 0: an error at the call, as in eager, and nothing is lost."""

import threading

import pytest
import torch
import torch.nn.functional as F
from support import run_tool

import moe_mlir


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, a, b, c=None):
        return self.function(a, b) if c is None else self.function(a, b, c)


def put(x, index, rows):
    x = x.clone()
    x[index] = rows
    return x


def ints(*values):
    return torch.tensor(values)


ROWS, IDS = torch.arange(35.0).view(5, 7), ints([0, 6], [3, 2], [1, 1], [6, 6], [2, 0])
# The call, good and bad inputs, and what the error says of the bad ones.
INDEXED = {
    "embedding": (lambda w, i: F.embedding(i, w), (ROWS, ints(0, 4, 2)), (ROWS, ints(0, 5, 2)),
                  r"embedding: .*'indices' to be at least 0 and less than 5, found 5 at \[1\]"),
    "embedding, negative": (lambda w, i: F.embedding(i, w), (ROWS, ints([0, 4], [1, 2])),
                            (ROWS, ints([0, 4], [-1, 2])), r"found -1 at \[1, 0\]"),
    "embedding, far": (lambda w, i: F.embedding(i, w), (ROWS, ints(0, 4)), (ROWS, ints(0, 2 ** 62)),
                       r"found 4611686018427387904 at \[1\]"),
    "embedding, int32": (lambda w, i: F.embedding(i, w), (ROWS, ints(0, 4).int()),
                         (ROWS, ints(-2 ** 31, 1).int()), r"found -2147483648 at \[0\]"),
    "gather": (lambda x, i: x.gather(1, i), (ROWS, IDS), (ROWS, IDS + 1),
               r"gather: .*'index' to be at least 0 and less than 7, found 7 at \[0, 1\]"),
    "gather, expanded": (lambda x, i: x[:, :, None].expand(-1, -1, 2).gather(
        1, i[:, :, None].expand(-1, -1, 2)), (ROWS, IDS), (ROWS, IDS - 1),
        r"found -1 at \[0, 0, 0\]"),
    "index": (lambda x, i: x[i], (ROWS, ints(-5, 4)), (ROWS, ints(-5, -6)),
              r"index: .*'indices\[0\]' to be at least -5 and less than 5, found -6 at \[1\]"),
    "index, columns": (lambda x, i: x[i, i], (ROWS[:, :3].clone(), ints(0, 2)),
                       (ROWS[:, :3].clone(), ints(0, 3)), r"'indices\[1\]' .*found 3 at \[1\]"),
    "index_select": (lambda x, i: x.index_select(1, i), (ROWS, ints(6, 0)), (ROWS, ints(6, 7)),
                     r"index_select: .*found 7 at \[1\]"),
    "index_put": (lambda x, i: put(x, i, 2.0), (ROWS, ints(-5, 4)), (ROWS, ints(4, 5)),
                  r"index_put: .*found 5 at \[1\]"),
    "index_put, expanded": (lambda x, i: put(x, i.expand(3), x[:3] * 2),
                            (ROWS, ints(4)), (ROWS, ints(5)), r"found 5 at \[0\]"),
    "scatter": (lambda x, i: x.scatter(1, i, 1.0), (ROWS, IDS), (ROWS, -IDS),
                r"scatter: .*found -6 at \[0, 1\]"),
    "scatter of a tensor": (lambda x, i: x.scatter(1, i, x * 2), (ROWS, IDS),
                            (ROWS, IDS + 2 ** 40), r"found 1099511627776 at \[0, 0\]"),
}


@pytest.mark.parametrize("case", INDEXED)
def test_an_index_out_of_range_is_an_error(case):
    function, good, bad, message = INDEXED[case]
    model = Function(function)
    compiled = moe_mlir.compile(model, good)
    with pytest.raises((IndexError, RuntimeError)):
        model(*bad)
    for _ in range(2):
        with pytest.raises(IndexError, match=message):
            compiled(*bad)
        torch.testing.assert_close(compiled(*good), model(*good))


def test_the_error_names_the_line():
    model = Function(lambda w, i: F.embedding(i, w))
    with pytest.raises(IndexError, match=r"; test_index_errors.py:\d+"):
        moe_mlir.compile(model, (ROWS, ints(1)))(ROWS, ints(9))


def test_a_size_that_grows_moves_the_bound():
    model = Function(lambda x, i: x.index_select(0, i))
    compiled = moe_mlir.compile(model, (ROWS, ints(4)))
    torch.testing.assert_close(compiled(torch.cat([ROWS, ROWS]), ints(9)), ROWS[4:])
    with pytest.raises(IndexError, match="less than 3, found 3"):
        compiled(ROWS[:3].clone(), ints(3))
    with pytest.raises(IndexError, match="less than 0, found 0"):
        compiled(ROWS[:0].clone(), ints(0))


class Layers(torch.nn.Module):
    """Equal layers, which are compiled as one function."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Embedding(6, 6) for _ in range(4))
        for layer in self.layers:
            layer.weight.data.copy_(torch.eye(6))

    def forward(self, ids, start):
        for layer in self.layers:
            ids = layer(ids + start).argmax(-1)
        return ids


def test_repeated_layers():
    compiled = moe_mlir.compile(Layers(), (ints(1, 0), ints(0, 0)))
    assert compiled(ints(0, 1), ints(1, 1)).tolist() == [4, 5]
    with pytest.raises(IndexError, match=r"found 6 at \[1\]"):
        compiled(ints(0, 2), ints(1, 1))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.eye(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids):
        rows = F.embedding(ids, self.table)
        self.seen.add_(rows.sum(0))
        return rows


def test_a_refused_call_updates_nothing():
    model = Counts()
    compiled = moe_mlir.compile(model, (ints(0, 1),))
    compiled(ints(0, 1))
    with pytest.raises(IndexError):
        compiled(ints(0, 4))
    assert model.seen.tolist() == [1, 1, 0, 0]


def test_threads_get_their_own_errors():
    compiled = moe_mlir.compile(Function(lambda w, i: F.embedding(i, w)), (ROWS, ints(1)))
    found = {}

    def call(number):
        for _ in range(200):
            with pytest.raises(IndexError) as caught:
                compiled(ROWS, ints(number))
            found.setdefault(number, set()).add(str(caught.value).partition(";")[0])
    threads = [threading.Thread(target=call, args=(10 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: {f"embedding: expected 'indices' to be at least 0 and less than 5, found {n} "
                         "at [0]"} for n in range(10, 14)}


@pytest.mark.parametrize("threads", [1, 2])
def test_of_many_wrong_indices_the_first_is_named(threads):
    before = torch.get_num_threads()
    compiled = moe_mlir.compile(Function(lambda w, i: F.embedding(i, w)), (ROWS, ints(1)))
    torch.set_num_threads(threads)
    try:
        for first in (0, 777, 19999):
            ids = torch.zeros(20000, dtype=torch.long)
            ids[first:] = 8
            with pytest.raises(IndexError, match=rf"found 8 at \[{first}\]"):
                compiled(ROWS, ids)
    finally:
        torch.set_num_threads(before)


DIVISIONS = {
    "//": lambda x, y: x // y, "%": lambda x, y: x % y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("case", DIVISIONS)
def test_division_of_integers(case, dtype):
    model = Function(DIVISIONS[case])
    x = torch.arange(-9, 9, dtype=dtype)
    y = torch.tensor([1, -1, 2, -2, 3, -3, 7, 100, -100] * 2, dtype=dtype)
    compiled = moe_mlir.compile(model, (x, y))
    torch.testing.assert_close(compiled(x, y), model(x, y))
    y[5] = 0
    with pytest.raises(ZeroDivisionError, match="expected divisors other than 0, found 0"):
        compiled(x, y)


@pytest.mark.parametrize("case", DIVISIONS)
def test_the_least_number_by_minus_one_wraps(case):
    """The processor traps here, and so does eager: two's complement has no such quotient."""
    least = torch.tensor([-2 ** 63, 5])
    compiled = moe_mlir.compile(Function(DIVISIONS[case]), (ints(1, 2), ints(1, 1)))
    found = compiled(least, ints(-1, -1))
    assert found.tolist() == ([0, 0] if case == "%" else [-2 ** 63, -5])


def test_an_artifact_refuses_as_a_model_does(tmp_path):
    import numpy as np

    program = torch.export.export(Function(lambda w, i: F.embedding(i, w)), (ROWS, ints(1, 2)))
    torch.export.save(program, tmp_path / "rows.pt2")
    done = run_tool("moe-compile", tmp_path / "rows.pt2", "-o", tmp_path / "a", "--target=cpu")
    assert done.returncode == 0, done.stderr
    np.save(tmp_path / "w.npy", ROWS.numpy())
    np.save(tmp_path / "i.npy", np.array([2, 5]))
    message = "'indices' to be at least 0 and less than 5, found 5 at [1]"
    done = run_tool("moe-run", tmp_path / "a", f"--input={tmp_path}/w.npy",
                    f"--input={tmp_path}/i.npy", f"--output={tmp_path}/y.npy")
    assert done.returncode == 1 and message in done.stderr
    assert not (tmp_path / "y.npy").exists()
    with pytest.raises(IndexError, match=r"less than 5, found 5 at \[1\]"):
        moe_mlir.load(tmp_path / "a")(ROWS, ints(2, 5))


class Asserts(torch.nn.Module):
    def forward(self, x):
        torch._assert_async((x > 0).all(), "expected {0} positive numbers")
        return x * 2


def test_an_assertion_on_values():
    compiled = moe_mlir.compile(Asserts(), (torch.ones(3),))
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match=r"expected \{ 0 \} positive numbers; test_index_errors"):
        compiled(torch.zeros(3))


def test_one_hot_of_a_class_that_is_none():
    model = Function(lambda x, i: F.one_hot(i, 8).float() * x)
    compiled = moe_mlir.compile(model, (torch.ones(8), ints(0, 7)))
    torch.testing.assert_close(compiled(torch.ones(8), ints(3, 1)), model(torch.ones(8), ints(3, 1)))
    for wrong, message in ((8, "smaller than num_classes"), (-1, "non-negative")):
        with pytest.raises(RuntimeError, match=f"Class values must be {message}"):
            compiled(torch.ones(8), ints(1, wrong))
