"""Times of the kernels, of torch eager, and of the best peer, in one process.

`% of limit` is the larger of bytes / bandwidth and operations / rate, over the time; both
limits are measured in the same run (`timing.Limits`). In the simulator a row is rehearsed: each
of its calls runs once at a fraction of the size, and ours must equal eager's.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import timing
from .case import Problem
from .target import Target, Text

_REHEARSED_TOKENS = 40


@dataclass
class Row:
    """`make(device, tokens)` gives inputs; `peers` are calls on them by name."""

    name: str
    tokens: int
    make: Callable
    ours: Callable
    eager: Callable
    bytes: int
    operations: int = 0
    peers: dict = field(default_factory=dict)
    # What bf16 rounds in eager is not rounded in ours; None compares nothing.
    tolerance: float | None = 1e-4
    # What is run, where a rehearsal runs another one.
    module: Text | None = None
    # A call whose kernels a GPU's tensors take and a CPU's do not.
    also: Callable | None = None
    group: str = "times"
    limit: float = 30.0
    model: float = 2.0

    def __post_init__(self):
        # Its value at that size has a case of its own.
        self.name = "time of " + self.name

    def run(self, target: Target) -> dict:
        with target.active():
            if target.rehearses:
                return self._rehearse(target)
            return {"row": {"bytes": self.bytes, "operations": self.operations,
                            **self._measure(target.torch_device)}}

    def _rehearse(self, target):
        inputs = self.make(target.torch_device, min(self.tokens, _REHEARSED_TOKENS))
        self._compare(self.ours(*inputs), self.eager(*inputs))
        failed = {}
        for name, peer in self.peers.items():
            try:
                self._compare(peer(*inputs), self.eager(*inputs))
            except Problem as problem:
                raise Problem(f"{name}: {problem}") from None
            except Exception as error:
                failed[name] = _first_line(error)
        return {"peers_without_cpu": failed} if failed else {}

    def _measure(self, device) -> dict:
        first = self.make(device, self.tokens)
        self._compare(self.ours(*first), self.eager(*first))
        inputs = timing.rotated(lambda: self.make(device, self.tokens),
                                sum(x.nbytes for x in first))
        result: dict[str, Any] = {"ours_us": timing.samples(self.ours, inputs)}
        for name, call in {"eager": self.eager, **self.peers}.items():
            try:
                result[f"{name}_us"] = timing.samples(call, inputs)
            except Exception as error:  # a peer that cannot run is a fact of the table
                torch.cuda.synchronize()
                result[f"{name}_error"] = _first_line(error)
        return result

    def _compare(self, found, expected):
        """The first result of each; the large cases are judged in float64 elsewhere."""
        if self.tolerance is None:
            return
        a, b = (x if isinstance(x, torch.Tensor) else x[0] for x in (found, expected))
        error = (a.float() - b.float()).abs()
        worst = float((error / (1 + b.float().abs())).max())
        if not worst <= self.tolerance:
            raise Problem(f"differs by {worst:.2g} from what it is timed against, at most "
                          f"{self.tolerance:.2g}")


def _first_line(error) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# ---------------------------------------------------------------- table


def table(lines: Sequence[dict[str, Any]]) -> str:
    """What a report's lines say of times; medians of the samples."""
    limits = next((line["limits"] for line in lines if "limits" in line), None)
    rows = [(line["case"].removeprefix("time of "), line["row"]) for line in lines if "row" in line]
    if not rows:
        return ""
    peers = sorted({key[:-3] for _, row in rows for key in row if key.endswith("_us")} - {"ours"})
    text = [f"{'':52}{'ours us':>9}" + "".join(f"{p + ' us':>18}" for p in peers)
            + f"{'% of limit':>12}"]
    for name, row in rows:
        medians = {key: statistics.median(row[f"{key}_us"]) for key in ("ours", *peers)
                   if f"{key}_us" in row}
        cells = "".join(f"{medians[p]:18.1f}" if p in medians else f"{'-':>18}" for p in peers)
        share = "-" if limits is None else f"{100 * bound(row, limits) / medians['ours']:.1f}"
        text.append(f"{name:52}{medians['ours']:9.1f}{cells}{share:>12}")
    return "\n".join(text)


def bound(row: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """Microseconds that bytes and operations take at the measured rates."""
    # Reading is quicker than copying, and most calls read more than they write.
    rate = limits.get("bytes_read_per_second", limits["bytes_per_second"])
    return 1e6 * max(row["bytes"] / rate,
                     row["operations"] / limits["operations_per_second"])
