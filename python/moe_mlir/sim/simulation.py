"""moe_mlir.simulate: run the GPU kernels of the routing ops on the CPU, with checks.

>>> with moe_mlir.simulate(chip="sm_90") as simulation:
...     p, lse = moe_mlir.similarity_inform(u, e, causal=True)
>>> simulation.reports[0].counters["instructions"]

Inside of the block the ops compile for the chip instead of this machine, and
their kernels run in the PTX simulator, on CPU tensors. Backward passes that are
written in torch stay in torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..compiler import jit
from ..compiler.chips import target_chips
from ..gpu.launch import LaunchPlan
from .module import Module
from .report import Report

# A Simulation, or what else runs kernels in its place.
_Runner = TypeVar("_Runner")
_active: contextvars.ContextVar[Any] = contextvars.ContextVar("moe_mlir_simulation", default=None)


class _Kernel(Protocol):
    """What a simulation asks of a kernel of ops, which imports this module."""

    @property
    def op(self) -> str: ...

    def text(self) -> str: ...


class SimulationError(RuntimeError):
    """A kernel has a race, an access out of bounds, or an uninitialised read; the text says where."""


@dataclass
class Simulation:
    """What `simulate` yields: how to run kernels, and the reports of those that ran."""

    chip: str
    options: dict
    strict: bool
    reports: list = field(default_factory=list)

    def run(self, kernel: _Kernel, tensors: Sequence[Any]) -> None:
        """Runs a kernel (ops/_kernel.py) on inputs and result buffers."""
        self.run_function(device_functions(kernel.text(), self.chip)[kernel.op], tensors)

    def run_function(self, function: DeviceFunction, buffers: Sequence[Any]) -> None:
        """Runs a DeviceFunction on inputs and result buffers."""
        reports = function(*buffers, **self.options)
        self.reports += reports
        for report in reports:
            if self.strict and report.findings:
                raise SimulationError(str(report))


@contextlib.contextmanager
def simulate(chip: str = "sm_90", *, strict: bool = True, **options: Any) -> Iterator[Simulation]:
    """Runs the routing ops on a simulated GPU while the block lasts.

    Args:
        chip: the NVIDIA chip to compile for.
        strict: raise SimulationError on a finding; otherwise look at `reports`.
        options: seed, policy, numerics, checks, threads of `moe_mlir.sim.launch`.

    Yields:
        a Simulation.

    Raises:
        ValueError: there are no kernels for `chip`.
    """
    if chip not in target_chips():
        raise ValueError(f"simulate: expected a chip among {', '.join(target_chips())}, found "
                         f"{chip!r}")
    with intercept(Simulation(chip, options, strict)) as simulation:
        yield simulation


@contextlib.contextmanager
def intercept(runner: _Runner) -> Iterator[_Runner]:
    """Gives the kernels of the routing ops to `runner.run` while the block lasts."""
    token = _active.set(runner)
    try:
        yield runner
    finally:
        _active.reset(token)


def active_simulation() -> Any:
    """The innermost simulation, or what else intercepts kernels, or None."""
    return _active.get()


class DeviceFunction:
    """A function compiled to kernels, in the simulator."""

    def __init__(self, module: Module, plan: LaunchPlan):
        self.module = module
        self.plan = plan

    def __call__(self, *buffers: Any, **options: Any) -> list[Report]:
        """Launches the kernels in order on inputs and result buffers; returns their reports."""
        given, buffers = buffers, tuple(self.plan.align(buffers))
        parameters, sizes = list(buffers), self.plan.sizes(buffers)
        if (size := self.plan.workspace(buffers)) is not None:
            parameters.append(_make_workspace(size))
            sizes.append(size)
        reports = [
            self.module.launch(
                launch.name,
                launch.grid,
                launch.block_size,
                launch.take([*parameters, *sizes]),
                dynamic_smem=launch.dynamic_smem,
                **options,
            )
            for launch in self.plan.launches(buffers)
        ]
        self.plan.put_back(given, buffers)
        return reports


def _make_workspace(size):
    import numpy

    # Not zeros: nothing may rely on what was there before.
    return numpy.full(size, 0xCD, numpy.uint8)


@functools.lru_cache(maxsize=256)
def device_functions(text: str, chip: str) -> dict:
    """The public functions of a module of MLIR text, compiled for a chip."""
    code = json.loads(jit.compile_kernels_cached(text, chip))
    return {f["name"]: device_function(code["ptx"], LaunchPlan(f)) for f in code["functions"]}


def device_function(ptx: str, plan: LaunchPlan) -> DeviceFunction:
    """The kernels of one function of PTX in the simulator."""
    return DeviceFunction(_load(ptx), plan)


_load = functools.lru_cache(maxsize=256)(Module)


__all__ = ["DeviceFunction", "Simulation", "SimulationError", "device_functions", "intercept",
           "simulate"]
