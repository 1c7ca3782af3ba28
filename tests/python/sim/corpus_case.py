"""A correct kernel, how it is launched, and what it must compute."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_mlir import sim

PTX = Path(__file__).parents[2] / "Simulator" / "corpus" / "ptx"


@dataclass(frozen=True)
class Case:
    """One kernel and its launches, one for each of `sizes`.

    ``build(rng, *size)`` gives (args, {index: check}); a check takes the output
    array and says whether it is right.
    """

    file: str
    kernel: str
    grid: Callable | tuple
    block: tuple
    build: Callable
    sizes: tuple = ((),)
    dynamic_smem: Callable | int = 0
    cluster: tuple | None = None

    @property
    def name(self):
        return f"{self.file}:{self.kernel}"

    @property
    def text(self):
        return (PTX / f"{self.file}.ptx").read_text()

    load = staticmethod(sim.Module)

    def launch(self, seed, policy, *, data=0, module=None, **options):
        """Returns (report, argument arrays, indices of the wrong outputs).

        `data` chooses the size and seeds the inputs.
        """
        size = self.sizes[data % len(self.sizes)]
        args, checks = self.build(np.random.default_rng(data), *size)
        smem = self.dynamic_smem
        report = sim.launch(
            module or load(self.file),
            self.kernel,
            self.grid(*size) if callable(self.grid) else self.grid,
            self.block,
            args,
            dynamic_smem=smem(*size) if callable(smem) else smem,
            cluster=self.cluster,
            seed=seed,
            policy=policy,
            **options,
        )
        arrays = [getattr(arg, "array", arg) for arg in args]
        wrong = [i for i, check in checks.items() if not check(arrays[i])]
        return report, arrays, wrong


@functools.cache
def load(file):
    return sim.Module(PTX / f"{file}.ptx")


CASES: list[Case] = []


def case(file, kernel, grid, block, *, sizes=((),), smem=0, cluster=None):
    def triple(size):
        size = (size,) if isinstance(size, int) else tuple(size)
        return size + (1,) * (3 - len(size))

    def register(build):
        CASES.append(
            Case(file, kernel, grid if callable(grid) else triple(grid),
                 triple(block), build,
                 tuple(s if isinstance(s, tuple) else (s,) for s in sizes),
                 smem, triple(cluster) if cluster else None)
        )
        return build

    return register


def exact(reference):
    return lambda out: np.array_equal(out, reference)


def close(reference, rtol=1e-5, atol=1e-6):
    return lambda out: np.allclose(out, reference, rtol, atol)


def integers(rng, low, high, *shape, dtype=np.int32):
    return rng.integers(low, high, shape, dtype=dtype)


def normals(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)
