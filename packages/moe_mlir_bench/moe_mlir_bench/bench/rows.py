"""Rows of the benchmark: what is measured and what it is held against.

A row is anything with `op`, `title`, `quick` and `measure(context) -> record`;
`Case` is the usual one, the same inputs through ours, eager, Inductor and a peer.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_mlir._torch import dynamo

from . import timing
from .machine import Machine

# Retained graphs of eager hold what is quadratic in the tokens.
_MOST_GRAPHS = 8


@dataclass
class Context:
    machine: Machine
    threads: int = 1
    rounds: int = 15
    inductor: bool = True
    seconds: float = 20.0  # of the rounds of a row, unless three of them take longer


class Skipped(Exception):
    """Why a row cannot be measured here."""


@dataclass(frozen=True)
class Goal:
    """A stated goal: `measure` of a record is at least, or at most, `bound`.

    `beside_fast` is the bound where torch's own GEMM uses the whole core.
    """

    measure: str
    bound: float
    at_most: bool = False
    beside_fast: float | None = None

    def on(self, machine: Machine) -> "Goal":
        """The goal for one machine."""
        if self.beside_fast is None or machine.has_slow_library():
            return self
        return replace(self, bound=self.beside_fast, beside_fast=None)

    def is_met(self, record: Mapping[str, Any]) -> bool:
        found = record[self.measure]
        return found is not None and (found <= self.bound if self.at_most else found >= self.bound)

    def describe(self) -> str:
        sign = "<=" if self.at_most else ">="
        name, unit = _MEASURES.get(self.measure, (self.measure, ""))
        return f"{name} {sign} {self.bound:g}{unit}"


_MEASURES = {
    "ratio": ("ratio", "x"),
    "percent_of_limit": ("% of limit", ""),
    "ours_us": ("time", " us"),
    "floors": ("time", " us or empty ops of torch"),
    "overhead": ("overhead", ""),
    "eager_ratio": ("eager / ours", "x"),
    "peer_ratio": ("peer / ours", "x"),
}

# What every record has; `record` fills in the rest.
FIELDS = (
    "op",
    "shape",
    "dtype",
    "threads",
    "ours_us",
    "ours_median_us",
    # Where weights may be packed, which ours are: the time without.
    "unpacked_us",
    "eager_us",
    "inductor_us",
    "peer",
    "peer_us",
    "peer_ratio",
    "ratio",
    "ratio_at_limit",
    "eager_ratio",
    "limit_us",
    "limit_terms",
    "bound",
    "percent_of_limit",
    "peak_mb",
    "eager_peak_mb",
    # Where there are several peers: the time of each, and why others have none.
    "rivals_us",
    "missing",
    "read_gbytes",
    "gflops",
    # Of a call: an op of torch that does nothing, and ours in those, or in microseconds where
    # it takes less than one.
    "floor_us",
    "floors",
    "goals",
    "why",
)


def make_record(row: Any, context: Context, **values: Any) -> dict[str, Any]:
    """A record with every field; goals are judged against it."""
    record = dict.fromkeys(FIELDS)
    record.update(op=row.op, shape=row.shape, dtype=name_of(row.dtype), threads=context.threads)
    record.update(values, title=row.title, why=row.why)
    goals = [goal.on(context.machine) for goal in row.goals]
    record["goals"] = [
        {"goal": g.describe(), "found": record[g.measure], "met": g.is_met(record)}
        for g in goals
    ]
    return record


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_title(op: str, shape: Mapping[str, Any], dtype: torch.dtype) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in shape.items())
    return f"{op} {sizes} {name_of(dtype)}"


@dataclass
class Case:
    """`inputs(seed)` feeds `ours`, `eager` and the peer alike.

    With `gradients`, the places of the inputs to differentiate by, the row
    times the backward alone, on graphs that are kept.
    """

    op: str
    shape: dict
    dtype: torch.dtype
    inputs: Callable
    ours: Callable
    eager: Callable
    check: Callable  # (inputs, results of ours) -> None, raises AssertionError
    flops: float = 0.0
    moved: float = 0.0  # bytes that must be read or written once
    exps: float = 0.0
    peer: tuple | None = None  # (name, function)
    compiled: Callable | None = None  # what torch.compile gets where it is not `eager`
    gradients: tuple = ()
    quick: bool = True
    more_rounds: int = 1  # times the rounds of the run: short calls find a quiet moment in many
    goals: tuple = ()
    why: str = ""  # where a goal is missed: the reason, for the page

    @property
    def title(self) -> str:
        return make_title(self.op, self.shape, self.dtype)

    def measure(self, context: Context) -> dict[str, Any]:
        first = self.inputs(0)
        self.check(first, self._thunk(self.ours, first)())
        rivals = self._rivals(context)
        most = _MOST_GRAPHS if self.gradients else 10**9
        count = timing.count_sets(first, most=most)
        sets = [first] + [self.inputs(100 * i) for i in range(1, count)]
        thunks = {name: [self._thunk(f, s) for s in sets] for name, f in rivals.items()}
        samples = timing.Turns(thunks, context.threads).samples(
            self.more_rounds * context.rounds, context.seconds
        )
        peaks = {name: timing.peak_mb(thunks[name][0]) for name in ("ours", "eager")}
        return self._record(context, samples, peaks)

    def _rivals(self, context):
        rivals = {"ours": self.ours, "eager": self.eager}
        if self.peer:
            rivals[self.peer[0]] = self.peer[1]
        if context.inductor:
            dynamo.reset()
            # Graphs are kept for many backwards.
            dynamo.functorch_config.donated_buffer = False
            rivals["inductor"] = torch.compile(self.compiled or self.eager, dynamic=False)
        return rivals

    def _thunk(self, function, inputs):
        if not self.gradients:
            return functools.partial(function, *inputs)
        leaves = [
            x.detach().requires_grad_() if i in self.gradients else x for i, x in enumerate(inputs)
        ]
        *arguments, cotangent = leaves
        with torch.enable_grad():
            result = function(*arguments)
        wanted = [leaves[i] for i in self.gradients]
        return lambda: torch.autograd.grad(result, wanted, cotangent, retain_graph=True)

    def _record(self, context, samples, peaks):
        best = {name: min(times) for name, times in samples.items()}
        peer = self.peer[0] if self.peer else None
        limit = context.machine.limit(self.flops, self.moved, self.exps, self.dtype)
        ours = best["ours"]
        best_rival = min(best[name] for name in ("eager", "inductor") if name in best)
        # What only Inductor is quick on is not judged without it.
        is_judged = not self.compiled or "inductor" in best
        return make_record(
            self,
            context,
            ours_us=ours,
            ours_median_us=statistics.median(samples["ours"]),
            eager_us=best["eager"],
            inductor_us=best.get("inductor"),
            peer=peer,
            peer_us=best.get(peer),
            peer_ratio=best[peer] / ours if peer else None,
            ratio=best_rival / ours if is_judged else None,
            ratio_at_limit=best_rival / limit.us if limit.us and is_judged else None,
            eager_ratio=best["eager"] / ours,
            limit_us=limit.us,
            limit_terms=vars(limit),
            bound=limit.bound,
            # With several threads the limit of one core says nothing.
            percent_of_limit=100 * limit.us / ours if limit.us and context.threads == 1 else None,
            peak_mb=peaks["ours"],
            eager_peak_mb=peaks["eager"],
        )


# ---------------------------------------------------------------------- inputs


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, tol: float, what: str) -> None:
    error = float((actual.double() - expected).abs().max())
    assert error <= tol, f"{what}: error {error:.2e} exceeds {tol:.2e}"


def check_gradients(
    eager: Callable[..., torch.Tensor],
    places: Sequence[int],
    tol: float = 2e-4,
) -> Callable[..., None]:
    """Gradients of ours against float64 autograd of `eager`, relative to the largest of all."""

    def check(inputs, results):
        *arguments, cotangent = [x.double() if x.is_floating_point() else x for x in inputs]
        for place in places:
            arguments[place] = arguments[place].detach().requires_grad_()
        with torch.enable_grad():
            out = eager(*arguments)
        expected = torch.autograd.grad(out, [arguments[p] for p in places], cotangent)
        bound = tol * max(float(reference.abs().max()) for reference in expected)
        for place, mine, reference in zip(places, results, expected):
            assert_within(mine, reference, bound, f"gradient {place}")

    return check
