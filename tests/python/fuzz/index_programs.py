"""Random programs of index and integer ops: compiled code against eager, call by call.

    python tests/python/fuzz/index_programs.py SEED PROGRAMS CALLS

Each program is compiled once and called with indices in range and out of it, divisors of 0, and
other sizes. Where eager refuses, compiled code must; where eager gives values, it must give the
same. Run it in a process of its own: a finding may be a signal. Prints the number of calls and of
refusals, and ends with status 1 at the first difference.
"""

import random
import sys

import torch
import torch.nn.functional as F

import moe_mlir

# The last dim of activations is not open.
_WIDTH = 8
REFUSALS = (IndexError, RuntimeError, ValueError, ZeroDivisionError)


def _put(x, i, _):
    x = x.clone()
    x[i] = 3.0
    return x


def _rows(i, x):
    return i[:, None].expand(-1, x.shape[1])


# From (rows [n, m], indices [k], others [k]) to rows. Each reads all of the rows: what no result
# needs, compiled code does not compute, nor check.
READS = {
    "embedding": lambda x, i, j: F.embedding(i, x),
    "index": lambda x, i, j: x[i],
    "index of two": lambda x, i, j: x[i, j][:, None] + x[i],
    "index_select": lambda x, i, j: x.index_select(0, i),
    "index_select of columns": lambda x, i, j: x.index_select(1, j).sum(1, keepdim=True) * x,
    "gather": lambda x, i, j: x.gather(0, _rows(i, x)),
    "gather of columns": lambda x, i, j: x[: i.shape[0]].gather(1, j[:, None]),
    "index_put": _put,
    "scatter": lambda x, i, j: x.scatter(0, _rows(i, x), 5.0),
    "scatter of columns": lambda x, i, j: x.scatter(1, _rows(i, x)[:, :1], 7.0),
    "select": lambda x, i, j: x + x[2] + x[:, -2][:, None],
    "slice": lambda x, i, j: x[1:4] * 2,
    "view": lambda x, i, j: x.reshape(-1, 2) + 1,
    "branch": lambda x, i, j: x * 2 if x.shape[0] % 3 == 1 else x - 1,
    "one_hot": lambda x, i, j: F.one_hot(i, 8).float() + x.sum(),
}
# From (indices, others) to indices.
INTEGERS = {
    "//": lambda i, j: i // j, "%": lambda i, j: i % j,
    "trunc": lambda i, j: torch.div(i, j, rounding_mode="trunc"),
    "+": lambda i, j: i + j, "-": lambda i, j: i - j, "*": lambda i, j: i * 3,
    "where": lambda i, j: torch.where(i > j, i, j), "clamp": lambda i, j: i.clamp(-2, 3),
    "flip": lambda i, j: -i, "max": torch.maximum, "same": lambda i, j: i,
}


class Program(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.integers = draw.choices(list(INTEGERS), k=draw.randint(0, 2))
        self.reads = draw.choices(list(READS), k=draw.randint(1, 3))

    def forward(self, x, i, j):
        for name in self.integers:
            i = INTEGERS[name](i, j)
        for name in self.reads:
            x = READS[name](x, i, j)
        return x, i

    def __repr__(self):
        return f"{self.integers} then {self.reads}"


def draw_inputs(draw, usual=False):
    n, k = draw.choice([3, 4, 5, 6]), draw.choice([3, 4, 5, 6])
    if not usual and draw.random() < 0.2:
        n, k = draw.choice([0, 1, n]), draw.choice([0, 1, k])
    generator = torch.Generator().manual_seed(draw.randrange(2 ** 31))
    x = torch.randn(n, _WIDTH, generator=generator)

    def integers(least, most):
        values = [draw.randint(least, most) for _ in range(k)]
        for place in range(k):
            if not usual and draw.random() < 0.08:
                values[place] = draw.choice([n, -1, -n - 1, 0, _WIDTH, 2 ** 31, -2 ** 40, 2 ** 62])
        return torch.tensor(values, dtype=torch.long)
    return x, integers(0, max(n - 1, 0)), integers(1, 2)


def outcome(function, inputs):
    try:
        return function(*(x.clone() for x in inputs)), None
    except REFUSALS as error:
        return None, error


def compile_program(draw):
    """A program that eager runs for some usual inputs, and its compiled form."""
    while True:
        program = Program(draw)
        for _ in range(10):
            inputs = draw_inputs(draw, usual=True)
            if outcome(program, inputs)[1] is None:
                return program, moe_mlir.compile(program, inputs)


def compare(program, compiled, inputs):
    """Whether eager refused; raises AssertionError where compiled code does otherwise."""
    wanted, refusal = outcome(program, inputs)
    found, error = outcome(compiled, inputs)
    if isinstance(error, ValueError) and not all(x.numel() for x in inputs):
        return True  # torch.export does not trace all code for no rows, and none for no indices
    if refusal is not None and error is None and not inputs[0].numel():
        return True  # of no elements nothing is computed, and no index is asked
    case = f"{program} of {[x.tolist() for x in inputs]}"
    assert (refusal is None) == (error is None), f"{case}: eager {refusal!r}, compiled {error!r}"
    if wanted is not None:
        for ours, eager in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, eager, msg=lambda text: f"{case}: {text}")
    return refusal is not None


def main():
    seed, programs, calls = map(int, sys.argv[1:])
    draw, refused = random.Random(seed), 0
    for number in range(programs):
        program, compiled = compile_program(draw)
        print(f"program {number}: {program}", file=sys.stderr, flush=True)
        refused += sum(compare(program, compiled, draw_inputs(draw)) for _ in range(calls))
    print(f"{programs * calls} calls, {refused} refused as by eager")


if __name__ == "__main__":
    main()
