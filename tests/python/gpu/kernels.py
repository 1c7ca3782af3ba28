"""Compiles MLIR text to kernels with moe-opt and runs them in the simulator."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE_ROOT = Path(__file__).resolve().parents[3]


def find_moe_opt() -> str:
    """moe-opt from MOE_OPT, PATH, or the default build tree."""
    built = SOURCE_ROOT / "build" / "bin" / "moe-opt"
    found = os.environ.get("MOE_OPT") or shutil.which("moe-opt")
    if not found and built.exists():
        found = str(built)
    if not found:
        raise FileNotFoundError(
            f"expected moe-opt in PATH, in MOE_OPT or at {built}, found none: "
            "build the target moe-opt"
        )
    return found


class Size(int):
    """A size in an affine expression, where ceildiv is written `@`."""

    def __add__(self, other):
        return Size(int(self) + int(other))

    __radd__ = __add__

    def __mul__(self, other):
        return Size(int(self) * int(other))

    __rmul__ = __mul__

    def __neg__(self):
        return Size(-int(self))

    def __matmul__(self, other):
        return Size(-(-int(self) // int(other)))


def evaluate_map(text: str, sizes: list[int]) -> tuple[int, ...]:
    """The results of an affine map of symbols only, such as
    `affine_map<()[s0] -> (s0 ceildiv 16, 1, 1)>`."""
    results = re.search(r"-> \((.*)\)>", text).group(1)
    names = {f"s{number}": Size(size) for number, size in enumerate(sizes)}
    expression = results.replace("ceildiv", "@")
    return tuple(int(value) for value in eval(expression, names))


@dataclass
class Kernel:
    """A kernel and how to launch it, as the attribute moe.kernels says."""

    ptx: str
    name: str
    grid: str
    block_size: int

    def grid_for(self, sizes: list[int]) -> tuple[int, ...]:
        return evaluate_map(self.grid, sizes)

    def run(self, args, shapes, **options):
        """Launches the kernel on `args`. `shapes` are the MLIR shapes of the
        buffers, None for a dynamic size; their sizes follow the arguments."""
        from moe_mlir import sim

        sizes = [
            size
            for arg, shape in zip(args, shapes)
            for size, static in zip(getattr(arg, "shape", ()), shape or ())
            if static is None
        ]
        grid = self.grid_for(sizes)
        if 0 in grid:
            return None
        return sim.launch(
            self.ptx,
            self.name,
            grid,
            (self.block_size, 1, 1),
            [*args, *sizes],
            **options,
        )


def unescape(text: str) -> str:
    return re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text)


def compile_kernels(text: str, chip: str = "sm_90") -> list[Kernel]:
    """The kernels of the only function of `text`."""
    result = subprocess.run(
        [
            find_moe_opt(),
            "-",
            f"--moe-to-nvvm=chip={chip}",
            "--mlir-print-local-scope",
        ],
        input=text,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise ValueError(result.stderr)
    ptx = unescape(
        re.search(r'assembly = "((?:[^"\\]|\\.)*)"', result.stdout).group(1)
    )
    attribute = re.search(r"moe\.kernels = \[(.*?\})\]", result.stdout).group(1)
    return [
        Kernel(
            ptx=ptx,
            name=re.search(r'name = "(\w+)"', entry).group(1),
            grid=re.search(r"grid = (affine_map<.*?\)>)", entry).group(1),
            block_size=int(re.search(r"block_size = (\d+)", entry).group(1)),
        )
        for entry in re.findall(r"\{.*?\}", attribute)
    ]


MLIR_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def shaped(container: str, shape, dtype: torch.dtype) -> str:
    """`tensor<?x64xf32>` for ("tensor", (None, 64), torch.float32)."""
    dims = "".join(f"{'?' if size is None else size}x" for size in shape)
    return f"{container}<{dims}{MLIR_TYPES[dtype]}>"
