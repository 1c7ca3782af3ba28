"""Branches of a model's code on sizes, and shapes that eager refuses."""

import pytest
import torch

import moe_mlir
from moe_mlir.compiled.cache_counters import _within
from moe_mlir.gpu.sizes import (
    RELATIONS,
    describe_condition,
    evaluate_text,
    linear_in,
    names_in,
    unmet_condition,
)
from moe_mlir.raising.guards import conditions


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, a, b=None):
        return self.function(a) if b is None else self.function(a, b)


def blocks(x):
    """A loop over blocks of 4, as models with linear attention have."""
    count = (x.shape[1] + 3) // 4
    parts, state = [], 0
    for i in range(count):
        part = x[:, i * 4:(i + 1) * 4]
        parts.append(part + state)
        state = state + part.sum(1, keepdim=True)
    return torch.cat(parts, 1)


def x_of(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


# The code, the example, and other sizes that go another way.
BRANCHES = {
    "a multiple": (lambda x: x * 2 if x.shape[1] % 4 == 0 else x * 3, [(2, 8, 3)],
                   [[(2, 7, 3)], [(2, 12, 3)], [(1, 1, 3)]]),
    "equal sizes": (lambda x, y: x.sum() + y.sum() if x.shape[0] == y.shape[0] else x.sum(),
                    [(5, 3), (6, 3)], [[(5, 3), (5, 3)], [(7, 3), (2, 3)]]),
    "unequal sizes": (lambda x, y: x.sum() + y.sum() if x.shape[0] == y.shape[0] else x.sum(),
                      [(5, 3), (5, 3)], [[(5, 3), (6, 3)]]),
    "a larger one": (lambda x, y: x * 2 if x.shape[0] > y.shape[0] else x * 3,
                     [(5, 3), (6, 3)], [[(8, 3), (5, 3)], [(4, 3), (4, 3)]]),
    "a product": (lambda x: x * 2 if x.shape[0] * x.shape[1] > 40 else x * 3,
                  [(5, 6, 3)], [[(8, 8, 3)], [(1, 41, 3)]]),
    "two conditions": (lambda x: x * 2 if x.shape[1] > 4 and x.shape[1] % 2 == 0 else x * 3,
                       [(2, 8, 3)], [[(2, 9, 3)], [(2, 2, 3)]]),
    "either condition": (lambda x: x * 2 if x.shape[1] < 4 or x.shape[0] > 3 else x * 3,
                         [(2, 8, 3)], [[(2, 3, 3)], [(4, 8, 3)]]),
    "a loop over blocks": (blocks, [(2, 11, 3)], [[(2, 13, 3)], [(2, 19, 3)], [(2, 4, 3)],
                                                 [(2, 3, 3)], [(2, 12, 3)]]),
    "a fraction": (lambda x: x * 2 if x.shape[1] * 0.5 > 3 else x * 3, [(2, 8, 3)],
                   [[(2, 5, 3)], [(2, 9, 3)]]),
    "a slice to a bound": (lambda x: x[:, :10].sum(1), [(2, 7, 3)], [[(2, 14, 3)], [(2, 10, 3)]]),
    "a slice from the end": (lambda x: x[:, -5:].sum(1), [(2, 7, 3)], [[(2, 4, 3)], [(2, 5, 3)]]),
    "a slice inside": (lambda x: x[:, 2:5].sum(1), [(2, 7, 3)], [[(2, 4, 3)], [(2, 1, 3)]]),
    "pieces": (lambda x: x.split(4, 1)[-1].sum(1), [(2, 11, 3)], [[(2, 5, 3)], [(2, 13, 3)]]),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("case", BRANCHES)
def test_other_sizes_take_their_own_way(case):
    function, example, others = BRANCHES[case]
    model = Function(function)
    compiled = moe_mlir.compile(model, tuple(x_of(*shape) for shape in example))
    for shapes in [example, *others]:
        inputs = tuple(x_of(*shape) for shape in shapes)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("case", BRANCHES)
def test_an_exported_program_serves_or_refuses(case):
    function, example, others = BRANCHES[case]
    model = Function(function)
    program = moe_mlir.compile(moe_mlir.export(model, tuple(x_of(*s) for s in example)))
    refused = 0
    for shapes in others:
        inputs = tuple(x_of(*shape) for shape in shapes)
        try:
            found = program(*inputs)
        except ValueError as error:
            assert "expected" in str(error) and "found" in str(error)
            refused += 1
        else:
            torch.testing.assert_close(found, model(*inputs))
    # torch keeps the sizes of slices open.
    assert refused or case.startswith("a slice")


REFUSED = {
    "select": (lambda x: x[:, 5], [(2, 7, 3)], [(2, 4, 3)]),
    "select from the end": (lambda x: x[:, -5], [(2, 7, 3)], [(2, 4, 3)]),
    "view": (lambda x: x.view(x.shape[0], -1, 4, 3), [(2, 8, 3)], [(2, 7, 3)]),
    "a view of another number": (lambda x: x.view(2, -1), [(2, 8, 3)], [(3, 7, 3)]),
    "gather": (lambda x, y: x.gather(1, y.long()), [(5, 7), (5, 3)], [(3, 7), (5, 3)]),
    "top-k": (lambda x: x.transpose(1, 2).topk(5).values, [(2, 7, 3)], [(2, 4, 3)]),
    "unequal operands": (lambda x, y: x + y, [(5, 3), (5, 3)], [(5, 3), (4, 3)]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_eager_refuses(case):
    function, example, bad = REFUSED[case]
    model = Function(function)
    good = tuple(x_of(*shape) * 0 for shape in example)
    compiled = moe_mlir.compile(model, good)
    torch.testing.assert_close(compiled(*good), model(*good))
    inputs = tuple(x_of(*shape) * 0 for shape in bad)
    with pytest.raises((RuntimeError, IndexError)):
        model(*inputs)
    with pytest.raises(ValueError, match="expected .*found"):
        compiled(*inputs)
    torch.testing.assert_close(compiled(*good), model(*good))


def test_a_size_that_divides_is_not_zero():
    model = Function(lambda x, y: x * (x.shape[0] // y.shape[0]))
    compiled = moe_mlir.compile(model, (x_of(8, 3), x_of(2, 3)))
    torch.testing.assert_close(compiled(x_of(9, 3), x_of(4, 3)), x_of(9, 3) * 2)
    with pytest.raises((ValueError, ZeroDivisionError)):
        compiled(x_of(9, 3), x_of(0, 3))


def test_what_a_condition_says():
    places = {"s0": ("x", 1), "s1": ("mask", 0)}
    condition = ("(s0 % 4)", "==", 0)
    assert names_in(condition[0]) == ["s0"] and names_in("max(s1, s0)") == ["s1", "s0"]
    assert unmet_condition([condition], {"s0": 8, "s1": 1}) is None
    assert unmet_condition([condition], {"s0": 7, "s1": 1}) == condition
    assert describe_condition(condition, {"s0": 7}, places, "it was traced") == (
        "input sizes: expected (x.shape[1] % 4) == 0, as it was traced, found x.shape[1] = 7")
    assert describe_condition(("s1", ">", 2), {"s1": 1}, places, "it was traced") == (
        "input 'mask': expected dim 0 > 2, as it was traced, found 1")


def test_conditions_of_a_program():
    def function(x):
        return x * 2 if x.shape[1] % 4 == 0 else x
    program = torch.export.export(Function(function), (x_of(2, 8, 3),),
                                  dynamic_shapes=({1: torch.export.Dim.AUTO},))
    sizes = {name: relation for name, relation, _ in conditions(program)}
    assert len(sizes) == 1 and "%" in next(iter(sizes))


@pytest.mark.parametrize("text", [
    "s0", "s1", 7, "(-10 + s0 + s1)", "(2*(s0 - s1)*3)", "-(s0 - 4)", "(s1*s0 + s0)",
    "(max(s1, 3) + s0)"])
def test_the_factor_of_a_size(text):
    factor, rest = linear_in(text, "s0", {"s1": 5})
    for s0 in (0, 1, 9):
        assert factor * s0 + rest == evaluate_text(text, {"s0": s0, "s1": 5})


@pytest.mark.parametrize("text", ["s0*s0", "max(s0, 3)", "(s0 // 2)", "(s0 % 4)", "(s0**2)"])
def test_a_size_without_a_factor(text):
    assert linear_in(text, "s0", {}) is None


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("factor", [-3, -1, 0, 1, 2])
def test_the_counts_around_one_for_which_a_condition_holds(relation, factor):
    """The longest run of counts: each in it meets the condition, the next ones do not."""
    for bound in range(-7, 8):
        def holds(count, bound=bound):
            return RELATIONS[relation](factor * count, bound)
        for now in filter(holds, range(9)):
            low, high = _within(0, 8, factor, relation, bound, now)
            assert low <= now <= high and all(map(holds, range(low, high + 1)))
            if relation != "==":
                assert low == 0 or not holds(low - 1)
                assert high == 8 or not holds(high + 1)
