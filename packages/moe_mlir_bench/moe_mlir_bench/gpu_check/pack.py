"""Collects kernels and what runs them in a folder for a machine without a compiler."""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_mlir import MoeError
from moe_mlir._native import native
from moe_mlir._support import files
from moe_mlir._support.paths import PACKAGE
from moe_mlir.compiler.chips import PACKED_TABLE
from moe_mlir.compiler.jit import pack_kernels as pack_text
from moe_mlir.sim.simulation import intercept

_LIBRARIES = ("libmoe_cuda_runtime.so", "libmoe_sim.so")
_RUN = '''"""Runs the checks of this folder; --help says more."""
import os, runpy, sys
here = os.path.dirname(os.path.abspath(__file__))
os.environ["MOE_MLIR_KERNELS"] = os.path.join(here, "kernels")
os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("MOE_MLIR_CACHE", "0")
sys.path.insert(0, here)
if len(sys.argv) < 2 or sys.argv[1] not in ("run", "sanitize", "fixtures", "worker"):
    sys.argv[1:1] = ["run"]
runpy.run_module("moe_mlir_bench.gpu_check", run_name="__main__")
'''


def pack(folder: Path, chips: Iterable[str]) -> None:
    """Writes both packages without the compiler, and the kernels of every case."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"expected '{folder}' to be free or empty, found files in it")
    package = folder / PACKAGE.name
    for source in (PACKAGE, Path(__file__).absolute().parents[1]):
        shutil.copytree(source, folder / source.name, ignore_dangling_symlinks=True,
                        ignore=shutil.ignore_patterns("*.so", "__pycache__", "demo"))
    for library in _LIBRARIES:
        shutil.copy2(PACKAGE / library, package)
    (package / PACKED_TABLE).write_text(native().known_chips())
    for chip in chips:
        pack_kernels(folder / "kernels", chip)
    # Last: a package that was interrupted cannot be started.
    files.write(folder / "run.py", _RUN)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB; on the GPU's machine: python {folder.name}/run.py")


def pack_kernels(folder: Path, chip: str) -> None:
    """Compiles what the cases and the rows of times will ask for."""
    texts = kernel_texts()
    show = sys.stderr.isatty()
    for i, text in enumerate(texts):
        if show:
            print(f"\r{chip}: kernel {i + 1} of {len(texts)}", end="", file=sys.stderr)
        try:
            pack_text(text, chip, folder)
        except MoeError as error:
            # An older chip has less memory; the case that asks for it fails there.
            print(f"{chip}: kernel {i + 1} is left out: {error}", file=sys.stderr)
    if show:
        print(file=sys.stderr)


def kernel_texts() -> list[str]:
    """The modules of all units, large or rehearsed: kernels are made for any number of tokens."""
    from . import cases, rows
    from .capture import all_captures

    recorder = _Recorder()
    with intercept(recorder):
        for case in cases.all_cases(rehearses=True):
            case.call(*case.inputs())
        for capture in all_captures():
            capture.case.call(*capture.case.inputs())
        for row in rows.all_rows(rehearses=False):
            if row.also:
                row.also()
        for row in rows.all_rows(rehearses=True):
            row.ours(*row.make("cpu", 2))
    units: list[Any] = [*cases.all_cases(rehearses=False), *rows.all_rows(rehearses=False)]
    recorder.texts |= dict.fromkeys(u.module.text() for u in units if u.module)
    return list(recorder.texts)


class _Recorder:
    """Ops add the module that they would run; their results are 0."""

    def __init__(self):
        self.texts = {}

    def run(self, kernel, tensors):
        self.texts[kernel.text()] = None
        for result in tensors[len(getattr(kernel, "inputs", tensors)):]:
            result.zero_()
