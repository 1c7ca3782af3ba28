"""moe_mlir.simulate: run the GPU kernels of the routing ops on the CPU, with checks.

>>> with moe_mlir.simulate(chip="sm_90") as simulation:
...     p, lse = moe_mlir.similarity_inform(u, e, causal=True)
>>> simulation.reports[0].counters["instructions"]

Inside of the block the ops compile for the chip instead of this machine, and
their kernels run in the PTX simulator, on CPU tensors. Backward passes that are
written in torch stay in torch.
"""

import contextlib
import contextvars
import functools
import json
from dataclasses import dataclass, field

from . import sim
from .artifact import evaluate_size

_active = contextvars.ContextVar("moe_mlir_simulation", default=None)

class SimulationError(RuntimeError):
    """A kernel raced, left its buffers, or read what nobody wrote; the text says where."""


@dataclass
class Simulation:
    """What `simulate` yields: how to run kernels, and the reports of those that ran."""

    chip: str
    options: dict
    strict: bool
    reports: list = field(default_factory=list)

    def run(self, kernel, tensors):
        """Runs a kernel (ops/_kernel.py) on inputs and result buffers."""
        function = device_functions(kernel.text(), self.chip)[kernel.op]
        reports = function(*tensors, **self.options)
        self.reports += reports
        for report in reports:
            if self.strict and report.findings:
                raise SimulationError(str(report))


@contextlib.contextmanager
def simulate(chip="sm_90", *, strict=True, **options):
    """Runs the routing ops on a simulated GPU while the block lasts.

    Args:
        chip: the NVIDIA chip to compile for.
        strict: raise SimulationError on a finding; otherwise look at `reports`.
        options: seed, policy, numerics, checks, threads of `moe_mlir.sim.launch`.

    Yields:
        a Simulation.
    """
    with intercept(Simulation(chip, options, strict)) as simulation:
        yield simulation


@contextlib.contextmanager
def intercept(runner):
    """Gives the kernels of the routing ops to `runner.run` while the block lasts."""
    token = _active.set(runner)
    try:
        yield runner
    finally:
        _active.reset(token)


def active_simulation():
    """The innermost simulation, or what else intercepts kernels, or None."""
    return _active.get()


class DeviceFunction:
    """A function compiled to kernels, and how to launch them (docs/Architecture.md)."""

    def __init__(self, module: sim.Module, description: dict):
        self.module = module
        self.name = description["name"]
        self.buffers = [*description["arguments"], *description["results"]]
        self.kernels = description["kernels"]
        self.workspace = description.get("workspace")

    def sizes(self, arguments) -> list[int]:
        """The dynamic sizes of the arguments, in the order of the kernels' parameters."""
        return [
            size
            for argument, buffer in zip(arguments, self.buffers, strict=True)
            for size, static in zip(
                getattr(argument, "shape", ()), buffer.get("shape", ()), strict=True
            )
            if static < 0
        ]

    def __call__(self, *arguments, **options) -> list:
        """Launches the kernels in order on inputs and result buffers; returns their reports."""
        sizes = self.sizes(arguments)
        parameters = list(arguments)
        if self.workspace is not None:
            parameters.append(_make_workspace(evaluate_size(self.workspace, arguments)))
            sizes.append(len(parameters[-1]))
        reports = []
        for kernel in self.kernels:
            grid = [evaluate_size(size, arguments) for size in kernel["grid"]]
            if 0 not in grid:
                reports.append(
                    self.module.launch(
                        kernel["name"],
                        grid,
                        kernel["block_size"],
                        [*parameters, *sizes],
                        dynamic_smem=kernel["dynamic_smem"],
                        **options,
                    )
                )
        return reports


def _make_workspace(size):
    import numpy

    # Not zeros: nothing may rely on what was there before.
    return numpy.full(size, 0xCD, numpy.uint8)


@functools.lru_cache(maxsize=256)
def device_functions(text: str, chip: str) -> dict:
    """The public functions of a module of MLIR text, compiled for a chip."""
    from .runtime import compile_kernels_cached

    code = json.loads(compile_kernels_cached(text, chip))
    module = sim.Module(code["ptx"])
    return {f["name"]: DeviceFunction(module, f) for f in code["functions"]}


__all__ = ["DeviceFunction", "Simulation", "SimulationError", "device_functions", "intercept",
           "simulate"]
