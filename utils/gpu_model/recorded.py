"""From a call to its launches: what they look like at full size, and what a block does.

Large sizes need not be simulated whole. The launches are planned at the size asked for;
how often a block runs each line of its PTX is counted at two smaller sizes and carried on
along a line, since the trips of its loops grow with the size or do not depend on it.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_mlir.compiler.jit import compile_kernels_cached
from moe_mlir.sim.simulation import device_functions, intercept

from . import kernel_time, sass

_filled = True


@contextlib.contextmanager
def unfilled():
    """Inputs have their sizes and no values: nothing is going to run."""
    global _filled
    _filled = False
    try:
        yield
    finally:
        _filled = True


def randn(*shape, dtype=torch.float32, scale=1.0):
    if not _filled:
        return torch.empty(shape, dtype=dtype)
    return (scale * torch.randn(shape)).to(dtype)


def randint(bound: int, *shape, dtype=torch.int64):
    return torch.randint(bound, shape, dtype=dtype) if _filled else torch.zeros(shape, dtype=dtype)


class Recorder:
    """Stands in for a simulation: keeps what is launched, and runs it if asked to."""

    def __init__(self, chip: str, run: bool):
        self.chip, self.runs, self.launched, self.buffers = chip, run, [], {}

    def run(self, kernel, tensors) -> None:
        self.run_text(kernel.text(), kernel.op, tensors)

    def run_text(self, text: str, name: str, tensors) -> None:
        function = device_functions(text, self.chip)[name]
        planned = function.plan.launches(tensors)
        reports = function(*tensors, checks=()) if self.runs else [None] * len(planned)
        self.launched += [(text, plan, report) for plan, report in zip(planned, reports)]
        self.buffers.update({t.data_ptr(): t.nbytes for t in tensors if t.nbytes})

    @property
    def least_bytes(self) -> int:
        """Of inputs and results, each counted once."""
        return sum(self.buffers.values())


@dataclass(frozen=True)
class Call:
    """A call of this package at a named size, and smaller sizes at which it is simulated."""

    name: str
    run: Callable  # takes a size and the recorder
    size: int
    simulated: tuple = ()
    chip: str = "sm_90"
    operations: float = 0.0
    working: float = 1.0  # share of the blocks that find something to do


@dataclass(frozen=True)
class Recorded:
    launches: list
    least_bytes: int


def record(call: Call) -> Recorded:
    sizes = call.simulated or (call.size,)
    runs = [_run(call, size, True) for size in sizes]
    if sizes == (call.size,):
        planned = runs[0]
    else:
        with unfilled():
            planned = _run(call, call.size, False)
    launches = []
    for at, (text, plan, _) in enumerate(planned.launched):
        small = [run.launched[at] for run in runs]
        if any(entry[0] != text or entry[1].name != plan.name for entry in small):
            raise ValueError(f"{call.name}: expected the same kernels at sizes {sizes} and "
                             f"{call.size}, found {plan.name} among others")
        launches.append(_launch(text, plan, small, sizes, call))
    return Recorded(launches, planned.least_bytes)


def _run(call: Call, size: int, run: bool) -> Recorder:
    recorder = Recorder(call.chip, run)
    with intercept(recorder):
        call.run(size, recorder)
    return recorder


def blocks_of(grid) -> int:
    blocks = 1
    for extent in grid:
        blocks *= extent
    return blocks


def _launch(text, plan, small, sizes, call):
    ptx = json.loads(compile_kernels_cached(text, call.chip))["ptx"]
    code = sass.assemble(ptx, call.chip, plan.name)
    counted = [of_a_block(report.counters, call.working * blocks_of(entry.grid))
               for _, entry, report in small]
    average = extend(counted, sizes, call.size)
    return kernel_time.Launch(
        plan.name, call.working * blocks_of(plan.grid), plan.block_size,
        code.blocks_an_sm(plan.block_size, plan.dynamic_smem, call.chip), code,
        sass.spread(average.pop("lines"), ptx), **average, cluster=cluster_of(ptx, plan.name))


def cluster_of(ptx: str, name: str) -> int:
    """Blocks of a cluster of a kernel."""
    (head,) = re.findall(rf"\.entry {name}\(.*?\n\{{", ptx, re.S)
    extents = re.search(r"\.reqnctapercluster (\d+), (\d+), (\d+)", head)
    return math.prod(map(int, extents.groups())) if extents else 1


def of_a_block(counters: dict, blocks: float) -> dict:
    return {
        "lines": {int(line): count / blocks for line, count in counters["lines"].items()},
        "wavefronts": counters["shared_wavefronts"] / blocks,
        "requests": counters["shared_requests"] / blocks,
        "sectors": counters["global_sectors"] / blocks,
        "loaded_bytes": counters["global_bytes_read"] / blocks,
        "stored_bytes": counters["global_bytes_written"] / blocks,
    }


def extend(counted: list, sizes: tuple, size: int) -> dict:
    """What is counted at a few sizes, at another one: along the polynomial through them."""
    weights = [1.0] * len(sizes)
    for i, here in enumerate(sizes):
        for other in sizes[:i] + sizes[i + 1 :]:
            weights[i] *= (size - other) / (here - other)

    def along(values):
        return max(0.0, sum(w * v for w, v in zip(weights, values)))

    lines = set().union(*(c["lines"] for c in counted))
    return {key: along([c[key] for c in counted]) for key in counted[0] if key != "lines"} | {
        "lines": {line: along([c["lines"].get(line, 0) for c in counted]) for line in lines}}


@dataclass(frozen=True)
class CallTime:
    """What the model says of a call on one chip."""

    launches: int
    seconds: float
    estimates: list
    longest: kernel_time.Estimate


def time_call(recorded: Recorded, chip) -> CallTime:
    cold, estimates = recorded.least_bytes, []
    for launch in recorded.launches:
        moved = launch.l2_bytes * launch.blocks
        # What an earlier launch has read is still in L2 if all fits there.
        dram = min(moved, cold if recorded.least_bytes <= chip.l2_bytes else recorded.least_bytes)
        cold = max(0.0, cold - dram)
        estimates.append(kernel_time.estimate(launch, chip, dram))
    seconds = sum(e.seconds for e in estimates) + len(estimates) * chip.launch
    return CallTime(len(estimates), seconds, estimates, max(estimates, key=lambda e: e.seconds))
