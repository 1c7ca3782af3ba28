"""A family of Triton kernels: how to launch it, and what it must compute.

A family is a function of a `Data` that returns a `Problem`: launches in order, and what tensors must
hold behind the last of them, by a reference in float64.
"""

import functools
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_mlir import sim

CHIPS = ("sm_80", "sm_89", "sm_90")
SEEDS, POLICIES = (0, 1), (0, 1)


class Data:
    """Draws tensors; two of one seed draw the same."""

    def __init__(self, seed, chip):
        self.chip = chip
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, dtype=torch.float32, scale=1.0):
        return (scale * torch.randn(*shape, generator=self.generator)).to(dtype)

    def integers(self, low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def permutation(self, n):
        return torch.randperm(n, generator=self.generator)


@dataclass(frozen=True)
class Step:
    """One launch: `kernel[grid](*args, **options)`."""

    kernel: object
    grid: tuple
    args: tuple
    options: dict


@dataclass
class Problem:
    steps: list[Step] = field(default_factory=list)
    checks: list[Callable] = field(default_factory=list)

    def launch(self, kernel, grid, *args, **options):
        self.steps.append(Step(kernel, grid, args, options))
        return self

    def close(self, tensor, reference, rtol=1e-5, atol=1e-5):
        """`tensor` must hold `reference` within the tolerance."""
        self.checks.append(lambda: torch.allclose(tensor.double(), reference.double(), rtol, atol,
                                                  equal_nan=True))
        return self

    def equal(self, tensor, reference):
        return self.close(tensor, reference, 0, 0)

    def holds(self, condition):
        """For what has several right results."""
        self.checks.append(condition)
        return self


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable
    chips: tuple
    #: A pattern of findings that are right: Triton itself emits a race there.
    own_race: str | None = None

    def steps(self, chip):
        return len(self.build(Data(0, chip)).steps)

    def compile(self, chip):
        """The compiled kernels of its launches."""
        return [sim.compile_triton(s.kernel, s.args, chip=chip, **s.options)
                for s in self.build(Data(0, chip)).steps]

    def is_own(self, finding):
        """Whether Triton itself emits what was found."""
        return bool(self.own_race and re.search(self.own_race, finding.message))

    def alarms(self, report):
        """The findings that are false, as the kernel is correct."""
        return [f for f in report.findings if not self.is_own(f)]

    def run(self, kernels, chip, seed, policy, *, data=None, **options):
        """(reports, whether every result is right); `data` seeds the inputs, else the seed does."""
        problem = self.build(Data(seed if data is None else data, chip))
        reports = [sim.launch_triton(k, s.grid, s.args, seed=seed, policy=policy, **options)
                   for k, s in zip(kernels, problem.steps, strict=True)]
        return reports, all(check() for check in problem.checks)


FAMILIES: dict[str, Family] = {}


def family(build=None, *, chips=CHIPS, own_race=None):
    """Registers a function from a Data to a Problem, under its name."""
    if build is None:
        return functools.partial(family, chips=chips, own_race=own_race)
    assert build.__name__ not in FAMILIES, build.__name__
    FAMILIES[build.__name__] = Family(build.__name__, build, chips, own_race)
    return build


@dataclass(frozen=True)
class Case:
    """One kernel of a family on one chip, for mutation.py."""

    family: Family
    chip: str
    step: int

    sizes = ((),)

    @property
    def name(self):
        return f"{self.family.name}@{self.chip}[{self.step}]"

    @functools.cached_property
    def kernels(self):
        return self.family.compile(self.chip)

    @property
    def kernel(self):
        return self.kernels[self.step].metadata.name

    @property
    def text(self):
        return self.kernels[self.step].asm["ptx"]

    def load(self, text):
        """The compiled kernel with other PTX, which must load."""
        sim.Module(text)
        kernel = self.kernels[self.step]
        return types.SimpleNamespace(asm={"ptx": text}, metadata=kernel.metadata, src=kernel.src)

    def launch(self, seed, policy, *, data, module, **options):
        """(report, None, wrong outputs) of the family's launches with `module` for this kernel;
        the report is this kernel's, but for findings of another one."""
        kernels = [*self.kernels[:self.step], module, *self.kernels[self.step + 1:]]
        reports, right = self.family.run(kernels, self.chip, seed, policy, data=data,
                                         **options)
        for report in reports:
            report.findings = self.family.alarms(report)
        report = next((r for r in reports if not r.ok), reports[self.step])
        return report, None, [] if right else ["results"]


def half_precision(tensor):
    """(rtol, atol) of a result that is rounded to the tensor's type at the end."""
    eps = torch.finfo(tensor.dtype).eps
    return 2 * eps, 2 * eps
