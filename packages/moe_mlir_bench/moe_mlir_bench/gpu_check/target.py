"""Where a case runs: the GPU of this machine, or the simulator."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_mlir.compiler.chips import runnable_chips
from moe_mlir.gpu import cuda
from moe_mlir.gpu.launch import LaunchPlan
from moe_mlir.sim.simulation import active_simulation, device_function, simulate


@dataclass(frozen=True)
class Target:
    """`device` is "cuda" or "sim"; `chip` what kernels are made for, None for the GPU's own."""

    device: str
    chip: str | None = None

    @property
    def torch_device(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def rehearses(self) -> bool:
        """The simulator takes large cases at a fraction of their size."""
        return self.device == "sim"

    @contextlib.contextmanager
    def active(self, chip: str | None = None) -> Iterator[None]:
        """The ops of the block run here."""
        chip = self.chip or chip
        if self.device == "cuda":
            with cuda.compile_for(chip):
                yield
        else:
            with simulate(chip=chip or "sm_90a"):
                yield

    def can_run(self, chip: str) -> bool:
        """Has this GPU the instructions of a chip? The simulator has all of them."""
        if self.device != "cuda":
            return True
        import torch

        return chip in runnable_chips(cuda.chip_for(torch.cuda.get_device_capability()))

    def synchronize(self) -> None:
        """Waits for the kernels, whose faults are raised here."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def run_ptx(self, ptx: str, name: str, buffers: Sequence[torch.Tensor], *,
                grid: Sequence[int] = (1,), block: int = 32, dynamic_smem: int = 0) -> None:
        """One kernel of PTX text, whose parameters are the addresses of the buffers."""
        plan = _plan(name, tuple(tuple(b.shape) for b in buffers), tuple(grid), block, dynamic_smem)
        if self.device == "cuda":
            cuda.run_kernels(ptx, plan, buffers)
            return
        active_simulation().run_function(device_function(ptx, plan), buffers)


@functools.lru_cache(maxsize=1024)
def _plan(name, shapes, grid, block, dynamic_smem) -> LaunchPlan:
    return LaunchPlan({
        "name": name, "results": [],
        "arguments": [{"dtype": "i32", "shape": list(shape)} for shape in shapes],
        "kernels": [{"name": name, "grid": list(grid), "block_size": block,
                     "dynamic_smem": dynamic_smem}],
    })


class Text(Protocol):
    """What is made of MLIR text: a `Module`, or an op's kernel."""

    def text(self) -> str: ...


@dataclass(frozen=True)
class Module:
    """One function of MLIR text, run as the kernel of an op is."""

    text_: str
    op: str

    def text(self) -> str:
        return self.text_

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs on inputs and result buffers."""
        if tensors[0].device.type == "cuda":
            cuda.run(self.text_, self.op, list(tensors))
        else:
            active_simulation().run(self, list(tensors))
