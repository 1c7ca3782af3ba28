"""How to launch the kernels of a compiled function: grids, workspace, parameters.

A kernel takes, in this order: every argument and result of its function, a
workspace if there is one, every dynamic size of the tensors, and the size of
the workspace (docs/Architecture.md).
"""

from dataclasses import dataclass

from .artifact import evaluate_size

# What the compiler has a target for, in the order in which PTX moves up.
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Targets with instructions of one chip, whose PTX runs there and nowhere else.
OWN_CHIPS = {"sm_90": "sm_90a"}


def runnable_chips(chip: str) -> tuple:
    """The targets whose PTX runs on a chip, the best first.

    >>> runnable_chips("sm_90a")
    ('sm_90a', 'sm_90', 'sm_89', 'sm_86', 'sm_80')
    """
    own = tuple(target for target in OWN_CHIPS.values() if target == chip)
    base = chip.removesuffix("a") if own else chip
    if base not in CHIPS:
        return (chip,)
    return own + CHIPS[CHIPS.index(base) :: -1]


@dataclass(frozen=True)
class KernelLaunch:
    name: str
    grid: tuple
    block_size: int
    dynamic_smem: int


class LaunchPlan:
    """The `functions` entry of a manifest, ready for buffers of any size."""

    def __init__(self, description: dict):
        self.name = description["name"]
        self.arguments = description["arguments"]
        self.results = description["results"]
        self._kernels = description["kernels"]
        self._workspace = description.get("workspace")

    @property
    def kernel_names(self) -> list[str]:
        return [kernel["name"] for kernel in self._kernels]

    def sizes(self, buffers) -> list[int]:
        """The dynamic sizes of the buffers, in the order of the kernels' parameters."""
        return [
            size
            for value, described in zip(buffers, [*self.arguments, *self.results], strict=True)
            for size, static in zip(
                getattr(value, "shape", ()), described.get("shape", ()), strict=True
            )
            if static < 0
        ]

    def workspace(self, buffers) -> int | None:
        """Bytes of the workspace; None if the kernels take none."""
        return None if self._workspace is None else evaluate_size(self._workspace, buffers)

    def launches(self, buffers) -> list[KernelLaunch]:
        """The kernels in order, without those that have nothing to do."""
        launches = (
            KernelLaunch(
                kernel["name"],
                tuple(evaluate_size(size, buffers) for size in kernel["grid"]),
                kernel["block_size"],
                kernel["dynamic_smem"],
            )
            for kernel in self._kernels
        )
        return [launch for launch in launches if 0 not in launch.grid]
