"""Compiles routing for an NVIDIA chip and asks ptxas what the kernels take."""

import pathlib
import re
import subprocess
from dataclasses import dataclass

from moe_mlir._native import native
from moe_mlir._support import files

_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)")
_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers", re.DOTALL)


@dataclass
class KernelReport:
    """`registers` and `spill_bytes` are None without ptxas."""

    name: str
    registers: int | None = None
    spill_bytes: int | None = None


def compile_kernels(text: str, chip: str, path: pathlib.Path) -> list[KernelReport]:
    """Writes the PTX to `path`; one report a kernel, in the file's order."""
    ptx = native().compile_ptx(text, chip)
    files.write(path, ptx)
    usage = _assemble(path, chip)
    return [KernelReport(name, *usage.get(name, (None, None))) for name in _ENTRY.findall(ptx)]


def _assemble(path: pathlib.Path, chip: str) -> dict:
    ptxas = native().find_ptxas()
    if not ptxas:
        return {}
    done = subprocess.run([ptxas, "-v", f"-arch={chip}", str(path), "-o",
                           str(path.with_suffix(".cubin"))], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas rejects {path} for {chip}: {done.stderr.strip()}")
    return {name: (int(registers), int(stores) + int(loads))
            for name, stores, loads, registers in _USAGE.findall(done.stderr)}
