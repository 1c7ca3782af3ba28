"""`pack` collects the kernels; `run` checks and times them (see the package)."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import moe_mlir

_PACKAGE = Path(moe_mlir.__file__).absolute().parent
_LIBRARIES = ("libmoe_cuda_runtime.so", "libmoe_sim.so")
_RUN = """import os, runpy, sys
here = os.path.dirname(os.path.abspath(__file__))
os.environ["MOE_MLIR_KERNELS"] = os.path.join(here, "kernels")
sys.path.insert(0, here)
sys.argv[1:1] = ["run"]
runpy.run_module("moe_mlir.gpu_check", run_name="__main__")
"""


def pack(folder: Path, chips) -> None:
    """Writes the package without the compiler, and the kernels of every case."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"expected '{folder}' to be free or empty, found files in it")
    package = folder / "moe_mlir"
    shutil.copytree(_PACKAGE, package, ignore_dangling_symlinks=True,
                    ignore=shutil.ignore_patterns("*.so", "__pycache__", "demo"))
    for library in _LIBRARIES:
        shutil.copy2(_PACKAGE / library, package)
    (folder / "run.py").write_text(_RUN)
    for chip in chips:
        pack_kernels(folder / "kernels", chip)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB; on the GPU's machine: python {folder.name}/run.py")


def pack_kernels(folder: Path, chip: str) -> None:
    """Compiles what the cases and the benchmark will ask for."""
    from moe_mlir.runtime import pack_kernels as pack_text
    from moe_mlir.simulate import intercept

    from . import benchmark, cases

    recorder = _Recorder()
    with intercept(recorder):
        for case in cases.all_cases():
            case.call(*case.inputs())
        for row in benchmark.all_rows():
            row.ours(*row.make("cpu"))
    show = sys.stderr.isatty()
    for i, text in enumerate(recorder.texts):
        if show:
            print(f"\r{chip}: kernel {i + 1} of {len(recorder.texts)}", end="", file=sys.stderr)
        pack_text(text, chip, folder)
    if show:
        print(file=sys.stderr)


class _Recorder:
    """Ops add the module that they would run, and run nothing."""

    def __init__(self):
        self.texts = {}

    def run(self, kernel, tensors):
        self.texts[kernel.text()] = None


def check(device: str) -> list[dict]:
    from . import cases

    results = []
    where = moe_mlir.simulate() if device == "sim" else contextlib.nullcontext()
    with where:
        for case in cases.all_cases():
            try:
                problem = case.check("cpu" if device == "sim" else device)
            except Exception as error:  # one failure must not hide the others
                problem = f"{type(error).__name__}: {error}"
            results.append({"case": case.name, "problem": problem})
            if problem:
                print(f"FAILED {case.name}: {problem}")
    failed = sum(bool(r["problem"]) for r in results)
    print(f"{len(results) - failed} cases passed, {failed} failed")
    return results


def time_rows(seconds: float) -> dict:
    from . import benchmark

    end = time.monotonic() + seconds
    limits = benchmark.measure_limits()
    print(f"limits: {limits['bytes_per_second'] / 1e12:.2f} TB/s copy, "
          f"{limits['operations_per_second'] / 1e12:.0f} TFLOP/s bf16 GEMM")
    rows = []
    for row in benchmark.all_rows():
        if time.monotonic() > end:
            print(f"stopped before '{row.name}': {seconds:.0f} s are over")
            break
        rows.append(benchmark.measure(row, limits))
    benchmark.print_table(rows)
    return {"limits": limits, "rows": rows}


def run(device: str, out: Path | None, seconds: float) -> int:
    import torch

    report = {"torch": torch.__version__, "device": device}
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("expected a GPU that torch can use, found none; --device=sim runs the "
                             "checks in the simulator")
        report["device"] = torch.cuda.get_device_name()
    print(f"{report['device']}, torch {report['torch']}")
    report["checks"] = check(device)
    if device == "cuda":
        report["benchmark"] = time_rows(seconds)
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(c["problem"] for c in report["checks"]))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_mlir.gpu_check",
                                     description=moe_mlir.gpu_check.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="collect kernels and code in a folder")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--chips", default="sm_80,sm_90,sm_90a",
                         help="chips to compile for (default sm_80,sm_90,sm_90a)")
    running = commands.add_parser("run", help="check the kernels, then time them")
    running.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    running.add_argument("--json", type=Path, help="also write the results to this file")
    running.add_argument("--seconds", type=float, default=300,
                         help="start no further row of the benchmark after this (default 300)")
    options = parser.parse_args(argv)
    if options.command == "pack":
        pack(options.folder, options.chips.split(","))
        return 0
    return run(options.device, options.json, options.seconds)


if __name__ == "__main__":
    os.environ.setdefault("MOE_MLIR_CACHE", "0")
    sys.exit(main())
