"""Programs with several results: none is computed in the memory of another that is still read."""

import random

import pytest
import torch
from seeds import run_seed
from support import Function

import moe_mlir

F = torch.nn.functional
GENERATOR = torch.Generator().manual_seed(0)
W, B, START = (torch.randn(*shape, generator=GENERATOR) / 3 for shape in ((8, 8), (8,), (1, 8)))
LIMIT = 4.0


def slices(x):
    y = x.exp()
    a = y.clone()
    a[1:3] = x[:2]
    b = y.clone()
    b[2:4] = a[:2] * 2
    return a, b


def index_add(x):
    y, i = x.exp(), torch.arange(x.shape[0]).flip(0)
    a = torch.index_add(y, 0, i, x)
    return a, torch.index_add(y, 0, i, a)


def scatter(x):
    y, i = x.exp(), torch.tensor([[1, 2, 0, 3]])
    a = torch.scatter(y, 0, i, x[:1, :4] * 3)
    return a, torch.scatter(y, 0, i, a[:1, :4] * 5)


def addmm(x):
    y = x.exp()
    a = torch.addmm(y, x, W)
    return a, torch.addmm(y, a, W)


def addmm_and_start(x):
    y = x.exp()
    a = torch.addmm(y, x, W)
    return a, torch.addmm(y, a, W), y


def layer_twice(x):
    a = F.linear(x, W, B)
    return a, F.linear(a, W, B)


def one_after_the_other(x):
    a = torch.addmm(x.exp(), x, W)
    b = torch.addmm(a, x, W)
    return a, b, torch.addmm(b, a, W)


def part_of_a_start(x):
    y = x.exp()
    return torch.addmm(y, x, W), y[1:3]


FUNCTIONS = (slices, index_add, scatter, addmm, addmm_and_start, layer_twice, one_after_the_other,
             part_of_a_start)


def check(function, compiled, rows):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) / 3
    torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-4,
                               msg=lambda text: f"{rows} rows: {text}")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_results_of_one_start(function):
    compiled = moe_mlir.compile(Function(function), (torch.randn(6, 8),))
    for rows in (4, 6, 301):  # of one tile, and of several
        check(function, compiled, rows)


@pytest.mark.parametrize("function", (addmm, addmm_and_start, layer_twice, one_after_the_other),
                         ids=lambda f: f.__name__)
def test_results_of_one_start_on_a_gpu(function):
    compiled = moe_mlir.compile(Function(function), (torch.randn(6, 8),), target="sm_90a")
    with moe_mlir.simulate(chip="sm_90a"):
        for rows in (4, 50):
            check(function, compiled, rows)


# ---- drawn programs -------------------------------------------------------------------

_LINES = ["torch.addmm({a}, {b}, W)", "F.linear({a}, W, B)", "{a} + {b}", "{a}.tanh()",
          "torch.index_add({a}, 0, I, {b})", "{a}.index_copy(0, I[:3], {b}[:3])", "{a}.flip(0)",
          "torch.cat([{a}[:2], {b}[2:]])", "torch.where({a} > 0, {a}, {b})", "{a} * START",
          "{a}.slice_scatter({b}[:2], 0, 1, 3)", "torch.addmm({a}, {b}.sin(), W)",
          "{a}.view(-1, 4, 2).transpose(1, 2).reshape(-1, 8)", "{a}.softmax(-1)"]


def draw(seed):
    """The text of a program, most of whose values are results."""
    rng = random.Random(seed)
    names, lines = ["x"], ["I = torch.arange(x.shape[0]).roll(1)"]
    for number in range(rng.randint(3, 8)):
        a, b = (rng.choice(names[-4:]) for _ in range(2))
        # Bounded, so that a product of products stays comparable.
        lines.append(f"v{number} = ({rng.choice(_LINES).format(a=a, b=b)}).clamp(-LIMIT, LIMIT)"
                     if rng.random() < 0.3 else f"v{number} = {rng.choice(_LINES).format(a=a, b=b)}")
        names.append(f"v{number}")
    results = rng.sample(names[1:], rng.randint(2, min(4, len(names) - 1)))
    body = "\n    ".join(lines)
    return f"def program(x):\n    {body}\n    return {', '.join(results)}\n"


@pytest.mark.parametrize("number", range(6))
def test_drawn_programs(number):
    text = draw(f"{run_seed()}.{number}")
    scope = {"torch": torch, "F": F, "W": W, "B": B, "START": START, "LIMIT": LIMIT}
    exec(text, scope)
    compiled = moe_mlir.compile(Function(scope["program"]), (torch.randn(6, 8),))
    try:
        for rows in (6, 67):
            check(scope["program"], compiled, rows)
    except AssertionError as error:
        raise AssertionError(f"{text}\n{error}") from None
